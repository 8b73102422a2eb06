#!/usr/bin/env bash
# The package and these benchmarks pass mypy, strictly, with PyTorch's own types.
exec "$(getent passwd "$EUID" | cut -d: -f6)/.cache/signpost/python/bin/python" -m mypy \
  --config-file=client/python/tests/mypy.ini --cache-dir="$TEST_TMPDIR" \
  client/python/signpost client/python/benchmarks/peers.py client/python/benchmarks/transport.py
