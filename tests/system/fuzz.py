"""Messages and HTTP requests that are malformed: no process dies of them, and valid requests are
answered.

    python -m tests.system.fuzz [--bodies N] [--requests N] [--seed N]

sends them to a gateway and a worker in this process, and prints the memory that they leave taken.
"""

import argparse
import asyncio
import gc
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from dataclasses import field as data_field
from typing import Any

import httpx
import psutil
from msgspec import Struct, field

from shared import topology
from shared.bus.base import Binding, Bus, Message, Queue, QueueState
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.errors import BusError
from shared.log import EMPTY_HASH
from shared.messages import (
    JSON,
    MSGPACK,
    Accepted,
    Announcement,
    Cancel,
    ChatMessage,
    ChatPrompt,
    Choice,
    Completed,
    Constraint,
    Continue,
    DetokenizeJob,
    EmbeddingJob,
    Failed,
    Finished,
    Follow,
    GenerationJob,
    HandedOver,
    Progress,
    PromptScores,
    Release,
    SamplingParams,
    Started,
    TextPrompt,
    TokenDelta,
    TokenizeJob,
    TokenPrompt,
    Tool,
    ToolCall,
    Withheld,
    decode_announcement,
    decode_event,
    encode,
)
from tests.support.deployment.processes import NO_TLS
from tests.support.gateway.http import live_gateway
from tests.support.workers.synthetic import echo_worker
from tests.system.mutations import Mutator

MORE_MEMORY_BYTES = 64 << 20
"""The memory that the last four fifths of what is sent may take: what allocators keep."""
_NUM_CLIENTS = 8
_MAX_ANSWER_BYTES = 1 << 20
NUM_HONEST = 3
"""Answers to valid requests, of which there must be more."""
ENDS_WITHIN_S = 200
OF_A_VICTIM = "log not readable"
"""Logged when a stream ends because its log cannot be decoded."""
SINK = topology.reply_queue("sink", expires_s=600)
HONEST = {
    "model": "echo",
    "prompt": "An honest question",
    "max_tokens": 20,
    "seed": 1,
    "ignore_eos": True,
}
BOTH = (MSGPACK, JSON)
HEADS = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    b"Accept: text/event-stream\r\nIdempotency-Key: abc\r\nAuthorization: Bearer wk-00-x\r\n",
    b"POST /tokenize HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n",
    b"GET /v1/streams/chatcmpl-00000000000000000000000000000000?after=1.2&token=1.0 HTTP/1.1\r\n"
    b"Host: 127.0.0.1\r\nLast-Event-ID: 1.2\r\ntraceparent: 00-0-0-01\r\n",
    b"DELETE /v1/responses/resp_00000000000000000000000000000000 HTTP/1.1\r\nHost: 127.0.0.1\r\n",
)
"""The heads of requests, without the length of the body and the end."""
SHORT = SamplingParams(max_tokens=4)
RICH = SamplingParams(
    max_tokens=4,
    temperature=0.5,
    top_p=0.9,
    top_k=5,
    min_p=0.1,
    seed=7,
    stop=("stop",),
    repetition_penalty=1.2,
    presence_penalty=0.5,
    frequency_penalty=0.5,
    logit_bias={5: 1.0},
    min_tokens=1,
    stop_token_ids=(2,),
    bad_words=("bad",),
    logprobs=2,
    prompt_logprobs=1,
)
GRAMMAR = SamplingParams(max_tokens=4, constraint=Constraint(kind="regex", source="[a-z]+"))
SCHEMA = SamplingParams(
    max_tokens=4,
    constraint=Constraint(
        kind="json_schema", source='{"type":"object","properties":{"a":{"type":"integer"}}}'
    ),
)
TALK = ChatPrompt(
    messages=(
        ChatMessage(role="user", content="hi"),
        ChatMessage(
            role="assistant", tool_calls=(ToolCall(id="1", name="f", arguments='{"a":1}'),)
        ),
        ChatMessage(role="tool", content="2", tool_call_id="1"),
    ),
    tools=(Tool(name="f", description="d", parameters={"type": "object"}),),
    template_kwargs={"enable_thinking": True},
)


