#!/usr/bin/env bash
# The line in docs/cpp.md builds a program in C without Bazel, which finds the library, and notices one
# that is not of its header's ABI.
set -euo pipefail
signpost=$PWD/$1 library=$PWD/$2 header=$PWD/$3 source=$PWD/$4
build=$(grep '^cc .*two_tensors' "$5")
cd "$TEST_TMPDIR"
mkdir -p bazel-bin/client client/examples elsewhere
ln -s "$library" bazel-bin/client/libsignpost.so
cp "$source" client/examples/two_tensors.c
cp "$header" client/signpost.h

eval "$build"
"$signpost" run -n 2 -- ./two_tensors

echo "linked by the library's path, and run elsewhere:"
eval "${build/-lsignpost/bazel-bin/client/libsignpost.so}"
(cd elsewhere && "$signpost" run -n 2 -- ../two_tensors)

echo "with the header of another ABI:"
sed -i 's/^#define SIGNPOST_ABI .*/#define SIGNPOST_ABI 1/' client/signpost.h
eval "$build"
output=$("$signpost" run -n 1 -- ./two_tensors 2>&1) && exit 1
echo "$output"
grep -q "libsignpost.so: another ABI than signpost.h's" <<<"$output"
