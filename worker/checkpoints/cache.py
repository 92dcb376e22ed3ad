"""The user's cache: directories that are built once, safely under concurrent use."""

import fcntl
import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TypeAlias

from shared.errors import StartupError

OnStageProgress: TypeAlias = Callable[[str, int, int], None]
"""Progress of a long operation: a stage's name, the amount done and the total; total 0: unknown."""

_CHUNK_BYTES = 1 << 20
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def cache_directory() -> Path:
    """``warren/`` in $XDG_CACHE_HOME or ~/.cache; it may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "warren"


def build_once(directory: Path, build: Callable[[Path], None]) -> Path:
    """Return ``directory``; if it is missing, ``build(partial)`` builds it.

    ``build`` fills an empty directory beside ``directory``, which is then renamed: ``directory`` is
    complete or absent. Of several processes one builds and the others wait. The next process
    removes the leftovers of a killed process. Raises `StartupError` if another user may have
    changed the directory or its files.
    """
    if directory.exists():
        check_owned(directory)
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _exclusive(directory.with_name(f".{directory.name}.lock")):
        if directory.exists():
            check_owned(directory)
            return directory
        partial = directory.with_name(f".{directory.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(mode=0o755)
        try:
            build(partial)
            for path in partial.iterdir():
                path.chmod(path.stat().st_mode & ~_WRITABLE_BY_OTHERS)
                _sync(path)
            _sync(partial)
            partial.rename(directory)
            _sync(directory.parent)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return directory


def copy_hashed(source: IO[bytes], path: Path) -> str:
    """Write all of ``source`` to ``path``; returns its SHA-256 in hex."""
    digest = hashlib.sha256()
    with path.open("wb") as file:
        while chunk := source.read(_CHUNK_BYTES):
            file.write(chunk)
            digest.update(chunk)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    """Wait until a file, or the entries of a directory, would survive a loss of power."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_owned(directory: Path) -> None:
    """Raise `StartupError` if another user may have changed the directory or a file in it.

    The files of a hub's snapshot are links; what they lead to is checked, and its directory.
    """
    files = [path.resolve() for path in directory.iterdir() if path.is_file()]
    for path in (directory, *{file.parent for file in files}, *files):
        state = path.stat()
        is_read_only = bool(os.statvfs(path).f_flag & os.ST_RDONLY)
        if state.st_uid not in (os.geteuid(), 0) and not is_read_only:
            raise StartupError(f"{path} belongs to another user, who may have changed the model")
        if _is_writable_by_others(state):
            folder = path if path.is_dir() else path.parent
            raise StartupError(f"others may write into {path}: run chmod -R go-w {folder}")


def _is_writable_by_others(state: os.stat_result) -> bool:
    # A group with the user's own number is private to the user. Its files are writable for it under
    # the umask 002 of most distributions, and in each volume that Kubernetes mounts with fsGroup.
    is_private = state.st_gid == os.getegid() == os.geteuid()
    return bool(state.st_mode & (stat.S_IWOTH if is_private else _WRITABLE_BY_OTHERS))


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
