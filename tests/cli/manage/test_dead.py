"""``warren dead`` against a real broker, and what it prints of a hostile letter."""

import asyncio
import re
import uuid
from functools import partial

import pytest

from cli.manage.dead import _connected, _print_letter, _print_list, _retry
from shared import topology
from shared.bus.base import Message
from shared.bus.memory import MemoryBus
from shared.bus.rabbit import RabbitBus
from shared.dead_letters import opened
from shared.errors import BusUnavailable, InvalidRequest
from shared.messages import GenerationJob, TextPrompt, encode
from tests.support.deployment.broker import Broker
from tests.support.deployment.command import Ended, warren
from tests.support.workers.jobs import num_ready

MODEL = "dead-letters-test"
SECRET = "nobody shall see this"
NOWHERE = "amqp://nobody:secret@127.0.0.1:1/warren"


class Letters:
    """The dead letters of a broker, as operators handle them."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._num = 0
        """How many the broker has at least."""

    def bury(self, request_id: str, body: bytes = b"") -> None:
        """Let a job die, or another ``body`` with the same id."""
        self._num = asyncio.run(dead_letter(self._broker, request_id, body))

    def bury_again(self, request_id: str) -> None:
        """Let a job die that was retried."""
        self._num = asyncio.run(bury_what_was_retried(self._broker, request_id))

    def warren(self, *arguments: str) -> Ended:
        """The command with the least account that works, once the broker offers the letters again
        that the listing before has held."""
        asyncio.run(wait_ready(self._broker, self._num))
        ended = warren("dead", *arguments, f"--broker={self._broker.url_of('gateway')}")
        for end in (" was returned to ", " was dropped\n"):
            self._num -= ended.stdout.count(end)
        return ended


@pytest.fixture
def letters(broker: Broker) -> Letters:
    return Letters(broker)


async def dead_letter(broker: Broker, request_id: str, body: bytes) -> int:
    """Let a job die; returns how many letters the broker has."""
    job = GenerationJob(request_id=request_id, model=MODEL, prompts=(TextPrompt(text=SECRET),))
    message = Message(body or encode(job), correlation_id=request_id, reply_to="reply.x")
    queue = topology.jobs_queue(MODEL, "interactive")
    async with RabbitBus(broker.url) as bus:
        await bus.declare(topology.DEAD_LETTERS, queue)
        await bus.publish(queue.bindings[0], message)
        async with bus.consume(queue.name, prefetch=1) as consumer:
            await (await anext(consumer)).reject()
        return await wait_dead(bus, request_id)


async def wait_dead(bus: RabbitBus, request_id: str) -> int:
    """Dead letters arrive asynchronously, and other tests may leave some, too; returns how many
    there are."""
    num_letters = 0
    async with bus.consume(topology.DEAD_LETTERS.name) as dead:
        async for delivery in dead:
            num_letters += 1
            if request_id.encode() in delivery.message.body:
                break
    return num_letters


async def wait_ready(broker: Broker, num_letters: int) -> None:
    """Wait until the broker offers so many letters to whoever asks."""
    async with RabbitBus(broker.url) as bus:
        name = topology.DEAD_LETTERS.name
        while await num_ready(bus, name) < num_letters:  # noqa: ASYNC110 (it tells nobody)
            await asyncio.sleep(0.02)


@pytest.fixture
def request_id(letters: Letters) -> str:
    """The id of a dead letter."""
    request_id = uuid.uuid4().hex
    letters.bury(request_id)
    return request_id


@pytest.mark.rabbit
def test_a_dead_letter_is_listed_shown_retried_and_dropped(
    letters: Letters, request_id: str
) -> None:
    listed = letters.warren("list")
    shown = letters.warren("show", request_id)
    with_body = letters.warren("show", request_id, "--body")
    retried = letters.warren("retry", request_id)
    letters.bury_again(request_id)
    dropped = letters.warren("drop", request_id)
    missing = letters.warren("show", request_id)

    assert request_id in listed.stdout
    assert "rejected" in shown.stdout
    assert SECRET not in listed.stdout + shown.stdout
    assert SECRET in with_body.stdout
    assert "returned to jobs.dead-letters-test.interactive" in retried.stdout
    assert "was dropped" in dropped.stdout
    assert (missing.returncode, request_id in missing.stderr) == (1, True)


@pytest.mark.rabbit
def test_what_is_no_job_can_only_be_dropped(letters: Letters) -> None:
    request_id = uuid.uuid4().hex
    letters.bury(request_id, f"no job {request_id}".encode())

    listed = letters.warren("list")
    retried = letters.warren("retry", request_id)
    dropped = letters.warren("drop", request_id)

    (row,) = [line for line in listed.stdout.splitlines() if request_id in line]
    assert re.search(r"  user \S+ +no +0:0\d:\d\d$", row)
    assert (retried.returncode, "can only be dropped: Expected" in retried.stderr) == (1, True)
    assert "was dropped" in dropped.stdout


@pytest.mark.rabbit
def test_all_are_dropped_only_after_a_question(letters: Letters, request_id: str) -> None:
    asked = letters.warren("drop", "all")
    listed = letters.warren("list")
    dropped = letters.warren("drop", "all", "--yes")

    assert (asked.returncode, "Drop all dead letters" in asked.stdout) == (1, True)
    assert request_id in listed.stdout
    assert f"{request_id} was dropped" in dropped.stdout


def test_the_wait_for_a_broker_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cli.manage.dead._connected", partial(_connected, timeout_s=1.0))

    ended = warren("dead", "list", f"--broker={NOWHERE}")

    first, last = ended.stderr.splitlines()
    assert first == "Waiting for the broker ..."
    assert last.startswith("error: the broker could not be reached within 1 s; ")


async def test_a_broker_is_not_waited_for_without_end() -> None:
    with pytest.raises(BusUnavailable, match=r"reached within 0.2 s; `warren doctor` finds"):
        async with _connected(RabbitBus(NOWHERE), timeout_s=0.2):
            pass


async def test_all_are_retried_but_those_that_can_only_be_dropped(
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = GenerationJob(request_id="a", model=MODEL, prompts=(TextPrompt(text=SECRET),))
    queue = topology.jobs_queue(MODEL, "interactive")
    async with MemoryBus() as bus:
        await bus.declare(topology.DEAD_LETTERS, queue)
        for reply_to in ("reply.a", "amq.gen-a"):
            message = Message(encode(job), correlation_id=reply_to, reply_to=reply_to)
            await bus.publish(queue.bindings[0], message)
            async with bus.consume(queue.name) as consumer:
                await (await anext(consumer)).reject()
        async with opened(bus, 10) as letters:
            await _print_list(bus, letters)
            await _retry(bus, letters, ["all"])
        async with opened(bus, 10) as letters:
            with pytest.raises(InvalidRequest, match="0 returned, 1 can only be dropped"):
                await _retry(bus, letters, ["all"])
            with pytest.raises(InvalidRequest, match="dropped: reply_to is not the key of a reply"):
                await _retry(bus, letters, ["amq.gen-a"])

    head, retriable, other, *returned = capsys.readouterr().out.splitlines()
    assert head.split() == ["id", "reason", "queue", "tenant", "retry", "age"]
    assert [row.split()[-2] for row in (retriable, other)] == ["yes", "no"]
    assert returned == [
        f"a was returned to {queue.name}",
        "1 returned, 1 can only be dropped",
    ]


async def test_a_publisher_cannot_control_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    queue = topology.jobs_queue(MODEL, "interactive")
    async with MemoryBus() as bus:
        await bus.declare(topology.DEAD_LETTERS, queue)
        await bus.publish(
            queue.bindings[0], Message(b"no\x1b[2J\njob", correlation_id="a\x1b[2J\nb")
        )
        async with bus.consume(queue.name) as consumer:
            await (await anext(consumer)).reject()
        async with opened(bus, 1) as letters:
            await _print_list(bus, letters)
            _print_letter(letters[0], with_body=True)

    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert r"a\x1b[2J\nb" in shown
    assert shown.endswith("no\\x1b[2J\njob\n")


async def bury_what_was_retried(broker: Broker, request_id: str) -> int:
    async with RabbitBus(broker.url) as bus:
        queue = topology.jobs_queue(MODEL, "interactive")
        async with bus.consume(queue.name, prefetch=1) as consumer:
            await (await anext(consumer)).reject()
        return await wait_dead(bus, request_id)
