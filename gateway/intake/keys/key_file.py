"""The file of API keys: read, and changed by adding, rotating and revoking keys.

A key has 256 random bits, so a fast hash like SHA-256 is sufficient. It is shown once, when it is
created, and not stored.
"""

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from gateway.intake.keys.api_key import ApiKey, new_key, parse_line, rotated
from shared.errors import StartupError

_BEFORE_COMMENT = re.compile(r"""(?:[^"'#\\]|\\.|"(?:[^"\\]|\\.)*"|'[^']*')*""")
"""The part of a line that `shlex` reads, which ends before a comment."""


def read_keys(path: Path) -> dict[str, ApiKey]:
    """All keys of a file by id. Raises `StartupError`, which names the line and the field."""
    keys, [*faults] = examine(path)
    if faults:
        raise StartupError(faults[0])
    return keys


def examine(path: Path) -> tuple[dict[str, ApiKey], list[str]]:
    """The keys of a file's valid lines by id, and the faults of the other lines. Raises
    `StartupError` if the file cannot be read."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise unusable(path, error) from None
    keys: dict[str, ApiKey] = {}
    faults = []
    for number, line in enumerate(text.split("\n"), 1):
        try:
            key = parse_line(line)
            if key is not None and key.key_id in keys:
                raise ValueError(f"duplicate key id {key.key_id}")  # noqa: TRY301
        except ValueError as error:
            faults.append(f"{path}:{number}: the keys cannot be used: {error}")
        else:
            if key is not None:
                keys[key.key_id] = key
    return keys, faults


def unusable(path: Path, error: OSError | UnicodeDecodeError) -> StartupError:
    reason = error.strerror if isinstance(error, OSError) else "not text"
    return StartupError(f"the keys of {path} cannot be used: {reason}")


class KeyFile:
    """Changes a file of API keys. Every method raises `StartupError` if the file cannot be used."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, tenant: str, **options: Any) -> str:
        """Create a key for a tenant, and the file if necessary; returns the key. ``options`` are
        the fields of `ApiKey` after ``created``."""
        try:
            key, made = new_key(tenant, **options)
        except ValueError as error:
            raise StartupError(str(error)) from None
        with self._changing(creates=True) as lines:
            if lines and not lines[-1].endswith("\n"):
                lines[-1] += "\n"
            lines.append(made.line)
        return key

    def rotate(self, key_id: str, grace: timedelta) -> str:
        """Replace a key by a new key with the same id; returns the new key. The old key remains
        valid for ``grace``."""
        with self._changing() as lines:
            index, old = self._place(lines, key_id)
            key, new = rotated(old, grace)
            lines[index] = new.line.rstrip() + _comment(lines[index]) + "\n"
        return key

    def revoke(self, key_id: str) -> ApiKey:
        """Remove a key from the file."""
        with self._changing() as lines:
            index, key = self._place(lines, key_id)
            del lines[index]
        return key

    def _place(self, lines: list[str], key_id: str) -> tuple[int, ApiKey]:
        for index, line in enumerate(lines):
            key = parse_line(line)
            if key is not None and key.key_id == key_id:
                return index, key
        raise StartupError(f"{self.path} has no key {key_id}")

    @contextmanager
    def _changing(self, *, creates: bool = False) -> Iterator[list[str]]:
        """The lines of the file, which replace it when they are changed. Others wait meanwhile.
        With ``creates``, the file need not exist."""
        path = self.path.resolve()
        try:
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                fcntl.flock(folder, fcntl.LOCK_EX)
                if creates and not path.exists():
                    lines, before = [], None
                else:
                    read_keys(path)
                    before = path.stat()
                    with path.open() as file:
                        lines = list(file)
                yield lines
                new = path.with_name(f".{path.name}.new")
                new.unlink(missing_ok=True)
                handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with os.fdopen(handle, "w") as file:
                    file.write("".join(lines))
                    file.flush()
                    if before is not None:  # the gateways can still read it
                        _copy_access(before, file.fileno())
                    os.fsync(file.fileno())
                new.replace(path)
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise unusable(path, error) from None


def _comment(line: str) -> str:
    """The comment at the end of a line, and the spaces before it; empty if it has none."""
    before = _BEFORE_COMMENT.match(line)
    assert before is not None
    return line[len(before.group().rstrip()) :].rstrip()


def _copy_access(before: os.stat_result, to: int) -> None:
    """Give a file the owner, the group and the mode of another file. Raises `OSError`."""
    now = os.fstat(to)
    if (now.st_uid, now.st_gid) != (before.st_uid, before.st_gid):
        os.fchown(to, before.st_uid, before.st_gid)
    os.fchmod(to, before.st_mode & 0o777)
