"""What the order of a batch's lines changes: the same lines in the order of their file and in the
order of `gateway.batches.order`, answered by the engine in simulated time.

The simulated steps take about as long as steps of SmolLM2 on two cores, so the figures do not
depend on the machine.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from bench.report import console
from gateway.batches.order import rank
from shared.messages import SamplingParams
from tests.worker.engine.simulation import Device, serve
from worker.engine.interface import SequenceId, Submit
from worker.engine.scheduler import SchedulerLimits

_NUM_SLOTS = 16
_STEP_TOKENS = 512
_BLOCK_SIZE = 16
_WINDOW = 128
"""Lines that are in the queue at once, as many as a gateway publishes by default."""
_QUESTION_TOKENS = 64
_CACHE_TOKENS = 40_000
"""Enough for all slots with the longest lines that share nothing."""
_CHARS_OF_TOKEN = 4
_VOCABULARY = range(1 << 16)


@dataclass(frozen=True, kw_only=True)
class Ordered:
    """A file in one order of its lines."""

    lines: str
    order: str
    num_lines: int
    kv_cache_tokens: int
    seconds: float
    tokens_per_s: float
    """Output tokens."""
    cached_share: float
    """The part of the prompt tokens that the prefix cache had."""
    tail_s: float
    """From the first token of the line that started last to the end: slots are idle meanwhile."""


@dataclass(frozen=True)
class _Line:
    prefix: int
    """The number of its system prompt."""
    max_tokens: int
    question: Sequence[int]

    def rank(self, prefixes: Sequence[Sequence[int]]) -> bytes:
        prompt = f"{self.prefix:>{_CHARS_OF_TOKEN}}" * len(prefixes[self.prefix])
        messages = [
            {"role": "system", "content": prompt},
            {"role": "user", "content": str(self.question)},
        ]
        return rank(json.dumps({"messages": messages, "max_tokens": self.max_tokens}).encode())


def measure(num_lines: int, num_prefixes: int, prefix_tokens: int) -> list[Ordered]:
    """Lines of equal length that share system prompts, with a KV cache that is smaller than all the
    prompts and with a larger cache, and lines of different lengths that share nothing."""
    draw = random.Random(0)

    def line(k: int, max_tokens: int) -> _Line:
        return _Line(k % num_prefixes, max_tokens, draw.choices(_VOCABULARY, k=_QUESTION_TOKENS))

    prefixes = [draw.choices(_VOCABULARY, k=prefix_tokens) for _ in range(num_prefixes)]
    alike = [line(k, 64) for k in range(num_lines)]
    draw.shuffle(alike)
    different = [line(k, round(2 ** draw.uniform(4, 10))) for k in range(num_lines)]
    total = num_prefixes * prefix_tokens
    name = f"{num_prefixes} system prompts of {prefix_tokens:,} tokens"
    nothing: list[list[int]] = [[] for _ in prefixes]
    return [
        row
        for lines, shared, kind, cache_tokens in (
            (alike, prefixes, name, total * 4 // 5),
            (alike, prefixes, name, total * 4),
            (different, nothing, "16 to 1,024 tokens out", _CACHE_TOKENS),
        )
        for row in _both(lines, shared, kind, cache_tokens)
    ]


def _both(
    lines: Sequence[_Line], prefixes: Sequence[Sequence[int]], kind: str, cache_tokens: int
) -> list[Ordered]:
    best = sorted(lines, key=lambda line: line.rank(prefixes))
    return [
        _run(ordered, prefixes, kind, order, cache_tokens)
        for order, ordered in (("of the file", lines), ("best", best))
    ]


def _run(
    lines: Sequence[_Line],
    prefixes: Sequence[Sequence[int]],
    kind: str,
    order: str,
    cache_tokens: int,
) -> Ordered:
    submits = [
        Submit(
            SequenceId(str(k), 0),
            [*prefixes[line.prefix], *line.question],
            SamplingParams(ignore_eos=True),
            0,
            line.max_tokens,
            job_class="batch",
        )
        for k, line in enumerate(lines)
    ]
    device = Device(num_blocks=cache_tokens // _BLOCK_SIZE, block_size=_BLOCK_SIZE)
    engine, streams = serve(device, SchedulerLimits(_NUM_SLOTS, _STEP_TOKENS), submits, _WINDOW)
    load = engine.load()
    last_began_at = max(times[0] for times in streams.token_at.values())
    return Ordered(
        lines=kind,
        order=order,
        num_lines=len(lines),
        kv_cache_tokens=cache_tokens,
        seconds=device.now,
        tokens_per_s=streams.num_tokens / device.now,
        cached_share=load.num_cached_tokens / sum(len(one.prompt_ids) for one in submits),
        tail_s=device.now - last_began_at,
    )


def show(rows: Sequence[Ordered]) -> None:
    table = Table("lines", "order", title="The order of a batch's lines, in simulated time")
    for heading in ("KV cache", "seconds", "tok/s", "of the file's order", "cached", "tail s"):
        table.add_column(heading, justify="right")
    for before, after in zip(rows[::2], rows[1::2], strict=True):
        for row in (before, after):
            table.add_row(
                row.lines,
                row.order,
                f"{row.kv_cache_tokens:,}",
                f"{row.seconds:.0f}",
                f"{row.tokens_per_s:.0f}",
                f"{row.tokens_per_s / before.tokens_per_s:.2f}x",
                f"{row.cached_share:.0%}",
                f"{row.tail_s:.1f}",
            )
    console().print(table)
