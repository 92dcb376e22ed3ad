"""The journal of a batch: the answers so far, on disk, so that no line is answered twice."""

import fcntl
import os
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, Self

import msgspec

from shared.errors import InvalidRequest
from shared.messages import Announcement


class _Header(msgspec.Struct, frozen=True):
    warren_batch: str
    """The digest of the input file."""
    served: Announcement | None = None
    """The worker's announcement that was current when the first job was built."""


class _Response(msgspec.Struct, frozen=True):
    status_code: int


class _Entry(msgspec.Struct, frozen=True):
    """The fields of an output line that the index needs."""

    custom_id: str
    response: _Response | None

    @property
    def is_failed(self) -> bool:
        return self.response is None or self.response.status_code != 200


class Journal:
    """The file ``OUT.part``: a header, then one output line per answer, in order of arrival.

    A line that a crash truncated is dropped when the file is opened again. A file lock prevents a
    second run; the operating system releases it however the process ends.
    """

    def __init__(
        self, file: BinaryIO, output: Path, digest: str, served: Announcement | None = None
    ) -> None:
        """Continue ``file``. Raises `InvalidRequest` if it belongs to another input."""
        self.num_failed = 0
        self.served = served
        """The announcement that the first run used."""
        self._file = file
        self._output = output
        self._spans: dict[str, tuple[int, int]] = {}
        self._end = self._restore(digest)
        file.truncate(self._end)
        if self._end == 0:
            self._write(msgspec.json.encode(_Header(digest, served)))

    @classmethod
    def open(cls, output: Path, digest: str, served: Announcement | None = None) -> Self:
        """Open or create the journal beside ``output`` for the input with ``digest``.

        Raises `InvalidRequest` if another run holds the journal, if it belongs to another input, or
        if there is no journal but ``output`` exists; `OSError`.
        """
        part = _part(output)
        if output.exists() and not part.exists():
            raise InvalidRequest(f"{output.name} exists already")
        file = part.open("a+b")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return cls(file, output, digest, served)
        except BlockingIOError:
            error = InvalidRequest(f"another run is writing {part.name}")
        except msgspec.DecodeError:
            error = InvalidRequest(f"{part.name} is not a journal of a batch")
        except InvalidRequest as foreign:
            error = foreign
        file.close()
        raise error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __len__(self) -> int:
        return len(self._spans)

    def __contains__(self, custom_id: str) -> bool:
        return custom_id in self._spans

    def append(self, line: bytes) -> None:
        """Append an output line, unless the journal already has its ``custom_id``."""
        entry = msgspec.json.decode(line, type=_Entry)
        if entry.custom_id not in self:
            self._index(entry, self._end, len(line))
            self._write(line)

    def sync(self) -> None:
        """Return once all appended lines are on disk."""
        os.fsync(self._file.fileno())

    def finish(self, custom_ids: Iterable[str]) -> None:
        """Write the lines of ``custom_ids`` to the output in that order, atomically, and delete the
        journal."""
        draft = self._output.with_name(f"{self._output.name}.draft")
        with draft.open("wb") as file:
            for custom_id in custom_ids:
                start, length = self._spans[custom_id]
                self._file.seek(start)
                file.write(self._file.read(length) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self._output)
        _sync_directory(self._output.parent)
        _part(self._output).unlink()

    def _restore(self, digest: str) -> int:
        """Index the existing lines; returns the offset at which the last complete line ends."""
        self._file.seek(0)
        end = 0
        for line in self._file:
            if not line.endswith(b"\n"):
                break
            if end == 0:
                self._read_header(line, digest)
            else:
                self._index(msgspec.json.decode(line, type=_Entry), end, len(line) - 1)
            end += len(line)
        return end

    def _read_header(self, line: bytes, digest: str) -> None:
        header = msgspec.json.decode(line, type=_Header)
        self.served = header.served
        if header.warren_batch != digest:
            raise InvalidRequest(
                f"{_part(self._output).name} contains answers to another input; move it elsewhere"
            )

    def _index(self, entry: _Entry, start: int, length: int) -> None:
        self._spans[entry.custom_id] = (start, length)
        self.num_failed += entry.is_failed

    def _write(self, line: bytes) -> None:
        self._file.write(line + b"\n")
        self._file.flush()
        self._end += len(line) + 1


def _part(output: Path) -> Path:
    return output.with_name(f"{output.name}.part")


def _sync_directory(directory: Path) -> None:
    """Make a rename in ``directory`` durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
