#!/usr/bin/env bash
# Measures the floor, our kernels and what else there is, on a host with GPUs, from the repository's
# root; some minutes:
#     benchmarks/on_gpu_host.sh DIRECTORY [RANKS ...]       (default: 2 4)
# Files go to DIRECTORY, and plots where matplotlib is installed. Several ranks may share a GPU;
# start CUDA MPS first (nvidia-cuda-mps-control -d).
set -euo pipefail
cd "$(dirname "$0")/.."
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
[ $# -gt 0 ] || { echo "usage: $0 DIRECTORY [RANKS ...]" >&2; exit 2; }
directory=$1
shift
[ $# -gt 0 ] || set -- 2 4
failed=0
for ranks in "$@"; do
  rows=$directory/$ranks-ranks.json
  timeout 140 mpirun -n "$ranks" python3 -m benchmarks allreduce --contenders all --floor --pdl both \
    -m device,graph,behind,early,eager --sizes "${SIZES:-128,8K,64K,256K,1M}" -n 15 -r 60 \
    --json "$rows" || failed=1
  timeout 60 mpirun -n "$ranks" python3 -m shmemar floor --json "$directory/$ranks-ranks-floor.json" \
    || failed=1
  if python3 -c "import matplotlib" 2>/dev/null && [ -e "$rows" ]; then
    python3 -m benchmarks plot "$rows" "${rows%.json}.svg"
  fi
done
exit $failed
