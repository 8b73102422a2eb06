#!/usr/bin/env bash
# Builds what tests/gpu/run.sh takes to a machine with a GPU: gpu-package.tar.gz in this repository's
# root, with the programs and the libraries that they need, since such a machine may have none of
# them. For a machine with nvcc, after ./signpost has installed the rest.
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../.."

bazel build --config=cuda //kernels:cuda_device_test //cli:signpost
rm -rf gpu-package
mkdir -p gpu-package/bin gpu-package/lib/c
cp -L bazel-bin/kernels/cuda_device_test bazel-bin/cli/signpost gpu-package/bin/
ldd gpu-package/bin/* | awk '$2 == "=>" { print $3 } $1 ~ "^/.*ld-linux" { print $1 }' | sort -u |
  xargs cp -Lt gpu-package/lib
# The C library and what loads programs stand apart: they are for machines whose own are older.
mv gpu-package/lib/{ld-linux*,libc.so.6,libm.so.6} gpu-package/lib/c/
chmod -R u+w gpu-package
strip gpu-package/bin/* gpu-package/lib/*.so* gpu-package/lib/c/*
tar -czf gpu-package.tar.gz gpu-package
rm -rf gpu-package
du -h gpu-package.tar.gz
