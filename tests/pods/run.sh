#!/usr/bin/env bash
# run.sh FILE: runs one file of tests as Bazel wants it, with its results where `./signpost test` counts
# them.
export PYTHONPATH=tests/pods PYTHONDONTWRITEBYTECODE=1
exec "$(getent passwd "$EUID" | cut -d: -f6)/.cache/signpost/python/bin/python" -m pytest --quiet \
  -p no:cacheprovider --junitxml="$XML_OUTPUT_FILE" "$@"
