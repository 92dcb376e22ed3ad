"""Limits of control groups, in the layouts of real machines and containers."""

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.control_groups import free_bytes_in_groups, usable_cpus

UNIFIED = "29 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
OLD = (
    "30 25 0:26 {root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "31 25 0:27 {root} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
)
UNIT = "system.slice/warren-worker.service"
NUM_CPUS = len(os.sched_getaffinity(0))


def write(root: Path, **files: str) -> Path:
    """Write files by their paths, where ``__`` stands for a slash."""
    for name, content in files.items():
        put(root, name.replace("__", "/"), content)
    return root


def put(root: Path, path: str, content: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(content)


def layout(root: Path, mounts: str, groups: str, **files: str) -> Path:
    put(root, "proc/self/mountinfo", mounts)
    put(root, "proc/self/cgroup", groups)
    for name, content in files.items():
        put(root, f"sys/fs/cgroup/{name}", content)
    return root


def memory(folder: str, limit: str, used: int, cached: int) -> dict[str, str]:
    return {
        f"{folder}memory.max": f"{limit}\n",
        f"{folder}memory.current": f"{used}\n",
        f"{folder}memory.stat": f"anon 5\ninactive_file {cached}\n",
    }


def old_memory(folder: str, limit: int, used: int, cached: int) -> dict[str, str]:
    return {
        f"memory/{folder}memory.limit_in_bytes": f"{limit}\n",
        f"memory/{folder}memory.usage_in_bytes": f"{used}\n",
        f"memory/{folder}memory.stat": f"inactive_file 1\ntotal_inactive_file {cached}\n",
    }


def test_a_container_of_version_2_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    files = memory("", "1000", 300, 210) | {"cpu.max": "100000 100000\n"}
    root = layout(tmp_path, UNIFIED, "0::/\n", **files)
    assert (free_bytes_in_groups(root), usable_cpus(root)) == (910, 1)


def test_a_unit_of_systemd_has_a_folder_of_its_own(tmp_path: Path) -> None:
    files = memory(f"{UNIT}/", "1000", 300, 0) | {f"{UNIT}/cpu.max": "150000 100000\n"}
    root = layout(tmp_path, UNIFIED, f"0::/{UNIT}\n", **files)
    assert (free_bytes_in_groups(root), usable_cpus(root)) == (700, 1)


def test_the_limit_of_a_parent_counts_if_it_leaves_less(tmp_path: Path) -> None:
    files = memory(f"{UNIT}/", "1000", 300, 0) | memory("system.slice/", "2000", 1900, 50)
    files |= {f"{UNIT}/cpu.max": "max 100000\n", "system.slice/cpu.max": "50000 100000\n"}
    root = layout(tmp_path, UNIFIED, f"0::/{UNIT}\n", **files)
    assert (free_bytes_in_groups(root), usable_cpus(root)) == (150, 1)


def test_a_container_of_version_1_sees_its_group_at_the_mount(tmp_path: Path) -> None:
    path = "/docker/0123"
    files = old_memory("", 1000, 300, 100)
    files |= {"cpu,cpuacct/cpu.cfs_quota_us": "50000", "cpu,cpuacct/cpu.cfs_period_us": "100000"}
    groups = f"5:memory:{path}\n4:cpu,cpuacct:{path}\n1:name=systemd:{path}\n0::/\n"
    root = layout(tmp_path, OLD.format(root=path), groups, **files)
    assert (free_bytes_in_groups(root), usable_cpus(root)) == (800, 1)


def test_a_group_of_version_1_is_found_below_the_mount(tmp_path: Path) -> None:
    files = old_memory("a/b/", 1 << 62, 300, 0) | old_memory("a/", 1000, 400, 0)
    files |= {"cpu,cpuacct/a/cpu.cfs_quota_us": "-1", "cpu,cpuacct/a/cpu.cfs_period_us": "100000"}
    groups = "5:memory:/a/b\n4:cpu,cpuacct:/a\n"
    root = layout(tmp_path, OLD.format(root="/"), groups, **files)
    assert (free_bytes_in_groups(root), usable_cpus(root)) == (600, NUM_CPUS)


def test_a_path_of_the_host_that_a_container_does_not_see_is_the_mount(tmp_path: Path) -> None:
    root = layout(tmp_path, UNIFIED, "0::/../../other\n", **memory("", "1000", 300, 0))
    assert free_bytes_in_groups(root) == 700


@pytest.mark.parametrize("limit", ["max", str(2**63 - 4096)])
def test_no_limit_is_none(tmp_path: Path, limit: str) -> None:
    files = memory("", limit, 300, 0) | {"cpu.max": "max 100000\n"}
    root = layout(tmp_path, UNIFIED, "0::/\n", **files)
    assert (free_bytes_in_groups(root), usable_cpus(root)) == (math.inf, NUM_CPUS)


def test_a_machine_without_control_groups_has_no_limit(tmp_path: Path) -> None:
    assert (free_bytes_in_groups(tmp_path), usable_cpus(tmp_path)) == (math.inf, NUM_CPUS)


@pytest.fixture
def real_groups() -> Iterator[dict[str, Path]]:
    """New groups of this machine, where it may create them."""
    folders = {kind: Path("/sys/fs/cgroup", kind, f"warren-{os.getpid()}") for kind in LIMITS}
    try:
        for folder in folders.values():
            folder.mkdir()
        for kind, limits in LIMITS.items():
            for name, value in limits.items():
                (folders[kind] / name).write_text(value)
    except OSError:
        pytest.skip("no control groups of version 1 can be created here")
    yield folders
    for folder in folders.values():
        folder.rmdir()


LIMITS = {
    "cpu": {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "50000"},
    "memory": {"memory.limit_in_bytes": str(300 << 20)},
}


def test_a_process_in_a_real_group_knows_its_limits(real_groups: dict[str, Path]) -> None:
    program = f"""
import os, sys
for folder in sys.argv[1:]:
    open(folder + "/cgroup.procs", "w").write(str(os.getpid()))
from shared.control_groups import free_bytes_in_groups, usable_cpus
print(usable_cpus(), free_bytes_in_groups() <= {300 << 20})
"""
    ran = subprocess.run(
        [sys.executable, "-c", program, *map(str, real_groups.values())],
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.split() == ["1", "True"]
