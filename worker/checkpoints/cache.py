"""The user's cache: directories that are built once, safely under concurrent use."""

import fcntl
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

from shared.errors import StartupError

Progress: TypeAlias = Callable[[str, int, int], None]
"""Progress of a long operation: a stage's name, the amount done and the total; total 0: unknown."""


def cache_directory() -> Path:
    """``warren/`` in $XDG_CACHE_HOME or ~/.cache; it may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "warren"


def build_once(directory: Path, build: Callable[[Path], None]) -> Path:
    """Return ``directory``; if it is missing, ``build(partial)`` builds it.

    ``build`` fills an empty directory beside the final one, which is then renamed: the final one is
    complete or absent. Of several processes one builds and the others wait. The leftovers of a
    killed process are removed by the next one. Raises `StartupError` if another user may have
    changed the directory.
    """
    if directory.exists():
        _check_owned(directory)
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _exclusive(directory.with_name(f".{directory.name}.lock")):
        if directory.exists():
            _check_owned(directory)
            return directory
        partial = directory.with_name(f".{directory.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(mode=0o755)
        try:
            build(partial)
            partial.rename(directory)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return directory


def _check_owned(directory: Path) -> None:
    state = directory.stat()
    is_read_only = bool(os.statvfs(directory).f_flag & os.ST_RDONLY)
    if state.st_uid not in (os.geteuid(), 0) and not is_read_only:
        raise StartupError(f"{directory} belongs to another user, who may have changed the model")
    if state.st_mode & stat.S_IWOTH:
        raise StartupError(f"everyone may write into {directory}: run chmod o-w on it")


def link(name: Path, directory: Path) -> None:
    """Make the symbolic link ``name`` point to ``directory``, replacing an older link
    atomically."""
    name.parent.mkdir(parents=True, exist_ok=True)
    new = name.with_name(f".{name.name}.{os.getpid()}.link")
    new.unlink(missing_ok=True)
    new.symlink_to(os.path.relpath(directory, name.parent))
    new.replace(name)


@contextmanager
def _exclusive(lock: Path) -> Iterator[None]:
    # The kernel releases the lock when its holder exits, even after a crash; the file itself is
    # kept, because a process may be waiting on it.
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
