#!/usr/bin/env bash
# quick_start.sh WHEEL SUITE [DIRECTORY]: does what README.md tells a PyTorch user to do first, on a Debian SUITE
# that has nothing but Python and PyTorch: installs the wheel without an index, and trains the README's program on
# two ranks. Makes the system in DIRECTORY unless it is there. Needs root and
# mmdebstrap; for bookworm, Debian 12 with the environment that client/python/environment.sh makes.
set -euo pipefail
here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
source "$here/system.sh"
wheel=$(readlink -f "$1") suite=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
root=${3:-$work/root}

fail() { echo "quick_start: $*" >&2; exit 1; }

case $suite in
  bookworm) make_system bookworm "$root" python3-venv ;;
  trixie) make_system trixie "$root" python3-venv,python3-torch ;;
  *) fail "the suite is '$suite', wanted bookworm or trixie" ;;
esac
rm -rf "$root/job"
mkdir "$root/job"
cp "$wheel" "$root/job/"
# The first program in Python that the README shows.
awk '/^```python$/ { inside = 1; next } /^```$/ { if (inside) exit } inside' "$here/../../README.md" >"$root/job/train.py"
grep -q OneBitAdam "$root/job/train.py" || fail "README.md does not begin with a program that has OneBitAdam"

in_system "$root" python3 -m venv --system-site-packages /job/environment
if [[ $suite == bookworm ]]; then
  # Debian 12 has PyTorch 1.13. This one has what the tests have: the newest.
  packages=$("$here/../../client/python/in_environment.sh" -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))')
  [[ $packages == */python3.11/* ]] || fail "$packages is not for Python 3.11: on Debian 12, run client/python/environment.sh first"
  for name in torch torchgen functorch sympy mpmath networkx jinja2 markupsafe filelock fsspec typing_extensions.py \
    torch-*.dist-info; do
    # shellcheck disable=SC2086
    cp -a --link "$packages"/$name "$root/job/environment/lib/python3.11/site-packages/" 2>/dev/null ||
      cp -a "$packages"/$name "$root/job/environment/lib/python3.11/site-packages/"
  done
fi

begin=$SECONDS
in_system "$root" bash -ec '
  cd /job && . environment/bin/activate
  pip install --quiet --no-index signpost-*.whl
  echo "installed"
  time signpost run -n 2 -- python train.py' 2>&1 | tee "$work/output"
echo "quick_start: $suite: $(in_system "$root" /job/environment/bin/python -c '
import sys, torch
print("Python", sys.version.split()[0], "with PyTorch", torch.__version__)'), $((SECONDS - begin)) s in all"
# One line of each rank: "rank 0: loss 0.0123, 2.06 bits per parameter". Of steps 100 to 199 fifteen refresh the variance.
(($(grep -cE 'rank [01]: loss 0\.[0-9]+, (1\.[0-9]|2\.[0-2])[0-9] bits per parameter' "$work/output") == 2)) ||
  fail "the two ranks did not end with a small loss and with some two bits per parameter"
