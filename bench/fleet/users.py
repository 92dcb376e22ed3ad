"""Users that send requests in sequence to a fleet, and what they receive in some seconds."""

import asyncio
import itertools
import time
from bisect import bisect_left
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from bench.echo_worker import MODEL
from bench.figures import percentile, ttft_s
from bench.load import LoadError, Request, Stream, follow

PROMPT_IDS = tuple(range(1000, 1128))


@dataclass(frozen=True, kw_only=True)
class Received:
    """What all users received, per second."""

    tokens_per_s: float
    events_per_s: float
    """Events with tokens, without the last event of an answer."""
    requests_per_s: float
    """Answered requests in a second."""
    ttft_p50_ms: float


class FleetUsers:
    """Users of several gateways in turn. All answers must have the same text and length."""

    def __init__(self, urls: Sequence[str], max_tokens: int) -> None:
        self._streams: list[Stream] = []
        """All streams, including the running streams."""
        self._urls = itertools.cycle(urls)
        self._request = Request(PROMPT_IDS, max_tokens, MODEL, seed=0)
        self._text: str | None = None
        self._users: list[asyncio.Task[None]] = []
        self._has_answer = asyncio.Event()

    def add(self, num_users: int) -> None:
        """Let more users send requests without end."""
        self._users += [asyncio.create_task(self._user(next(self._urls))) for _ in range(num_users)]

    async def measure(self, seconds: float) -> Received:
        """Everything that arrives from now on, for ``seconds`` or until the next answer, if that
        takes longer. Raises `LoadError` for an answer that differs from its request."""
        start = time.perf_counter()
        self._has_answer.clear()
        await asyncio.sleep(seconds)
        await self._wait_for_answer()
        end = time.perf_counter()
        self.check()
        ended = [one for one in self._streams if one.num_tokens]
        in_window = [one for one in ended if start <= one.chunk_times[-1] < end]
        num_events = sum(
            bisect_left(one.chunk_times, end) - bisect_left(one.chunk_times, start)
            for one in self._streams
        ) - len(in_window)
        tokens_per_event = sum(one.num_tokens for one in ended) / sum(
            len(one.chunk_times) - 1 for one in ended
        )
        events_per_s = num_events / (end - start)
        return Received(
            tokens_per_s=events_per_s * tokens_per_event,
            events_per_s=events_per_s,
            requests_per_s=len(in_window) / (end - start),
            ttft_p50_ms=1e3 * percentile([ttft_s(one) for one in in_window], 50),
        )

    def check(self) -> None:
        """Raises the error of the first user that met an error."""
        for user in self._users:
            if user.done():
                user.result()

    async def stop(self) -> None:
        """Let all users leave."""
        for user in self._users:
            user.cancel()
        await asyncio.gather(*self._users, return_exceptions=True)

    async def _wait_for_answer(self) -> None:
        """Return once an answer has arrived, or a user has failed."""
        waiting = asyncio.create_task(self._has_answer.wait())
        await asyncio.wait([waiting, *self._users], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()

    async def _user(self, url: str) -> None:
        while True:
            stream = Stream()
            self._streams.append(stream)
            await follow(url, self._request, stream)
            stream.check(self._request)
            if self._text is None:
                self._text = stream.text
            if stream.text != self._text:
                raise LoadError(f"an answer differs from an earlier one: {stream.text!r}")
            self._has_answer.set()


@asynccontextmanager
async def users(urls: Sequence[str], max_tokens: int) -> AsyncIterator[FleetUsers]:
    """Users that leave at the end of the ``async with``."""
    several = FleetUsers(urls, max_tokens)
    try:
        yield several
    finally:
        await several.stop()
