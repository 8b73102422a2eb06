#!/usr/bin/env bash
# Builds what tests/gpu/run.sh takes to a machine with a GPU: gpu-package.tar.gz in this repository's
# root, with the programs, the Python package, and the libraries that both need, since such a machine
# may have none of them. (Linking those statically would do for the programs, but Debian's archives
# cannot go into libsignpost.so.) For a machine with nvcc, after ./signpost has installed the rest. The
# other machine needs a driver for this nvcc's CUDA: 580 or later for CUDA 13, 525 for CUDA 12.
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../.."

# Where programs, and what Python loads, look for libraries, and these for theirs.
rpath='$ORIGIN/../lib:$ORIGIN/../../lib'
bazel build --config=cuda --linkopt=-Wl,--disable-new-dtags --linkopt="-Wl,-rpath,$rpath" \
  //kernels:cuda_device_test //tests:gpu_job_device_test //tests:gpu_node_device_test //cli:signpost //client/python:package \
  //client/examples:libtopk.so
rm -rf gpu-package
mkdir -p gpu-package/bin gpu-package/lib/c gpu-package/python gpu-package/client/examples
cp -L bazel-bin/kernels/cuda_device_test bazel-bin/tests/gpu_{job,node}_device_test bazel-bin/cli/signpost gpu-package/bin/
cp -RL bazel-bin/client/python/package/signpost gpu-package/python/
cp client/python/tests/{gpu_job,ddp_job,job,codecs_of_mine,simulated_gpu,gpt2}.py client/python/benchmarks/gpu_steps.py \
  gpu-package/python/
cp -L bazel-bin/client/examples/libtopk.so gpu-package/client/examples/  # where the tests look for it
ln -f gpu-package/bin/signpost gpu-package/python/signpost/signpost
ldd gpu-package/bin/* gpu-package/python/signpost/libsignpost.so |
  awk '$2 == "=>" { print $3 } $1 ~ "^/.*ld-linux" { print $1 }' | sort -u | xargs cp -Lt gpu-package/lib
# The C and C++ libraries and what loads programs stand apart: they are for machines whose own are older.
mv gpu-package/lib/{ld-linux*,libc.so.6,libm.so.6,libstdc++.so.6,libgcc_s.so.1} gpu-package/lib/c/
cat README.md ARCHITECTURE.md docs/*.md >gpu-package/text  # for the language model to learn from
chmod -R u+w gpu-package
strip gpu-package/bin/* gpu-package/python/signpost/libsignpost.so gpu-package/lib/*.so* gpu-package/lib/c/*
tar -czf gpu-package.tar.gz gpu-package
rm -rf gpu-package
du -h gpu-package.tar.gz
most=$((64 << 20))
if (($(stat -c %s gpu-package.tar.gz) > most)); then
  echo "package.sh: gpu-package.tar.gz is larger than 64 MiB" >&2
  exit 1
fi
