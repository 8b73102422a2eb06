#!/bin/sh
# image_root.sh PROGRAM DIRECTORY: makes the file system of the image in DIRECTORY, which must not exist.
# PROGRAM is the directory of a release. The image gets the program with its libraries, and this machine's
# glibc, libstdc++ and libgcc. It has no shell. Names, times (SOURCE_DATE_EPOCH, or 1970) and modes depend
# on nothing else.
set -eu
program=$1 root=$2
umask 022
mkdir -p "$root/usr/bin" "$root/usr/lib" "$root/usr/lib64" "$root/etc" "$root/tmp" "$root/proc" \
  "$root/dev" "$root/sys" "$root/var/lib/signpost" "$root/usr/share/common-licenses"
ln -s usr/lib "$root/lib"
ln -s usr/lib64 "$root/lib64"
chmod 1777 "$root/tmp"
cp -R "$program/bin/signpost" "$root/usr/bin/"
cp -R "$program/lib/." "$root/usr/lib/"
cp -R "$program/licenses" "$root/usr/share/"

# "libm.so.6 => /lib/x86_64-linux-gnu/libm.so.6 (0x...)" and "/lib64/ld-linux-x86-64.so.2 (0x...)"
ldd "$program/bin/signpost" "$program"/lib/* >"$root.ldd"
if grep 'not found' "$root.ldd" >&2; then exit 1; fi
sed -nE 's@^.*[[:space:]](/[^ ]+) \(0x.*@\1@p' "$root.ldd" | grep -v -F -e '-signpost-' | sort -u |
  while read -r library; do
    case $library in
      /usr/*) to=$root$library ;;
      *) to=$root/usr$library ;;
    esac
    mkdir -p "$(dirname "$to")"
    install -m 755 "$(readlink -f "$library")" "$to"
  done
rm "$root.ldd"

# What `signpost demo-worker` learns from.
cp -L /usr/share/common-licenses/GPL-3 "$root/usr/share/common-licenses/"
echo 'signpost:x:65532:65532:signpost:/tmp:/nonexistent' >"$root/etc/passwd"
echo 'signpost:x:65532:' >"$root/etc/group"
echo 'hosts: files dns' >"$root/etc/nsswitch.conf"
: >"$root/etc/hosts"
: >"$root/etc/resolv.conf"
find "$root" -exec touch -h -d "@${SOURCE_DATE_EPOCH:-0}" {} +
