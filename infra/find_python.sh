#!/usr/bin/env bash
# Print a Python that Warren runs on: $PYTHON if it is set, else the first in PATH.
set -euo pipefail

is_supported() {
    "$1" -c 'import sys; sys.exit(sys.version_info[:2] not in {(3, 11), (3, 12)})' 2>/dev/null
}

for python in ${PYTHON:-python3 python3.12 python3.11}; do
    if is_supported "$python"; then
        command -v "$python"
        exit
    fi
done
echo "Warren needs Python 3.11 or 3.12: install one, or name it with PYTHON=/path/to/python" >&2
exit 1
