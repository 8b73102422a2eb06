#!/usr/bin/env bash
# What must be run on a GPU, on a machine that has one: with the driver, and for compute-sanitizer the
# CUDA toolkit, but neither Bazel nor any of the libraries: gpu-package.tar.gz, which
# tests/gpu/package.sh has made elsewhere, is in the repository's root.
#
#   equality   the CUDA kernels give the CPU kernels' bytes, and kernels/gpu.h is as it says, in the same
#              tests as on the host
#   memcheck, racecheck   compute-sanitizer finds nothing in them; what is read or written beside a
#              buffer, but in the tests' own memory, is for the tests' guards to find
#   kernels    how fast they are, against copying within the device's memory
#
# Ends with a table of these, and 1 if one of them failed. OUT=DIR keeps what they say in DIR.
set -uo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../.." || exit
out=${OUT:-$(mktemp -d)}
mkdir -p "$out"
if [[ ! -f gpu-package.tar.gz ]]; then
  echo "run.sh: there is no gpu-package.tar.gz; tests/gpu/package.sh makes it where nvcc and Bazel are" >&2
  exit 64
fi
unpacked=$(mktemp -d)
trap 'rm -rf "$unpacked"' EXIT
tar -xzf gpu-package.tar.gz -C "$unpacked"
package=$unpacked/gpu-package

# The package's programs with its libraries, and where the machine's C library is older with its own.
export LD_LIBRARY_PATH=$package/lib
loader=()
if ! "$package/bin/signpost" version >/dev/null 2>&1; then
  unset LD_LIBRARY_PATH
  loader=("$package"/lib/c/ld-linux*.so* --library-path "$package/lib:$package/lib/c")
fi
program() { "${loader[@]}" "$package/bin/$1" "${@:2}"; }

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
  results+=("$(printf '%-12s %-12s %4d s' "$name" "$word" $((SECONDS - begin)))")
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
# Without the test that asks CUDA for more than it has: the error is what it wants.
sanitize() {
  with_device compute-sanitizer --tool "$1" --error-exitcode 9 "${loader[@]}" \
    "$package/bin/cuda_device_test" --gtest_filter=-Gpu.SaysHowMuchRoomThereIs
}

program signpost version
step equality equality
if command -v compute-sanitizer >/dev/null; then
  step memcheck sanitize memcheck
  step racecheck sanitize racecheck
else
  results+=("memcheck     not run: there is no compute-sanitizer")
fi
step kernels program signpost bench kernels --device cuda --json "$out/kernels.json"
step kernels-340M program signpost bench kernels --device cuda --elements 340000000

echo
printf '%s\n' "${results[@]}"
exit $failed
