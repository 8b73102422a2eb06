#!/usr/bin/env bash
# What must be run on a GPU, on a machine that has one: with the driver, for compute-sanitizer the
# CUDA toolkit, and PyTorch with CUDA; but neither Bazel nor any of the libraries: gpu-package.tar.gz,
# which tests/gpu/package.sh has made elsewhere, is in the repository's root.
#
#   equality   the CUDA kernels give the CPU kernels' bytes, and kernels/gpu.h is as it says, in the same
#              tests as on the host
#   jobs       two workers that share the GPU, one on the CPU, and two aggregators: the bytes of a job
#              on the CPU, in all stages
#   nodes      two nodes of two processes each that share the GPU, all or some of them, and their
#              workers too: the bytes of nodes on the CPU
#   memcheck, racecheck   compute-sanitizer finds nothing in equality, and memcheck-jobs and
#              memcheck-nodes not in those;
#              what is read or written beside a buffer, but in the tests' own memory, is for the tests'
#              guards to find
#   optimizers  PyTorch's on CUDA, each with overlap, with clipping and as DeepSpeed's: a rank on the GPU
#              and one on the CPU end with the same parameters
#   language_model and so on: the PyTorch examples, two ranks on the GPU and one on the CPU, which end
#              with the same parameters; language_model-node, four ranks of two nodes, of which
#              each has one on the GPU; and language_model-node-gpu, where the nodes' workers are on
#              it too, and share its memory with their ranks
#   kernels, kernels-340M    how fast they are, against copying within the device's memory
#
# run.sh STEP... runs these only. Ends with what it ran on and a table of these, also when it is interrupted, and with 1 if one
# of them failed or could not be run (resnet may be left out: its images are scikit-learn's). OUT=DIR keeps what they say
# in DIR.
set -uo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../.." || exit
out=${OUT:-$(mktemp -d)}
mkdir -p "$out"
out=$(readlink -f "$out")
rm -f "$out"/kernels*.json
if [[ ! -f gpu-package.tar.gz ]]; then
  echo "run.sh: there is no gpu-package.tar.gz; tests/gpu/package.sh makes it where nvcc and Bazel are" >&2
  exit 64
fi
wanted=" $* "
unpacked=$(mktemp -d)
tar -xzf gpu-package.tar.gz -C "$unpacked"
package=$unpacked/gpu-package

results=() failed=0
# What a person is to see at the end, however it comes.
end() {
  rm -rf "$unpacked"
  echo
  echo "$(date -u +%F), $(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null || echo 'no nvidia-smi')"
  command -v nvcc >/dev/null && nvcc --version | grep release
  python3 -c 'import torch; print("PyTorch", torch.__version__)' 2>/dev/null
  printf '%s\n' "${results[@]}"
  figures
}
trap end EXIT
trap 'exit 130' INT TERM HUP
# What is asked of compressing and applying: of the copy's bandwidth, and milliseconds for 340M parameters.
figures() {
  python3 - "$out"/kernels*.json <<'EOF'
import json
import sys

for path in sys.argv[1:]:
    elements = 340e6 if "340M" in path else 100e6
    milliseconds = 0
    try:
        with open(path) as file:
            rows = json.load(file)["figures"]
    except OSError:
        continue
    for row in rows:
        if row["name"] not in ("compress, fp32 gradient, one-bit momentum", "apply"):
            continue
        if row["unit"] == "GB/s":
            share = f"{row['of_bound']:.0%} of the copy's bandwidth"
            print(f"{elements / 1e6:.0f}M, {row['name']}: {row['value']:.0f} GB/s, {share}")
        else:
            milliseconds += elements / row["value"] / 1e6
    print(f"{elements / 1e6:.0f}M, both together: {milliseconds:.2f} ms")
EOF
}

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
# step NAME COMMAND...: runs it, keeps what it says, and whether it succeeded.
step() {
  local name=$1 code=0 begin=$SECONDS
  shift
  is_wanted "$name" || return 0
  echo "--- $name: $*"
  "$@" >"$out/$name.log" 2>&1 || code=$?
  tail -n 40 "$out/$name.log"
  local word=passed
  if ((code != 0)); then word="FAILED ($code)" failed=1; fi
  results+=("$(printf '%-24s %-12s %4d s' "$name" "$word" $((SECONDS - begin)))")
}

