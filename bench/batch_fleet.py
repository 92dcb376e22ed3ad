"""What the order of a batch's lines changes in a fleet: a batch over HTTP whose lines share system
prompts, in the order of the file and in the order of `gateway.batches.order`.

Gateway, broker and workers are real. The engine is synthetic, with steps of a fixed duration, and
the cache of a worker has less room than all system prompts together take.
"""

import json
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from rich.table import Table

from bench.affinity import Fleet, FleetPlan, FleetSetup
from bench.batch_client import URL, BatchClient
from bench.echo_worker import MODEL
from bench.other_load import OtherLoad
from bench.report import console
from tests.support.metrics import sample
from worker.decode.served_model import BLOCK_SIZE

WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world")
"""Each word is a token after a space."""
END_S = 10.0
"""The seconds at the end of a batch in which a worker may be idle."""
_LOOK_S = 0.1
_RUNNING = "warren_worker_sequences_running"
_QUESTION_WORDS = 64
_ANSWER_TOKENS = (64, 127)
"""Lengths that the order does not tell apart: it runs lines with equal beginnings together."""


@dataclass(frozen=True, kw_only=True)
class OrderedFleet:
    """A batch of a fleet, with one order of its lines."""

    order: str
    num_workers: int
    num_lines: int
    kv_cache_tokens: int
    """Of each worker."""
    seconds: float
    """From the creation of the batch to its output file."""
    tokens_per_s: float
    """Output tokens."""
    cached_share: float
    """The part of the prompt tokens that a prefix cache had."""
    idle_at_end: Sequence[float]
    """For each worker: the share of the last `END_S` seconds in which it had no running line."""
    other_cores: float


class FleetSample(NamedTuple):
    """A look at the workers."""

    at_s: float
    is_running: Sequence[bool]
    """For each worker: whether it has a running line."""


def idle_shares(looks: Sequence[FleetSample], end_s: float = END_S) -> list[float]:
    """For each worker: the share of the last ``end_s`` seconds in which it had no running line. The
    end is the last look at which any worker has a line."""
    last_s = max((look.at_s for look in looks if any(look.is_running)), default=0.0)
    last = [look.is_running for look in looks if last_s - end_s <= look.at_s <= last_s]
    return [1 - sum(worker) / len(last) for worker in zip(*last, strict=True)]


def bodies(num_lines: int, num_prefixes: int, prefix_tokens: int) -> Iterator[dict[str, Any]]:
    """Requests with different questions, and answers of 64 to 127 tokens. Each system prompt has
    about ``prefix_tokens`` tokens, and the requests that share it are all over the file."""
    draw = random.Random(0)
    prefixes = [_text(draw, prefix_tokens) for _ in range(num_prefixes)]
    order = [k % num_prefixes for k in range(num_lines)]
    draw.shuffle(order)
    for prefix in order:
        messages = [
            {"role": "system", "content": prefixes[prefix]},
            {"role": "user", "content": _text(draw, _QUESTION_WORDS)},
        ]
        max_tokens = draw.randint(*_ANSWER_TOKENS)
        yield {"model": MODEL, "messages": messages, "max_tokens": max_tokens, "ignore_eos": True}


def _text(draw: random.Random, num_words: int) -> str:
    return " ".join(draw.choices(WORDS, k=num_words))


def measure(
    broker: str, num_workers: int, num_lines: int, num_prefixes: int, prefix_tokens: int
) -> list[OrderedFleet]:
    """The same file in both orders. Raises `RuntimeError` if a line has no answer."""
    cache_tokens = num_prefixes * prefix_tokens * 4 // 5
    # A step takes about as long as a step of SmolLM2 on two cores.
    plan = FleetPlan(
        step_s=0.03,
        token_s=0.3e-3,
        step_tokens=512,
        num_slots=16,
        num_blocks=cache_tokens // BLOCK_SIZE,
    )
    with TemporaryDirectory(prefix="warren-bench-") as name:
        path = Path(name) / "lines.jsonl"
        with path.open("w") as lines:
            for k, body in enumerate(bodies(num_lines, num_prefixes, prefix_tokens)):
                line = {"custom_id": str(k), "method": "POST", "url": URL, "body": body}
                lines.write(f"{json.dumps(line)}\n")
        return [
            _measure(broker, plan, FleetSetup(name=order, num_workers=num_workers, **changes), path)
            for order, changes in (("of the file", {"has_batch_order": False}), ("best", {}))
        ]


def _measure(broker: str, plan: FleetPlan, system: FleetSetup, path: Path) -> OrderedFleet:
    with ExitStack() as stack:
        fleet = Fleet(broker, plan, system, stack)
        client = stack.enter_context(BatchClient(fleet.gateway.url))
        file_id = client.upload(path)
        others, looks = OtherLoad(), list[FleetSample]()
        began = time.perf_counter()
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(client.run, file_id)
            while not running.done():
                is_running = [sample(worker, _RUNNING) > 0 for worker in fleet.workers]
                looks.append(FleetSample(time.perf_counter() - began, is_running))
                time.sleep(_LOOK_S)
            batch = running.result()
        seconds = time.perf_counter() - began
        other_cores = others.cores()
    counts, usage = batch["request_counts"], batch["usage"]
    if counts["completed"] != counts["total"]:
        raise RuntimeError(f"not all lines were answered: {batch}")
    return OrderedFleet(
        order=system.name,
        num_workers=system.num_workers,
        num_lines=counts["total"],
        kv_cache_tokens=plan.num_blocks * BLOCK_SIZE,
        seconds=seconds,
        tokens_per_s=usage["output_tokens"] / seconds,
        cached_share=usage["input_tokens_details"]["cached_tokens"] / usage["input_tokens"],
        idle_at_end=idle_shares(looks),
        other_cores=other_cores,
    )


def show(rows: Sequence[OrderedFleet]) -> None:
    table = Table("order", title="The order of a batch's lines, over HTTP")
    for heading in (
        "workers",
        "lines",
        "seconds",
        "tok/s",
        "of the file's order",
        "cached",
        f"idle in the last {END_S:.0f} s",
        "others",
    ):
        table.add_column(heading, justify="right")
    for before, after in zip(rows[::2], rows[1::2], strict=True):
        for row in (before, after):
            table.add_row(
                row.order,
                str(row.num_workers),
                f"{row.num_lines:,}",
                f"{row.seconds:.0f}",
                f"{row.tokens_per_s:.0f}",
                f"{row.tokens_per_s / before.tokens_per_s:.2f}x",
                f"{row.cached_share:.0%}",
                ", ".join(f"{share:.0%}" for share in row.idle_at_end),
                f"{row.other_cores:.1f}",
            )
    console().print(table)
