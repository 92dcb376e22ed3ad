#!/usr/bin/env bash
# Run one part of the work on the machine with the GPU, within the ten minutes of a call:
#   bench/gpu/on_device.sh tests|chaos|kernels|engine|peers|awq [OPTION]...
# Needs .carry/ (see carry.sh). Writes to $OUT. Further options go to pytest, tests.system.chaos or bench.gpu.
set -euo pipefail
cd "$(dirname "$0")/../.."

readonly PART=$1 SITE=${SITE:-/tmp/site} BROKER=${BROKER:-/tmp/rabbitmq}
shift
export PYTHONPATH=$SITE PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
# The kernels stay compiled between calls.
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-/tmp/triton}
if ! python3 -c 'import aio_pika' 2>/dev/null; then
    python3 -m pip --disable-pip-version-check install --quiet --no-index --no-deps --no-compile --no-cache-dir \
        --upgrade --target "$SITE" .carry/*.whl
fi

# What is measured last is lost, not the call, if the time is up.
within() {
    timeout --kill-after=5 --signal=INT "${LIMIT_S:-560}" "$@" 2>&1 | tee "$OUT/$PART.log"
}

install_broker() {
    mkdir -p "$BROKER"
    # A system without xz has Python's.
    tar xf .carry/rabbitmq.tar.xz -C "$BROKER" || python3 -m tarfile --extract .carry/rabbitmq.tar.xz "$BROKER"
    local present library PATH=$PATH:/usr/sbin:/sbin
    present=$(ldconfig -p)$'\n'
    for library in "$BROKER"/spare/*; do
        [[ $present == *"/${library##*/}"$'\n'* ]] || install "$library" /usr/local/lib/
    done
    ldconfig
}

if [[ $PART == chaos ]]; then
    [[ -x $BROKER/usr/bin/erl ]] || install_broker
    export PATH=$BROKER/usr/lib/rabbitmq/bin:$BROKER/usr/bin:$PATH WARREN_DEVICE=${WARREN_DEVICE:-cuda}
    export TMPDIR=$BROKER/tmp
    rm -rf "$TMPDIR"
    mkdir "$TMPDIR"
    # Every fault once.
    within python3 -m tests.system.chaos --part device --share 0.1 --callers 16 "$@" || failed=$?
    cp "$TMPDIR"/warren-chaos-*/device/{worker,gateway}* "$OUT" || true # none was started
    exit "${failed:-0}"
elif [[ $PART == tests ]]; then
    # Warnings of other versions than constraints.txt's are not this code's errors.
    # What needs no GPU was tested elsewhere. Names are printed at once, in case time runs out.
    within python3 -m pytest --verbose -W default -n "${NUM_PROCESSES:-8}" --dist worksteal --timeout 300 \
        -m 'gpu or not rabbit' -k 'not native and not cubins' \
        tests/kernels/triton tests/kernels/test_{awq_linear,elementwise_ops,paged_attention,sampling_ops,store_kv}.py \
        tests/worker/model/test_{graphs,gpu_memory,warm_up}.py tests/worker/model/weights/test_awq.py "$@"
else
    within python3 -m bench.gpu --only "$PART" --out "$OUT" "$@"
fi