# The tests skip themselves where there is no device, which must not pass for success here.
with_device() {
  local said
  said=$("$@" 2>&1)
  local code=$?
  echo "$said"
  ((code == 0)) && [[ $said != *"there is no device"* ]]
}
equality() { with_device program cuda_device_test; }
jobs_on_gpu() { with_device in_package program gpu_job_device_test; }
nodes_on_gpu() { with_device in_package program gpu_node_device_test; }
# sanitize TOOL PROGRAM: without the test that asks CUDA for more than it has, whose error is right.
sanitize() {
  with_device in_package compute-sanitizer --tool "$1" --error-exitcode 9 "${loader[@]}" \
    "$package/bin/$2" --gtest_filter=-Gpu.SaysHowMuchRoomThereIs
}
# pytorch EXAMPLE RANKS ON_CPU [FLAG...]: on so many ranks, of which those ("1 3") are on the CPU, with
# more flags for `signpost run`; all end with the same parameters.
declare -A flags_of=([language_model]="--text $package/text")
pytorch() {
  local said ranks=$2
  said=$(ON_CPU=" $3 " PYTHONPATH=$package/python "$package/bin/signpost" run -n "$ranks" --aggregators 2 "${@:4}" -- bash -c '
    device=cuda:0
    [[ $ON_CPU != *" $SIGNPOST_RANK "* ]] || device=cpu
    exec python3 "$0" --device "$device" --results "$1" --steps 100 "${@:2}"' \
    "$package/python/signpost/examples/$1.py" "$unpacked/$1" ${flags_of[$1]:-} 2>&1)
  local code=$?
  echo "$said"
  local ends
  ends=$(grep -o 'done: parameters [0-9a-f]*' <<<"$said" | sort | uniq -c | awk '{ print $1 }')
  [[ $code == 0 && $ends == "$ranks" ]]
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
  local said
  said=$(PYTHONPATH=$package/python "$package/bin/signpost" run -n 2 --aggregators 2 -- \
    python3 "$package/python/gpu_job.py" 0 2>&1)
  local code=$?
  echo "$said"
  local of_rank=("$(sed -n 's/^\[rank 0\] \(steps\|model\) //p' <<<"$said")"
    "$(sed -n 's/^\[rank 1\] \(steps\|model\) //p' <<<"$said")")
  [[ $code == 0 && -n ${of_rank[0]} && ${of_rank[0]} == "${of_rank[1]}" ]]
}
examples=(optimizers {,masked_}language_model resnet language_model-node{,-gpu})
if ((${#loader[@]} > 0)); then
  cannot_run "this machine's C or C++ library is older than libsignpost.so's" "${examples[@]}"
elif python3 -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null; then
  step optimizers optimizers
  for example in language_model masked_language_model; do step "$example" pytorch "$example" 3 2; done
  if python3 -c 'import sklearn' 2>/dev/null; then
    step resnet pytorch resnet 3 2
  else
    leave_out resnet "there is no scikit-learn"
  fi
  step language_model-node pytorch language_model 4 "1 3" --per-node 2
  step language_model-node-gpu pytorch language_model 4 "" --per-node 2 --node-gpu 0
else
  cannot_run "python3 has no PyTorch that finds a GPU" "${examples[@]}"
fi
step kernels program signpost bench kernels --device cuda --elements 100000000 --json "$out/kernels.json"
step kernels-340M program signpost bench kernels --device cuda --elements 340000000 --json "$out/kernels-340M.json"
for name in "$@"; do
  [[ -n ${steps[$name]:-} ]] && continue
  results+=("$(printf '%-24s there is no such step' "$name")")
  failed=1
done
exit $failed
