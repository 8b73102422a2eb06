#!/usr/bin/env bash
# build.sh SUITE [DIRECTORY]: builds this source tree on a fresh Debian SUITE, by ./signpost and the packages that it
# installs, and runs a job with what was built. Makes the system in DIRECTORY unless it is there.
set -euo pipefail
here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
source "$here/system.sh"
suite=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
root=${2:-$work/root}

make_system "$suite" "$root" ca-certificates # for npm and pip; Debian's mirror needs none
mkdir -p "$root/signpost"
git -C "$here/../.." ls-files -z | tar -C "$here/../.." --null --files-from=- -c | tar -C "$root/signpost" -x
# Whether everything compiles and works does not depend on optimisation, which takes most of the time. Bazel's
# sandbox needs mounts that are not there.
echo "build -c fastbuild --copt=-O0 --spawn_strategy=local --keep_going" >"$root/signpost/user.bazelrc"
in_system "$root" bash -ec '
  cd /signpost
  ./signpost version
  ./signpost demo --hidden 16 --steps 20 --freeze-step 5 -n 2 --text README.md --output demo'
