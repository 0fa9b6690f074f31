#!/usr/bin/env bash
# Tests and measures everything on a host with several GPUs, from the repository's root:
#     benchmarks/several_gpus.sh DIRECTORY [PART ...]
# A rank has a GPU of its own; with RANKS="2 4" set, these numbers of ranks in turn, else the number
# of GPUs. What each part prints and measures goes to DIRECTORY. Parts, by default all of them, in
# this order: topology tests floor contenders kernels eigensolver decode lanczos tune types barrier
# solve.
# All together end within LIMIT_S seconds (580); a part for which no time is left says so, and the
# exit status is 1. For a trial on one GPU start CUDA MPS first (nvidia-cuda-mps-control -d); NCCL,
# which refuses ranks that share one, is left out of the applications then.
set -uo pipefail
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4} SHMEMAR_TIMEOUT_S=${SHMEMAR_TIMEOUT_S:-20}
export SHMEMAR_HEAP_NBYTES=${SHMEMAR_HEAP_NBYTES:-2147483648}
# NVLink multicast is off for all alike, so that hosts with and without it can be compared, unless
# these say otherwise. Results of all-reduces and applications hold them.
export NVSHMEM_DISABLE_NVLS=${NVSHMEM_DISABLE_NVLS-1} NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE-0}
export TORCH_SYMM_MEM_DISABLE_MULTICAST=${TORCH_SYMM_MEM_DISABLE_MULTICAST-1}
[ $# -gt 0 ] || { echo "usage: $0 DIRECTORY [PART ...]" >&2; exit 2; }
mkdir -p "$1" && directory=$(cd "$1" && pwd) || exit 2
shift
cd "$(dirname "$0")/.." || exit 2
parts=(topology tests floor contenders kernels eigensolver decode lanczos tune types barrier solve)
[ $# -gt 0 ] || set -- "${parts[@]}"
for part in "$@"; do
  [[ " ${parts[*]} " == *" $part "* ]] || { echo "no part $part; expected ${parts[*]}" >&2; exit 2; }
done
gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l)
if [ -z "${RANKS:-}" ] && [ "$gpus" = 0 ]; then
  echo "nvidia-smi lists no GPU, so the number of ranks is not known; set RANKS" >&2
  exit 2
fi
sizes=${SIZES:-128,8K,64K,256K,1M,8M,32M}
failed=0

# step NAME SECONDS COMMAND...: runs on $ranks ranks, and says how it ended.
step() {
  local name=$1 limit=$2 left=$((${LIMIT_S:-580} - SECONDS)) start=$SECONDS status=0
  shift 2
  local log=$directory/$name-$ranks-ranks.txt
  if [ "$left" -lt 15 ]; then
    echo "== $name, $ranks ranks: no time left"
    failed=1
    return
  fi
  left=$((left - 3)) # which killing takes
  timeout -k 3 $((limit < left ? limit : left)) mpirun -n "$ranks" python3 "$@" >"$log" 2>&1 ||
    status=$?
  echo "== $name, $ranks ranks: status $status, $((SECONDS - start)) s"
  grep -aE "^[0-9]+ (passed|failed)|[0-9]+ failed|passed:|all results right|WRONG" "$log" |
    cut -c1-200 | sort | uniq -c | tail -4
  [ "$status" = 0 ] && return
  failed=1
  grep -aE "^(E  |FAILED|ERROR)|Error" "$log" | sort | uniq -c | sort -rn | head -8 | cut -c1-250
}

# json NAME: where a part's rows go.
json() { echo "$directory/$1-$ranks-ranks.json"; }

run() {
  local nccl=,nccl
  [ "$ranks" -le "$gpus" ] || nccl=
  case $1 in
    topology)
      local what
      for what in "topo -m" "topo -p2p r" "nvlink -s"; do
        # shellcheck disable=SC2086 # words
        timeout 10 nvidia-smi $what
      done >"$directory/topology.txt" 2>&1
      step doctor 60 -m shmemar doctor
      ;;
    tests)
      local suite=(-m pytest --distributed -q -p no:cacheprovider --color=no --maxfail=6 -rf
        --backend=nvshmem --arrays=cupy -o faulthandler_timeout=60)
      local name files=()
      for name in allreduce kernels gpu plans lines litmus barrier broadcast signal user_kernels stock; do
        files+=("tests/distributed/test_$name.py")
      done
      step tests 200 "${suite[@]}" "${files[@]}"
      ;;
    floor)
      step floor 40 -m shmemar floor --json "$(json floor)"
      ;;
    contenders)
      step contenders 120 -m benchmarks allreduce --contenders all --floor --pdl both --sizes "$sizes" \
        -m device,graph,behind,eager -n 10 -r 40 --json "$(json contenders)"
      # NVSHMEM hands its collectives to NCCL where it finds one.
      NVSHMEM_DISABLE_NCCL=1 step nvshmem-own 40 -m benchmarks allreduce --contenders nvshmem \
        --sizes "$sizes" -m graph -n 10 -r 40 --json "$(json nvshmem-own)"
      ;;
    kernels)
      step kernels 120 -m benchmarks allreduce --sizes "$sizes" -m device,graph --pdl both -n 8 -r 30 \
        --kernels one_shot,two_shot,ll128_atomic,barrier_one_shot,barrier_two_shot \
        --json "$(json kernels)"
      ;;
    types)
      local dtype
      for dtype in bfloat16 float64; do
        step "$dtype" 50 -m benchmarks allreduce --sizes "$sizes" -d "$dtype" -m device,graph,eager \
          --pdl both -n 8 -r 30 --json "$(json "$dtype")"
      done
      ;;
    tune)
      step tune 90 -m shmemar tune -e 32M --output "$(json tuned)"
      ;;
    eigensolver)
      step eigensolver 120 -m benchmarks.apps.eigensolver --tridiagonalise-only --repeat 2 \
        --n "${EIGENSOLVER_N:-2048,4096,8192,16384}" --backend "shmemar,shmemar-fused,nvshmem$nccl" \
        --json "$(json eigensolver)"
      ;;
    decode)
      step decode 90 -m benchmarks.apps.decode --shared-weights --check --layers "${LAYERS:-80}" \
        --backend "shmemar,nvshmem$nccl" --json "$(json decode)"
      ;;
    lanczos)
      step lanczos 60 -m benchmarks.apps.lanczos --grid 128,120,112 --basis 40 --backend "shmemar,nvshmem,mpi$nccl" \
        --json "$(json lanczos)"
      ;;
    solve)
      step solve 600 -m benchmarks.apps.eigensolver --check --repeat "${REPEAT:-3}" \
        --n "${SOLVE_N:-1024,2048,4096,8192}" --backend "shmemar,shmemar-fused,nvshmem,mpi$nccl" \
        --json "$(json solve)"
      ;;
    barrier)
      step barrier 60 -m benchmarks barrier --json "$(json barrier)"
      ;;
  esac
}

for ranks in ${RANKS:-$gpus}; do
  for part in "$@"; do run "$part"; done
done
exit $failed
