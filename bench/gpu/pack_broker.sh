#!/usr/bin/env bash
# Pack RabbitMQ and Erlang, as this Debian has them, into an archive that runs from any directory:
#   bench/gpu/pack_broker.sh ARCHIVE
# The packages are downloaded, not installed. Plugins, documentation and what beam files hold for debuggers are left
# out. `spare` holds the libraries that Erlang needs, for a system that lacks them.
set -euo pipefail

readonly ARCHIVE=$(realpath "$1")
readonly ERLANG=(base asn1 crypto eldap inets mnesia os-mon parsetools public-key runtime-tools ssl syntax-tools tools xmerl)
readonly LIBRARIES=(libcap2 libgcrypt20 libgpg-error0 liblz4-1 liblzma5 libssl3 libsystemd0 libtinfo6 libzstd1)

folder=$(mktemp --directory)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
mkdir -p packages root/spare

(
    cd packages
    download() { apt-get --quiet=2 --option APT::Sandbox::User=root download rabbitmq-server "${ERLANG[@]/#/erlang-}" "${LIBRARIES[@]}"; }
    # The lists may be missing, or name packages that were replaced.
    download || { apt-get --quiet=2 update && download; }
)
for package in packages/{rabbitmq,erlang}*.deb; do dpkg -x "$package" root; done
for package in packages/lib*.deb; do dpkg -x "$package" libraries; done
find libraries -name 'lib*.so.*' ! -name 'lib*.so.*.*' -exec cp --dereference --target-directory root/spare {} +

rm -rf root/usr/share/{doc,man} root/etc root/lib root/var
find root/usr/lib/rabbitmq/lib/*/plugins -mindepth 1 -maxdepth 1 \
    \( -name 'rabbitmq_*' -o -name 'cow*' -o -name 'gun-*' -o -name 'jose-*' -o -name 'eetcd-*' -o -name 'prometheus-*' \) \
    ! -name 'rabbitmq_prelaunch-*' -exec rm -rf {} +
sed -i 's|ROOTDIR=/usr/lib/erlang|ROOTDIR=$(dirname "$(dirname "$(readlink -f "$0")")")|' root/usr/lib/erlang/bin/erl
root/usr/bin/erl -noinput -eval '
    Files = filelib:wildcard("root/usr/lib/{rabbitmq,erlang}/**/*.beam"),
    {ok, _} = beam_lib:strip_files(Files, ["Attr", "CInf"]),
    halt().'
tar cJf "$ARCHIVE" -C root .
