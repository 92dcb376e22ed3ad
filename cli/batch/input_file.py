"""The input of a batch. The whole file is checked before the first line is answered."""

import hashlib
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, Self, TypeAlias

import msgspec
from msgspec import Meta

from gateway.api.bodies import schemas
from gateway.api.bodies.submission import Submission, submission
from shared.bus.base import MAX_MESSAGE_BYTES
from shared.errors import InvalidRequest, RequestError, Unavailable
from shared.messages import Announcement, GenerationJob, ModelName, encode
from shared.publishers import own_name

_MAX_PROBLEMS_SHOWN = 20

Url: TypeAlias = Literal["/v1/chat/completions", "/v1/completions"]


class BatchLine(msgspec.Struct, frozen=True):
    """One request, in the format of OpenAI's Batch API."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=512)]
    method: Literal["POST"]
    url: Url
    body: msgspec.Raw

    def submission(
        self, request_id: str, created_at: float, served: Announcement | None = None
    ) -> Submission:
        """Build the job, and the constraint that it may have, from a worker's announcement
        ``served``.

        Raises `RequestError` and `Unavailable`.
        """
        body = bytes(self.body)
        request: schemas.ChatRequest | schemas.CompletionRequest
        if self.url == "/v1/chat/completions":
            request = schemas.parse(schemas.ChatRequest, body)
        else:
            request = schemas.parse(schemas.CompletionRequest, body)
        if request.stream:
            raise InvalidRequest("stream: batches do not support streaming", param="stream")
        return submission(
            request, request_id=request_id, created_at=created_at, mode="final", served=served
        )

    def job(
        self, request_id: str, created_at: float, served: Announcement | None = None
    ) -> GenerationJob:
        """The job to publish. The line was already checked with `submission`."""
        submitted = self.submission(request_id, created_at, served)
        if submitted.wanted is not None and submitted.wanted.is_optional:
            submitted = submitted.checked_now()
        job = submitted.job
        # Between two runs nothing reads the reply queue; the job must continue all the same.
        return msgspec.structs.replace(job, is_detached=True)


class _Body(msgspec.Struct):
    model: ModelName


class _Line(msgspec.Struct):
    body: _Body


_DECODER = msgspec.json.Decoder(BatchLine)
_MODEL_DECODER = msgspec.json.Decoder(_Line)


def model_of(path: Path) -> str | None:
    """The model of the first line that names one. Raises `OSError`."""
    with path.open("rb") as file:
        for text in file:
            with suppress(msgspec.MsgspecError):
                return _MODEL_DECODER.decode(text).body.model
    return None


class BatchFile:
    """A checked input file. Only the positions of lines are kept in memory, because files are
    large.

    A line is identified by its position in the file.
    """

    def __init__(self, path: Path, index: "_Index", user: str) -> None:
        self.path = path
        self._user = user
        self.served = index.served
        """The worker's announcement that jobs and answers are built from."""
        self.digest = index.digest.hexdigest()
        self.model = index.model
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
        index = _Index(served)
        offset = 0
        with path.open("rb") as file:
            for number, text in enumerate(file, start=1):
                index.digest.update(text)
                if not text.isspace():
                    index.add(number, offset, text)
                offset += len(text)
        if not index.offsets and not index.problems:
            raise InvalidRequest(f"{path.name} contains no requests")
        if index.problems:
            raise InvalidRequest(_report(path, index.problems))
        return cls(path, index, user)

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

    def line(self, position: int) -> BatchLine:
        """Read a line from the file again."""
        with self.path.open("rb") as file:
            file.seek(self._offsets[position])
            return _DECODER.decode(file.readline())

    def job(self, position: int, created_at: float) -> GenerationJob:
        """The job of a line; ``created_at`` is Unix time in seconds."""
        return self.line(position).job(self.request_id(position), created_at, self.served)


@dataclass(slots=True)
class _Index:
    """Collects the positions and problems of lines during the first pass over the file."""

    served: Announcement | None
    digest: "hashlib._Hash" = field(default_factory=hashlib.sha256)
    model: str = ""
    offsets: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def add(self, number: int, offset: int, text: bytes) -> None:
        try:
            line = _DECODER.decode(text)
            job = line.submission("check", created_at=0, served=self.served).checked_now().job
        except (msgspec.MsgspecError, RequestError, Unavailable) as error:
            self.problems.append(f"line {number}: {' '.join(str(error).split())}")
            return
        self.model = self.model or job.model
        if job.model != self.model:
            self.problems.append(
                f"line {number}: model {job.model!r}, but the first line has {self.model!r}"
            )
        if line.custom_id in self.offsets:
            self.problems.append(f"line {number}: custom_id {line.custom_id!r} is not unique")
        if len(encode(job)) > MAX_MESSAGE_BYTES - 1024:
            self.problems.append(f"line {number}: too long for one message")
        self.offsets[line.custom_id] = offset


def _report(path: Path, problems: list[str]) -> str:
    shown = problems[:_MAX_PROBLEMS_SHOWN]
    num_more = len(problems) - len(shown)
    more = [f"and {num_more} more"] if num_more else []
    return "\n".join([f"{path.name}: {len(problems)} bad lines", *shown, *more])
