# Root file systems of other Debian releases, for scripts that source this file. Needs root and mmdebstrap.

# make_system SUITE DIRECTORY [PACKAGE,...]: makes one, unless the directory exists.
make_system() {
  [[ -d $2 ]] || mmdebstrap --quiet --variant=minbase ${3:+--include="$3"} "$1" "$2"
}

# in_system DIRECTORY COMMAND...: runs a command in it, with this machine's network. Of its environment
# only CI is passed on. Mounts and processes end with the command.
in_system() {
  local root=$1
  shift
  # shellcheck disable=SC2016
  unshare --mount --pid --fork --kill-child --propagation private bash -c '
    set -e
    root=$1
    shift
    mount --bind "$root" "$root"
    mount --rbind /dev "$root/dev"
    mount --rbind /sys "$root/sys"
    mount -t proc proc "$root/proc"
    exec chroot "$root" env -i HOME=/root LANG=C.UTF-8 ${CI:+CI=$CI} \
      PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$@"' bash "$root" "$@"
}