def jobs(request_id: str) -> list[Struct]:
    def job(*prompts: Any, **facts: Any) -> GenerationJob:
        return GenerationJob(request_id=request_id, model="echo", prompts=prompts, **facts)

    return [
        job(TALK, sampling=SHORT, mode="stream", tenant="t", trace={"traceparent": "00"}),
        job(TextPrompt(text="Once"), sampling=RICH, num_choices=2, wants_prompt_text=True),
        job(TokenPrompt(token_ids=(1, 2, 3)), sampling=GRAMMAR, deadline=4e9, created_at=1.0),
        job(TextPrompt(text="a"), TextPrompt(text="b"), sampling=SCHEMA, mode="stream"),
        job(TextPrompt(text="c"), sampling=SHORT, publication=3, is_detached=True, context=b"c"),
    ]


def quick_jobs(request_id: str) -> list[Struct]:
    return [
        TokenizeJob(request_id=request_id, model="echo", prompt=TALK),
        DetokenizeJob(request_id=request_id, model="echo", token_ids=(1, 2, 3)),
        EmbeddingJob(request_id=request_id, model="echo", prompts=(TextPrompt(text="a"),)),
    ]


def events(_: str) -> list[Struct]:
    place: dict[str, Any] = {"choice": 0, "attempt": 1, "index": 0, "prefix_hash": EMPTY_HASH}
    choice = Choice(token_ids=(1,), text="a", finish_reason="length", num_prompt_tokens=2)
    return [
        Accepted(body_hash="h", context=b"c"),
        Started(worker="worker.x", ticket="t", num_prompt_tokens=(3,), is_waiting=True),
        HandedOver(ticket="t"),
        TokenDelta(token_ids=(5, 6), text="ab", **place),
        Finished(token_ids=(), text="", finish_reason="stop", **place),
        Failed(code="internal_error", message="m", **place),
        PromptScores(prompt=0, attempt=1, start=0, token_ids=(1,), logprobs=(None,)),
        Completed(request_id="r", choices=(choice,)),
    ]


def commands(request_id: str) -> list[Struct]:
    progress = Progress(token_ids=(1, 2), is_finished=False)
    return [
        Cancel(request_id=request_id),
        Cancel(request_id=request_id, ticket="t", is_replaced=True),
        Continue(request_id=request_id, ticket="t", attempt=2, choices=(progress,)),
        Release(request_id=request_id, reader="g", is_cancelled=True),
        Withheld(request_id=request_id, reader="g", code="stream_not_found"),
        Follow(request_id=request_id, reply_to="reply.copy-1"),
    ]


def announcements(_: str) -> list[Struct]:
    return [
        Announcement(
            worker="worker.other",
            model="other",
            vocab_size=100,
            max_seq_len=100,
            fingerprint="f",
            max_num_seqs=4,
        )
    ]


@dataclass(frozen=True)
class Target:
    """Where bodies are sent, and the messages from which they are made."""

    binding: Binding
    messages: Callable[[str], Sequence[Struct]]
    content_types: Sequence[str] = (MSGPACK,)


def targets(worker: str, victim: str) -> list[Target]:
    """Every queue and exchange from which a process of a deployment reads."""
    lanes = [
        Target(topology.jobs_binding("echo", lane), quick_jobs if lane == "quick" else jobs, BOTH)
        for lane in topology.DECLARED_LANES
    ]
    return [
        *lanes,
        Target(topology.worker_binding(worker), commands),
        Target(topology.ALL_GATEWAYS, commands),
        Target(topology.reply_binding(f"reply.{victim}"), events, BOTH),
        Target(topology.ANNOUNCEMENTS, announcements),
    ]


