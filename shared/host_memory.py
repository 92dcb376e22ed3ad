"""The free memory of the machine, or of the container, and how sizes are written."""

import os
from pathlib import Path

from shared.control_groups import free_bytes_in_groups


def free_bytes() -> int:
    """The free memory of the machine, or of the container if that is less."""
    return int(min(_available_bytes(), free_bytes_in_groups()))


def readable_size(num_bytes: int) -> str:
    """A number of bytes for people to read: ``1.50 GiB``, or ``12.0 MiB`` if that is less than a
    GiB."""
    if num_bytes >= 1 << 30:
        return f"{num_bytes / (1 << 30):.2f} GiB"
    return f"{num_bytes / (1 << 20):.1f} MiB"


def _available_bytes() -> int:
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    lines = (line.split() for line in meminfo.read_text().splitlines())
    return next(int(line[1]) * 1024 for line in lines if line[0] == "MemAvailable:")
