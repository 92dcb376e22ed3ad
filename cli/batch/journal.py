"""The journal of a batch, so that nothing is done twice: the answers so far, and what a gateway has
of it, on disk."""

import fcntl
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Self

import msgspec

from shared.errors import InvalidRequest
from shared.messages import Announcement


class Header(msgspec.Struct, frozen=True):
    warren_batch: str
    """The digest of the input file."""
    served: Announcement | None = None
    """The worker's announcement that was current when the first job was built."""
    is_remote: bool = False
    """Whether a gateway runs the batch."""


class Remote(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a gateway has of a batch, as far as it has confirmed it."""

    upload_id: str = ""
    part_ids: tuple[str, ...] = ()
    """The parts of the upload, in order; all but the last have the same size."""
    file_id: str = ""
    """The file, once the upload is complete."""
    window: str = ""
    """The completion window with which the batch of the file is ordered."""
    batch_id: str = ""


class _Response(msgspec.Struct, frozen=True):
    status_code: int


class _Error(msgspec.Struct, frozen=True):
    code: str | None = None


class _Entry(msgspec.Struct, frozen=True):
    """The fields of an output line that the index needs."""

    custom_id: str
    response: _Response | None
    error: _Error | None = None

    @property
    def ending(self) -> str | None:
        """How the batch ended before the request was executed; None if it was executed."""
        if self.response is not None or self.error is None or self.error.code is None:
            return None
        return _ENDINGS.get(self.error.code)

    @property
    def is_failed(self) -> bool:
        if self.response is None:
            return self.ending is None
        return self.response.status_code != 200


class _Note(msgspec.Struct, frozen=True):
    """A line between the lines of answers. The last such line counts."""

    remote: Remote


_ENDINGS = {"batch_cancelled": "cancelled", "batch_expired": "expired"}
"""The codes of requests that a gateway has not executed."""
_NOTE = b'{"remote":'
"""How a note begins; an output line begins with its ``id``."""


class Journal:
    """The file ``OUT.part``: a header, then one output line per answer, in order of arrival, and
    notes of what a gateway has.

    A line that a crash truncated is dropped when the file is opened again. A file lock prevents a
    second run; the operating system releases it however the process ends.
    """

    def __init__(self, file: BinaryIO, output: Path, header: Header) -> None:
        """Continue ``file``. Raises `InvalidRequest` if it belongs to another input, or to a run of
        the other kind."""
        self.num_failed = 0
        self.num_unexecuted = 0
        """Requests that were not executed before the batch ended."""
        self.ending = "completed"
        """How the batch ended, as far as the lines say."""
        self.served = header.served
        """The announcement that the first run used."""
        self.remote = Remote()
        self._file = file
        self._output = output
        self._spans: dict[str, tuple[int, int]] = {}
        self._end = self._restore(header)
        file.truncate(self._end)
        if self._end == 0:
            self._write(msgspec.json.encode(header))
            _sync_directory(output.parent)

    @classmethod
    def open(
        cls,
        output: Path,
        digest: str,
        served: Announcement | None = None,
        *,
        is_remote: bool = False,
    ) -> Self:
        """Open or create the journal beside ``output`` for the input with ``digest``.
        ``is_remote``: whether a gateway runs the batch.

        Raises `InvalidRequest` if another run holds the journal, if it belongs to another input or
        to a run of the other kind, or if there is no journal but ``output`` exists; `OSError`.
        """
        part = _part(output)
        if output.exists() and not part.exists():
            raise InvalidRequest(f"{output.name} exists already")
        file = part.open("a+b")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return cls(file, output, Header(digest, served, is_remote))
        except BlockingIOError:
            error = InvalidRequest(f"another run is writing {part.name}")
        except msgspec.DecodeError:
            error = InvalidRequest(f"{part.name} is not a journal of a batch")
        except InvalidRequest as foreign:
            error = foreign
        file.close()
        raise error

    @property
    def name(self) -> str:
        """The name of its file."""
        return _part(self._output).name

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

    def note(self, remote: Remote) -> None:
        """Remember what a gateway has; returns once it is on disk."""
        self.remote = remote
        self._write(msgspec.json.encode(_Note(remote)))
        self.sync()

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

    def discard(self) -> None:
        """Delete the journal, so that the next run begins again."""
        _part(self._output).unlink()

    def _restore(self, header: Header) -> int:
        """Index the existing lines; returns the offset at which the last complete line ends."""
        self._file.seek(0)
        end = 0
        for line in self._file:
            if not line.endswith(b"\n"):
                break
            if end == 0:
                self._read_header(line, header)
            elif line.startswith(_NOTE):
                self.remote = msgspec.json.decode(line, type=_Note).remote
            else:
                self._index(msgspec.json.decode(line, type=_Entry), end, len(line) - 1)
            end += len(line)
        return end

    def _read_header(self, line: bytes, ours: Header) -> None:
        header = msgspec.json.decode(line, type=Header)
        self.served = header.served
        if header.warren_batch != ours.warren_batch:
            raise InvalidRequest(f"{self.name} is of a run with another input; move it elsewhere")
        if header.is_remote != ours.is_remote:
            way = "with --url" if header.is_remote else "without --url"
            message = f"{self.name} is of a run {way}; continue it so, or move it elsewhere"
            raise InvalidRequest(message)

    def _index(self, entry: _Entry, start: int, length: int) -> None:
        self._spans[entry.custom_id] = (start, length)
        self.num_failed += entry.is_failed
        if entry.ending is not None:
            self.num_unexecuted += 1
            self.ending = entry.ending

    def _write(self, line: bytes) -> None:
        self._file.write(line + b"\n")
        self._file.flush()
        self._end += len(line) + 1


def noted(output: Path) -> Remote:
    """What a journal beside ``output`` says that a gateway has, also while a run holds it."""
    remote = Remote()
    with suppress(FileNotFoundError), _part(output).open("rb") as file:
        for line in file:
            if line.startswith(_NOTE) and line.endswith(b"\n"):
                remote = msgspec.json.decode(line, type=_Note).remote
    return remote


def _part(output: Path) -> Path:
    return output.with_name(f"{output.name}.part")


def _sync_directory(directory: Path) -> None:
    """Make a rename in ``directory`` durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
