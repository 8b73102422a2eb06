#!/usr/bin/env bash
# build.sh SUITE [DIRECTORY]: builds the program, not the tests or the wheel, on a fresh Debian SUITE with ./signpost
# and the packages that it installs, and runs a short demo. Makes the system in DIRECTORY unless it is there. Needs
# root and mmdebstrap.
set -euo pipefail
here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
source "$here/system.sh"
suite=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
root=${2:-$work/root}

make_system "$suite" "$root"
mkdir -p "$root/signpost"
git -C "$here/../.." ls-files -z | tar -C "$here/../.." --null --files-from=- -c | tar -C "$root/signpost" -x
# Without optimisation, which takes most of the time and finds no further missing include. Bazel's sandbox needs
# mounts that are not there.
echo "build -c fastbuild --copt=-O0 --spawn_strategy=local --keep_going" >"$root/signpost/user.bazelrc"
in_system "$root" bash -ec '
  cd /signpost
  ./signpost version
  ./signpost demo --hidden 16 --steps 20 --freeze-step 5 -n 2 --text README.md --output demo'
