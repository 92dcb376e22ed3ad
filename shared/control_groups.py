"""The limits of the control groups that this process is in: CPU time and memory.

Both versions are read: in version 1 each controller has a hierarchy of its own, in version 2 all
controllers share a hierarchy. A limit of any parent counts, too. In a container the files may show
only the part of the hierarchy that belongs to it.
"""

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_UNLIMITED = 1 << 60
"""Version 1 writes the largest multiple of a page for no limit."""


class _Mount(NamedTuple):
    """A hierarchy in the file system."""

    folder: Path
    root: str
    """The group that ``folder`` shows."""
    is_unified: bool


def usable_cpus(root: Path = Path("/")) -> int:
    """How many CPUs this process can keep busy: the CPUs that it may run on, or its quota if the
    quota is less. A thread beyond the quota would be stopped while the other threads wait for
    it."""
    quotas = [_quota(group) for group in _groups("cpu", root)]
    return max(1, math.floor(min([len(os.sched_getaffinity(0)), *quotas])))


def free_bytes_in_groups(root: Path = Path("/")) -> float:
    """The memory that the control groups still allow; infinite without a limit."""
    return min((_free_bytes(group) for group in _groups("memory", root)), default=math.inf)


def _quota(group: Path) -> float:
    """The number of CPUs' time."""
    unified = _read(group / "cpu.max")
    if unified is not None:
        quota, _, period = unified.partition(" ")
    else:
        quota = _read(group / "cpu.cfs_quota_us") or "-1"
        period = _read(group / "cpu.cfs_period_us") or ""
    if quota in ("max", "-1") or not period:
        return math.inf
    return int(quota) / int(period)


def _free_bytes(group: Path) -> float:
    limit = _read(group / "memory.max") or _read(group / "memory.limit_in_bytes") or "max"
    if limit == "max" or int(limit) >= _UNLIMITED:
        return math.inf
    used = _read(group / "memory.current") or _read(group / "memory.usage_in_bytes") or "0"
    lines = (line.split() for line in (_read(group / "memory.stat") or "").splitlines())
    stat = {name: int(value) for name, value in lines}
    # The kernel reclaims cached files before it refuses memory, and the weights are such files. In
    # version 1 the total includes the groups below.
    cached = stat.get("total_inactive_file", stat.get("inactive_file", 0))
    return int(limit) - (int(used) - cached)


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """The folders of the process's groups with this controller, in both versions, and of all their
    parents."""
    paths = [line.split(":", 2) for line in (_read(root / "proc/self/cgroup") or "").splitlines()]
    for mount in _mounts(controller, root):
        for _, controllers, path in paths:
            if mount.is_unified == (not controllers) and (
                mount.is_unified or controller in controllers.split(",")
            ):
                yield from _up(mount, path)


def _up(mount: _Mount, path: str) -> Iterator[Path]:
    is_within = path == mount.root or path.startswith(mount.root.rstrip("/") + "/")
    inner = path[len(mount.root.rstrip("/")) :].strip("/") if is_within else ""
    folder = mount.folder / inner
    if not folder.is_dir():  # a path of the host, seen from a container
        folder = mount.folder
    while True:
        yield folder
        if folder == mount.folder:
            return
        folder = folder.parent


def _mounts(controller: str, root: Path) -> Iterator[_Mount]:
    for line in (_read(root / "proc/self/mountinfo") or "").splitlines():
        own, _, kind = line.partition(" - ")
        fields, (version, _, options) = own.split(), kind.split(maxsplit=2)
        is_unified = version == "cgroup2"
        if is_unified or (version == "cgroup" and controller in options.split(",")):
            yield _Mount(root / fields[4].lstrip("/"), fields[3], is_unified)


def _read(path: Path) -> str | None:
    """The text of a file; None if there is none or its group has ended."""
    try:
        return path.read_text().strip()
    except OSError:
        return None
