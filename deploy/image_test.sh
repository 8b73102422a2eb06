#!/usr/bin/env bash
# image_test.sh PROGRAM IMAGE: builds the image of a release again, which must give the same bytes, and looks at
# what is in it. Needs what build_image.sh needs.
set -euo pipefail
program=$(readlink -f "$1") image=$(readlink -f "$2")
deploy=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

fail() { echo "image_test: $*" >&2; exit 1; }

"$deploy/build_image.sh" "$program" "$work/image.tar"
cmp "$work/image.tar" "$image" || fail "two builds differ"

buildah=(buildah "--root=$work/images" "--runroot=$work/run" --storage-driver=vfs)
container=$("${buildah[@]}" from "docker-archive:$image")
inspect() { "${buildah[@]}" inspect --format "$1" "$container"; }
[[ $(inspect '{{.OCIv1.Config.User}}') == 65532:65532 ]] || fail "it does not run as 65532"
[[ $(inspect '{{.OCIv1.Config.Entrypoint}}') == "[/usr/bin/signpost]" ]] || fail "another entry point"
[[ $(inspect '{{index .OCIv1.Config.Labels "org.opencontainers.image.licenses"}}') == Apache-2.0 ]] ||
  fail "no labels"
root=$("${buildah[@]}" mount "$container")
programs=$(find "$root" -type f -perm /111 ! -name '*.so*' -printf '%P\n')
[[ $programs == usr/bin/signpost ]] || fail "there is more to execute than the program: $programs"
[[ -z $(find "$root" -perm /6000) ]] || fail "something has a user's or group's rights"
"${buildah[@]}" run --isolation=chroot "$container" -- signpost version | grep '^signpost ' ||
  fail "it does not run"
echo "image_test: $(sha256sum <"$image" | cut -c1-64), $(du -sm "$root" | cut -f1) MB"
