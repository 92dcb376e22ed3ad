"""Gives a stream whose worker is slow a second worker.

A request without a first token after its expected time, and a stream that is silent for several of
its usual intervals, is published again as a hedge. `shared.log` decides which run is the log's
writer: the run that writes first. The other run is stopped.

The expected times are learned from the streams of this gateway, for each worker: the time to the
first token by the size of the prompt, and the interval between two events. A slow worker must not
raise what is expected of all, so the expectation is the median of the workers' 95th percentiles.

A hedge costs an advance that is paid back if it becomes the writer. The advances of the other
hedges are limited to a share of the requests, so that an overloaded fleet gets little extra work.
"""

import asyncio
import logging
import statistics
import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, TypeAlias

import msgspec
from prometheus_client import Counter

from gateway.fleet.affinity import num_used
from gateway.fleet.live_workers import LiveWorkers
from gateway.log.relay import LogRelay
from shared import topology
from shared.bus.base import Bus
from shared.errors import BusError
from shared.messages import Announcement, Hedge
from shared.messages.token_estimates import tokens_of_prompts
from shared.telemetry.metrics import Catalog

logger = logging.getLogger(__name__)

_LOOK_INTERVAL_S = 0.05
_MAX_LATE_S = 0.25
_SLOW_BROKER_S = 0.25
"""Seconds. A broker that takes longer to answer may be the reason for all silence."""
_FORGET_INTERVAL_S = 10.0
_NUM_REMEMBERED = 64
"""Times that are remembered of each worker."""
_NUM_NEEDED = 8
"""Times without which nothing is expected of a worker."""
_PERCENTILE = 0.95
_LEAST_WAIT_S = 0.2
"""Seconds. A second worker cannot be much faster."""
_WAITS = 1.5
"""How many times the expected time a first token may take."""
_LEAST_SILENCE_S = 0.4
_SILENCES = 4.0
"""How many of the expected intervals a stream may be silent."""
_SLOW = 1.5
"""A worker whose median exceeds the expected time by this factor is slow: its requests are hedged
at once."""
_MAX_SAMPLES = 16
"""Intervals that are learned at each look, so that a look takes little time."""
SHARE = 0.05
"""Hedges that do not become the writer, as a share of the interactive requests."""
_MOST_ADVANCED = 32.0
"""Hedges that may be under way before any request has earned an advance."""
_NUM_TARGETS = 3
"""Hedges of a stream without any progress between them."""

Reason: TypeAlias = Literal["first_token", "silence"]
Outcome: TypeAlias = Literal["won", "lost", "cancelled"]
OUTCOMES: tuple[Outcome, ...] = ("won", "lost", "cancelled")


class Times:
    """The last times of a worker, in seconds."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []

    def learn(self, seconds: float) -> None:
        if len(self._recent) == _NUM_REMEMBERED:
            self._sorted.remove(self._recent.popleft())
        self._recent.append(seconds)
        insort(self._sorted, seconds)

    def quantile(self, share: float) -> float | None:
        """The time that ``share`` of the remembered times do not exceed; None if too few are
        known."""
        if len(self._sorted) < _NUM_NEEDED:
            return None
        return self._sorted[int(share * (len(self._sorted) - 1))]


class Expectation:
    """The times of one kind, by worker."""

    def __init__(self) -> None:
        self._by_worker: dict[str, Times] = {}

    def learn(self, worker: str, seconds: float) -> None:
        self._by_worker.setdefault(worker, Times()).learn(seconds)

    def learn_outrun(self, worker: str, seconds: float) -> None:
        """Learn that a worker would have taken longer than ``seconds``, at least as long as it
        usually does."""
        self.learn(worker, max(seconds, self._median(worker) or 0.0))

    def forget_all_but(self, workers: Iterable[str]) -> None:
        kept = set(workers)
        self._by_worker = {name: one for name, one in self._by_worker.items() if name in kept}

    @property
    def seconds(self) -> float | None:
        """The expected time: the lower median of the workers' 95th percentiles."""
        known = [times.quantile(_PERCENTILE) for times in self._by_worker.values()]
        return statistics.median_low(found) if (found := [t for t in known if t]) else None

    def is_slow(self, worker: str) -> bool:
        """Whether a worker usually exceeds the expected time by far."""
        median, expected = self._median(worker), self.seconds
        return median is not None and expected is not None and median > _SLOW * expected

    def _median(self, worker: str) -> float | None:
        times = self._by_worker.get(worker)
        return None if times is None else times.quantile(0.5)


