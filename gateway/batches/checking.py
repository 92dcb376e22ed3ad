"""Checks the whole input file of a batch before anything runs, and names each bad line."""

import asyncio
import hashlib
import json
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    closing,
    contextmanager,
    nullcontext,
    suppress,
)
from dataclasses import dataclass, field
from functools import partial

from gateway.api.bodies.quick import EmbeddingRequest, QuickDraft
from gateway.api.bodies.submission import submission
from gateway.batches.bad_lines import BadInput, read_line, repeated, require_url, required
from gateway.batches.lines import ENDPOINTS, InputLine, LineRequest, RequestLine
from gateway.intake.key_usage import require_possible
from gateway.intake.keys.api_key import ApiKey
from gateway.wiring import Gateway
from shared.errors import BusError, Overloaded, RequestError, Unavailable
from shared.messages import Announcement
from shared.messages.token_estimates import tokens_of, tokens_of_quick
from shared.off_loop import off_loop

_MAX_ERRORS = 1000
_MAX_ERROR_BYTES = 64 << 10
"""The maximum size of a batch's errors as JSON, the form in which they are stored. A page of a
listing has the errors of many batches."""
_MAX_MESSAGE_CHARS = 500
_MAX_PARAM_CHARS = 200
_MAX_MODELS = 8
_BYTES_PER_LINE = 4 << 10
"""A batch may have as many requests as fit the longest file with this size."""
"""Each has lines in memory while its batch runs, even if it has no workers."""
_LARGE_BYTES = 1 << 20
"""Lines that take more are checked one at a time, together with the large lines of all other
batches."""
_PAUSE_S = 0.5
_DIGEST_BYTES = 8
"""Two of a million custom_ids have the same digest with a probability of 3e-8."""
_CACHE_KIB = 32 << 10
"""The memory for about 1.5 million digests."""

IsNew = Callable[[str], bool]
"""Whether a custom_id has not been passed before."""


@dataclass(slots=True)
class Checked:
    """The result of a check."""

    num_lines: int = 0
    models: list[str] = field(default_factory=list)
    errors: list[dict[str, int | str | None]] = field(default_factory=list)
    """The first errors, in OpenAI's form: ``code``, ``line``, ``message`` and ``param``. If a check
    finds more errors, a last error says how many; it is not counted in the limits."""
    num_errors: int = 0
    num_error_bytes: int = 0

    def add(self, problem: BadInput, line: int | None = None) -> None:
        text = " ".join(problem.message.split())[:_MAX_MESSAGE_CHARS]
        path = None if problem.param is None else problem.param[:_MAX_PARAM_CHARS]
        error = {"code": problem.code, "line": line, "message": text, "param": path}
        self.num_errors += 1
        self.num_error_bytes += len(json.dumps(error))
        if self.num_errors <= _MAX_ERRORS and self.num_error_bytes <= _MAX_ERROR_BYTES:
            self.errors.append(error)

    def add_model(self, model: str) -> None:
        """Raises `BadInput` if there are too many."""
        if model in self.models:
            return
        if len(self.models) == _MAX_MODELS:
            message = f"The file has more than {_MAX_MODELS} models."
            raise BadInput("too_many_models", message, "body.model")
        self.models.append(model)


async def check(
    gateway: Gateway,
    endpoint: str,
    key: ApiKey,
    lines: AsyncIterator[InputLine],
    large: asyncio.Lock,
) -> Checked:
    """Check a file. Everything is checked that can be known without the model's tokenizer, as for
    single requests, including the permissions of the API key. Each large line is checked under the
    lock ``large``.

    Raises `Unavailable` if the file cannot be read.
    """
    checked = Checked()
    max_lines = gateway.settings.max_file_bytes // _BYTES_PER_LINE
    with _custom_ids() as is_new:
        async for line in lines:
            checked.num_lines += 1
            if checked.num_lines > max_lines:
                message = f"The file has more than {max_lines} requests."
                checked.add(BadInput("too_many_requests", message), line.number)
                break
            num_bytes = await line.num_bytes()
            turn = large if num_bytes > _LARGE_BYTES else nullcontext()
            try:
                checked.add_model(
                    await _model_of(gateway, endpoint, key, line, is_new, turn, num_bytes)
                )
            except BadInput as error:
                checked.add(error, line.number)
            except RequestError as error:
                checked.add(BadInput.of_request(error), line.number)
    if not checked.num_lines:
        checked.add(BadInput("empty_file", "The file has no requests."))
    if checked.num_errors > len(checked.errors):
        num_more = checked.num_errors - len(checked.errors)
        message = f"There are {num_more} more errors."
        checked.errors.append(
            {"code": "too_many_errors", "line": None, "message": message, "param": None}
        )
    return checked


