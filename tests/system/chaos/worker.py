"""An echo worker that deadly prompts kill: ``python -m tests.system.chaos.worker``."""

import asyncio
import os
import signal
from typing import Annotated

import typer

from bench.echo_worker import MODEL, echo_model
from cli.runtime import run
from shared import settings
from shared.bus.rabbit import RabbitBus
from shared.settings import WorkerSettings
from shared.telemetry import setup
from worker.decode.served_model import BLOCK_SIZE, ServedModel
from worker.engine.driver import EngineThread
from worker.engine.engine import Engine
from worker.engine.interface import ScheduledBatch, StepHandle
from worker.engine.scheduler import SchedulerLimits
from worker.model.echo import EchoRunner
from worker.process.service import run_worker
from worker.process.tuning import WorkerTuning

DEADLY_TOKEN = 4242
_SLOTS = 64
_NOTICE_INTERVAL_S = 0.1


class MortalRunner(EchoRunner):
    """Ends the process when a prompt contains `DEADLY_TOKEN`."""

    def launch(self, batch: ScheduledBatch) -> StepHandle:
        if any(DEADLY_TOKEN in s.token_ids for s in batch.sequences if s.num_tokens > 1):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().launch(batch)


def mortal_model(worker: WorkerSettings, step_s: float) -> ServedModel:
    honest = echo_model(worker, step_s)
    runner = MortalRunner(
        num_blocks=8192,
        block_size=BLOCK_SIZE,
        vocab_size=honest.tokenizer.vocab_size,
        max_seq_len=8192,
        step_s=step_s,
    )
    limits = SchedulerLimits(
        max_num_seqs=worker.max_num_seqs,
        max_num_batched_tokens=worker.max_num_batched_tokens,
        batch_reserve=worker.batch_reserve,
    )
    return ServedModel(
        name=MODEL,
        tokenizer=honest.tokenizer,
        engine=EngineThread(Engine(runner, limits)),
        max_seq_len=8192,
        fingerprint=MODEL,
        numerics=honest.numerics,
        is_exact=honest.is_exact,
    )


async def _run(broker: str, worker: WorkerSettings, step_s: float) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with RabbitBus(broker) as bus:
        await run_worker(
            worker,
            bus,
            stop=stop,
            model=mortal_model(worker, step_s),
            tuning=WorkerTuning(notice_interval_s=_NOTICE_INTERVAL_S),
        )


def main(
    broker: Annotated[str, typer.Option(help="AMQP URL.")],
    health_port: Annotated[int, typer.Option()],
    step_ms: float = 20.0,
    stall_timeout_s: float = 5.0,
    drain_grace_s: float = 2.0,
    interruption_notice: str = "",
) -> None:
    worker = settings.load(
        WorkerSettings,
        broker=broker,
        health_port=health_port,
        stall_timeout_s=stall_timeout_s,
        drain_grace_s=drain_grace_s,
        interruption_notice=interruption_notice,
    )
    setup.configure(worker, "warren-chaos-worker")
    run(_run(broker, worker, step_ms / 1e3))


if __name__ == "__main__":
    typer.run(main)
