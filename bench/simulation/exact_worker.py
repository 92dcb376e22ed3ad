"""One worker of an exact fleet: a real engine and a real window, and the shell around them."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

from bench.simulation.spec import Spec
from shared import topology
from shared.bus.base import Consumer, Delivery, Message, Queue
from shared.bus.memory import MemoryBus
from shared.messages import Announcement, GenerationJob, SamplingParams, TokenPrompt
from tests.worker.engine.simulation import Device
from worker.engine.engine import Engine
from worker.engine.interface import CancelSequence, Command, Output, SequenceId, StepOutput, Submit
from worker.engine.scheduler import SchedulerLimits
from worker.engine.step_cost import StepWork
from worker.jobs.window import JobWindow, Place, Turn

MODEL = "model"
_BALANCE_INTERVAL_S = 0.25
_SET_ASIDE_SHARE = 4
"""As in `worker.process.service`."""
_BLOCKS_PER_SEQUENCE = 400
"""Enough for the longest request: memory is never what a sequence waits for."""
_GREEDY = SamplingParams(ignore_eos=True)
_PROMPT = (TokenPrompt(token_ids=(0,)),)


@dataclass(eq=False)
class Request:
    """A request from its arrival to its end."""

    name: str
    tenant: int
    tenant_name: str
    arrived_at: float
    prompt: int
    answer: int
    num_tokens: int = 0
    """Generated so far."""
    has_begun: bool = False
    conversation: int = 0
    """Its number; 0: it is the only request."""
    said: list[int] = field(default_factory=list)
    """The tokens of the prompt, if it is part of a conversation."""
    turn: int = 0
    """How many turns of the conversation precede it."""
    deadline: asyncio.TimerHandle | None = None
    cancel: Callable[[], object] = lambda: None
    """Ends it at the worker that holds it, if one does."""

    def say(self, num_tokens: int) -> None:
        """Continue the prompt with tokens that no other conversation has there."""
        start = len(self.said)
        tokens = range(start, start + num_tokens)
        self.said += [1 + (self.conversation * 7919 + k * 31) % 65_521 for k in tokens]


def job_of(request: Request) -> GenerationJob:
    """The job, with its tokens only if a gateway looks at them."""
    prompts = (TokenPrompt(token_ids=tuple(request.said)),) if request.said else None
    return GenerationJob(
        request_id=request.name,
        model=MODEL,
        prompts=prompts or _PROMPT,
        tenant=request.tenant_name,
    )


class OnToken(Protocol):
    def __call__(self, request: Request, *, num_cached: int, is_last: bool) -> None: ...


class _End(Enum):
    """How a request has ended at a worker."""

    ANSWERED = auto()
    CANCELLED = auto()
    HANDED_OVER = auto()


class ExactWorker:
    """See the module. ``peers`` are all workers of the fleet, and ``requests`` all its requests."""

    def __init__(
        self,
        name: str,
        spec: Spec,
        weights: Mapping[str, float],
        bus: MemoryBus,
        requests: Mapping[str, Request],
        *,
        peers: Sequence["ExactWorker"],
        hear: Callable[[Announcement], None],
        on_token: OnToken,
        on_hand_over: Callable[[Request], object],
    ) -> None:
        self.name = name
        self.is_draining = False
        self._spec = spec
        self._bus = bus
        self._requests = requests
        self._peers = peers
        self._hear = hear
        self._on_token = on_token
        self._on_hand_over = on_hand_over
        num_blocks = spec.num_blocks or spec.max_num_seqs * _BLOCKS_PER_SEQUENCE
        self._device = Device(num_blocks, step_s=self._step_s)
        limits = SchedulerLimits(
            spec.max_num_seqs,
            spec.max_num_batched_tokens,
            prefix_cache=spec.num_blocks > 0,
            max_step_s=spec.max_step_s,
            tenant_weights=weights,
        )
        self.engine = Engine(self._device, limits, clock=lambda: self._device.now)
        self.window = JobWindow(spec.max_num_seqs, weights, spec.max_waiting_jobs)
        self._commands: list[Command] = []
        self._has_commands = asyncio.Event()
        self._running: dict[str, tuple[Request, Place, asyncio.Future[_End]]] = {}
        self._serving: set[asyncio.Task[None]] = set()
        self._consumers: list[Consumer] = []
        self._may_take = asyncio.Event()
        self._may_take.set()
        self._drained = asyncio.Event()
        self._num_answered = 0
        self._busy_s = 0.0

    def take_busy_s(self) -> float:
        """The seconds of all steps that were launched since the last call."""
        busy_s, self._busy_s = self._busy_s, 0.0
        return busy_s

    @property
    def _takes_near_jobs(self) -> bool:
        return self._spec.has_affinity and self._spec.num_blocks > 0 and not self.is_draining

    @property
    def num_new(self) -> int:
        """Sequences that the engine has not seen yet."""
        return sum(isinstance(command, Submit) for command in self._commands)

    @property
    def num_free(self) -> int:
        """Slots that it neither uses nor needs for jobs that it holds."""
        load = self.engine.load()
        num_used = load.num_running + load.num_waiting + self.num_new + self.window.num_waiting
        return 0 if self.is_draining else max(0, self._spec.max_num_seqs - num_used)

    async def run(self) -> None:
        """Work until `drain` has ended."""
        max_begun, max_waiting = self._spec.max_num_seqs, self._spec.max_waiting_jobs
        interactive = topology.jobs_queue(MODEL, "interactive")
        overflow = topology.jobs_queue(MODEL, "overflow")
        near = topology.near_queue(MODEL, self.name)
        if self._takes_near_jobs:
            await self._bus.declare(near)
        aside = max_begun + max_waiting // _SET_ASIDE_SHARE
        async with asyncio.TaskGroup() as tasks, AsyncExitStack() as stack:
            background = [
                tasks.create_task(work)
                for work in (
                    self._consume(stack, interactive, max_begun + max_waiting),
                    self._consume(stack, overflow, aside),
                    *([self._consume(stack, near, aside)] if self._takes_near_jobs else []),
                    self._step(),
                    self._balance(),
                    self._announce(),
                )
            ]
            await self._drained.wait()
            for task in background:
                task.cancel()

    async def drain(self) -> None:
        """Take no more jobs, let those that run end within the grace period, and hand over the
        others. Returns at once."""
        self.is_draining = True
        await self._stop_consuming()
        self.window.close()
        self._announce_once()
        asyncio.get_running_loop().create_task(self._finish())

    async def _finish(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._spec.drain_grace_s):
                while self._serving:
                    await asyncio.wait(self._serving)
        for name, (request, _, _) in [*self._running.items()]:
            self._leave(name, _End.HANDED_OVER)
            self._on_hand_over(request)
        while self._serving:
            await asyncio.wait(self._serving)
        self._drained.set()

    async def _consume(self, stack: AsyncExitStack, queue: Queue, prefetch: int) -> None:
        while True:
            await self._may_take.wait()
            consuming = self._bus.consume(queue.name, prefetch=prefetch)
            # It stays open after it was stopped: closing it would return what it has delivered.
            consumer = await stack.enter_async_context(consuming)
            self._consumers.append(consumer)
            async for delivery in consumer:
                task = asyncio.create_task(self._serve(delivery, queue))
                self._serving.add(task)
                task.add_done_callback(self._serving.discard)

    async def _stop_consuming(self) -> None:
        self._may_take.clear()
        while self._consumers:
            await self._consumers.pop().stop()

    async def _serve(self, delivery: Delivery, queue: Queue) -> None:
        """What `worker.jobs.consumer` does with a delivery."""
        request = self._requests.get(delivery.message.correlation_id)
        if request is None:  # its deadline has passed
            return await delivery.ack()
        job = job_of(request)
        is_near = queue.name == topology.near_queue(MODEL, self.name).name
        shared = topology.jobs_queue(MODEL, "interactive") if is_near else queue
        with self.window.place(
            job,
            is_fresh=not delivery.num_returns,
            at_once=False,
            was_set_aside=queue.name.endswith("overflow"),
            may_wait=not is_near,
        ) as place:
            request.cancel = lambda: self.window.begin(place)
            match await place.turn():
                case Turn.BEGIN:
                    if await self._generate(request, place) is _End.HANDED_OVER:
                        return await delivery.reject(requeue=True)
                case Turn.SET_ASIDE:
                    overflow = topology.jobs_queue(MODEL, "overflow")
                    await self._publish(delivery.message, overflow)
                case Turn.GIVE_BACK | Turn.LOST:
                    await self._publish(delivery.message, shared)
            return await delivery.ack()

    async def _publish(self, message: Message, queue: Queue) -> None:
        await self._bus.publish(queue.bindings[0], message)

    async def _generate(self, request: Request, place: Place) -> _End:
        if request.name not in self._requests:
            return _End.CANCELLED
        ended: asyncio.Future[_End] = asyncio.get_running_loop().create_future()
        self._running[request.name] = request, place, ended
        request.has_begun = True
        request.cancel = lambda: self._leave(request.name, _End.CANCELLED)
        self._send(
            Submit(
                sequence_id=SequenceId(request.name, 0),
                prompt_ids=request.said or [0] * request.prompt,
                sampling=_GREEDY,
                seed=0,
                max_tokens=request.answer,
                output_ids=[0] * request.num_tokens,
                tenant=request.tenant_name,
            )
        )
        return await ended

    def _leave(self, name: str, end: _End) -> None:
        """End a running request before its last token."""
        request, _, ended = self._running.pop(name)
        request.cancel = lambda: None
        self._send(CancelSequence(SequenceId(name, 0)))
        ended.set_result(end)

    def _send(self, command: Command) -> None:
        self._commands.append(command)
        self._has_commands.set()

    def _step_s(self, work: StepWork) -> float:
        seconds = self._spec.prices.seconds(work)
        self._busy_s += seconds
        return seconds

    async def _step(self) -> None:
        """What the engine's thread does."""
        loop = asyncio.get_running_loop()
        while True:
            if not self._commands and not self.engine.has_work:
                self._has_commands.clear()
                await self._has_commands.wait()
            commands, self._commands = self._commands, []
            self._device.now = loop.time()
            outputs = self.engine.step(commands)
            await asyncio.sleep(max(0.0, self._device.now - loop.time()))
            for output in outputs:
                self._receive(output)

    def _receive(self, output: Output) -> None:
        assert isinstance(output, StepOutput)
        name = output.sequence_id.request_id
        if name not in self._running:  # it was cancelled meanwhile
            return
        request, place, ended = self._running[name]
        request.num_tokens += 1
        place.progress()
        is_last = output.finish_reason is not None
        if is_last:
            self._num_answered += 1
            del self._running[name]
            ended.set_result(_End.ANSWERED)
        self._on_token(request, num_cached=output.num_cached_tokens, is_last=is_last)

    async def _balance(self) -> None:
        """Leave jobs to workers that have free slots while this one has none."""
        while True:
            await asyncio.sleep(_BALANCE_INTERVAL_S)
            num_free = sum(peer.num_free for peer in self._peers if peer is not self)
            yields = num_free > 0 and self.window.is_full
            if yields and not self.window.yields:
                await self._stop_consuming()
            elif self.window.yields and not yields and not self.is_draining:
                self._may_take.set()
            self.window.yields = yields
            if yields:
                self.window.give_back(num_free)

    async def _announce(self) -> None:
        while True:
            self._announce_once()
            await asyncio.sleep(self._spec.announce_interval_s)

    def _announce_once(self) -> None:
        load = self.engine.load()
        self._hear(
            Announcement(
                worker=self.name,
                model=MODEL,
                vocab_size=1,
                max_seq_len=1,
                fingerprint="",
                max_num_seqs=self._spec.max_num_seqs,
                num_running=load.num_running,
                num_waiting=load.num_waiting + self.window.num_waiting,
                num_answered=self._num_answered,
                is_leaving=self.is_draining,
                takes_near_jobs=self._takes_near_jobs,
            )
        )
