#!/usr/bin/env bash
# What must be run on a GPU, on a machine that has one: with the driver, for compute-sanitizer the
# CUDA toolkit, and PyTorch with CUDA; but neither Bazel nor any of the libraries: gpu-package.tar.gz,
# which tests/gpu/package.sh has made elsewhere, is in the repository's root.
#
#   equality   the CUDA kernels give the CPU kernels' bytes, and kernels/gpu.h is as it says, in the same
#              tests as on the host
#   jobs       two workers that share the GPU, one on the CPU, and two aggregators: the bytes of a job
#              on the CPU, in all stages; and of reductions, in all codecs
#   nodes      two nodes of two processes each that share the GPU, all or some of them, and their
#              workers too: the bytes of nodes on the CPU
#   memcheck, racecheck   compute-sanitizer finds nothing in equality, and memcheck-jobs and
#              memcheck-nodes not in those;
#              what is read or written beside a buffer, but in the tests' own memory, is for the tests'
#              guards to find
#   optimizers  PyTorch's on CUDA, each with overlap, with clipping and as DeepSpeed's: a rank on the GPU
#              and one on the CPU end with the same parameters
#   reductions  two ranks that share the GPU reduce tensors of all types in all codecs, and train with
#              DistributedDataParallel and ddp_hook: both end with the same bits
#   language_model and so on: the PyTorch examples, two ranks on the GPU and one on the CPU, which end
#              with the same parameters
#   kernels, kernels-340M    how fast they are, against copying within the device's memory; of 100 million
#              elements compressing and applying must each reach 85% of it, and of 340 million both
#              together take 3 ms at most, which asks for an H100 or better
#   steps      how long whole steps take, of 1M, 25M, 100M and 340M parameters and two ranks that share the
#              GPU, in turns with Gloo's all-reduce and PyTorch's AdamW; and reductions in one bit, in turns with Gloo's
#
# run.sh STEP... runs these only, in the order above. run.sh together runs all, those that are timed first and
# the others beside each other, the sanitizers' in shards: for a machine of 16 processors or so, and 128 GB of
# memory, that is lent for minutes.
# Ends with what it ran on and a table of these, also when it is interrupted, and with 1 if one
# of them failed or could not be run (resnet may be left out: its images are scikit-learn's). A step that takes longer than
# LIMIT_S seconds (1800) is ended, and has failed. OUT=DIR keeps what they say in DIR, as they say it.
set -uo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../.." || exit
out=${OUT:-$(mktemp -d)}
mkdir -p "$out"
out=$(readlink -f "$out")
limit=${LIMIT_S:-1800}
PATH=$PATH:/usr/local/cuda/bin
if [[ ! -f gpu-package.tar.gz ]]; then
  echo "run.sh: there is no gpu-package.tar.gz; tests/gpu/package.sh makes it where nvcc and Bazel are" >&2
  exit 64
fi
versions() {
  echo "$(date -u +%F), $(timeout 20 nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null || echo 'no nvidia-smi')"
  command -v nvcc >/dev/null && nvcc --version | grep release
  timeout 60 python3 -c 'import torch; print("PyTorch", torch.__version__)' 2>/dev/null
}

# Groups beside each other, each by this script, with an OUT below ours, and a table of all.
groups=() logs=()  # their processes, and what they say
# group NAME STEP...
group() {
  logs+=("$out/$1.log")
  OUT=$out/$1 IS_GROUP=1 tests/gpu/run.sh "${@:2}" >"$out/$1.log" 2>&1 &
  groups+=($!)
}
# in_shards COUNT STEP
in_shards() {
  for ((shard = 0; shard < $1; ++shard)); do
    GTEST_TOTAL_SHARDS=$1 GTEST_SHARD_INDEX=$shard group "$2-$shard" "$2"
  done
}
# Of each group what comes behind the last empty line; what could not be run is the same in all shards.
table_of_groups() {
  for log in "${logs[@]}"; do tac "$log" | sed '/^$/q' | tac; done | awk 'NF && !(/ not run: / && seen[$0]++)'
}
together() {
  trap 'kill "${groups[@]}" 2>/dev/null; wait; echo "$what"; table_of_groups; exit 130' INT TERM HUP
  local code=0 what
  what=$(versions)
  group timed kernels kernels-340M steps
  wait "${groups[0]}" || code=1
  groups=()
  group tests equality jobs nodes
  in_shards 3 memcheck
  in_shards 4 racecheck
  in_shards 2 memcheck-jobs
  group memcheck-nodes memcheck-nodes
  group optimizers optimizers reductions resnet
  group models language_model masked_language_model
  for process in "${groups[@]}"; do wait "$process" || code=1; done
  echo "$what"
  table_of_groups
  return $code
}
if [[ $* == together ]]; then
  together
  exit
fi

wanted=" $* "
unpacked=$(mktemp -d)
tar -xzf gpu-package.tar.gz -C "$unpacked"
package=$unpacked/gpu-package

