#!/usr/bin/env bash
# run.sh PACKAGE FILE: runs one file of tests as Bazel wants it, with its results where `./signpost test`
# counts them. ../environment.sh has made the environment.
export PYTHONPATH=client/python/$1:client/python/tests PYTHONDONTWRITEBYTECODE=1
exec "$(getent passwd "$EUID" | cut -d: -f6)/.cache/signpost/python/bin/python" -m pytest --quiet \
  -p no:cacheprovider --junitxml="$XML_OUTPUT_FILE" "${@:2}"
