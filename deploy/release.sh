#!/usr/bin/env bash
# release.sh WHEEL: writes what a release consists of to the wheel's directory, as root, beside the wheel:
#
#   signpost-VERSION-linux-x86_64.tar.gz    the program with its libraries, for machines without Python
#   signpost-VERSION-image.tar              the container image of aggregators, as `docker load` takes it
#   SHA256SUMS                              checksums of the wheel and of these two
#
# The same wheel and the same Debian packages give the same bytes.
set -euo pipefail
umask 022
deploy=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
wheel=$(readlink -f "$1")
version=$(basename "$wheel" | cut -d- -f2)
name=signpost-$version-linux-x86_64
output=$(dirname "$wheel")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

/usr/bin/python3 "$deploy/unpack_program.py" "$wheel" "$work/$name"
tar -C "$work" --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner --format=ustar -c "$name" |
  gzip -9n >"$output/$name.tar.gz"
"$deploy/build_image.sh" "$output/$name.tar.gz" "$output/signpost-$version-image.tar"
cd "$output"
sha256sum "$(basename "$wheel")" "$name.tar.gz" "signpost-$version-image.tar" | tee SHA256SUMS
