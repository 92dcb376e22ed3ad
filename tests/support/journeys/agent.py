"""The messages of an agent's chat over two workers, for docs/life-of-a-request.md.

The gateway, RabbitMQ and the workers are real. The engines behind the workers say what they are
told, because no small model would call the tool. The first worker dies in the middle of a thought.
The second worker completes the thought, calls the tool, and answers once it has the tool's result.
Without affinity, because the gateway would prefer the dead worker for some more seconds.
"""

import json
import re
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from shared import messages, topology
from shared.bus.base import Binding, Message
from shared.bus.rabbit import RabbitBus
from shared.messages.fields import Wire
from tests.support.engines.scripted_server import engine_server
from tests.support.gateway.http import LiveGateway, hears_a_worker, live_gateway
from tests.support.workers.synthetic import doomed_remote_worker, remote_worker
from worker.text import Tokenizer

_MODEL = "smollm2"
_THOUGHT = "The user asks for the weather in Rome. A tool knows it."
_CALL = '{"name": "get_weather", "arguments": {"city": "Rome"}}'
_SECOND_THOUGHT = "It is 24 degrees."
_ANSWER = "It is warm in Rome."
_NUM_TOKENS_OF_FIRST = 10
"""The tokens that the first worker generates before it dies."""
_NUM_TOKENS_BEFORE_PAUSE = 7
"""The tokens after which the second worker waits for its reader, so that the end of an answer
arrives after its beginning."""
_QUESTION = {"role": "user", "content": "How is the weather in Rome?"}
_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
_KINDS: Mapping[object, type[Wire]] = {
    kind.__struct_config__.tag: kind
    for kind in vars(messages).values()
    if isinstance(kind, type) and issubclass(kind, Wire)
}
_LEFT_OUT = (messages.Announcement, messages.UsageReport)
"""What processes tell each other regularly, whether there are requests or not."""
_TABLE = re.compile(r"(<!-- messages: agent -->\n).*?(<!-- /messages -->)", re.DOTALL)


@dataclass(frozen=True)
class Row:
    """Messages of one kind, or parts of an answer, from one process to another."""

    sender: str
    kind: str
    receiver: str
    meaning: str


def rendered(page: str, rows: Iterable[Row]) -> str:
    """The text of a page with the table of these rows."""
    lines = [
        f"| {number} | {row.sender} | {row.kind} | {row.receiver} | {row.meaning} |\n"
        for number, row in enumerate(rows, 1)
    ]
    head = "| | From | Message | To | Meaning |\n|---|---|---|---|---|\n"
    return _TABLE.sub(lambda match: f"{match[1]}{head}{''.join(lines)}{match[2]}", page)


async def travel(url: str, model: Path) -> list[Row]:
    """Have the chat over the broker at ``url``, with the tokenizer of ``model``."""
    journal = _Journal()
    tokenizer = Tokenizer.load(model)
    options = {"model": str(model), "served_name": _MODEL, "reasoning_parser": "qwen3"}
    async with AsyncExitStack() as stack:
        first, second = (
            stack.enter_context(engine_server("llama-server", tokenizer, max_seq_len=2048))
            for _ in range(2)
        )
        bus, bus_of_second = [
            await stack.enter_async_context(_ObservedBus(url, name, journal))
            for name in ("gateway", "worker 2")
        ]
        gateway = await stack.enter_async_context(live_gateway(bus, has_affinity=False))
        life = AsyncExitStack()
        bus_of_first = await life.enter_async_context(_ObservedBus(url, "worker 1", journal))
        await life.enter_async_context(doomed_remote_worker(bus_of_first, first, **options))
        await hears_a_worker(gateway)

        call = tokenizer.encode_text(_thought(_THOUGHT, f"<tool_call>\n{_CALL}\n</tool_call>"))
        first.script, second.script = call, call[_NUM_TOKENS_OF_FIRST:]
        first.paused_after = _NUM_TOKENS_OF_FIRST
        second.paused_after = _NUM_TOKENS_BEFORE_PAUSE
        said = tokenizer.decode(call[:_NUM_TOKENS_OF_FIRST]).removeprefix("<think>\n")
        journal.add("agent", "`POST`", "gateway", "The chat, and the tool")
        async with _answer(gateway, [_QUESTION], journal) as answer:
            await answer.read(lambda: answer.thought == said)
            await stack.enter_async_context(remote_worker(bus_of_second, second, **options))
            journal.add("worker 1", "", "", "The worker dies")
            await life.aclose()
            await answer.read(lambda: answer.thought != said)
            second.may_continue.set()
            await answer.read()
        second.may_continue.clear()
        second.script = tokenizer.encode_text(_thought(_SECOND_THOUGHT, _ANSWER))
        journal.add(
            "agent",
            "`POST`",
            "gateway",
            "The chat with the call and the tool's result, and the tool",
        )
        async with _answer(gateway, [_QUESTION, *_called(answer)], journal) as answer:
            await answer.read(lambda: bool(answer.thought))
            second.may_continue.set()
            await answer.read()
    return journal.rows


