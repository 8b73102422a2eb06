#!/usr/bin/env bash
# build_image.sh PROGRAM IMAGE: builds deploy/Dockerfile around the PROGRAM of a release, a .tar.gz, and writes the
# image as `docker load` takes it. Needs root, buildah and mmdebstrap, and no registry: the system that glibc is
# taken from is made from the packages of this machine's Debian.
set -euo pipefail
program=$(readlink -f "$1") image=$(realpath "$2")
deploy=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
version=$(basename "$program" | cut -d- -f2)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# The program needs a glibc at least as new as the one that it was linked with.
suite=$(. /etc/os-release && echo "$VERSION_CODENAME")
buildah=(buildah "--root=$work/images" "--runroot=$work/run" --storage-driver=vfs)

mmdebstrap --quiet --variant=essential --include=libstdc++6 "$suite" "$work/base.tar"
container=$("${buildah[@]}" from scratch)
"${buildah[@]}" add -q "$container" "$work/base.tar" / >/dev/null
"${buildah[@]}" commit -q "$container" "localhost/debian:$suite" >/dev/null
"${buildah[@]}" rm "$container" >/dev/null

mkdir -p "$work/context/deploy" "$work/context/dist"
cp "$deploy/image_root.sh" "$work/context/deploy/"
cp "$program" "$work/context/dist/"
"${buildah[@]}" build --quiet --isolation=chroot --timestamp=0 --build-arg "VERSION=$version" \
  --build-arg "BASE=localhost/debian:$suite" --file "$deploy/Dockerfile" --tag "localhost/signpost:$version" \
  "$work/context" >/dev/null
rm -f "$image"
"${buildah[@]}" push --quiet "localhost/signpost:$version" "docker-archive:$image:localhost/signpost:$version"