@dataclass(slots=True)
class ModelTimes:
    """What is known of a model's workers."""

    first_tokens: dict[int, Expectation] = field(default_factory=dict)
    """By the size class of the prompts."""
    intervals: Expectation = field(default_factory=Expectation)
    advance: float = _MOST_ADVANCED

    def first_token(self, size: int) -> Expectation:
        return self.first_tokens.setdefault(size, Expectation())

    def forget_all_but(self, workers: Sequence[str]) -> None:
        for expectation in (self.intervals, *self.first_tokens.values()):
            expectation.forget_all_but(workers)


@dataclass(frozen=True, slots=True)
class SentHedge:
    """A hedge whose outcome is not known yet."""

    hedge: Hedge
    target: str
    worker: str | None
    """The worker that had the request; None if no worker had started it."""
    ordinal: int
    """The number of the log's accepted events when it was sent."""


@dataclass
class Watched:
    """A request in progress."""

    relay: LogRelay
    model: ModelTimes
    ordinal: int = 0
    moved_at: float = 0.0
    """Monotonic time of the last progress."""
    sent: SentHedge | None = None
    tried: set[str] = field(default_factory=set)
    """The workers to which hedges went since the last progress."""

    @cached_property
    def size(self) -> int:
        """The size class of its prompts."""
        assert self.relay.job is not None
        return tokens_of_prompts(self.relay.job.prompts).bit_length()