@dataclass
class _Journal:
    """The rows so far. Several messages of a kind, one after another, are one row."""

    rows: list[Row] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    """What workers are called, by their addresses."""
    _start: int = 0

    def add(self, sender: str, kind: str, receiver: str, meaning: str) -> None:
        row = Row(sender, kind, receiver, meaning)
        if row not in self.rows[self._start :]:
            self.rows.append(row)

    def begin(self) -> None:
        """From here on the same messages are new rows."""
        self._start = len(self.rows)


class _ObservedBus(RabbitBus):
    """A connection that records the messages which its process publishes."""

    def __init__(self, url: str, process: str, journal: _Journal) -> None:
        super().__init__(url)
        self._process, self._journal = process, journal

    async def publish(self, binding: Binding, message: Message) -> None:
        if message.body:  # the gateway tests bindings with empty messages
            fields = msgspec.msgpack.decode(message.body)
            kind = _KINDS[fields["type"]]
            if kind not in _LEFT_OUT:
                self._note(kind, fields, binding)
        await super().publish(binding, message)

    def _note(self, kind: type[Wire], fields: Mapping[str, Any], binding: Binding) -> None:
        journal = self._journal
        if kind is messages.Started:
            journal.names[fields["worker"]] = self._process
        receiver = _receiver(binding, journal.names)
        journal.add(self._process, f"`{kind.__name__}`", receiver, _meaning(kind, fields))


def _receiver(binding: Binding, names: Mapping[str, str]) -> str:
    """The queue of a job or a log, or the process that gets a command."""
    key = binding.routing_key
    if binding.exchange == topology.REPLIES:
        return "the log, `reply.<id>`"
    if binding.exchange == topology.LEDGER:
        return f"`{topology.LEDGER_RECORDS.name}`"
    return names.get(key, f"`{topology.JOBS_PREFIX}{key}`")


def _meaning(kind: type[Wire], fields: Mapping[str, Any]) -> str:
    match kind:
        case messages.GenerationJob:
            roles = [message["role"] for message in fields["prompts"][0]["messages"]]
            return f"A prompt of the roles {', '.join(roles)}, and the tool"
        case messages.Started if fields["is_waiting"]:
            return "The worker has the job, which another worker had: where to continue?"
        case messages.Started:
            return "The worker has the job"
        case messages.Continue:
            (choice,) = fields["choices"]
            return f"Attempt {fields['attempt']} continues after {len(choice['token_ids'])} tokens"
        case messages.Cancel:
            return "Another worker owns the log"
        case messages.TokenDelta:
            return f"Tokens of attempt {fields['attempt']}, and their text"
        case messages.UsageRecord:
            return "What the request has used, for usage reports"
        case messages.Finished:
            return "The last tokens, and why the answer ends"
    raise ValueError(f"no meaning of {kind.__name__}")


def _thought(thought: str, answer: str) -> str:
    return f"<think>\n{thought}\n</think>\n\n{answer}<|im_end|>"


def _called(answer: "_Answer") -> list[dict[str, Any]]:
    """The messages of a call and of its result."""
    call = {"name": "get_weather", "arguments": answer.arguments}
    return [
        {
            "role": "assistant",
            "tool_calls": [{"id": answer.call_id, "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": answer.call_id, "content": "24 degrees"},
    ]


class _Answer:
    """A streamed answer, as far as its client has read it."""

    def __init__(self, lines: AsyncIterator[str], journal: _Journal) -> None:
        self.thought = ""
        self.arguments = ""
        self.call_id = ""
        self._lines = lines
        self._journal = journal
        self._parts: list[str] = []

    async def read(self, is_enough: Callable[[], bool] = lambda: False) -> None:
        """Read the answer to its end, or until it is enough. Then its parts so far are rows."""
        async for line in self._lines:
            if line.startswith("data: {"):
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    self._take(choice)
            if is_enough():
                return
        for part in self._parts:
            self._journal.add("gateway", "a chunk", "agent", part)

    def _take(self, choice: dict[str, Any]) -> None:
        delta = choice["delta"]
        self.thought += delta.get("reasoning_content", "")
        for call in delta.get("tool_calls", ()):
            self.call_id = call.get("id", self.call_id)
            self.arguments += call["function"]["arguments"]
        parts = [
            f"`{name}`"
            for name in ("reasoning_content", "content", "tool_calls")
            if delta.get(name)
        ]
        if choice["finish_reason"]:
            parts.append(f"`finish_reason`: `{choice['finish_reason']}`")
        self._parts += [part for part in parts if part not in self._parts]


@asynccontextmanager
async def _answer(
    gateway: LiveGateway, chat: Sequence[dict[str, Any]], journal: _Journal
) -> AsyncIterator[_Answer]:
    body = {"model": _MODEL, "messages": chat, "tools": [_TOOL], "stream": True}
    journal.begin()
    async with gateway.http.stream("POST", "/v1/chat/completions", json=body) as response:
        yield _Answer(response.aiter_lines(), journal)
