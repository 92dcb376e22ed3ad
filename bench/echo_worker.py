"""A worker with a synthetic engine; everything else is real.

Its tokens are a function of the previous tokens (`worker.model.echo`), so the queue, the relay and
failures can be measured and tested at any rate, without the cost of a model. With ``--clock`` they
state the time (`bench.fleet.clock`). It serves the name ``echo`` with SmolLM2's tokenizer.
"""

import asyncio
import functools
import signal
from typing import Annotated, Any

import msgspec
import typer

from bench.fleet.clock import ClockRunner, words
from cli.runtime import run
from shared import settings
from shared.bus.base import Bus
from shared.bus.rabbit import RabbitBus
from shared.settings import WorkerSettings
from shared.telemetry import setup
from worker.checkpoints import store
from worker.decode.served_model import BLOCK_SIZE, ServedModel
from worker.engine.driver import EngineThread
from worker.engine.engine import Engine
from worker.engine.scheduler import SchedulerLimits
from worker.model.echo import EchoRunner
from worker.process.service import run_worker
from worker.process.tuning import WorkerTuning
from worker.text import Tokenizer, tool_parser

MODEL = "echo"


@functools.cache
def synthetic_tokenizer() -> Tokenizer:
    """The tokenizer of the synthetic model."""
    return Tokenizer.load(store.resolve(settings.DEFAULT_MODEL))


def echo_model(
    worker: WorkerSettings,
    step_s: float = 0.0,
    num_blocks: int = 8192,
    numerics: str = MODEL,
    *,
    is_clock: bool = False,
    token_s: float = 0.0,
) -> ServedModel:
    """The synthetic model. Each step takes ``step_s``, and without ``is_clock`` ``token_s`` for
    each of its tokens."""
    tokenizer = synthetic_tokenizer()
    sizes: dict[str, Any] = {
        "num_blocks": num_blocks,
        "block_size": BLOCK_SIZE,
        "vocab_size": tokenizer.vocab_size,
        "max_seq_len": worker.max_seq_len or 8192,
    }
    runner: EchoRunner | ClockRunner = (
        ClockRunner(list(words(tokenizer).values()), **sizes, step_s=step_s)
        if is_clock
        else EchoRunner(**sizes, step_s=step_s, token_s=token_s)
    )
    limits = SchedulerLimits(
        max_num_seqs=worker.max_num_seqs,
        max_num_batched_tokens=worker.max_num_batched_tokens,
        batch_reserve=worker.batch_reserve,
        max_step_s=worker.max_step_ms / 1000,
        tenant_weights=worker.tenant_weights,
    )
    return ServedModel(
        name=MODEL,
        tokenizer=tokenizer,
        engine=EngineThread(Engine(runner, limits)),
        max_seq_len=min(runner.max_seq_len, num_blocks * BLOCK_SIZE),
        fingerprint=MODEL,
        numerics=numerics,
        is_exact=True,
        tool_parser=tool_parser(tokenizer, worker.tool_parser),
        facts={
            "device": "cpu",
            "dtype": "none",
            "numerics": numerics,
            "kv_cache_tokens": num_blocks * BLOCK_SIZE,
        },
    )


async def _run(bus: Bus, worker: WorkerSettings, model: ServedModel, tuning: WorkerTuning) -> None:
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    async with bus:
        await run_worker(worker, bus, stop=stop, model=model, tuning=tuning)


def main(
    broker: Annotated[str, typer.Option(help="AMQP URL.")],
    health_port: int | None = None,
    drain_grace_s: float | None = None,
    step_ms: Annotated[float, typer.Option(help="Duration of one step.")] = 0.0,
    token_ms: Annotated[float, typer.Option(help="Of each token of a step, in addition.")] = 0.0,
    num_blocks: Annotated[int, typer.Option(help="Of the KV cache.")] = 8192,
    numerics: Annotated[str, typer.Option(help="What it announces as its numerics.")] = MODEL,
    clock: Annotated[bool, typer.Option("--clock", help="Tokens state the time.")] = False,
    tuning: Annotated[str, typer.Option(help="A JSON object of fields of `WorkerTuning`.")] = "{}",
) -> None:
    worker = settings.load(
        WorkerSettings, broker=broker, health_port=health_port, drain_grace_s=drain_grace_s
    )
    setup.configure(worker, "warren-echo-worker")
    model = echo_model(
        worker, step_ms / 1e3, num_blocks, numerics, is_clock=clock, token_s=token_ms / 1e3
    )
    run(_run(RabbitBus(broker), worker, model, msgspec.json.decode(tuning, type=WorkerTuning)))


if __name__ == "__main__":
    typer.run(main)
