"""When tokens are news to their reader."""

import asyncio
import time
from collections.abc import Callable

import pytest

from shared.errors import InternalError
from tests.support.models.engine import VOCAB_SIZE
from worker.decode.bridge import EventPace, Generation
from worker.engine.driver import EngineThread
from worker.engine.engine import Engine
from worker.engine.interface import SequenceFailed, SequenceId, StepOutput
from worker.engine.scheduler import SchedulerLimits
from worker.model.echo import EchoRunner

ID = SequenceId("request", 0)
SELDOM = 0.001
"""Events per second."""


class Reader:
    """Takes tokens whenever there are news."""

    def __init__(
        self, *, events_per_s: float, num_at_once: int = 1, reads_each: bool = False
    ) -> None:
        self.taken: list[list[int]] = []
        self.due: list[bool] = []
        self._has_taken = asyncio.Event()
        runner = EchoRunner(num_blocks=4, block_size=4, vocab_size=VOCAB_SIZE)
        engine = Engine(runner, SchedulerLimits(max_num_seqs=1, max_num_batched_tokens=64))
        self.generation = Generation(
            EngineThread(engine),
            {},
            [ID],
            self.take,
            EventPace(events_per_s, num_at_once),
            interactive_pace=lambda: EventPace(1000, 2),
            reads_each=reads_each,
        )

    def put(self, *token_ids: int, is_last: bool = False) -> None:
        for token_id in token_ids:
            is_end = is_last and token_id == token_ids[-1]
            self.generation.put(StepOutput(ID, token_id, "length" if is_end else None))

    def take(self) -> None:
        news = self.generation.take()
        if news is not None:
            outputs = [one.token_id for one in news.outputs if isinstance(one, StepOutput)]
            self.taken.append(outputs)
            self.due.append(news.is_due)
            self._has_taken.set()

    async def wait_taken(self, num_times: int) -> None:
        while len(self.taken) < num_times:
            self._has_taken.clear()
            await self._has_taken.wait()


@pytest.fixture
async def make_due(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Lets the event loop's time pass until an event is due, however seldom events are."""
    loop = asyncio.get_running_loop()
    return lambda: monkeypatch.setattr(loop, "time", lambda: time.monotonic() + 2 / SELDOM)


async def test_the_first_and_the_last_tokens_are_news() -> None:
    reader = Reader(events_per_s=SELDOM, num_at_once=2)

    reader.put(1, 2, 3)
    reader.take()
    reader.put(4, 5, is_last=True)

    assert reader.taken == [[1], [2], [3, 4, 5]]


async def test_tokens_gather_for_a_while(make_due: Callable[[], None]) -> None:
    reader = Reader(events_per_s=SELDOM)

    reader.put(1, 2, 3)
    make_due()
    await reader.wait_taken(2)
    reader.put(4, 5, is_last=True)

    assert reader.taken == [[1], [2, 3], [4, 5]]


async def test_tokens_that_may_end_the_answer_are_read_before_their_event_is_due() -> None:
    reader = Reader(events_per_s=SELDOM, reads_each=True)

    reader.put(1, 2, 3)
    reader.put(4, is_last=True)

    assert reader.taken == [[1], [2], [3], [4]]
    assert reader.due == [True, False, False, True]


async def test_tokens_that_were_read_early_are_due_in_the_end(
    make_due: Callable[[], None],
) -> None:
    reader = Reader(events_per_s=SELDOM, reads_each=True)

    reader.put(1, 2)
    make_due()
    await reader.wait_taken(3)

    assert reader.taken == [[1], [2], []]
    assert reader.due == [True, False, True]


@pytest.mark.parametrize("reads_each", [False, True])
async def test_a_failure_comes_after_the_tokens_that_gathered(*, reads_each: bool) -> None:
    reader = Reader(events_per_s=SELDOM, reads_each=reads_each)

    reader.put(1, 2, 3)
    reader.generation.fail(SequenceFailed(ID, InternalError("The step failed.")))

    assert [token_id for taken in reader.taken for token_id in taken] == [1, 2, 3]
    assert reader.due[-1]
    with pytest.raises(InternalError, match="The step failed"):
        reader.take()


async def test_a_promoted_job_has_the_pace_of_an_interactive_job() -> None:
    reader = Reader(events_per_s=SELDOM)

    reader.put(1, 2)
    reader.generation.promote()
    reader.put(3, 4)

    assert reader.taken == [[1], [2, 3], [4]]
