#!/usr/bin/env bash
# in_environment.sh PROGRAM ARGUMENT...: runs a program in Python in the environment that environment.sh has made.
exec "$(getent passwd "$EUID" | cut -d: -f6)/.cache/signpost/python/bin/python" "$@"
