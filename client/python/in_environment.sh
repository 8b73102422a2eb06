#!/usr/bin/env bash
# in_environment.sh ARGUMENT...: runs Python, with these arguments, in the environment that environment.sh makes.
python=$(getent passwd "$EUID" | cut -d: -f6)/.cache/signpost/python/bin/python
if [[ ! -x $python ]]; then
  echo "in_environment.sh: there is no $python; \`./signpost test\` makes it, and so does client/python/environment.sh" >&2
  exit 69
fi
exec "$python" "$@"