exec 3>&1 4>&2
results=() failed=0 with_figures=()
running=()  # process groups, as kill has them: the step's, and its clock's
current=    # the step
# What a person is to see at the end, however it comes. What asks the GPU may hang.
end() {
  exec >&3 2>&4  # a step's may go to its log
  ((${#running[@]} == 0)) || kill -TERM -- "${running[@]}" 2>/dev/null
  rm -rf "$unpacked"
  if [[ $current ]]; then
    results+=("$(printf '%-24s interrupted' "$current")")
    with_figures+=("$current")
  fi
  echo
  [[ ${IS_GROUP:-} ]] || versions
  ((${#results[@]} == 0)) || printf '%s\n' "${results[@]}"
  for name in "${with_figures[@]}"; do cat "$out/$name.figures" 2>/dev/null; done
  ((${#running[@]} == 0)) || kill -KILL -- "${running[@]}" 2>/dev/null
}
trap end EXIT
trap 'exit 130' INT TERM HUP

# The package's programs find its libraries; where the machine's C or C++ library is older, with its own.
loader=()
if ! "$package/bin/signpost" version >/dev/null 2>&1; then
  loader=("$package"/lib/c/ld-linux*.so* --library-path "$package/lib:$package/lib/c")
fi
program() { "${loader[@]}" "$package/bin/$1" "${@:2}"; }
# The tests look for an example's codec from where they are.
in_package() { (cd "$package" && "$@"); }

# STEPs that there are.
declare -A steps
is_wanted() {
  steps[$1]=1
  [[ $wanted == "  " || $wanted == *" $1 "* ]]
}
# leave_out NAME WHY: which is no failure.
leave_out() { ! is_wanted "$1" || results+=("$(printf '%-24s not run: %s' "$1" "$2")"); }
# cannot_run WHY NAME...: which is one.
cannot_run() {
  for name in "${@:2}"; do
    leave_out "$name" "$1"
    ! is_wanted "$name" || failed=1
  done
}
# within SECONDS COMMAND...: ends it, with all that it has started, when it takes longer.
within() {
  local code=0
  set -m  # a process group for each
  ("${@:2}") &
  running=("-$!")
  (
    trap 'exit 0' TERM
    sleep "$1"
    kill -TERM -- "${running[0]}"
    sleep 10
    kill -KILL -- "${running[0]}"
    sleep 5  # not for good: what hangs in the driver cannot be killed
  ) >/dev/null 2>&1 &
  running+=("-$!")
  set +m
  wait -n "${running[@]#-}" || code=$?
  kill -TERM -- "${running[1]}" 2>/dev/null
  running=()
  return $code
}
# step NAME COMMAND...: runs it, keeps what it says in $log, and whether it succeeded.
step() {
  local name=$1 code=0 begin=$SECONDS log=$out/$1.log word=passed
  local label=$1${GTEST_TOTAL_SHARDS:+ $((GTEST_SHARD_INDEX + 1))/$GTEST_TOTAL_SHARDS}
  shift
  is_wanted "$name" || return 0
  echo "--- $name: $* ($log; at most $limit s)"
  current=$label
  within "$limit" "$@" >"$log" 2>&1 || code=$?
  current=
  tail -n 40 "$log"
  local seconds=$((SECONDS - begin))
  if ((seconds >= limit)); then
    word="FAILED (too slow)" failed=1
  elif grep -q "there is no device" "$log"; then  # the tests skip themselves, which is no success here
    word="FAILED (no device)" failed=1
  elif ((code != 0)); then
    word="FAILED ($code)" failed=1
  fi
  results+=("$(printf '%-24s %-18s %4d s' "$label" "$word" $seconds)")
  [[ ! -f $out/$name.figures ]] || with_figures+=("$name")
}

equality() { program cuda_device_test; }
jobs_on_gpu() { in_package program gpu_job_device_test; }
nodes_on_gpu() { in_package program gpu_node_device_test; }
# sanitize TOOL PROGRAM: without the test that asks CUDA for more than it has, whose error is right.
sanitize() {
  in_package compute-sanitizer --tool "$1" --error-exitcode 9 "${loader[@]}" \
    "$package/bin/$2" --gtest_filter=-Gpu.SaysHowMuchRoomThereIs
}
# pytorch EXAMPLE RANKS ON_CPU [FLAG...]: on so many ranks, of which those ("1 3") are on the CPU, with
# more flags for `signpost run`; all end with the same parameters.
declare -A flags_of=([language_model]="--text $package/text")
pytorch() {
  local ranks=$2
  ON_CPU=" $3 " PYTHONPATH=$package/python "$package/bin/signpost" run -n "$ranks" --aggregators 2 -- bash -c '
    device=cuda:0
    [[ $ON_CPU != *" $SIGNPOST_RANK "* ]] || device=cpu
    exec python3 "$0" --device "$device" --results "$1" --steps 100 "${@:2}"' \
    "$package/python/signpost/examples/$1.py" "$unpacked/$1" ${flags_of[$1]:-} || return
  local ends
  ends=$(grep -o 'done: parameters [0-9a-f]*' "$log" | sort | uniq -c | awk '{ print $1 }')
  [[ $ends == "$ranks" ]]
}

program signpost version
step equality equality
step jobs jobs_on_gpu
step nodes nodes_on_gpu
if command -v compute-sanitizer >/dev/null; then
  step memcheck sanitize memcheck cuda_device_test
  step racecheck sanitize racecheck cuda_device_test
  step memcheck-jobs sanitize memcheck gpu_job_device_test
  step memcheck-nodes sanitize memcheck gpu_node_device_test
else
  cannot_run "there is no compute-sanitizer" memcheck racecheck memcheck-{jobs,nodes}
fi
# Of two ranks, of which the first is on the GPU; each says the same.
optimizers() {
  PYTHONPATH=$package/python "$package/bin/signpost" run -n 2 --aggregators 2 -- \
    python3 "$package/python/gpu_job.py" 0 || return
  local of_rank=("$(sed -n 's/^\[rank 0\] \(steps\|model\) //p' "$log")"
    "$(sed -n 's/^\[rank 1\] \(steps\|model\) //p' "$log")")
  [[ -n ${of_rank[0]} && ${of_rank[0]} == "${of_rank[1]}" ]]
}
# Of two ranks that share the GPU: each says the same, and of reductions what two on the CPU say.
reductions() {
  local ranks
  for ranks in 01 ""; do
    GLOO_SOCKET_IFNAME=lo PYTHONPATH=$package/python "$package/bin/signpost" run -n 2 --aggregators 2 -- \
      python3 "$package/python/gpu_job.py" "$ranks" reductions "$unpacked/rendezvous$ranks" || return
  done
  # Lines of each rank, by what it has said before: on the GPU, and on the CPU.
  local counts
  counts=$(sed -nE 's/^\[rank [01]\] (torch\..* [0-9a-f]{8})$/\1/p' "$log" | sort | uniq -c | awk '{ print $1 }' | sort -u)
  [[ $counts == 4 ]] && (($(sed -nE 's/^\[rank [01]\] (model [0-9a-f]{8})$/\1/p' "$log" | sort -u | wc -l) <= 2))
}
has_pytorch=
! timeout 120 python3 -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null || has_pytorch=1
examples=(optimizers reductions {,masked_}language_model resnet)
if ((${#loader[@]} > 0)); then
  cannot_run "this machine's C or C++ library is older than libsignpost.so's" "${examples[@]}"
elif [[ $has_pytorch ]]; then
  step optimizers optimizers
  step reductions reductions
  for example in language_model masked_language_model; do step "$example" pytorch "$example" 3 2; done
  if python3 -c 'import sklearn' 2>/dev/null; then
    step resnet pytorch resnet 3 2
  else
    leave_out resnet "there is no scikit-learn"
  fi
else
  cannot_run "python3 has no PyTorch that finds a GPU" "${examples[@]}"
fi
# kernels NAME MILLIONS LEAST_SHARE MOST_MS: prints and keeps how fast so many elements are compressed and
# applied, and fails unless each has that share of the copy's bandwidth at least, and both together
# take so long at most; empty: however fast.
kernels() {
  rm -f "$out/$1".{json,figures}
  program signpost bench kernels --device cuda --elements "${2}000000" --json "$out/$1.json" || return
  python3 - "$out/$1.json" "${@:2}" <<'EOF' | tee "$out/$1.figures"
import json
import sys

path, millions, least_share, most_ms = sys.argv[1:]
with open(path) as file:
    rows = json.load(file)["figures"]
milliseconds = 0
misses = 0


def say(what, holds):
    global misses
    misses += not holds
    print(f"{millions}M, {what}{'' if holds else ': TOO SLOW'}")


for name in ("compress, fp32 gradient, one-bit momentum", "apply"):
    of_unit = {row["unit"]: row for row in rows if row["name"] == name}
    speed, share = of_unit["GB/s"]["value"], of_unit["GB/s"]["of_bound"]
    holds = not least_share or share >= float(least_share)
    say(f"{name}: {speed:.0f} GB/s, {share:.0%} of the copy's bandwidth", holds)
    milliseconds += float(millions) / of_unit["Gelem/s"]["value"]
say(f"both together: {milliseconds:.2f} ms", not most_ms or milliseconds <= float(most_ms))
sys.exit(misses > 0)
EOF
}
step kernels kernels kernels 100 0.85 ""
step kernels-340M kernels kernels-340M 340 "" 3
steps_on_gpu() {
  rm -f "$out/steps.figures"
  for millions in 1 25 100 340; do
    PYTHONPATH=$package/python "$package/bin/signpost" run -n 2 --aggregators 2 -- \
      python3 "$package/python/gpu_steps.py" --parameters "${millions}000000" || return
  done | tee /dev/stderr | sed -u 's/^\[rank 0\] //' >"$out/steps.figures"
}
if ((${#loader[@]} == 0)) && [[ $has_pytorch ]]; then
  step steps steps_on_gpu
else
  cannot_run "there is no PyTorch that finds a GPU, or it cannot load libsignpost.so" steps
fi
for name in "$@"; do
  [[ -n ${steps[$name]:-} ]] && continue
  results+=("$(printf '%-24s there is no such step' "$name")")
  failed=1
done
exit $failed
