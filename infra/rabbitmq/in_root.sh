#!/usr/bin/env bash
# Run PROGRAM of the Debian in the directory ROOT, which sees SHARED, a directory of this one.
# Usage: in_root.sh ROOT SHARED PROGRAM [ARGUMENT...]
set -euo pipefail

# The mounts are those of this process alone and of what it starts, and end with it.
[[ -n ${IN_OWN_MOUNTS:-} ]] || IN_OWN_MOUNTS=1 exec unshare --mount "$0" "$@"
unset IN_OWN_MOUNTS

root=$1 shared=$2
shift 2
mkdir -p "$root$shared"
for directory in /proc /sys /dev "$shared"; do
    mount --rbind "$directory" "$root$directory"
done
exec chroot "$root" "$@"
