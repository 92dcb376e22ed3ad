#!/usr/bin/env bash
# Print a Python that Warren runs on: $PYTHON if it is set, else the first in PATH.
# With --versions, print the versions that Warren runs on.
set -euo pipefail

versions=(3.11 3.12 3.13 3.14)

if [[ ${1:-} == --versions ]]; then
    echo "${versions[@]}"
    exit
fi

is_supported() {
    [[ " ${versions[*]} " == *" $("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) "* ]]
}

for python in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
    if is_supported "$python"; then
        command -v "$python"
        exit
    fi
done
echo "Warren needs Python 3.11, 3.12, 3.13 or 3.14: install one, or name it with PYTHON=/path/to/python" >&2
exit 1
