#!/usr/bin/env bash
# Run on_device.sh without a GPU, in an environment like that of the machine with the GPU: only the packages of
# device-packages.txt and those of carry.sh, no network, and only the files that travel. It proves imports,
# arguments, paths and the files that are written, with a tiny model; of the kernels, in Triton's interpreter, that
# they agree with the reference. What takes long in the interpreter runs with the reference's.
#   bench/gpu/dry_run.sh [FOLDER]
# torch is that of constraints.txt, and Python the one that is here; other versions are those of
# device-packages.txt, Triton's included. FOLDER keeps the environment for the next run.
set -euo pipefail
cd "$(dirname "$0")/../.."

readonly FOLDER=$(realpath "${1:-$(mktemp --directory)}")
# What the benchmark and the tests use of device-packages.txt; that machine has more.
readonly USED='accelerate|aiohttp|huggingface-hub|hypothesis|jinja2|matplotlib|numpy|prometheus-client|psutil|pytest|pytest-timeout'
readonly ALSO='pytest-xdist|pyyaml|requests|rich|safetensors|tokenizers|transformers|triton|typer|uvloop|yarl'
python=$(infra/find_python.sh)
version=$("$python" -c 'import sys; print(*sys.version_info[:2], sep=".")')

if [[ ! -e $FOLDER/venv/.complete ]]; then
    "$python" -m venv "$FOLDER/venv"
    pip=("$FOLDER/venv/bin/python" -m pip --disable-pip-version-check)
    # That machine's numpy needs its Python, and Triton 3.6's interpreter an older one.
    grep -E "^($USED|$ALSO)(==|$)" bench/gpu/device-packages.txt | sed 's/^numpy==.*/numpy<2.4/' >"$FOLDER/used.txt"
    "${pip[@]}" install --quiet --no-compile "$(grep '^torch==' constraints.txt)" --requirement "$FOLDER/used.txt"
    # Some packages install others that are not on that machine.
    normal() { tr 'A-Z_' 'a-z-' | sed 's/==.*//' | sort; }
    comm -23 <("${pip[@]}" list --format=freeze | normal) <(grep -v '^#' bench/gpu/device-packages.txt | normal) \
        >"$FOLDER/missing-there.txt"
    xargs --no-run-if-empty "${pip[@]}" uninstall --quiet --yes <"$FOLDER/missing-there.txt"
    touch "$FOLDER/venv/.complete"
fi

# The files that travel: those that git has or does not ignore, and the wheels for this Python.
rm -rf "$FOLDER/tree" "$FOLDER/site" "$FOLDER/rabbitmq" "$FOLDER/out"
mkdir "$FOLDER/tree"
git ls-files --cached --others --exclude-standard -z | xargs -0 cp --parents --target-directory "$FOLDER/tree" 2>/dev/null \
    || true # files that were removed
cd "$FOLDER/tree"
bench/gpu/carry.sh # for Python 3.12: that all wheels exist, and are small enough
bench/gpu/carry.sh "$version"

failed=()
run() {
    local interpreter=(TRITON_INTERPRET=1)
    [[ $1 == tests || $1 == kernels ]] || interpreter=()
    echo "## $*"
    # An empty environment, in which no package is found that was not named.
    mkdir -p "$FOLDER/out/$1"
    env --ignore-environment HOME="$FOLDER" PATH="$FOLDER/venv/bin:/usr/bin:/bin" OUT="$FOLDER/out/$1" \
        SITE="$FOLDER/site" BROKER="$FOLDER/rabbitmq" TRITON_CACHE_DIR="$FOLDER/triton" WARREN_DEVICE=cpu \
        NUM_PROCESSES=2 PIP_NO_INDEX=1 HTTPS_PROXY=http://127.0.0.1:9 LIMIT_S=1800 "${interpreter[@]}" bench/gpu/on_device.sh "$@" || failed+=("$1")
}
run tests --collect-only --quiet
run chaos --callers 4 --only 'worker killed' --only 'gateway killed' --only 'broker restarted'
for part in kernels engine peers awq; do
    run "$part" --device cpu --shape tiny
    [[ -s $FOLDER/out/$part/gpu-$part.json ]] || failed+=("$part: no file")
done
ls -l "$FOLDER"/out/*
((${#failed[@]} == 0)) || { echo "failed: ${failed[*]}" >&2; exit 1; }
