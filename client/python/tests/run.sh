#!/usr/bin/env bash
# run.sh PACKAGE FILE: runs one file of tests by pytest, as Bazel wants it, with its results where `./signpost test`
# counts them. PACKAGE is the folder of client/python that has the Python package, or "none".
export HOME=${HOME:-$TEST_TMPDIR} # Open MPI 5 ends without one
export PYTHONPATH=client/python/$1:client/python/tests PYTHONDONTWRITEBYTECODE=1
exec client/python/in_environment.sh -m pytest --quiet -p no:cacheprovider --junitxml="$XML_OUTPUT_FILE" "${@:2}"
