"""Requests of several tenants: a Poisson process with a daily curve, bursts and floods.

All draws come from one seed and do not depend on how far the traffic is read at a time.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.simulation.spec import Spec

DAY_S = 24 * 3600.0
_CHUNK_S = 60.0
_CELL_S = 5.0
"""The rate is constant for so long."""
_PEAK_S = 15 * 3600.0
"""The hour of the day with the most requests."""
_DAILY_SWING = 0.6
"""The rate at the peak and in the deepest night differ from the mean by this share of it."""
_BURST_GAP_S = 1800.0
_BURST_S = 180.0
_BURST_FACTOR = 1.0
"""The means of the pauses between a tenant's bursts, of their duration, and of what they add to its
rate, as a multiple of it. All three are exponential."""
_NUM_SAMPLED = 100_000

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Lengths:
    """Numbers of tokens with a log-normal distribution."""

    mean: float
    sigma: float = 0.8
    """The standard deviation of the logarithm."""
    largest: int = 4096

    def draw(self, rng: np.random.Generator, count: int) -> Ints:
        location = math.log(self.mean) - self.sigma**2 / 2
        drawn = rng.lognormal(location, self.sigma, count)
        return np.clip(np.rint(drawn), 1, self.largest).astype(np.int64)


class Flood(NamedTuple):
    """Requests at a constant rate from one time of the day to another, in hours."""

    begin_h: float
    end_h: float
    load: float
    """How much of the fleet's capacity the requests take."""


class Talk(NamedTuple):
    """A conversation: its first request is followed by others, each of which repeats what was said
    before."""

    num_turns: int
    pause_s: float
    """The mean pause between an answer and the next turn, with an exponential distribution."""
    question: Lengths
    """What a later turn adds to the prompt."""


@dataclass(frozen=True)
class Tenant:
    """Sends ``share`` of all requests outside of floods, or only its floods."""

    name: str
    share: float = 0.0
    weight: float = 1.0
    prompt: Lengths = Lengths(220)
    answer: Lengths = Lengths(200, largest=2048)
    floods: tuple[Flood, ...] = ()
    talk: Talk | None = None
    """Its requests begin conversations, in an exact fleet."""


