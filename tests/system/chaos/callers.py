"""Clients that retry: each asks, follows its stream through all faults, and compares the answer.

Other clients leave in the middle.
"""

import asyncio
import json
import logging
import random
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.system.chaos.tenants import Tenant

logger = logging.getLogger(__name__)

_PAUSE_S = 0.1
_MAX_PAUSE_S = 2.0
_PATIENCE_S = 120.0
_PASSING_STATUSES = {409, 429, 502, 503}
_PASSING_CODES = {"service_unavailable", "taken_over", "broker_unavailable"}
"""Codes of errors after which a client should retry, at any gateway."""
_LIMITED_STATUS = 429
_GONE_STATUS = 410
_TOKEN_ID = "token_id:"
_MAX_EVENTS_READ = 30
_LEAVES_WITHIN_S = 2.0
_SHARE_DELETED = 0.25
_LONG_GAP_S = 3.0
"""Seconds. Longer gaps are logged with the id of their stream, whose log lines explain them."""


@dataclass(frozen=True)
class Question:
    """A request; equal questions have equal answers."""

    model: str
    prompt: str | list[int]
    max_tokens: int
    seed: int
    temperature: float = 1.0
    timeout_s: float = 300
    has_receipt: bool = False
    """Whether the stream has the ids of its tokens, and ends with a receipt."""

    @property
    def body(self) -> dict[str, object]:
        with_ids = {"receipt": True, "logprobs": 0, "return_tokens_as_token_ids": True}
        return {
            "model": self.model,
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "seed": self.seed,
            "temperature": self.temperature,
            "stream": True,
            "ignore_eos": True,
            "timeout": self.timeout_s,
            **(with_ids if self.has_receipt else {}),
        }


@dataclass
class Tally:
    """The results of the streams."""

    num_streams: int = 0
    num_left: int = 0
    """Streams whose client left, which are counted separately."""
    num_resumed: int = 0
    num_limited: int = 0
    """Refusals because of a tenant's limits."""
    num_lost: int = 0
    num_repeated: int = 0
    num_changed: int = 0
    num_diverged: int = 0
    """Streams that equal their logs, and not the undisturbed answer of an engine that does not
    repeat itself exactly."""
    num_failed: int = 0
    worst_gap_s: float = 0.0
    noted: Counter[str] = field(default_factory=Counter)
    """How often something happened that the fault's name in the table tells."""
    errors: list[str] = field(default_factory=list)
    answered: dict[str, tuple[str, int]] = field(default_factory=dict)
    """The tenant and the number of tokens of each answer that was read to its end, by the request's
    id."""

    def compare(self, text: str, expected: str) -> None:
        self.num_streams += 1
        if text == expected:
            return
        self.errors.append(f"{text!r} instead of {expected!r}")
        if expected.startswith(text):
            self.num_lost += 1
        elif len(text) > len(expected):
            self.num_repeated += 1
        else:
            self.num_changed += 1

    def miss(self, reason: str) -> None:
        """Count a promise that was not kept, of a stream that was counted."""
        self.num_changed += 1
        self.errors.append(reason)

    def fail(self, reason: str) -> None:
        self.num_streams += 1
        self.num_failed += 1
        self.errors.append(reason)