class Hedging:
    """Watches the streams of a gateway, and hedges those that are slow."""

    def __init__(
        self,
        bus: Bus,
        workers: LiveWorkers,
        catalog: Catalog,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``clock`` returns the time in seconds, as `LogReading.read_at`."""
        self._bus = bus
        self._workers = workers
        self._clock = clock
        self._models: dict[str, ModelTimes] = {}
        self._streams: dict[str, Watched] = {}
        self._of_slow_workers: list[Watched] = []
        """Streams that a slow worker has begun."""
        self._has_news = asyncio.Event()
        self._sent_to: dict[str, tuple[Announcement, int]] = {}
        """How many hedges each worker was sent since its last announcement."""
        self._heard_at: dict[str, float] = {}
        """When each worker has last written to a log."""
        self._looked_at = clock()
        self._forget_at = self._looked_at + _FORGET_INTERVAL_S
        self.outcomes: Counter = catalog.counter(
            "warren_gateway_hedges_total",
            "Requests that were given a second worker, by the outcome: won (the second worker "
            "wrote first), lost (the first did), or cancelled (the request ended before).",
            "model",
            "outcome",
        )
        """Hedges, by model and outcome."""

    async def watch(self, current: Callable[[], Iterable[LogRelay]]) -> None:
        """Hedge the streams that ``current`` returns; never returns."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_INTERVAL_S):
                    await self._has_news.wait()
            self._has_news.clear()
            slow, self._of_slow_workers = self._of_slow_workers, []
            if not slow:
                slow = self.look(current(), is_connected=self._bus.is_connected)
            if slow and await self._is_broker_well():
                for stream in slow:
                    await self.hedge(stream)

    def hear_start(self, relay: LogRelay) -> None:
        """Note that a worker has begun a request: the requests of a slow worker are hedged at
        once."""
        if not _may_be_hedged(relay) or relay.cursor.reader.ordinal:
            return
        stream = self._streams.get(relay.request_id)
        if stream is None or stream.relay is not relay:
            stream = self._streams[relay.request_id] = self._begin(relay)
        if self._is_of_slow_worker(stream):
            self._of_slow_workers.append(stream)
            self._has_news.set()

    def look(self, relays: Iterable[LogRelay], *, is_connected: bool) -> list[Watched]:
        """Learn from the progress of the streams; returns the streams that are to be hedged.

        Nobody can be heard while the broker is away or this process itself is late.
        """
        now = self._clock()
        can_hear = is_connected and now - self._looked_at < _LOOK_INTERVAL_S + _MAX_LATE_S
        self._looked_at = now
        streams: dict[str, Watched] = {}
        slow: list[Watched] = []
        num_left = _MAX_SAMPLES
        for relay in relays:
            stream = self._streams.get(relay.request_id)
            if stream is None or stream.relay is not relay:
                if not _may_be_hedged(relay):
                    continue
                stream = self._begin(relay)
            streams[relay.request_id] = stream
            if relay.cursor.reader.ordinal != stream.ordinal:
                num_left -= self._progress(stream, is_learned=num_left > 0)
            elif not can_hear or relay.progress is None or relay.reading.is_recreating:
                stream.moved_at = now
            elif self._is_slow(stream, now):
                slow.append(stream)
        for request_id, stream in self._streams.items():
            if streams.get(request_id) is not stream:
                self._settle(stream, "cancelled")
        self._streams = streams
        if now >= self._forget_at:
            self._forget_workers()
            self._forget_at = now + _FORGET_INTERVAL_S
        return slow

    def _forget_workers(self) -> None:
        """Forget the times of workers that are gone."""
        for name, model in self._models.items():
            model.forget_all_but([one.worker for one in self._workers.of_model(name)])
        live = {one.worker for one, _ in self._workers.announced()}
        self._heard_at = {name: at for name, at in self._heard_at.items() if name in live}
        self._sent_to = {name: one for name, one in self._sent_to.items() if name in live}

    def _begin(self, relay: LogRelay) -> Watched:
        assert relay.job is not None
        model = self._models.setdefault(relay.job.model, ModelTimes())
        model.advance = min(model.advance + SHARE, _MOST_ADVANCED)
        return Watched(relay, model, moved_at=relay.began_at)

    def _progress(self, stream: Watched, *, is_learned: bool) -> int:
        """Note that a log has got further; returns the number of intervals that were learned."""
        relay, read_at = stream.relay, stream.relay.reading.read_at
        is_first, since, worker = not stream.ordinal, stream.moved_at, relay.worker
        stream.ordinal, stream.moved_at = relay.cursor.reader.ordinal, read_at
        was_hedged = stream.sent is not None
        if was_hedged:
            self._settle(stream, "lost")
        stream.tried.clear()
        if worker is None:
            return 0
        self._heard_at[worker] = read_at
        if is_first and not was_hedged:
            stream.model.first_token(stream.size).learn(worker, read_at - stream.relay.began_at)
        elif is_learned and not was_hedged:
            stream.model.intervals.learn(worker, read_at - since)
            return 1
        return 0

    def _is_slow(self, stream: Watched, now: float) -> bool:
        waited_s = (now - stream.moved_at) / (len(stream.tried) + 1)
        if len(stream.tried) >= _NUM_TARGETS or stream.relay.has_ended:
            return False
        if stream.ordinal:
            if waited_s < _LEAST_SILENCE_S:
                return False
            expected_s = stream.model.intervals.seconds
            return expected_s is not None and waited_s >= _SILENCES * expected_s
        if self._is_of_slow_worker(stream):
            return True
        if waited_s < _LEAST_WAIT_S:
            return False
        expected_s = stream.model.first_token(stream.size).seconds
        return expected_s is not None and waited_s >= _WAITS * expected_s

    def _is_of_slow_worker(self, stream: Watched) -> bool:
        worker = stream.relay.worker
        if worker is None or stream.tried:
            return False
        return stream.model.first_token(stream.size).is_slow(worker)

    async def _is_broker_well(self) -> bool:
        try:
            async with asyncio.timeout(_SLOW_BROKER_S):
                await self._bus.inspect(topology.DEAD_LETTERS.name)
        except (BusError, TimeoutError):
            return False
        return True

    async def hedge(self, stream: Watched) -> None:
        """Give a stream a second worker, if there is a worker for it. A request that may have
        crashed a worker gets none."""
        relay, job, reader = stream.relay, stream.relay.job, stream.relay.cursor.reader
        has_moved = relay.has_ended or reader.ordinal != stream.ordinal
        if job is None or has_moved or reader.num_crashes or stream.model.advance < 1.0:
            return
        target = self._target(stream, job.model)
        if target is None:
            return
        # The message that it hedges, and its own, may be counted as a further publication when they
        # go from a worker's queue to the queue of all workers.
        number = max(job.publication, relay.cursor.publication) + 2
        hedge = Hedge(number=number, num_tokens=reader.num_tokens)
        relay.job = msgspec.structs.replace(job, publication=number + 1)
        again = msgspec.structs.replace(job, publication=number, hedge=hedge)
        sent = SentHedge(hedge, target.worker, relay.worker, reader.ordinal)
        try:
            if not await self._workers.publish_near(again, relay.log_name, target.worker):
                return
        except BusError as error:
            facts = {"request_id": relay.request_id, "reason": error.code}
            logger.info("hedge not published", extra=facts)
            return
        self._settle(stream, "lost")
        stream.model.advance -= 1.0
        stream.sent = sent
        stream.tried.add(target.worker)
        self._count_sent(target)
        self._write("request hedged", stream, sent, tokens=hedge.num_tokens)

    def _target(self, stream: Watched, model: str) -> Announcement | None:
        """The worker to which to send a hedge: it has a free slot and the numerics of the worker
        that it hedges, and was heard last; None if there is no such worker."""
        worker = stream.relay.worker
        announced = self._workers.of_model(model)
        numerics = next((one.numerics for one in announced if one.worker == worker), None)
        able = [
            one
            for one in announced
            if one.takes_near_jobs
            and one.worker != worker
            and one.worker not in stream.tried
            and (numerics is None or one.numerics == numerics)
            and num_used(one) + self._num_sent(one) < one.max_num_seqs
            and not stream.model.first_token(stream.size).is_slow(one.worker)
        ]
        if len(announced) < 2 or not able:
            return None
        return max(able, key=self._liveliness)

    def _liveliness(self, one: Announcement) -> tuple[int, float]:
        """Orders workers: the least busy worker of those that were heard in the last moment."""
        heard_at = max(self._workers.heard_at(one.worker), self._heard_at.get(one.worker, 0.0))
        free = (one.max_num_seqs - num_used(one) - self._num_sent(one)) / one.max_num_seqs
        return int(self._clock() - heard_at < topology.ANNOUNCE_INTERVAL_S * 1.25), free

    def _num_sent(self, one: Announcement) -> int:
        announcement, num_sent = self._sent_to.get(one.worker, (one, 0))
        return num_sent if announcement is one else 0

    def _count_sent(self, target: Announcement) -> None:
        self._sent_to[target.worker] = target, self._num_sent(target) + 1

    def _settle(self, stream: Watched, otherwise: Outcome) -> None:
        """Note the outcome of the stream's hedge, if it has a hedge: ``otherwise`` if neither the
        hedge nor the run before it has written."""
        sent, stream.sent = stream.sent, None
        if sent is None:
            return
        reader = stream.relay.cursor.reader
        has_moved = reader.ordinal != sent.ordinal
        outcome: Outcome = "lost" if has_moved else otherwise
        if reader.has_won(sent.hedge):
            outcome = "won"
        took_s = stream.relay.reading.read_at - stream.relay.began_at
        if outcome == "won":
            stream.model.advance += 1.0
        if sent.worker is not None and not sent.ordinal and has_moved:
            times = stream.model.first_token(stream.size)
            learn = times.learn_outrun if outcome == "won" else times.learn
            learn(sent.worker, took_s)
        assert stream.relay.job is not None
        self.outcomes.labels(stream.relay.job.model, outcome).inc()
        self._write("hedge ended", stream, sent, outcome=outcome)

    def _write(self, event: str, stream: Watched, sent: SentHedge, **facts: object) -> None:
        fields = {
            "request_id": stream.relay.request_id,
            "worker": sent.worker,
            "hedge": sent.target,
            **facts,
        }
        logger.info(event, extra=fields)


def _may_be_hedged(relay: LogRelay) -> bool:
    """Whether a relay is of an interactive request that this gateway has published and that has
    not ended. A detached request is in no hurry."""
    job = relay.job
    if job is None or job.is_detached or relay.has_ended or relay.repeats_earlier:
        return False
    return relay.lane == "interactive"
