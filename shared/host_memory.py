"""The free memory of the machine, or of the container, and how sizes are written."""

import math
import os
from pathlib import Path


def free_bytes() -> int:
    """The free memory of the machine, or of the container if that is less."""
    return int(min(_available_bytes(), container_free_bytes()))


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


def container_free_bytes(folder: Path = Path("/sys/fs/cgroup")) -> float:
    """The memory that the control group (version 2) still allows; infinite without a limit."""
    limit = folder / "memory.max"
    if not limit.exists() or (allowed := limit.read_text().strip()) == "max":
        return math.inf
    stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    # The kernel reclaims cached files before it refuses memory, and the weights are such files.
    used = int((folder / "memory.current").read_text()) - int(stat["inactive_file"])
    return int(allowed) - used