@contextmanager
def _custom_ids() -> Iterator[IsNew]:
    """Collects digests of custom_ids in a temporary database. Data that exceeds its cache is in a
    file that SQLite deletes."""
    with closing(sqlite3.connect("")) as database:
        database.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
        database.execute("PRAGMA journal_mode = OFF")
        database.execute("CREATE TABLE ids (digest INTEGER PRIMARY KEY)")

        def is_new(custom_id: str) -> bool:
            digest = hashlib.sha256(custom_id.encode()).digest()[:_DIGEST_BYTES]
            row = (int.from_bytes(digest, signed=True),)
            return database.execute("INSERT OR IGNORE INTO ids VALUES (?)", row).rowcount == 1

        yield is_new


async def _model_of(
    gateway: Gateway,
    endpoint: str,
    key: ApiKey,
    line: InputLine,
    is_new: IsNew,
    turn: AbstractAsyncContextManager[None],
    num_bytes: int,
) -> str:
    """Check a line, which takes so many bytes of memory, its request during ``turn``; returns its
    model. Raises `BadInput`, and `RequestError` of its body."""
    max_bytes = gateway.settings.max_body_bytes
    if line.text is None or len(line.text) > max_bytes:
        raise BadInput("line_too_long", f"The line is longer than {max_bytes} bytes.")
    request = await off_loop(partial(read_line, line.text), len(line.text))
    if not is_new(request.custom_id):
        raise repeated(request.custom_id)
    require_url(request, endpoint)
    return await _check_request(gateway, key, request, turn, num_bytes)


async def _check_request(
    gateway: Gateway,
    key: ApiKey,
    line: RequestLine,
    turn: AbstractAsyncContextManager[None],
    num_bytes: int,
) -> str:
    """Check a line like a single request; returns its model. Raises `RequestError`."""
    while True:
        # These errors are not the fault of the request. While it waits, other requests have their
        # turn, and its parsed body is released.
        with suppress(Overloaded, Unavailable, BusError):
            async with turn:
                read = partial(ENDPOINTS[line.url].read, bytes(line.body))
                request = await off_loop(read, num_bytes)
                return await check_request(gateway, key, request, num_bytes)
        await asyncio.sleep(_PAUSE_S)


async def check_request(gateway: Gateway, key: ApiKey, request: LineRequest, num_bytes: int) -> str:
    """Check a parsed body, which takes so many bytes of memory; returns its model. Raises
    `RequestError`, `Overloaded`, `Unavailable` and `BusError`."""
    now = time.time()
    if isinstance(request, EmbeddingRequest):
        model = required(request.model)
        key.require_model(model)
        draft = QuickDraft(model, "check", now, "")
        job = await off_loop(partial(request.job, draft), num_bytes)
        require_possible(key, tokens_of_quick(job))
        request.check(await _served(gateway, model))
        return model
    with request.translate_errors():
        body = request.body
        model = required(body.model)
        key.require_model(model)
        build = partial(
            submission,
            body,
            request_id="check",
            created_at=now,
            served=await _served(gateway, model),
            echoed=request.echoed,
        )
        submitted = (await off_loop(build, num_bytes)).limited(key)
        require_possible(key, tokens_of(submitted.job))
        await submitted.check_constraint()
    return model


async def _served(gateway: Gateway, model: str) -> Announcement | None:
    return await gateway.workers.find(model)
