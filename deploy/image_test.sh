#!/usr/bin/env bash
# image_test.sh PROGRAM: builds deploy/Dockerfile around a program that has been built already, twice, on a
# base of this machine's Debian mirror, and looks at what came out. Needs root, buildah and mmdebstrap, and
# no registry.
set -euo pipefail
program=$(readlink -f "$1")
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
libraries=libabsl20220623,libgrpc++1.51,libhwy1,libisal2,libmicrohttpd12,libopenblas0-serial,libprotobuf32,libyaml-cpp0.7
image=("--root=$work/images" "--runroot=$work/run" --storage-driver=vfs)

fail() { echo "image_test: $*" >&2; exit 1; }

# What debian:12-slim is to who has a registry, with the libraries that ./signpost would install.
mmdebstrap --quiet --variant=essential --include="$libraries" bookworm "$work/base.tar"
base=$(buildah "${image[@]}" from scratch)
buildah "${image[@]}" add -q "$base" "$work/base.tar" / >/dev/null
buildah "${image[@]}" commit -q "$base" localhost/debian:12 >/dev/null
buildah "${image[@]}" rm "$base" >/dev/null

mkdir -p "$work/context/deploy"
cp deploy/image_root.sh "$work/context/deploy/"
cp "$program" "$work/context/program"
digests=()
for build in 1 2; do
  touch "$work/context/program"
  buildah "${image[@]}" build --quiet --no-cache --isolation=chroot --timestamp=0 --build-arg PROGRAM=program \
    --build-arg BASE=localhost/debian:12 --file deploy/Dockerfile --tag "signpost:$build" "$work/context" >/dev/null
  digests+=("$(buildah "${image[@]}" inspect --type=image --format '{{.FromImageDigest}}' "localhost/signpost:$build")")
done
[[ ${digests[0]} == "${digests[1]}" ]] || fail "two builds give ${digests[*]}"

inspect() { buildah "${image[@]}" inspect --format "$1" localhost/signpost:1; }
[[ $(inspect '{{.OCIv1.Config.User}}') == 65532:65532 ]] || fail "it does not run as 65532"
[[ $(inspect '{{.OCIv1.Config.Entrypoint}}') == "[/usr/bin/signpost]" ]] || fail "another entry point"
[[ $(inspect '{{index .OCIv1.Config.Labels "org.opencontainers.image.licenses"}}') == Apache-2.0 ]] ||
  fail "no labels"
container=$(buildah "${image[@]}" from localhost/signpost:1)
root=$(buildah "${image[@]}" mount "$container")
programs=$(find "$root" -type f -perm /111 ! -name '*.so*' -printf '%P\n')
[[ $programs == usr/bin/signpost ]] || fail "there is more to execute than the program: $programs"
[[ -z $(find "$root" -perm /6000) ]] || fail "something has a user's or group's rights"
buildah "${image[@]}" run --isolation=chroot "$container" -- signpost version | grep '^signpost ' ||
  fail "it does not run"
echo "image_test: ${digests[0]}, $(du -sm "$root" | cut -f1) MB"
