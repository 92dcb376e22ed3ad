#!/usr/bin/env bash
# Write the locks of the images: the versions of constraints.txt, with the hashes that pip checks.
# Run it when constraints.txt has changed. Needs uv.
set -euo pipefail
cd "$(dirname "$0")/../.."

compile() { # compile LOCK [OPTION...], with the requirements on standard input
    uv pip compile - --generate-hashes --python-version 3.12 \
        --python-platform x86_64-unknown-linux-gnu --no-annotate --no-header --quiet \
        --output-file "infra/docker/$1.lock" "${@:2}" >/dev/null
}

lock() { # lock NAME EXTRA [OPTION...]
    printf "%s\n" setuptools setuptools-scm | compile "$1" pyproject.toml --extra "$2" --constraint constraints.txt "${@:3}"
}

lock gateway gateway
lock worker-cuda worker
# PyTorch's own index has the build for CPUs, which needs no CUDA libraries.
mapfile -t cuda < <(grep -oE '^(torch|nvidia-[^=]+|cuda-[^=]+)' infra/docker/worker-cuda.lock)
lock worker-cpu worker "${cuda[@]/#/--no-emit-package=}"
grep '^torch==' constraints.txt \
    | compile torch-cpu --no-deps --default-index https://download.pytorch.org/whl/cpu
