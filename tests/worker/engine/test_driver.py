import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread

import pytest

from tests.support import PATIENCE_S
from tests.support.engines.brake import Brake
from tests.support.engines.listener import Listener
from tests.support.models.engine import (
    VOCAB_SIZE,
    BreakingRunner,
    DeviceLost,
    by_sequence,
    expected_outputs,
    new_submit,
)
from worker.engine.driver import EngineThread
from worker.engine.engine import Engine
from worker.engine.interface import (
    CancelSequence,
    ModelRunner,
    ScheduledBatch,
    StepHandle,
)
from worker.engine.scheduler import SchedulerLimits
from worker.model.echo import EchoRunner


def echo_runner() -> EchoRunner:
    return EchoRunner(num_blocks=64, block_size=4, vocab_size=VOCAB_SIZE)


@contextmanager
def running(
    runner: ModelRunner, brake: Brake | None = None
) -> Iterator[tuple[EngineThread, Listener]]:
    listener = Listener()
    engine = Engine(runner, SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=64))
    thread = EngineThread(engine)
    if brake is not None:
        thread = brake.on(thread)
    thread.start(listener)
    try:
        yield thread, listener
    finally:
        thread.stop()
    assert listener.ready.empty(), "an engine in this process is always ready"


def test_sequences_sent_from_many_threads_all_yield_their_streams() -> None:
    submits = [new_submit(f"s{k}", num_prompt=k + 1) for k in range(16)]
    with running(echo_runner()) as (thread, listener):
        senders = [Thread(target=thread.send, args=(submit,)) for submit in submits]
        for sender in senders:
            sender.start()
        outputs = listener.hear_ends(len(submits))
        for sender in senders:
            sender.join()

    assert by_sequence(outputs) == {s.sequence_id: expected_outputs(s) for s in submits}


def test_an_idle_engine_wakes_for_the_next_command() -> None:
    with running(echo_runner()) as (thread, listener):
        for name in ("first", "second"):
            submit = new_submit(name)
            thread.send(submit)
            assert listener.hear_ends(1) == expected_outputs(submit)


def test_a_cancelled_sequence_falls_silent() -> None:
    endless, other = new_submit("endless", max_tokens=200), new_submit("other")
    brake = Brake(2)
    with running(echo_runner(), brake) as (thread, listener):
        thread.send(endless)
        first = listener.outputs.get(timeout=PATIENCE_S)
        thread.send(CancelSequence(endless.sequence_id))
        thread.send(other)
        brake.release()
        rest = listener.hear_ends(1)

    assert first[0].sequence_id == endless.sequence_id
    assert by_sequence(rest)[other.sequence_id] == expected_outputs(other)
    assert rest[-1].sequence_id == other.sequence_id


def test_a_submit_that_can_never_run_is_refused_where_it_is_sent() -> None:
    submit = new_submit()
    with running(echo_runner()) as (thread, listener):
        with pytest.raises(ValueError, match="at least one token"):
            thread.send(new_submit(prompt_ids=[]))
        thread.send(submit)
        assert listener.hear_ends(1) == expected_outputs(submit)


def test_a_step_that_raises_is_reported_once_and_ends_the_thread() -> None:
    with running(BreakingRunner(num_good_steps=2)) as (thread, listener):
        thread.send(new_submit())
        assert isinstance(listener.failures.get(timeout=PATIENCE_S), DeviceLost)
        thread.send(new_submit("late"))

    assert listener.failures.empty()
    assert listener.outputs.qsize() == 1
    assert thread.stalled_s == 0


def test_stop_ends_the_thread_while_sequences_run() -> None:
    with running(echo_runner(), Brake(2)) as (thread, listener):
        thread.send(new_submit(max_tokens=240))
        listener.outputs.get(timeout=PATIENCE_S)

    num_outputs = listener.outputs.qsize()
    assert num_outputs < 239
    assert listener.failures.empty()


def test_the_load_is_that_after_the_last_step() -> None:
    with running(echo_runner(), Brake(2)) as (thread, listener):
        assert thread.load().num_free_blocks == 64
        thread.send(new_submit(num_prompt=20, max_tokens=200))
        listener.outputs.get(timeout=PATIENCE_S)

        load = thread.load()

    assert (load.num_running, load.num_waiting) == (1, 0)
    assert load.num_free_blocks <= 64 - 5


class HangingRunner(EchoRunner):
    """Its steps wait until ``released`` is set."""

    def __init__(self) -> None:
        super().__init__(num_blocks=64, block_size=4, vocab_size=VOCAB_SIZE)
        self.launched = Event()
        self.released = Event()

    def launch(self, batch: ScheduledBatch) -> StepHandle:
        self.launched.set()
        self.released.wait(PATIENCE_S)
        return super().launch(batch)


def test_a_hanging_step_shows_as_a_stall_and_an_idle_engine_does_not() -> None:
    runner = HangingRunner()
    with running(runner) as (thread, listener):
        assert thread.stalled_s == 0
        thread.send(new_submit())
        assert runner.launched.wait(PATIENCE_S)
        assert thread.stalled_s > 0

        runner.released.set()
        listener.hear_ends(1)
        is_idle_by = time.monotonic() + PATIENCE_S
        while thread.stalled_s > 0:
            assert time.monotonic() < is_idle_by
