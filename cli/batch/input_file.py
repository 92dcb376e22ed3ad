"""The input of a batch. The whole file is checked before the first line is answered, in the same
words as by a gateway."""

import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import msgspec

from cli.terminal import number_of
from gateway.api.bodies.parsing import refused
from gateway.api.bodies.submission import Submission, submission
from gateway.api.routes.generation import ParsedRequest
from gateway.batches.bad_lines import (
    BadInput,
    check_alone,
    read_line,
    repeated,
    require_url,
    required,
)
from gateway.batches.lines import ENDPOINTS, LINE_DECODER, UNREADABLE, RequestLine
from gateway.batches.order import rank
from shared.bus.base import MAX_MESSAGE_BYTES
from shared.errors import InvalidRequest, RequestError, Unavailable
from shared.messages import Announcement, GenerationJob, ModelName, encode
from shared.topology import own_name

_MAX_SHOWN = 20
_BROKER_URLS = ("/v1/chat/completions", "/v1/completions")


class _Body(msgspec.Struct):
    model: ModelName


class _Line(msgspec.Struct):
    body: _Body


_MODEL_DECODER = msgspec.json.Decoder(_Line)


def model_of(path: Path) -> str | None:
    """The model of the first line that names a model. Raises `OSError`."""
    with path.open("rb") as file:
        for text in file:
            with suppress(*UNREADABLE):
                return _MODEL_DECODER.decode(text).body.model
    return None


@dataclass(slots=True)
class InputIndex:
    """The positions of the lines of a file that was read once: files are large."""

    digest: str = ""
    num_bytes: int = 0
    offsets: dict[str, int] = field(default_factory=dict)
    """The position of each line by its ``custom_id``, in the order of the file."""

    @classmethod
    def read(cls, path: Path, check: Callable[[RequestLine], object]) -> Self:
        """Read the whole file. ``check`` raises `BadInput`, `RequestError` or `Unavailable`.

        Raises `InvalidRequest` naming each bad line, and `OSError`.
        """
        index = cls()
        digest = hashlib.sha256()
        problems: list[str] = []
        with path.open("rb") as file:
            for number, text in enumerate(file, start=1):
                digest.update(text)
                if not text.isspace():
                    problem = index._add(text, check)
                    if problem is not None:
                        problems.append(worded(problem.message, number, problem.param))
                index.num_bytes += len(text)
        if not index.offsets and not problems:
            raise InvalidRequest(f"{path.name} contains no requests")
        if problems:
            raise InvalidRequest(report(path, problems))
        index.digest = digest.hexdigest()
        return index

    def _add(self, text: bytes, check: Callable[[RequestLine], object]) -> BadInput | None:
        """Add the next line; returns its error, if it has an error."""
        try:
            line = read_line(text)
            if line.custom_id in self.offsets:
                raise repeated(line.custom_id)
            self.offsets[line.custom_id] = self.num_bytes
            check(line)
        except BadInput as error:
            return error
        except RequestError as error:
            return BadInput.of_request(error)
        except Unavailable as error:
            return BadInput(error.code, error.message)
        return None


class RemoteFile:
    """A file for a gateway, checked as far as that is possible here."""

    def __init__(self, path: Path, index: InputIndex, endpoint: str) -> None:
        self.path = path
        self.endpoint = endpoint
        """The endpoint of all lines."""
        self.digest = index.digest
        self.num_bytes = index.num_bytes
        self.custom_ids = tuple(index.offsets)

    @classmethod
    def check(cls, path: Path) -> Self:
        """Raises `InvalidRequest` naming each bad line, and `OSError`."""
        endpoint = ""

        def check(line: RequestLine) -> None:
            nonlocal endpoint
            if not endpoint and line.url in ENDPOINTS:
                endpoint = line.url
            require_url(line, endpoint or " or ".join(ENDPOINTS))
            check_alone(line)

        return cls(path, InputIndex.read(path, check), endpoint)


