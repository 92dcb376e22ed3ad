#!/usr/bin/env bash
# Run one part of the work on the machine with the GPU, within the ten minutes of a call:
#   bench/gpu/on_device.sh tests|kernels|engine|peers|awq [OPTION]...
# Needs .carry/ (see carry.sh). Writes to $OUT. Further options go to pytest or bench.gpu.
set -euo pipefail
cd "$(dirname "$0")/../.."

readonly PART=$1 SITE=${SITE:-/tmp/site}
shift
export PYTHONPATH=$SITE PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
# The kernels stay compiled between calls.
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-/tmp/triton}
if ! python3 -c 'import msgspec' 2>/dev/null; then
    python3 -m pip --disable-pip-version-check install --quiet --no-index --no-deps --no-compile --no-cache-dir \
        --upgrade --target "$SITE" .carry/*.whl
fi

# What is measured last is lost, not the call, if the time is up.
within() {
    timeout --kill-after=5 --signal=INT "${LIMIT_S:-560}" "$@" 2>&1 | tee "$OUT/$PART.log"
}

if [[ $PART == tests ]]; then
    # Warnings of other versions than constraints.txt's are not this code's errors.
    # What needs no GPU was tested elsewhere.
    within python3 -m pytest -W default -n "${NUM_PROCESSES:-8}" --dist worksteal --timeout 300 \
        -m 'gpu or not rabbit' -k 'not native and not cubins and not reference' \
        tests/kernels/triton tests/kernels/test_{awq_linear,elementwise_ops,paged_attention,sampling_ops,store_kv}.py \
        tests/worker/model/test_{graphs,gpu_memory,warm_up}.py tests/worker/model/weights/test_awq.py "$@"
else
    within python3 -m bench.gpu --only "$PART" --out "$OUT" "$@"
fi
