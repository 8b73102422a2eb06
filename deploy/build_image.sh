#!/usr/bin/env bash
# build_image.sh PROGRAM IMAGE: builds deploy/Dockerfile around the PROGRAM of a release, a .tar.gz, and writes the
# image as `docker load` takes it. Needs root, buildah and mmdebstrap, and no registry: the system that glibc is
# taken from is made from Debian's packages.
set -euo pipefail
program=$(readlink -f "$1") image=$(realpath "$2")
deploy=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
version=$(basename "$program" | cut -d- -f2)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
buildah=(buildah "--root=$work/images" "--runroot=$work/run" --storage-driver=vfs)

mmdebstrap --quiet --variant=essential --include=libstdc++6 bookworm "$work/base.tar"
container=$("${buildah[@]}" from scratch)
"${buildah[@]}" add -q "$container" "$work/base.tar" / >/dev/null
"${buildah[@]}" commit -q "$container" localhost/debian:12 >/dev/null
"${buildah[@]}" rm "$container" >/dev/null

mkdir -p "$work/context/deploy" "$work/context/dist"
cp "$deploy/image_root.sh" "$work/context/deploy/"
cp "$program" "$work/context/dist/"
"${buildah[@]}" build --quiet --isolation=chroot --timestamp=0 --build-arg "VERSION=$version" \
  --build-arg BASE=localhost/debian:12 --file "$deploy/Dockerfile" --tag "localhost/signpost:$version" \
  "$work/context" >/dev/null
rm -f "$image"
"${buildah[@]}" push --quiet "localhost/signpost:$version" "docker-archive:$image:localhost/signpost:$version"
