#!/usr/bin/env bash
# Runs the tests that need a GPU, on a host with one or more, from the repository's root:
#     tests/on_gpu_host.sh [RANKS ...]       (default: 1 2 4 8)
# With LOG_DIRECTORY set, what each step printed is kept there.
# Several ranks may share a GPU; start CUDA MPS first (nvidia-cuda-mps-control -d).
# The last step loses a rank in the middle of a kernel, which can take the MPS server down.
set -uo pipefail
cd "$(dirname "$0")/.."
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
failed=0
log=$(mktemp)
steps=0

# step STATUS TIMES EXPECTED SECONDS COMMAND...: the command ends within SECONDS with STATUS (0 or 1)
# and prints EXPECTED on TIMES lines.
step() {
  local wanted=$1 times=$2 expected=$3 limit=$4 start=$SECONDS status=0
  shift 4
  echo "== $*"
  timeout "$limit" "$@" >"$log" 2>&1 || status=$?
  if [ "$status" != "$wanted" ] || [ "$(grep -cE "$expected" "$log")" != "$times" ]; then
    failed=1
    echo "FAILED, status $status"
    grep -E "^(E  |FAILED|ERROR)|Error" "$log" | sort | uniq -c | sort -rn | head -15 | cut -c1-300
  fi
  steps=$((steps + 1))
  if [ -n "${LOG_DIRECTORY:-}" ]; then cp "$log" "$LOG_DIRECTORY/step-$steps.log"; fi
  grep -E "passed|failed|CAUGHT|ERROR SUMMARY|all results right" "$log" | cut -c1-200 | sort | uniq -c
  echo "-- $((SECONDS - start)) s"
}

suite=(python3 -m pytest tests/distributed --distributed -q -p no:cacheprovider --color=no
  --maxfail=6 --backend=nvshmem -o faulthandler_timeout=60)
export SHMEMAR_TIMEOUT_S=20
[ $# -gt 0 ] || set -- 1 2 4 8
for ranks in "$@"; do
  step 0 "$ranks" "[0-9]+ passed" 300 mpirun -n "$ranks" "${suite[@]}" --arrays=cupy \
    --random-calls="${RANDOM_CALLS:-10000}"
done
step 0 1 "litmus test +passed: [0-9,]+ line writes of .* by 2 ranks" 120 \
  mpirun -n 2 python3 -m shmemar doctor
step 0 2 "[0-9]+ passed" 240 mpirun -n 2 "${suite[@]}" --arrays=torch --random-calls=200 \
  -k "not test_gpu and not every_count"
# Without MPS, which the memory checker does not support; it must find a planted error.
CUDA_MPS_PIPE_DIRECTORY=/tmp/no-mps step 0 2 "all results right" 120 \
  mpirun -n 2 python3 tests/programs/small_run.py
# NVSHMEM's own device API, compiled from its headers, where that can be.
if python3 -c "import cffi" 2>"$log"; then
  step 0 2 "all results right" 200 mpirun -n 2 python3 tests/programs/nvshmem_device.py
else
  echo "== tests/programs/nvshmem_device.py needs cffi, which is not installed"
fi
memcheck=(compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 1
  python3 -m tests.programs.check_memory)
CUDA_MPS_PIPE_DIRECTORY=/tmp/no-mps step 0 1 "ERROR SUMMARY: 0 errors" 120 "${memcheck[@]}"
CUDA_MPS_PIPE_DIRECTORY=/tmp/no-mps step 1 1 "ERROR SUMMARY: [1-9]" 60 "${memcheck[@]}" --plant
# The last rank is lost. NVSHMEM takes as many ranks on each GPU, or all on one.
gpus=$(nvidia-smi --list-gpus | wc -l)
ranks=$((gpus > 1 ? gpus : 3))
SHMEMAR_TIMEOUT_S=3 step 1 $((ranks - 1)) "STILL BROKEN rank [0-9]+" 60 \
  mpirun -n "$ranks" python3 tests/programs/lose_rank.py SIGSTOP nvshmem loop
rm -f "$log"
exit $failed
