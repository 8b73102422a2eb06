#!/usr/bin/env bash
# Runs one file of tests as Bazel wants it: with its results where `./signpost test` counts them.
export PYTHONPATH=client/python/package:client/python/tests PYTHONDONTWRITEBYTECODE=1
exec /usr/bin/python3 -m pytest --quiet -p no:cacheprovider --junitxml="$XML_OUTPUT_FILE" "$@"