TENANTS = (
    Tenant("chat", share=0.6),
    Tenant("agents", share=0.25, prompt=Lengths(600), answer=Lengths(120, largest=2048)),
    Tenant("search", share=0.15, prompt=Lengths(300), answer=Lengths(40, largest=512)),
    Tenant("crawler", floods=(Flood(3, 3.5, 1.5), Flood(13, 13.5, 1.5))),
    Tenant("reports", weight=3.0, floods=(Flood(13, 13.5, 1.5),)),
)
"""Two floods of one tenant, the second together with that of a tenant with three times its
weight."""


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Requests in the order of their arrival, one array for each property."""

    at: Floats
    """Seconds of virtual time."""
    tenant: Ints
    """The index of its tenant."""
    prompt: Ints
    """The number of tokens."""
    answer: Ints

    def __len__(self) -> int:
        return len(self.at)

    def part(self, which: slice | NDArray[np.bool_] | Ints) -> "Arrivals":
        return Arrivals(self.at[which], self.tenant[which], self.prompt[which], self.answer[which])

    @staticmethod
    def none() -> "Arrivals":
        nothing = np.zeros(0, dtype=np.int64)
        return Arrivals(np.zeros(0), nothing, nothing, nothing)

    @staticmethod
    def joined(parts: Sequence["Arrivals"]) -> "Arrivals":
        """All of them, in the order of their arrival."""
        at = np.concatenate([part.at for part in parts])
        tenant = np.concatenate([part.tenant for part in parts])
        prompt = np.concatenate([part.prompt for part in parts])
        answer = np.concatenate([part.answer for part in parts])
        return Arrivals(at, tenant, prompt, answer).part(np.argsort(at, kind="stable"))


class Traffic:
    """Draws requests as they are asked for, in order."""

    def __init__(
        self,
        tenants: Sequence[Tenant],
        per_s: float,
        seed: int,
        *,
        capacity_per_s: float = 0.0,
        end_s: float = math.inf,
    ) -> None:
        """``per_s``: the mean number of requests over a day without floods, whose rate is a
        multiple of ``capacity_per_s``. None arrives after ``end_s``."""
        self.tenants = tenants
        self._per_s = per_s
        self._capacity_per_s = capacity_per_s
        self._end_s = end_s
        self._rng = np.random.default_rng(seed)
        self._bursts = [_Bursts(np.random.default_rng([seed, k])) for k in range(len(tenants))]
        self._drawn_until = 0.0
        self._ahead = Arrivals.none()

    def until(self, end: float) -> Arrivals:
        """The requests that arrive before ``end`` and were not returned before."""
        if self._drawn_until < end:
            parts = [self._ahead]
            while self._drawn_until < end:
                parts.append(self._draw())
            self._ahead = Arrivals.joined(parts)
        count = int(np.searchsorted(self._ahead.at, end))
        arrived = self._ahead.part(slice(count))
        self._ahead = self._ahead.part(slice(count, None))
        return arrived

    def _draw(self) -> Arrivals:
        cells = self._drawn_until + np.arange(0.0, _CHUNK_S, _CELL_S)
        parts = [self._of_tenant(index, cells) for index in range(len(self.tenants))]
        self._drawn_until += _CHUNK_S
        return Arrivals.joined(parts)

    def _of_tenant(self, index: int, cells: Floats) -> Arrivals:
        rates = self._rates(index, cells) * (cells < self._end_s)
        counts = self._rng.poisson(rates * _CELL_S)
        total = int(counts.sum())
        at = np.sort(np.repeat(cells, counts) + self._rng.random(total) * _CELL_S)
        tenant = self.tenants[index]
        return Arrivals(
            at,
            np.full(total, index),
            tenant.prompt.draw(self._rng, total),
            tenant.answer.draw(self._rng, total),
        )

    def _rates(self, index: int, at: Floats) -> Floats:
        """Requests of a tenant per second."""
        tenant = self.tenants[index]
        daily = 1 + _DAILY_SWING * np.cos(2 * np.pi * (at - _PEAK_S) / DAY_S)
        rates: Floats = self._per_s * tenant.share * daily * self._bursts[index].factor(at)
        for flood in tenant.floods:
            hour = (at % DAY_S) / 3600
            during = (flood.begin_h <= hour) & (hour < flood.end_h)
            rates += during * flood.load * self._capacity_per_s
        return rates


class _Bursts:
    """Sudden multiples of a tenant's rate, drawn one after another."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._bursts: list[tuple[float, float, float]] = []
        self._known_until = 0.0

    def factor(self, at: Floats) -> Floats:
        """The multiples at increasing times."""
        while self._known_until < at[-1]:
            begin = self._known_until + self._rng.exponential(_BURST_GAP_S)
            end = begin + self._rng.exponential(_BURST_S)
            self._bursts.append((begin, end, self._rng.exponential(_BURST_FACTOR)))
            self._known_until = end
        self._bursts = [burst for burst in self._bursts if burst[1] >= at[0]]
        factor = np.ones_like(at)
        for begin, end, height in self._bursts:
            factor += height * ((begin <= at) & (at < end))
        return factor


def capacity_per_s(spec: Spec, tenants: Sequence[Tenant]) -> float:
    """The requests of this mix that one worker answers per second with a full batch."""
    rng = np.random.default_rng(0)
    prices = spec.prices
    total_s = 0.0
    shares = sum(tenant.share for tenant in tenants)
    for tenant in tenants:
        prompt = tenant.prompt.draw(rng, _NUM_SAMPLED)
        answer = tenant.answer.draw(rng, _NUM_SAMPLED)
        context = prompt + answer / 2
        prefill_s = prompt_seconds(spec, prompt)
        token_s = prices.step / spec.max_num_seqs + prices.decode + prices.decode_pair * context
        total_s += tenant.share / shares * float(np.mean(prefill_s + answer * token_s))
    return 1 / total_s


def prompt_seconds(spec: Spec, num_tokens: Ints) -> Floats:
    """What prompts add to the steps that compute them."""
    prices = spec.prices
    pairs = num_tokens * (num_tokens + 1) / 2
    seconds: Floats = prices.prompt_token * num_tokens + prices.prompt_pair * pairs
    return seconds