@dataclass
class Attack:
    """Publishes bodies while victims and valid requests are answered."""

    bus: Bus
    url: str
    mutator: Mutator
    http: httpx.AsyncClient
    worker: str = ""
    victim: str = f"req-{0:032x}"
    """An id as long as a request's, because bodies depend on the seed alone."""
    numbers: Iterator[int] = data_field(default_factory=itertools.count)
    """Of the bodies, which have an id each."""
    num_rejected: int = 0
    replies: list[str] = data_field(default_factory=list)
    honest: list[str] = data_field(default_factory=list)

    async def publish(self, count: int) -> None:
        for _ in range(count):
            place: Target = self.mutator.choice(targets(self.worker, self.victim))
            name = self.mutator.choice([f"fuzz-{next(self.numbers)}", self.victim])
            content_type = self.mutator.choice(place.content_types)
            message = Message(
                self.mutator.body(self.mutator.choice(place.messages(name)), content_type),
                content_type=content_type,
                reply_to=self.mutator.choice([*[SINK.name] * 6, "", "jobs.echo.batch", "reply.no"]),
            )
            with suppress(BusError):
                await self.bus.publish(place.binding, message)
            await asyncio.sleep(0)

    async def ask_honestly(self) -> None:
        """Ask again and again."""
        while True:
            response = await self.http.post(f"{self.url}/v1/completions", json=HONEST)
            assert response.status_code == 200, response.text
            self.honest.append(response.json()["choices"][0]["text"])

    async def be_a_victim(self) -> None:
        """Streams whose logs contain foreign events have to end somehow."""
        body = {**HONEST, "max_tokens": 120, "stream": True}
        while True:
            async with asyncio.timeout(ENDS_WITHIN_S):
                async with self.http.stream("POST", f"{self.url}/v1/completions", json=body) as it:
                    self.victim = it.headers["x-request-id"]
                    async for _ in it.aiter_bytes():
                        pass

    async def dead_letter(self) -> None:
        async with self.bus.consume(topology.DEAD_LETTERS.name, prefetch=100) as dead:
            async for delivery in dead:
                self.num_rejected += 1
                await delivery.ack()

    async def collect(self) -> None:
        async with self.bus.consume(SINK.name, prefetch=100) as replies:
            async for delivery in replies:
                event = decode_event(delivery.message.body, delivery.message.content_type)
                self.replies.append(type(event).__name__)
                await delivery.ack()
                if isinstance(event, Started) and event.is_waiting:
                    await self._send_away(delivery.message.correlation_id, event.ticket)

    async def _send_away(self, request_id: str, ticket: str) -> None:
        """Cancel a run that waits for `Continue`, because its deadline may be distant."""
        cancel = Cancel(request_id=request_id, ticket=ticket)
        await self.bus.publish(topology.worker_binding(self.worker), Message(encode(cancel)))

    async def wait_answered(self) -> None:
        """Wait until no job is queued."""
        deadline = asyncio.get_running_loop().time() + ENDS_WITHIN_S
        while waiting := await self._waiting():
            assert asyncio.get_running_loop().time() < deadline, f"still waiting: {waiting}"
            await asyncio.sleep(0.1)

    @property
    def never_sent(self) -> set[str]:
        """The kinds of replies that some bodies get but no body has had yet."""
        return {"Completed", "TokenDelta", "Failed", "Tokenized"} - set(self.replies)

    async def _waiting(self) -> dict[str, QueueState]:
        """The queues that contain jobs."""
        queues = [topology.jobs_queue("echo", lane).name for lane in topology.DECLARED_LANES]
        states = {queue: await self.bus.inspect(queue) for queue in queues}
        return {queue: state for queue, state in states.items() if state and state.num_ready}


@asynccontextmanager
async def attack(bus: Bus, url: str, seed: int) -> AsyncIterator[Attack]:
    """Everything around the bodies: readers of their results, and clients with valid requests."""
    await bus.declare(SINK)
    async with httpx.AsyncClient(timeout=ENDS_WITHIN_S, verify=NO_TLS) as http:
        it = Attack(bus, url, Mutator(seed), http)
        it.worker = await worker_address(bus)
        others = [it.ask_honestly(), it.be_a_victim(), it.dead_letter(), it.collect()]
        tasks = [asyncio.create_task(other) for other in others]
        try:
            yield it
        finally:
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            assert {type(end) for end in ends} == {asyncio.CancelledError}, ends


