#!/usr/bin/env bash
# Makes the Python environment of the tests and of `./signpost demo --torch`: PyTorch, and what
# tests/requirements.txt names. It lies in ~/.cache/signpost/pythonVERSION-HASH, with HASH of the requirements: when they
# change, a new one is made, and the old one stays. The link ~/.cache/signpost/python names the newest. Prints the path of the environment's interpreter.
#
# Exit codes: 69 if PyTorch or another package cannot be had.
set -euo pipefail
requirements=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/tests/requirements.txt
current=$(getent passwd "$EUID" | cut -d: -f6)/.cache/signpost/python
version=$(/usr/bin/python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
directory=$current$version-$(sha256sum <"$requirements" | cut -c1-16)
making=$directory.$$
log=$(mktemp)
trap 'rm -rf "$log" "$making"' EXIT

say() { echo "signpost: $*" >&2; }

pip_install() {
  "$making/bin/python" -m pip --disable-pip-version-check install "$@" >"$log" 2>&1
}

has_torch() {
  /usr/bin/python3 -c '
import sklearn, torch
assert tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 6)' 2>/dev/null
}

# pip's own choice would be the build with CUDA, which is gigabytes. So first a build that pip is configured to
# find on this machine, then PyTorch's index of builds for CPUs, then what the system has.
make_environment() {
  local torch
  torch=$(grep '^torch==' "$requirements")
  mkdir -p "${directory%/*}"
  /usr/bin/python3 -m venv "$making" >"$log" 2>&1 || return
  if pip_install --no-index --no-deps "$torch"; then
    say "$torch comes from where pip is configured to look (find-links)"
  elif pip_install --timeout 15 --retries 1 --no-deps \
    --index-url https://download.pytorch.org/whl/cpu "$torch"; then
    say "$torch is from PyTorch's index of builds for CPUs"
  elif has_torch; then
    say "$torch for CPUs cannot be had; the system's PyTorch is used instead"
    /usr/bin/python3 -m venv --clear --system-site-packages "$making"
    grep -vE '^(torch|numpy|scikit-learn)==' "$requirements" >"$making/requirements.txt"
    pip_install --requirement "$making/requirements.txt"
    return
  else
    say "$torch for CPUs cannot be had, and the system has no PyTorch 2.6 or newer with scikit-learn. Debian 13 has both: apt-get install python3-torch python3-sklearn"
    return 69
  fi
  pip_install --requirement "$requirements"
}

if [[ ! -x $directory/bin/python ]]; then
  say "installing PyTorch and Python packages in $directory"
  make_environment || { cat "$log" >&2; exit 69; }
  # Programs in bin/ name the directory that they were installed in. Only bin/python is used.
  mv -T "$making" "$directory" 2>/dev/null || [[ -x $directory/bin/python ]] # another start was faster
fi
ln -sfn "$directory" "$current"
echo "$current/bin/python"
