#!/usr/bin/env bash
# Run COMMAND as with_rabbitmq.sh does, but with RabbitMQ 4: Debian 13's package, in a directory.
# Usage: with_rabbitmq4.sh COMMAND [ARGUMENT...]
#
# Needs root on a Debian. The directory is WARREN_TEST_RABBITMQ_ROOT, or one in ~/.cache/warren.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
root=${WARREN_TEST_RABBITMQ_ROOT:-${XDG_CACHE_HOME:-$HOME/.cache}/warren/rabbitmq4}

make_root() {
    command -v debootstrap >/dev/null || {
        apt-get update
        apt-get install --yes --no-install-recommends debootstrap
    }
    local mirror
    mirror=$(apt-get indextargets --format '$(SITE)' | sed -n 1p)
    rm -rf "$root.part"
    mkdir -p "$(dirname "$root")"
    debootstrap --variant=minbase --include=rabbitmq-server trixie "$root.part" "$mirror"
    mv "$root.part" "$root"
}

if [[ $(id -u) != 0 ]] || ! command -v apt-get >/dev/null; then
    echo "RabbitMQ 4 is installed into a directory with debootstrap, which needs root on a Debian." \
        "Elsewhere, name a broker with WARREN_TEST_AMQP_URL=amqp://user:password@host/vhost" >&2
    exit 1
fi
[[ -d $root ]] || make_root
WARREN_TEST_RABBITMQ_ROOT=$root exec "$here/with_rabbitmq.sh" "$@"
