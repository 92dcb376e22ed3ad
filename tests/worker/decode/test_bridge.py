"""When tokens are news to their reader."""

import asyncio
import math

import pytest

from shared.errors import InternalError
from tests.support.models.engine import VOCAB_SIZE
from worker.decode import bridge
from worker.decode.bridge import EventPacing, Generation
from worker.engine.driver import EngineThread
from worker.engine.engine import Engine
from worker.engine.interface import SequenceFailed, SequenceId, StepOutput
from worker.engine.scheduler import SchedulerLimits
from worker.model.echo import EchoRunner

ID = SequenceId("request", 0)


class Reader:
    """Takes tokens whenever there are news."""

    def __init__(self, *, is_interactive: bool) -> None:
        self.taken: list[list[int]] = []
        runner = EchoRunner(num_blocks=4, block_size=4, vocab_size=VOCAB_SIZE)
        engine = Engine(runner, SchedulerLimits(max_num_seqs=1, max_num_batched_tokens=64))
        self.pacing = EventPacing(math.inf, max_delay_s=0.01)
        self.generation = Generation(
            EngineThread(engine), {}, [ID], self.take, self.pacing, is_interactive=is_interactive
        )

    def put(self, *token_ids: int, is_last: bool = False) -> None:
        for token_id in token_ids:
            is_end = is_last and token_id == token_ids[-1]
            self.generation.put(StepOutput(ID, token_id, "length" if is_end else None))

    def take(self) -> None:
        outputs = self.generation.take()
        self.taken.append([one.token_id for one in outputs if isinstance(one, StepOutput)])


async def test_every_token_of_an_interactive_job_is_news() -> None:
    reader = Reader(is_interactive=True)

    reader.put(1, 2, 3, is_last=True)

    assert reader.taken == [[1], [2], [3]]


async def test_paced_tokens_wait_for_each_other_but_not_for_long() -> None:
    reader = Reader(is_interactive=True)

    reader.put(1)
    reader.pacing.num_gathered = 3
    reader.put(2, 3, 4, 5)
    await asyncio.sleep(0.05)

    assert reader.taken == [[1], [2, 3, 4], [5]]


async def test_the_first_and_the_last_token_of_a_batch_job_are_news() -> None:
    reader = Reader(is_interactive=False)

    reader.put(1, 2, 3)
    reader.take()
    reader.put(4, 5, is_last=True)

    assert reader.taken == [[1], [], [2, 3, 4, 5]]


async def test_tokens_of_a_batch_job_gather_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bridge, "_GATHERED_S", 0.0)
    reader = Reader(is_interactive=False)

    reader.put(1, 2, 3)
    await asyncio.sleep(0.01)
    reader.put(4, 5)
    await asyncio.sleep(0.01)

    assert reader.taken == [[1], [2, 3], [4, 5]]


async def test_a_failure_comes_after_the_tokens_that_gathered() -> None:
    reader = Reader(is_interactive=False)

    reader.put(1, 2, 3)
    reader.generation.fail(SequenceFailed(ID, InternalError("The step failed.")))

    assert reader.taken == [[1], [2, 3]]
    with pytest.raises(InternalError, match="The step failed"):
        reader.take()


async def test_a_promoted_job_is_read_as_it_is_generated() -> None:
    reader = Reader(is_interactive=False)

    reader.put(1, 2)
    reader.generation.promote()
    reader.put(3, 4)

    assert reader.taken == [[1], [2, 3], [4]]
