"""The lines of the input, output and error files of batches, in OpenAI's formats."""

import asyncio
import hashlib
import time
from codecs import BOM_UTF8
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta

from gateway.api.bodies.parsing import parse, refused
from gateway.api.bodies.quick import EmbeddingRequest, Embeddings
from gateway.api.bodies.responses import ResponsesRequest
from gateway.api.bodies.schemas import ChatRequest, CompletionRequest
from gateway.api.render.formats import ChatCompletion, Completion, Usage
from gateway.api.render.responses import ResponseObject, ResponseUsage
from gateway.api.routes.generation import ParsedRequest
from gateway.api.routes.responses import read_response
from gateway.errors import error_body, status_of
from gateway.intake.admission import BYTES_OF_VALUE, MAX_VALUES, count_values
from gateway.store.batches import TokensUsed
from shared.errors import InvalidRequest, WarrenError
from shared.off_loop import off_loop

LineRequest: TypeAlias = ParsedRequest | EmbeddingRequest
"""The parsed body of a line."""


class LineEndpoint(NamedTuple):
    id_prefix: str
    """The prefix of the ids of its requests."""
    read: Callable[[bytes], LineRequest]
    """Parses a body. Raises `InvalidRequest` and `ModelNotFound`."""


def _read(read: Callable[[bytes], ParsedRequest], raw_body: bytes) -> ParsedRequest:
    """Raises `InvalidRequest` and `ModelNotFound`."""
    parsed = read(raw_body)
    if parsed.body.stream:
        raise refused("stream", "not supported in a batch.")
    if parsed.background_answer is not None:
        raise refused("background", "not supported in a batch.")
    return parsed


def _read_response(raw_body: bytes) -> ParsedRequest:
    """Raises `InvalidRequest` and `ModelNotFound`."""
    parsed = _read(read_response, raw_body)
    if isinstance(parsed.body, ResponsesRequest):
        for name in ("previous_response_id", "conversation"):
            if getattr(parsed.body, name) is not None:
                raise refused(name, "not supported in a batch.")
        if parsed.body.truncation == "auto":
            raise refused("truncation", "not supported in a batch.")
    return parsed


ENDPOINTS: Mapping[str, LineEndpoint] = {
    "/v1/chat/completions": LineEndpoint(
        "chatcmpl-", partial(_read, partial(ParsedRequest.of, ChatRequest))
    ),
    "/v1/completions": LineEndpoint(
        "cmpl-", partial(_read, partial(ParsedRequest.of, CompletionRequest))
    ),
    "/v1/embeddings": LineEndpoint("embd-", partial(parse, EmbeddingRequest)),
    "/v1/responses": LineEndpoint("resp_", _read_response),
}


class RequestLine(msgspec.Struct, frozen=True, kw_only=True):
    """A request of a batch."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=512)]
    method: Literal["POST"] = "POST"
    url: str
    body: msgspec.Raw


class _Model(msgspec.Struct, frozen=True):
    model: Any = None
    """The last of several that have this name, as in the check. The others may be of any type."""


LINE_DECODER = msgspec.json.Decoder(RequestLine)
_MODEL_DECODER = msgspec.json.Decoder(_Model)
_TURN_S = 1e-3
"""How long the event loop waits for lines; some ten are checked in this time."""
_BYTES_OF_LINE = 4096
"""The memory that the objects of any line take."""
_FOUR_BYTES = (b"\xf0", b"\xf1", b"\xf2", b"\xf3", b"\xf4", b"\\ud", b"\\uD")
"""The beginnings of characters above U+FFFF, in UTF-8 and escaped."""
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""The errors that decoding an invalid line raises."""


class InputLine(NamedTuple):
    number: int
    """From 1; empty lines count."""
    text: bytes | None
    """None if the line is too long to be read."""
    start: int = 0
    """The offset of ``text`` in the file."""

    async def num_bytes(self) -> int:
        """About how much memory the line takes, together with its request and its job. A large line
        is measured in a thread."""
        if self.text is None:
            return 0
        return await off_loop(partial(_num_bytes, self.text), len(self.text))

    @property
    def model(self) -> object:
        """The model of a checked line. None if the line cannot be parsed here, for example because
        the stack is deeper than it was during the check."""
        assert self.text is not None
        try:
            model: object = _MODEL_DECODER.decode(LINE_DECODER.decode(self.text).body).model
        except UNREADABLE:
            return None
        return model

    @property
    def custom_id(self) -> str:
        """The ``custom_id`` of a checked line. Empty if the line cannot be parsed here."""
        assert self.text is not None
        try:
            return LINE_DECODER.decode(self.text).custom_id
        except UNREADABLE:
            return ""


