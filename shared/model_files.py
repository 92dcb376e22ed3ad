"""Reads the small files of a model directory, with errors that name the file and the remedy."""

import json
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from shared.errors import StartupError

_LFS_POINTER = b"version https://git-lfs"
HEAD_BYTES = len(_LFS_POINTER)
_Fields = TypeVar("_Fields")


def read_bytes(path: Path) -> bytes | None:
    """The content of a file; None if it does not exist. Raises `StartupError`."""
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise unreadable(path, error) from None
    check_content(path, content)
    return content


def read_text(path: Path) -> str | None:
    """The text of a file; None if it does not exist. Raises `StartupError`."""
    content = read_bytes(path)
    try:
        return None if content is None else content.decode()
    except UnicodeDecodeError as error:
        raise StartupError(f"{path} is not UTF-8: {error}; download it again") from None


def read_json(path: Path) -> Any:
    """The JSON value in a file; None if the file does not exist. Raises `StartupError`."""
    text = read_text(path)
    try:
        return None if text is None else json.loads(text)
    except (ValueError, RecursionError) as error:
        what = "is empty" if not text else f"is not valid JSON: {error}"
        raise StartupError(f"{path} {what}; download it again") from None


def read_json_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None if the file does not exist. Raises `StartupError`."""
    content = read_json(path)
    if content is None and not path.exists():
        return None
    if not isinstance(content, dict):
        raise StartupError(f"{path} contains no JSON object")
    return content


def check_fields(content: dict[str, Any], kind: type[_Fields], name: str) -> _Fields:
    """The fields of a JSON object that Warren reads. Raises `StartupError` for the first of a wrong
    type, with ``name``, which is the file's."""
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        raise StartupError(f"{name} has a value that no model can have: {error}") from None


def unreadable(path: Path, error: OSError) -> StartupError:
    """The error of a file that exists and cannot be read."""
    remedy = ""
    if isinstance(error, PermissionError):
        remedy = f": give the user of this process access (chmod a+r {path})"
    return StartupError(f"{path} cannot be read: {error.strerror}{remedy}")


def check_content(path: Path, head: bytes) -> None:
    """Raise `StartupError` for the pointer that Git LFS has in place of a file that it has not
    fetched. ``head`` is at least `HEAD_BYTES` long, or the whole file."""
    if head.startswith(_LFS_POINTER):
        raise StartupError(
            f"{path} is a pointer of Git LFS instead of the file: run `git lfs pull` in its "
            "directory"
        )
