"""A worker of any engine: Warren's own engine, a scripted server, or a real server."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from shared import topology
from shared.bus.base import Bus, Message
from shared.bus.memory import MemoryBus
from shared.messages import Cancel, GenerationJob, Prompt, SamplingParams, encode
from tests.support.deployment.processes import free_port
from tests.support.engines.real_servers import RealEngine
from tests.support.engines.scripted_server import ScriptedEngine, engine_server
from tests.support.workers.jobs import Log, ask, new_job, publish, read, reading
from tests.support.workers.synthetic import echo_worker, real_worker, remote_worker
from worker.engines.adapter import EngineTraits
from worker.engines.adapters import ADAPTERS
from worker.text import Tokenizer

OWN = "own"


class Place(NamedTuple):
    """A worker, and whom it serves."""

    bus: Bus
    model: str
    max_seq_len: int
    traits: EngineTraits | None = None
    """None: the engine is Warren's own."""
    script: ScriptedEngine | None = None
    url: str = ""
    """The address of a real server."""

    @property
    def has_token_ids(self) -> bool:
        return self.traits is None or self.traits.has_token_ids

    def can(self, parameter: str) -> bool:
        return self.traits is None or self.traits.can(parameter)

    def new_job(self, sampling: SamplingParams, *prompts: Prompt, n: int = 1) -> GenerationJob:
        job = new_job(self.model, *prompts, sampling=sampling)
        if sampling.seed is not None:
            job = msgspec.structs.replace(job, sampling=sampling)
        return msgspec.structs.replace(job, num_choices=n)

    async def ask(self, sampling: SamplingParams, *prompts: Prompt, n: int = 1) -> Log:
        return await ask(self.bus, self.new_job(sampling, *prompts, n=n))

    async def ask_and_cancel(self, sampling: SamplingParams) -> Log:
        """The log of a request that is cancelled after its first tokens."""
        job = self.new_job(sampling)
        async with reading(self.bus, job) as consumer:
            await publish(self.bus, job)
            log = await read(self.bus, job, consumer, num_tokens=1)
            command = Message(encode(Cancel(request_id=job.request_id)))
            await self.bus.publish(topology.worker_binding(str(log.reader.worker)), command)
            return await read(self.bus, job, consumer, log)


@asynccontextmanager
async def place_of(kind: str, tokenizer: Tokenizer, max_seq_len: int = 512) -> AsyncIterator[Place]:
    """The synthetic engine, or a scripted server of this kind."""
    async with MemoryBus() as bus:
        if kind == OWN:
            async with echo_worker(bus, max_seq_len=max_seq_len):
                yield Place(bus, "echo", max_seq_len)
        else:
            with engine_server(kind, tokenizer, max_seq_len=max_seq_len) as server:
                async with remote_worker(bus, server):
                    yield Place(bus, "smollm2", max_seq_len, ADAPTERS[kind].traits, server)


@asynccontextmanager
async def real_place(
    engine: RealEngine | None, model: Path, max_seq_len: int = 512
) -> AsyncIterator[Place]:
    """A real model, and a real server or, with None, Warren's own engine."""
    async with MemoryBus() as bus:
        port = free_port()
        options = {} if engine is None else engine.options(model, port, max_seq_len=max_seq_len)
        traits = None if engine is None else ADAPTERS[engine.name].traits
        async with real_worker(
            bus, model=str(model), served_name="smollm2", max_seq_len=max_seq_len, **options
        ):
            url = f"http://127.0.0.1:{port}"
            yield Place(bus, "smollm2", max_seq_len, traits, url=url)