def _num_bytes(text: bytes) -> int:
    try:
        num_values = count_values(text)
    except InvalidRequest:  # it will be refused
        num_values = MAX_VALUES
    # The text, the strings of the request, and the strings of the job, which are often the same.
    num_text_bytes = len(text) * (1 + 2 * _char_bytes(text))
    return _BYTES_OF_LINE + num_text_bytes + BYTES_OF_VALUE * num_values


def _char_bytes(text: bytes) -> int:
    """The most bytes that a character of a string from this JSON takes: in a string, all characters
    take as many bytes as the widest character."""
    if any(mark in text for mark in _FOUR_BYTES):
        return 4
    return 1 if text.isascii() and b"\\u" not in text else 2


async def input_lines(
    parts: AsyncIterator[bytes], max_bytes: int
) -> AsyncGenerator[InputLine, None]:
    """The lines of a file that are not empty. The text of a line of more than ``max_bytes`` is not
    kept in memory. The event loop is free after the line with which the caller has spent a
    millisecond."""
    number, rest, is_cut = 0, b"", False
    end = 0  # of the lines so far
    turn_began_at = time.monotonic()
    async for part in parts:
        *lines, last = part.split(b"\n")
        for line in lines:
            number += 1
            text = rest + line
            end += len(line) + 1
            if number == 1:
                text = text.removeprefix(BOM_UTF8)
            is_too_long = is_cut or len(text) > max_bytes
            rest, is_cut = b"", False
            if is_too_long:
                yield InputLine(number, None)
            elif text.strip():
                yield InputLine(number, text, end - 1 - len(text))
            if time.monotonic() - turn_began_at > _TURN_S:
                await asyncio.sleep(0)
                turn_began_at = time.monotonic()
        rest += last
        end += len(last)
        if len(rest) > max_bytes:
            rest, is_cut = b"", True
    if number == 0:
        rest = rest.removeprefix(BOM_UTF8)
    if is_cut or rest.strip():
        yield InputLine(number + 1, None if is_cut else rest, end - len(rest))


def request_id_of(batch_id: str, line: int, prefix: str) -> str:
    """The request id of a line: the same for every gateway, so that a gateway that continues a
    batch finds the logs of the lines that were running. The id of the batch is not guessable, and
    neither is the request id."""
    digest = hashlib.sha256(f"{batch_id}:{line}".encode()).hexdigest()
    return f"{prefix}{digest[:32]}"


class _LineResponse(msgspec.Struct, frozen=True, kw_only=True):
    status_code: int
    request_id: str
    body: object


class _Unexecuted(msgspec.Struct, frozen=True, kw_only=True):
    code: str
    message: str


class _OutputLine(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    custom_id: str
    response: _LineResponse | None
    error: _Unexecuted | None = None


class LineOutcome(NamedTuple):
    """The answer to a line."""

    request_id: str
    answer: object
    """The body of the response, or the error."""
    is_promoted: bool = False
    """Whether it was answered with interactive priority."""

    @property
    def is_error(self) -> bool:
        return isinstance(self.answer, WarrenError)

    @property
    def used(self) -> TokensUsed:
        """The usage that the answer states."""
        match self.answer:
            case ChatCompletion(usage=Usage() as usage) | Completion(usage=Usage() as usage):
                return TokensUsed(
                    usage.prompt_tokens,
                    usage.prompt_tokens_details.cached_tokens,
                    usage.completion_tokens,
                    usage.completion_tokens_details.reasoning_tokens,
                )
            case ResponseObject(usage=ResponseUsage() as of_response):
                return TokensUsed(
                    of_response.input_tokens,
                    of_response.input_tokens_details.cached_tokens,
                    of_response.output_tokens,
                    of_response.output_tokens_details.reasoning_tokens,
                )
            case Embeddings():
                return TokensUsed(self.answer.usage.prompt_tokens)
        return TokensUsed()

    def line(self, line_id: str, custom_id: str) -> bytes:
        """The line of the output file, or of the error file if it is an error."""
        status, body = 200, self.answer
        if isinstance(body, WarrenError):
            status, body = status_of(body).code, error_body(body)
        response = _LineResponse(status_code=status, request_id=self.request_id, body=body)
        return msgspec.json.encode(_OutputLine(id=line_id, custom_id=custom_id, response=response))


_REASONS = {
    "expired": "This request could not be executed before the completion window expired.",
    "cancelled": "This request was not executed because the batch was cancelled.",
}


def unexecuted_line(
    batch_id: str, number: int, custom_id: str, ending: Literal["expired", "cancelled"]
) -> bytes:
    """The line of the error file for a request that was not executed."""
    error = _Unexecuted(code=f"batch_{ending}", message=_REASONS[ending])
    return msgspec.json.encode(
        _OutputLine(id=line_id(batch_id, number), custom_id=custom_id, response=None, error=error)
    )


def line_id(batch_id: str, number: int) -> str:
    return request_id_of(batch_id, number, "batch_req_")
