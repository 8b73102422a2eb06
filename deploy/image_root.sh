#!/bin/sh
# image_root.sh PROGRAM DIRECTORY: makes the file system of the image in DIRECTORY, which must not be
# there: the program, the libraries that it loads, and no shell. What is made depends on nothing else:
# names, times (SOURCE_DATE_EPOCH, or 1970) and modes are the same whenever and wherever it runs.
set -eu
program=$1 root=$2
umask 022
mkdir -p "$root/usr/bin" "$root/usr/lib" "$root/usr/lib64" "$root/etc" "$root/tmp" "$root/proc" \
  "$root/dev" "$root/sys" "$root/var/lib/signpost" "$root/usr/share/common-licenses"
ln -s usr/lib "$root/lib"
ln -s usr/lib64 "$root/lib64"
chmod 1777 "$root/tmp"
install -m 755 "$program" "$root/usr/bin/signpost"

# "libz.so.1 => /lib/x86_64-linux-gnu/libz.so.1 (0x...)" and "/lib64/ld-linux-x86-64.so.2 (0x...)"
ldd "$program" >"$root.ldd"
if grep 'not found' "$root.ldd" >&2; then exit 1; fi
sed -nE 's@^.*[[:space:]](/[^ ]+) \(0x.*@\1@p' "$root.ldd" | while read -r library; do
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
