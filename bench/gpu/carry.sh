#!/usr/bin/env bash
# Fill .carry/, which git ignores, with what on_device.sh installs on the machine with the GPU: the wheels that the
# benchmark, the tests for GPUs and Warren's processes import and device-packages.txt lacks, and RabbitMQ.
#   bench/gpu/carry.sh [PYTHON_VERSION]
# Versions are those of constraints.txt, and RabbitMQ's that of this Debian. That machine has Python 3.12 and no
# network.
set -euo pipefail
cd "$(dirname "$0")/../.."

readonly VERSION=${1:-3.12} FOLDER=.carry MAX_MIB=40
# pip matches the number in a platform's name exactly.
platforms=(--platform manylinux1_x86_64 --platform manylinux2014_x86_64)
for minor in 17 24 27 28 31 34; do platforms+=(--platform "manylinux_2_${minor}_x86_64"); done

mapfile -t names < <(grep -v '^#' bench/gpu/carried-packages.txt)
pins=()
for name in "${names[@]}"; do
    pins+=("$(grep -E "^$name==" constraints.txt)")
done

rm -rf "$FOLDER"
"${PYTHON:-python3}" -m pip --disable-pip-version-check download --quiet --no-deps --only-binary=:all: \
    --implementation cp --python-version "$VERSION" "${platforms[@]}" --dest "$FOLDER" "${pins[@]}"
bench/gpu/pack_broker.sh "$FOLDER/rabbitmq.tar.xz"
size=$(du --summarize --block-size=1M "$FOLDER" | cut -f1)
echo "$FOLDER: $(ls "$FOLDER" | wc -l) files, $size MiB"
((size <= MAX_MIB)) # beside the working tree
