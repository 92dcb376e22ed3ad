"""The user's cache: directories that are built once, whoever asks for them and however often."""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

Progress: TypeAlias = Callable[[str, int, int], None]
"""Told of what takes long: a stage's name, what is done of it and its total; total 0: unknown."""


def cache_directory() -> Path:
    """``warren/`` in $XDG_CACHE_HOME or ~/.cache; it may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "warren"


def build_once(directory: Path, build: Callable[[Path], None]) -> Path:
    """Return ``directory``, built by ``build(partial)`` if it is missing.

    ``build`` fills an empty directory beside the final one, which appears by one rename: it is
    complete or absent. Of several processes one builds and the others wait. What a killed process
    left behind is removed by the next one.
    """
    if directory.exists():
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _exclusive(directory.with_name(f".{directory.name}.lock")):
        if directory.exists():
            return directory
        partial = directory.with_name(f".{directory.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            build(partial)
            partial.rename(directory)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return directory


def link(name: Path, directory: Path) -> None:
    """Let the symbolic link ``name`` point to ``directory``, replacing an older one atomically."""
    name.parent.mkdir(parents=True, exist_ok=True)
    new = name.with_name(f".{name.name}.{os.getpid()}.link")
    new.unlink(missing_ok=True)
    new.symlink_to(os.path.relpath(directory, name.parent))
    new.replace(name)


@contextmanager
def _exclusive(lock: Path) -> Iterator[None]:
    # The kernel drops the lock with its holder, so a crash leaves none; the file itself stays,
    # because a process may wait on it.
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
