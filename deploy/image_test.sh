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
# is NAME TEMPLATE WANTED: the image's configuration has that.
is() {
  local got
  got=$(inspect "$2")
  [[ $got == "$3" ]] || fail "the $1 is '$got', wanted '$3'"
}
is user '{{.OCIv1.Config.User}}' 65532:65532
is "entry point" '{{.OCIv1.Config.Entrypoint}}' "[/usr/bin/signpost]"
is licence '{{index .OCIv1.Config.Labels "org.opencontainers.image.licenses"}}' Apache-2.0
root=$("${buildah[@]}" mount "$container")
programs=$(find "$root" -type f -perm /111 ! -name '*.so*' -printf '%P\n')
[[ $programs == usr/bin/signpost ]] || fail "there is more to execute than the program: $programs"
[[ -z $(find "$root" -perm /6000) ]] || fail "there are setuid or setgid files: $(find "$root" -perm /6000)"
"${buildah[@]}" run --isolation=chroot "$container" -- signpost version | grep '^signpost ' ||
  fail "signpost version fails in the image"
echo "image_test: $(sha256sum <"$image" | cut -c1-64), $(du -sm "$root" | cut -f1) MB"
