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
#   language_model and so on: the PyTorch examples, two ranks on the GPU and one on the CPU, which end
#              with the same parameters; language_model-node, four ranks of two nodes, of which
#              each has one on the GPU; and language_model-node-gpu, where the nodes' workers are on
#              it too, and share its memory with their ranks
#   kernels    how fast they are, against copying within the device's memory
#
# Ends with a table of these, and 1 if one of them failed or could not be run. OUT=DIR keeps what they say in DIR.
set -uo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../.." || exit
out=${OUT:-$(mktemp -d)}
mkdir -p "$out"
out=$(readlink -f "$out")
if [[ ! -f gpu-package.tar.gz ]]; then
  echo "run.sh: there is no gpu-package.tar.gz; tests/gpu/package.sh makes it where nvcc and Bazel are" >&2
  exit 64
fi
unpacked=$(mktemp -d)
trap 'rm -rf "$unpacked"' EXIT
tar -xzf gpu-package.tar.gz -C "$unpacked"
package=$unpacked/gpu-package

# The package's programs find its libraries; where the machine's C library is older, with its own.
loader=()
if ! "$package/bin/signpost" version >/dev/null 2>&1; then
  loader=("$package"/lib/c/ld-linux*.so* --library-path "$package/lib:$package/lib/c")
fi
program() { "${loader[@]}" "$package/bin/$1" "${@:2}"; }
# The tests look for an example's codec from where they are.
in_package() { (cd "$package" && "$@"); }

results=() failed=0
# step NAME COMMAND...: runs it, keeps what it says, and whether it succeeded.
step() {
  local name=$1 code=0 begin=$SECONDS
  shift
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
pytorch() {
  local said ranks=$2
  said=$(ON_CPU=" $3 " PYTHONPATH=$package/python "$package/bin/signpost" run -n "$ranks" --aggregators 2 "${@:4}" -- bash -c '
    device=cuda:0
    [[ $ON_CPU != *" $SIGNPOST_RANK "* ]] || device=cpu
    exec python3 "$0" --device "$device" --results "$1" --steps 100' \
    "$package/python/signpost/examples/$1.py" "$unpacked/$1" 2>&1)
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
  results+=("memcheck                 not run: there is no compute-sanitizer") failed=1
fi
if python3 -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null; then
  for example in language_model masked_language_model resnet; do step "$example" pytorch "$example" 3 2; done
  step language_model-node pytorch language_model 4 "1 3" --per-node 2
  step language_model-node-gpu pytorch language_model 4 "" --per-node 2 --node-gpu 0
else
  results+=("the examples are not run: python3 has no PyTorch that finds a GPU") failed=1
fi
step kernels program signpost bench kernels --device cuda --json "$out/kernels.json"
step kernels-340M program signpost bench kernels --device cuda --elements 340000000

echo
printf '%s\n' "${results[@]}"
exit $failed
