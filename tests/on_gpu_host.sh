#!/usr/bin/env bash
# Runs the tests that need a GPU, on a host with one or more, from the repository's root:
#     tests/on_gpu_host.sh [RANKS ...]       (default: 1 2 4 8)
# Several ranks may share a GPU; start CUDA MPS first (nvidia-cuda-mps-control -d).
set -uo pipefail
cd "$(dirname "$0")/.."
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
export SHMEMAR_TIMEOUT_S=${SHMEMAR_TIMEOUT_S:-20}
calls=${RANDOM_CALLS:-2000}
failed=0
step() {
  echo "== $*"
  local start=$SECONDS
  if ! timeout "${LIMIT:-240}" "$@" >/tmp/step.log 2>&1; then
    failed=1
    echo "FAILED"
    grep -E "^(E  |FAILED|ERROR)|Error" /tmp/step.log | sort | uniq -c | sort -rn | head -"${LINES_OF_LOG:-15}" | cut -c1-400
  fi
  grep -E "passed|failed|CAUGHT|ERROR SUMMARY|all results right" /tmp/step.log | cut -c1-300 | sort | uniq -c
  echo "-- $((SECONDS - start)) s"
}
suite="python3 -m pytest tests/distributed --distributed -q -p no:cacheprovider --color=no --maxfail=6"
[ $# -gt 0 ] || set -- 1 2 4 8
for ranks in "$@"; do
  step mpirun -n "$ranks" $suite --backend=nvshmem --arrays=cupy --random-calls="$calls"
done
step mpirun -n 2 $suite --backend=nvshmem --arrays=torch --random-calls=200 -k "not test_gpu and not every_count"
SHMEMAR_TIMEOUT_S=3 step mpirun -n 3 python3 tests/programs/lose_rank.py SIGSTOP nvshmem loop
step mpirun -n 2 compute-sanitizer --tool memcheck --target-processes all --error-exitcode 9 \
  python3 tests/programs/small_run.py
CUDA_MPS_PIPE_DIRECTORY=/tmp/no-mps step mpirun -n 2 python3 tests/programs/small_run.py
exit $failed
