"""The figures that are computed from streams, as ``vllm bench serve`` defines them.

TTFT is the time from sending the request to the first chunk, and ITL the time between two chunks of
a stream. TPOT is the time from the first chunk of a stream to its last chunk, divided by its tokens
but the first. Output tokens per second are all tokens divided by the time that all requests took
together.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from bench.load import MeasuredLoad, Stream


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The figures of a setting. Percentiles are over requests, but percentiles of ITL are over
    chunks."""

    tokens_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float
    itl_p99_ms: float
    response_mean_ms: float
    response_p90_ms: float


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The result of a system with a setting in a run. A system with other weights counts as another
    system."""

    system: str
    weights: str
    is_peer: bool
    num_users: int
    run: int
    start_s: float
    memory_bytes: int
    other_cores: float
    """Cores that other processes used during the measurement."""
    figures: Figures
    cpu_ms_per_token: dict[str, float] = dataclasses.field(default_factory=dict)
    """The CPU time of gateway and worker, without that of an engine of another project."""
    prompt_len: int = 128


@dataclass(frozen=True, kw_only=True)
class Row:
    """The medians of a system's setting over all runs, compared with its peers."""

    system: str
    weights: str
    is_peer: bool
    num_users: int
    num_runs: int
    start_s: float
    memory_bytes: float
    other_cores: float
    """The maximum over all runs."""
    figures: Figures
    slowest_tokens_per_s: float
    fastest_tokens_per_s: float
    to_best_peer: float | None
    """Tokens per second, relative to the fastest peer in the same setting; None without a peer."""
    to_same_weights: float | None
    """The same, but only among peers with the same weight format."""
    cpu_ms_per_token: dict[str, float] = dataclasses.field(default_factory=dict)
    prompt_len: int = 128

    @property
    def prompt_tokens_per_s(self) -> float | None:
        """The rate of a prompt that is computed alone; None with several users, whose prompts wait
        for each other."""
        return None if self.num_users > 1 else 1e3 * self.prompt_len / self.figures.ttft_p50_ms


def ttft_s(stream: Stream) -> float:
    return stream.chunk_times[0] - stream.sent_at


def itls_s(stream: Stream) -> list[float]:
    return [after - before for before, after in pairwise(stream.chunk_times)]


def tpot_s(stream: Stream) -> float:
    """Raises `ZeroDivisionError` for a stream of one token."""
    return (stream.chunk_times[-1] - stream.chunk_times[0]) / (stream.num_tokens - 1)


def response_s(stream: Stream) -> float:
    return stream.chunk_times[-1] - stream.sent_at


def percentile(values: Sequence[float], percent: float) -> float:
    """A percentile, interpolated linearly. Raises `ValueError` if there are no values."""
    if not values:
        raise ValueError("no values have no percentile")
    return float(np.percentile(values, percent))


def figures_of(load: MeasuredLoad) -> Figures:
    ttfts = [ttft_s(stream) for stream in load.streams]
    itls = [gap for stream in load.streams for gap in itls_s(stream)]
    responses = [response_s(stream) for stream in load.streams]
    return Figures(
        tokens_per_s=sum(stream.num_tokens for stream in load.streams) / load.duration_s,
        ttft_p50_ms=1e3 * percentile(ttfts, 50),
        ttft_p99_ms=1e3 * percentile(ttfts, 99),
        tpot_p50_ms=1e3 * percentile([tpot_s(stream) for stream in load.streams], 50),
        itl_p99_ms=1e3 * percentile(itls, 99),
        response_mean_ms=1e3 * sum(responses) / len(responses),
        response_p90_ms=1e3 * percentile(responses, 90),
    )


def rows_of(measurements: Sequence[Measurement]) -> list[Row]:
    """A row for each setting of a system, in the order of the first runs."""
    settings: dict[tuple[str, str, int, int], list[Measurement]] = {}
    for one in measurements:
        setting = (one.system, one.weights, one.prompt_len, one.num_users)
        settings.setdefault(setting, []).append(one)
    rows = [_row(runs) for runs in settings.values()]
    return [_beside_peers(row, rows) for row in rows]


def setting_of(row: Row) -> tuple[int, int]:
    """The tokens of a prompt, and the number of users."""
    return row.prompt_len, row.num_users


def _row(runs: Sequence[Measurement]) -> Row:
    rates = [one.figures.tokens_per_s for one in runs]
    names = [entry.name for entry in dataclasses.fields(Figures)]
    medians = {name: percentile([getattr(one.figures, name) for one in runs], 50) for name in names}
    return Row(
        system=runs[0].system,
        weights=runs[0].weights,
        is_peer=runs[0].is_peer,
        num_users=runs[0].num_users,
        num_runs=len(runs),
        start_s=percentile([one.start_s for one in runs], 50),
        memory_bytes=percentile([one.memory_bytes for one in runs], 50),
        other_cores=max(one.other_cores for one in runs),
        figures=Figures(**medians),
        slowest_tokens_per_s=min(rates),
        fastest_tokens_per_s=max(rates),
        to_best_peer=None,
        to_same_weights=None,
        cpu_ms_per_token={
            role: percentile([one.cpu_ms_per_token[role] for one in runs], 50)
            for role in runs[0].cpu_ms_per_token
        },
        prompt_len=runs[0].prompt_len,
    )


def _beside_peers(row: Row, rows: Sequence[Row]) -> Row:
    peers = [other for other in rows if other.is_peer and setting_of(other) == setting_of(row)]
    same = [peer for peer in peers if peer.weights == row.weights]
    return dataclasses.replace(
        row, to_best_peer=_ratio(row, peers), to_same_weights=_ratio(row, same)
    )


def _ratio(row: Row, peers: Sequence[Row]) -> float | None:
    if not peers:
        return None
    return row.figures.tokens_per_s / max(peer.figures.tokens_per_s for peer in peers)