async def worker_address(bus: Bus) -> str:
    ears = Queue("test.announcements", (topology.ANNOUNCEMENTS,), is_exclusive=True)
    await bus.declare(ears)
    async with bus.consume(ears.name) as heard:
        address = decode_announcement((await anext(heard)).message.body).worker
    await bus.delete_queue(ears.name)
    return address


def check(it: Attack) -> None:
    """Check that valid answers are equal, and that some bodies were accepted and some rejected."""
    assert len(it.honest) > NUM_HONEST
    assert len(set(it.honest)) == 1
    assert it.num_rejected > 0
    assert not it.never_sent, it.never_sent


def memory_bytes() -> int:
    gc.collect()
    rss: int = psutil.Process().memory_info().rss
    return rss


class ChatBody(Struct):
    """A chat request with many of its fields."""

    model: str = "echo"
    messages: tuple[dict[str, Any], ...] = ({"role": "user", "content": "hi"},)
    max_tokens: int = 4
    stream: bool = False
    stop: tuple[str, ...] = ("stop",)
    logit_bias: dict[str, float] = field(default_factory=lambda: {"5": 1.0})
    metadata: dict[str, str] = field(default_factory=lambda: {"a": "b"})
    response_format: dict[str, Any] = field(default_factory=lambda: {"type": "text"})
    tools: tuple[dict[str, Any], ...] = (
        {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}},
    )
    chat_template_kwargs: dict[str, Any] = field(default_factory=lambda: {"a": [1]})


async def send_requests(url: str, mutator: Mutator, count: int) -> None:
    """Send malformed HTTP requests, some at a time, each on its own connection."""
    host, port = httpx.URL(url).host, httpx.URL(url).port

    async def send_some(num: int) -> None:
        for _ in range(num):
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(ENDS_WITHIN_S):
                    await _send(host, port, _request(mutator))

    await asyncio.gather(*(send_some(count // _NUM_CLIENTS) for _ in range(_NUM_CLIENTS)))


def _request(mutator: Mutator) -> bytes:
    body = mutator.body(ChatBody(), JSON)
    head = mutator.mangled(mutator.choice(HEADS))
    length = b"%d" % len(body)
    if mutator.choice(range(8)) == 0:
        length = mutator.mangled(length)
    return head + b"Content-Length: " + length + b"\r\n\r\n" + body


async def _send(host: str, port: int | None, request: bytes) -> None:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(request)
        writer.write_eof()
        await reader.read(_MAX_ANSWER_BYTES)
    finally:
        writer.close()


async def grown_bytes(num_bodies: int, num_requests: int, seed: int) -> int:
    """Send these to a deployment in memory; returns the memory that the last four fifths leave
    taken."""

    def never() -> None:
        raise AssertionError("the worker has stalled")

    broker = MemoryBroker()
    async with (
        MemoryBus(broker) as bus,
        echo_worker(broker, step_s=0.001, max_seq_len=256, request_timeout_s=10, on_stall=never),
        live_gateway(broker, request_timeout_s=ENDS_WITHIN_S / 2) as gateway,
        attack(bus, gateway.url, seed=seed) as it,
    ):
        for share in (1, 4):
            before = memory_bytes()
            await it.publish(num_bodies * share // 5)
            await send_requests(gateway.url, it.mutator, num_requests * share // 5)
            await it.wait_answered()
        after = memory_bytes()

    check(it)
    return after - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bodies", type=int, default=10_000)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    logging.disable()  # what is refused is logged
    grown = asyncio.run(grown_bytes(args.bodies, args.requests, args.seed))
    is_flat = grown < MORE_MEMORY_BYTES
    print(f"memory grew by {grown / 2**20:.1f} MiB: {'flat' if is_flat else 'NOT FLAT'}")
    if not is_flat:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