class StreamFailed(Exception):
    """The stream ended with an error that does not promise success for a retry, or not in time."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


class Caller:
    """Sends a tenant's requests to any of the gateways whose addresses ``gateways`` returns."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        gateways: Callable[[], Sequence[str]],
        tenant: Tenant,
        *,
        is_shared: bool = False,
    ) -> None:
        """``is_shared``: equal requests may share an execution."""
        self._client = client
        self._gateways = gateways
        self._tenant = tenant
        self._is_shared = is_shared
        self._next = secrets.randbelow(16)

    async def ask(self, question: Question, tally: Tally) -> str:
        """The whole answer. Raises `StreamFailed`."""
        return (await self.read(self.stream(question, tally))).text

    async def ask_and_read_again(self, question: Question, tally: Tally) -> tuple[str, str]:
        """The whole answer, and what its log contains afterwards. Raises `StreamFailed`."""
        stream = await self.read(self.stream(question, tally))
        again = Stream(question, Tally(), self._tenant, stream_id=stream.stream_id)
        await self._read(again)
        return stream.text, again.text

    def stream(self, question: Question, tally: Tally, *, is_kept: bool = False) -> "Stream":
        """A stream that was not asked for yet. ``is_kept``: its log can be forked."""
        if self._is_shared:
            return Stream(question, tally, self._tenant, key=None, is_shared=True)
        key = secrets.token_hex(8) if is_kept else _key_or_none()
        return Stream(question, tally, self._tenant, key=key)

    def fork(self, stream: "Stream", at: int, question: Question) -> "Stream":
        """The stream that begins with so many tokens of ``stream``, and goes on as the answer to
        ``question``."""
        path = f"/v1/streams/{stream.stream_id}/fork?at={at}"
        return Stream(question, stream.tally, self._tenant, path=path)

    async def read(self, stream: "Stream") -> "Stream":
        """Read the stream to its end; returns it. Raises `StreamFailed`."""
        await self._read(stream)
        if stream.stream_id is not None:
            num_tokens = stream.question.max_tokens
            stream.tally.answered[stream.stream_id] = self._tenant.name, num_tokens
        return stream

    async def _read(self, stream: "Stream") -> None:
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await self._follow_to_the_end(stream)
        except TimeoutError:
            raise StreamFailed("timeout", f"after {_PATIENCE_S:.0f} s {stream.place}") from None
        if stream.num_ends != 1:
            raise StreamFailed("terminal_events", f"{stream.num_ends}: {stream.place}")

    async def _follow_to_the_end(self, stream: "Stream") -> None:
        while not stream.is_done:
            try:
                await self._follow(stream)
            except httpx.TransportError as error:
                stream.last_answer = repr(error)
            if not stream.is_done:
                await asyncio.sleep(stream.pause_s)

    async def _follow(self, stream: "Stream") -> None:
        self._next += 1
        gateways = self._gateways()
        url = gateways[self._next % len(gateways)]
        async with self._client.stream(**stream.request(url)) as response:
            if response.status_code == 204:
                stream.is_done = True
            elif response.status_code == 200:
                stream.last_answer = f"a stream from {url}"
                stream.stream_id = response.headers["x-request-id"]
                async for event_id, data in events(response):
                    stream.take(event_id, data)
            else:
                await response.aread()
                stream.refused(response)


class Leaver:
    """Asks, reads a little, and leaves for good. Some callers cancel the request first."""

    def __init__(
        self, client: httpx.AsyncClient, gateways: Callable[[], Sequence[str]], tenant: Tenant
    ) -> None:
        self._client = client
        self._gateways = gateways
        self._tenant = tenant

    async def ask(self, question: Question, tally: Tally) -> None:
        """Return when it has left, with or without a response."""
        tally.num_left += 1
        try:
            with suppress(TimeoutError, httpx.TransportError):
                async with asyncio.timeout(random.uniform(0, _LEAVES_WITHIN_S)):
                    await self._read_a_little(question)
        except StreamFailed as error:
            logger.warning("failed: %s", error)
            tally.num_failed += 1
            tally.errors.append(str(error))
        await asyncio.sleep(_PAUSE_S)

    async def _read_a_little(self, question: Question) -> None:
        url = f"{random.choice(self._gateways())}/v1/completions"
        # A stream with ids continues for a while without its client; others end at once.
        has_ids = random.choice([{}, {"Accept": "text/event-stream"}])
        headers = {**self._tenant.headers, **has_ids}
        num_left = random.randint(0, _MAX_EVENTS_READ)
        async with self._client.stream("POST", url, json=question.body, headers=headers) as answer:
            await _check_refusal(answer)
            async for _, data in events(answer):
                if num_left == 0 or data == "[DONE]":
                    break
                num_left -= 1
                if error := json.loads(data).get("error"):
                    if error["code"] not in _PASSING_CODES:
                        raise StreamFailed(error["code"], f"a client that leaves got {data}")
                    return
            if answer.is_success and random.random() < _SHARE_DELETED:
                await self._delete(answer.headers["x-request-id"])

    async def _delete(self, stream_id: str) -> None:
        url = f"{random.choice(self._gateways())}/v1/streams/{stream_id}"
        answer = await self._client.delete(url, headers=self._tenant.headers)
        if answer.status_code != _GONE_STATUS:
            await _check_refusal(answer)


