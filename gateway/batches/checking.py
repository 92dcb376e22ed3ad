"""Checks the whole input file of a batch before anything runs, and names each bad line."""

import asyncio
import hashlib
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field

import msgspec

from gateway.api.bodies.quick import EmbeddingRequest, QuickDraft
from gateway.api.bodies.submission import submission
from gateway.batches.lines import ENDPOINTS, LINE_DECODER, InputLine, Request, RequestLine
from gateway.intake.body import count_values, parsed
from gateway.intake.key_file import ApiKey
from gateway.intake.limits import require_possible, tokens_of, tokens_of_quick
from gateway.wiring import Gateway
from shared.errors import BusError, InvalidRequest, Overloaded, RequestError, Unavailable
from shared.messages import Announcement

_MAX_ERRORS = 1000
_MAX_MESSAGE_CHARS = 500
_MAX_MODELS = 64
_PAUSE_S = 0.5
_DIGEST_BYTES = 8
"""Two of a million custom_ids have the same digest with a probability of 3e-8."""
_TURN_S = 1e-3
"""How long the event loop waits for lines; some ten are checked in this time."""
_CACHE_KIB = 32 << 10
"""The memory for about 1.5 million digests."""

IsNew = Callable[[str], bool]
"""Whether a custom_id has not been passed before."""


@dataclass(slots=True)
class Checked:
    """The result of a check."""

    num_lines: int = 0
    models: list[str] = field(default_factory=list)
    errors: list[dict[str, object]] = field(default_factory=list)
    """OpenAI's errors: ``code``, ``line``, ``message`` and ``param``."""
    num_errors: int = 0

    def add_error(self, code: str, message: str, line: int | None, param: str | None) -> None:
        self.num_errors += 1
        if len(self.errors) < _MAX_ERRORS:
            text = " ".join(message.split())[:_MAX_MESSAGE_CHARS]
            self.errors.append({"code": code, "line": line, "message": text, "param": param})


async def check(
    gateway: Gateway, endpoint: str, key: ApiKey, lines: AsyncIterator[InputLine]
) -> Checked:
    """Check a file. Everything is checked that can be known without the model's tokenizer, as for
    single requests, including what the API key never permits. The event loop is free after every
    millisecond.

    Raises `Unavailable` if the file cannot be read.
    """
    checked = Checked()
    max_lines = gateway.settings.max_batch_lines
    began_at = time.monotonic()
    with _custom_ids() as is_new:
        async for line in lines:
            checked.num_lines += 1
            if checked.num_lines > max_lines:
                message = f"The file has more than {max_lines} requests."
                checked.add_error("too_many_requests", message, line.number, None)
                break
            await _check_line(gateway, endpoint, key, line, is_new, checked)
            if time.monotonic() - began_at > _TURN_S:
                await asyncio.sleep(0)
                began_at = time.monotonic()
    if not checked.num_lines:
        checked.add_error("empty_file", "The file has no requests.", None, None)
    if checked.num_errors > len(checked.errors):
        num_more = checked.num_errors - len(checked.errors)
        message = f"There are {num_more} more errors."
        checked.errors.append(
            {"code": "too_many_errors", "line": None, "message": message, "param": None}
        )
    return checked


@contextmanager
def _custom_ids() -> Iterator[IsNew]:
    """Collects digests of custom_ids in a temporary database: what exceeds its cache is in a file
    that SQLite deletes."""
    with closing(sqlite3.connect("")) as database:
        database.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
        database.execute("PRAGMA journal_mode = OFF")
        database.execute("CREATE TABLE ids (digest INTEGER PRIMARY KEY)")

        def is_new(custom_id: str) -> bool:
            digest = hashlib.sha256(custom_id.encode()).digest()[:_DIGEST_BYTES]
            row = (int.from_bytes(digest, signed=True),)
            return database.execute("INSERT OR IGNORE INTO ids VALUES (?)", row).rowcount == 1

        yield is_new


async def _check_line(
    gateway: Gateway,
    endpoint: str,
    key: ApiKey,
    line: InputLine,
    is_new: IsNew,
    checked: Checked,
) -> None:
    number = line.number
    if line.text is None or len(line.text) > gateway.settings.max_body_bytes:
        message = f"The line is longer than {gateway.settings.max_body_bytes} bytes."
        return checked.add_error("line_too_long", message, number, None)
    try:
        count_values(line.text)
        request = await parsed(LINE_DECODER.decode, line.text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return checked.add_error(*_malformed(error, number))
    except InvalidRequest as error:
        return checked.add_error(error.code, error.message, number, error.param)
    if not is_new(request.custom_id):
        message = f"The custom_id {request.custom_id[:64]!r} is not unique."
        return checked.add_error("duplicate_custom_id", message, number, "custom_id")
    if request.url != endpoint:
        message = f"The URL is not {endpoint}, which is the batch's endpoint."
        return checked.add_error("mismatched_url", message, number, "url")
    try:
        model = await _check_request(gateway, key, request)
    except RequestError as error:
        param = None if error.param is None else f"body.{error.param}"
        return checked.add_error(error.code, error.message, number, param)
    if model not in checked.models:
        if len(checked.models) == _MAX_MODELS:
            message = f"The file has more than {_MAX_MODELS} models."
            return checked.add_error("too_many_models", message, number, "body.model")
        checked.models.append(model)
    return None


def _malformed(error: Exception, number: int) -> tuple[str, str, int, str | None]:
    message = str(error)
    if not isinstance(error, msgspec.ValidationError):
        return "invalid_json_line", f"The line is not valid JSON: {message}", number, None
    reason, _, place = message.partition(" - at `$")
    missing = reason.partition("missing required field `")[2].rstrip("`")
    return "invalid_line", message, number, missing or place.rstrip("`").lstrip(".") or None


async def _check_request(gateway: Gateway, key: ApiKey, line: RequestLine) -> str:
    """Check a request like a single one; returns its model. Raises `RequestError`."""
    request = await parsed(ENDPOINTS[line.url].read, bytes(line.body))
    while True:
        try:
            return await check_request(gateway, key, request)
        except (Overloaded, Unavailable, BusError):  # not the fault of the request
            await asyncio.sleep(_PAUSE_S)


async def check_request(gateway: Gateway, key: ApiKey, request: Request) -> str:
    """Check a parsed body; returns its model. Raises `RequestError`, `Overloaded`, `Unavailable`
    and `BusError`."""
    now = time.time()
    if isinstance(request, EmbeddingRequest):
        model = _required(request.model)
        key.require_model(model)
        job = request.job(QuickDraft(model, "check", now, ""))
        require_possible(key, tokens_of_quick(job))
        request.check(await _served(gateway, model))
        return model
    with request.in_own_words():
        body = request.body
        model = _required(body.model)
        key.require_model(model)
        if body.stream:
            raise InvalidRequest("stream: batches do not support it.", param="stream")
        if request.promise is not None:
            raise InvalidRequest("background: batches do not support it.", param="background")
        submitted = submission(
            body,
            request_id="check",
            created_at=now,
            served=await _served(gateway, model),
            echoed=request.echoed,
        ).limited(key)
        require_possible(key, tokens_of(submitted.job))
        await submitted.checked()
    return model


async def _served(gateway: Gateway, model: str) -> Announcement | None:
    return await gateway.workers.find(model)


def _required(model: str | None) -> str:
    if not model:
        raise InvalidRequest("model: expected the name of a model.", param="model")
    return model
