#!/bin/sh
# Make a self-signed certificate in DIRECTORY, unless there is one. Put your own there for production.
# Usage: certificate.sh DIRECTORY
set -eu
cd "$1"
if [ ! -s tls.crt ]; then
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 825 \
        -subj /CN=localhost -addext subjectAltName=DNS:localhost,IP:127.0.0.1 \
        -keyout tls.key -out tls.crt
    chmod 644 tls.key # the proxy runs as another user, and only it has this volume
fi