async def _check_refusal(answer: httpx.Response) -> None:
    """Raise `StreamFailed` for an error that does not promise success for a retry."""
    if answer.is_error and answer.status_code not in _PASSING_STATUSES:
        code = json.loads(await answer.aread())["error"]["code"]
        raise StreamFailed(code, f"a client that leaves got {answer.status_code}")


def _key_or_none() -> str | None:
    return random.choice([secrets.token_hex(8), None])


@dataclass
class Stream:
    """An answer as far as its client has it, through any number of connections."""

    question: Question
    tally: Tally
    tenant: Tenant
    key: str | None = field(default_factory=_key_or_none)
    """An Idempotency-Key, which half of the streams have."""
    is_shared: bool = False
    path: str = "/v1/completions"
    """Where it is asked for."""
    stream_id: str | None = None
    last_id: str | None = None
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    """Empty unless the question wants a receipt."""
    receipt: str = ""
    is_done: bool = False
    waits: bool = field(init=False)
    """Whether the next try waits for the tenant's limits. An Idempotency-Key stands for one body,
    so a stream that has a key waits from the first try; others wait once they were refused."""
    num_ends: int = 0
    """Events with a reason for the end, of which there must be one."""
    heard_at: float = 0.0
    last_answer: str = "nothing"
    pause_s: float = _PAUSE_S
    """The time until the next try."""

    def __post_init__(self) -> None:
        self.waits = self.key is not None

    @property
    def place(self) -> str:
        return f"{self.stream_id} after {self.last_id}: {self.last_answer}"

    def request(self, url: str) -> dict[str, Any]:
        if self.stream_id is None:
            return {
                "method": "POST",
                "url": f"{url}{self.path}",
                "json": {**self.question.body, **({"on_limit": "wait"} if self.waits else {})},
                "headers": {
                    **self.tenant.headers,
                    **({"Idempotency-Key": self.key} if self.key else {}),
                    **({"x-warren-cache": "exact"} if self.is_shared else {}),
                    "Accept": "text/event-stream",
                },
            }
        self.tally.num_resumed += 1
        headers = dict(self.tenant.headers)
        if self.last_id is not None:
            headers["Last-Event-ID"] = self.last_id
        return {
            "method": "GET",
            "url": f"{url}/v1/streams/{self.stream_id}",
            "headers": headers,
        }

    def refused(self, response: httpx.Response) -> None:
        """``response`` was read. Raises `StreamFailed`."""
        self.last_answer = f"{response.status_code} {response.text}"
        if response.status_code not in _PASSING_STATUSES:
            raise StreamFailed(response.json()["error"]["code"], f"{self.place}")
        self.pause_s = _PAUSE_S
        if response.status_code == _LIMITED_STATUS:
            self.waits = True
            self.tally.num_limited += 1
            self.pause_s = min(float(response.headers["retry-after"]), _MAX_PAUSE_S)

    def take(self, event_id: str | None, data: str) -> None:
        now = time.monotonic()
        gap_s = now - self.heard_at
        if self.heard_at and gap_s > self.tally.worst_gap_s:
            self.tally.worst_gap_s = gap_s
            if gap_s > _LONG_GAP_S:
                logger.info("a gap of %.1f s: %s after %s", gap_s, self.stream_id, self.last_id)
        self.heard_at = now
        if data == "[DONE]":
            self.is_done = True
            return
        event = json.loads(data)
        if error := event.get("error"):
            self.last_answer = data
            if error["code"] not in _PASSING_CODES:
                raise StreamFailed(error["code"], self.place)
            return
        self.text += "".join(choice["text"] for choice in event["choices"])
        self.receipt = event.get("receipt", self.receipt)
        for choice in event["choices"]:
            tokens = (choice.get("logprobs") or {}).get("tokens", [])
            self.token_ids += [int(token.removeprefix(_TOKEN_ID)) for token in tokens]
        self.num_ends += sum(choice["finish_reason"] is not None for choice in event["choices"])
        self.last_id = event_id or self.last_id


async def events(response: httpx.Response) -> AsyncIterator[tuple[str | None, str]]:
    event_id: str | None = None
    async for line in response.aiter_lines():
        if line.startswith("id: "):
            event_id = line[4:]
        elif line.startswith("data: "):
            yield event_id, line[6:]
            event_id = None
