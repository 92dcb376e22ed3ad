#!/usr/bin/env bash
# Run COMMAND with a RabbitMQ for the tests: the installed one, or a container that ends with COMMAND.
# Usage: with_rabbitmq.sh COMMAND [ARGUMENT...]
set -euo pipefail

directory=$(cd "$(dirname "$0")" && pwd)
image=rabbitmq:4.1

is_installed() {
    [[ -n ${WARREN_TEST_AMQP_URL:-} ]] || command -v rabbitmq-server >/dev/null ||
        [[ -x /usr/sbin/rabbitmq-server || -x /usr/lib/rabbitmq/bin/rabbitmq-server ]]
}

install_debian_packages() (
    # Debian starts every service that it installs unless a policy forbids it. The tests start their own.
    policy=/usr/sbin/policy-rc.d
    if [[ ! -e $policy ]]; then
        trap "rm -f $policy" EXIT
        printf '#!/bin/sh\nexit 101\n' >$policy
        chmod +x $policy
    fi
    apt-get update
    DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends "$@"
)

run_in_container() {
    local password secrets
    password=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
    secrets=$(mktemp -d)
    GATEWAY_PASSWORD=$password WORKER_PASSWORD=$password PUBLISHER_PASSWORD=$password \
        OPERATOR_PASSWORD=$password \
        python3 "$directory/render_definitions.py" --mode=644 "$secrets/definitions.json"
    chmod 755 "$secrets"
    local container
    container=$(docker run --detach --rm --publish 127.0.0.1::5672 \
        --volume "$directory/rabbitmq.conf:/etc/rabbitmq/rabbitmq.conf:ro" \
        --volume "$secrets:/etc/rabbitmq/definitions:ro" "$image")
    trap "docker stop '$container' >/dev/null; rm -rf '$secrets'" EXIT
    docker exec "$container" sh -c \
        'timeout 60 sh -c "until rabbitmq-diagnostics -q check_port_listener 5672; do sleep 1; done"'
    local address
    address=$(docker port "$container" 5672/tcp)
    WARREN_TEST_AMQP_URL="amqp://operator:$password@$address/warren" "$@"
}

missing=()
is_installed || missing+=(rabbitmq-server)
# Tests that need one of these are skipped where it is not installed.
command -v nginx >/dev/null || missing+=(nginx-light)
command -v chromium >/dev/null || missing+=(chromium)
command -v prometheus >/dev/null || missing+=(prometheus)
command -v java >/dev/null || missing+=(default-jdk-headless)
command -v curl >/dev/null || missing+=(curl)
command -v jq >/dev/null || missing+=(jq)
command -v aarch64-linux-gnu-g++ >/dev/null || missing+=(g++-aarch64-linux-gnu)
command -v qemu-aarch64-static >/dev/null || missing+=(qemu-user-static)
[[ -d /usr/include/simde ]] || missing+=(libsimde-dev)
compgen -G '/usr/lib/postgresql/*/bin/initdb' >/dev/null || missing+=(postgresql)
command -v pgbouncer >/dev/null || [[ -x /usr/sbin/pgbouncer ]] || missing+=(pgbouncer)
if ((${#missing[@]})) && [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
    install_debian_packages "${missing[@]}" || is_installed || install_debian_packages rabbitmq-server
fi

if is_installed; then
    exec "$@"
elif docker info >/dev/null 2>&1; then
    run_in_container "$@"
else
    echo "The tests need RabbitMQ: install rabbitmq-server, start Docker, or name a broker that" \
        "they may use with WARREN_TEST_AMQP_URL=amqp://user:password@host/vhost" >&2
    exit 1
fi