class BatchFile:
    """A checked file for the broker. Only the positions of lines are kept in memory.

    A line is identified by its position in the file.
    """

    def __init__(
        self,
        path: Path,
        index: InputIndex,
        model: str,
        served: Announcement | None,
        user: str,
        ranks: Sequence[bytes],
    ) -> None:
        self.path = path
        self.order = sorted(range(len(ranks)), key=ranks.__getitem__)
        """The positions of the lines in the order in which they run."""
        self._user = user
        self.served = served
        """The worker's announcement that jobs and answers are built from."""
        self.digest = index.digest
        self.model = model
        self.custom_ids = tuple(index.offsets)
        self._offsets = tuple(index.offsets.values())
        self._positions = {self.request_id(k): k for k in range(len(self))}

    @classmethod
    def check(
        cls, path: Path, served: Announcement | None = None, *, user: str = "publisher"
    ) -> Self:
        """Read the whole file, whose jobs ``user`` of the broker will publish.

        Raises `InvalidRequest` naming each bad line, and `OSError`.
        """
        model = ""
        ranks: list[bytes] = []

        def check(line: RequestLine) -> None:
            nonlocal model
            ranks.append(rank(line.body))
            job = submitted(line, "check", 0.0, served).check_constraint_now().job
            model = model or job.model
            if job.model != model:
                raise refused("model", f"{job.model!r}, but the first line has {model!r}.")
            if len(encode(job)) > MAX_MESSAGE_BYTES - 1024:
                raise BadInput("line_too_long", "The line is too long for one message.")

        index = InputIndex.read(path, check)
        return cls(path, index, model, served, user, ranks)

    def __len__(self) -> int:
        return len(self.custom_ids)

    @property
    def run_id(self) -> str:
        """An id that depends only on the user and the content of the input."""
        return own_name(self._user, f"batch-{self.digest[:32]}")

    def request_id(self, position: int) -> str:
        """The request id of a line; it is the same in every run."""
        name = hashlib.sha256(self.custom_ids[position].encode()).hexdigest()
        return f"{self.run_id}-{name[:32]}"

    def position(self, request_id: str) -> int | None:
        """The position of the line whose job has this ``request_id``."""
        return self._positions.get(request_id)

    def job(self, position: int, created_at: float) -> GenerationJob:
        """The job of a line, which is read from the file again; ``created_at`` is Unix time in
        seconds."""
        with self.path.open("rb") as file:
            file.seek(self._offsets[position])
            line = LINE_DECODER.decode(file.readline())
        return job_of(line, self.request_id(position), created_at, self.served)


def submitted(
    line: RequestLine, request_id: str, created_at: float, served: Announcement | None
) -> Submission:
    """The job of a line, and the constraint that it may have, from a worker's announcement
    ``served``.

    Raises `RequestError`, `Unavailable` and `BadInput`.
    """
    if line.url not in _BROKER_URLS:
        message = f"The URL is not {' or '.join(_BROKER_URLS)}, which a batch over the broker has."
        raise BadInput("mismatched_url", message, "url")
    request = ENDPOINTS[line.url].read(bytes(line.body))
    assert isinstance(request, ParsedRequest)
    required(request.body.model)
    if request.body.receipt:
        raise refused("receipt", "only gateways sign receipts: name one with --url.")
    return submission(
        request.body, request_id=request_id, created_at=created_at, mode="final", served=served
    )


def job_of(
    line: RequestLine, request_id: str, created_at: float, served: Announcement | None = None
) -> GenerationJob:
    """The job to publish for a checked line."""
    ready = submitted(line, request_id, created_at, served)
    if ready.wanted is not None and ready.wanted.drop_part is not None:
        ready = ready.check_constraint_now()
    # Between two runs nothing reads the reply queue; the job must continue all the same.
    return msgspec.structs.replace(ready.job, is_detached=True)


def worded(message: str, number: int | None, param: str | None) -> str:
    """An error with its line and its field."""
    name = (param or "").removeprefix("body.")
    message = " ".join(message.split())
    named = message if name.lower() in message.lower() else f"{name}: {message}"
    return named if number is None else f"line {number}: {named}"


def report(path: Path, problems: Sequence[str], *, are_all: bool = True) -> str:
    """A message with the first ``problems``; ``are_all``: whether there are no others."""
    num_problems, shown = len(problems), problems[:_MAX_SHOWN]
    count = (
        number_of(num_problems, "bad line") if are_all else f"more than {num_problems} bad lines"
    )
    num_hidden = num_problems - len(shown)
    more = [f"and {num_hidden} more" if are_all else "and others"] if num_hidden else []
    return "\n".join([f"{path.name}: {count}", *shown, *more])
