#!/bin/sh
# Make a self-signed certificate in DIRECTORY, unless there is one. One of its own that expires within 30 days is replaced.
# Put your own there for production.
# Usage: certificate.sh DIRECTORY
set -eu
cd "$1"

is_own() {
    names=$(openssl x509 -in tls.crt -noout -subject -issuer -nameopt RFC2253 | tr '\n' ' ')
    [ "$names" = "subject=CN=localhost issuer=CN=localhost " ]
}

if [ ! -s tls.crt ] || { is_own && ! openssl x509 -in tls.crt -noout -checkend 2592000 >/dev/null; }; then
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 825 \
        -subj /CN=localhost -addext subjectAltName=DNS:localhost,IP:127.0.0.1 \
        -keyout tls.key -out tls.crt
    chmod 644 tls.key # the proxy runs as another user, and only it has this volume
fi
