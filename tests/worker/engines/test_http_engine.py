"""An engine over HTTP: the order in which it runs sequences, and what it counts and logs."""

import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from shared.errors import EngineFailed, StartupError
from shared.messages import Constraint, SamplingParams
from tests.support import PATIENCE_S
from tests.support.engines.listener import Listener
from tests.support.engines.scripted_server import Fault, ScriptedEngine, engine_server
from worker.engine.interface import CancelSequence, Promote, SequenceId, StepOutput, Submit
from worker.engines import http_engine
from worker.engines.adapters import ADAPTERS
from worker.engines.http_engine import HttpEngine
from worker.engines.server import EngineServer
from worker.text import Tokenizer

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
BOOLEAN = Constraint(kind="json_schema", source=json.dumps({"type": "boolean"}))
FAILURES: Sequence[tuple[Fault, str]] = [
    ("break", "failed"),
    ("cut", "failed"),
    ("nonsense", "failed"),
    ("error", "failed"),
    ("unknown token", "failed"),
    ("500", "failed"),
    ("429", "busy"),
    ("400", "refused"),
]


@pytest.fixture(autouse=True)
def _with_haste(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_engine, "_LOOK_INTERVAL_S", 0.05)


@pytest.fixture
def server(tokenizer: Tokenizer) -> Iterator[ScriptedEngine]:
    with engine_server("llama-server", tokenizer) as server:
        yield server


@contextmanager
def running(
    server: ScriptedEngine,
    *,
    max_num_seqs: int = 4,
    batch_reserve: int = 0,
    recheck: Callable[[], object] = lambda: None,
) -> Iterator[tuple[HttpEngine, Listener]]:
    listener = Listener()
    engine = HttpEngine(
        EngineServer(server.url, None, silence_s=PATIENCE_S),
        ADAPTERS[server.protocol],
        server.tokenizer,
        max_seq_len=server.max_seq_len,
        max_num_seqs=max_num_seqs,
        batch_reserve=batch_reserve,
        tenant_weights={},
        recheck=recheck,
        process=None,
    )
    engine.start(listener)
    try:
        yield engine, listener
    finally:
        server.may_continue.set()
        engine.stop()


def new_submit(token_id: int, *, sampling: SamplingParams = GREEDY, **fields: Any) -> Submit:
    """A sequence whose prompt is this token, by which the server's requests are told apart."""
    return Submit(
        SequenceId(f"r{token_id}", 0), [token_id], sampling, seed=1, max_tokens=8, **fields
    )


def wait_until(is_true: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not is_true():
        assert time.monotonic() < until
        time.sleep(0.005)


def wait_for(engine: HttpEngine, num_running: int, num_waiting: int) -> None:
    def are_there() -> bool:
        load = engine.load()
        return (load.num_running, load.num_waiting) == (num_running, num_waiting)

    wait_until(are_there)


def prompts(server: ScriptedEngine) -> list[int]:
    return [body["prompt"][0] for body in server.bodies]


def order_behind_the_first(server: ScriptedEngine, *submits: Submit) -> list[int]:
    """The prompts in the order in which an engine with one slot runs them, if all others come while
    the first runs."""
    server.paused_after = 0
    with running(server, max_num_seqs=1) as (engine, listener):
        for submit in submits:
            engine.send(submit)
        wait_for(engine, 1, len(submits) - 1)
        server.may_continue.set()
        listener.hear_ends(len(submits))
    return prompts(server)


def test_the_tenant_that_was_served_least_is_next(server: ScriptedEngine) -> None:
    of_first = [new_submit(1000 + k, tenant="first") for k in range(3)]

    order = order_behind_the_first(server, *of_first, new_submit(1100, tenant="second"))

    assert order == [1000, 1100, 1001, 1002]


def test_interactive_sequences_are_before_batches(server: ScriptedEngine) -> None:
    batch = new_submit(1001, job_class="batch")

    order = order_behind_the_first(server, new_submit(1000), batch, new_submit(1002))

    assert order == [1000, 1002, 1001]


def test_batches_leave_slots_to_interactive_sequences(server: ScriptedEngine) -> None:
    server.paused_after = 0
    with running(server, max_num_seqs=2, batch_reserve=1) as (engine, _):
        for k in range(2):
            engine.send(new_submit(1000 + k, job_class="batch"))
        wait_for(engine, 1, 1)
        engine.send(new_submit(1002))
        wait_for(engine, 2, 1)
        wait_until(lambda: len(server.bodies) == 2)

    assert set(prompts(server)[:2]) == {1000, 1002}


def test_a_batch_that_is_promoted_takes_a_slot_that_was_left(server: ScriptedEngine) -> None:
    server.paused_after = 0
    with running(server, max_num_seqs=2, batch_reserve=1) as (engine, _):
        waiting = new_submit(1001, job_class="batch")
        engine.send(new_submit(1000, job_class="batch"))
        engine.send(waiting)
        wait_for(engine, 1, 1)

        engine.send(Promote(waiting.sequence_id))

        wait_for(engine, 2, 0)


@pytest.mark.parametrize("protocol", ADAPTERS)
def test_a_cancelled_sequence_closes_its_request(protocol: str, tokenizer: Tokenizer) -> None:
    with engine_server(protocol, tokenizer) as server, running(server) as (engine, listener):
        server.paused_after, server.script = 1, tokenizer.encode_text("One two three four five")
        submit = new_submit(1000)
        engine.send(submit)
        listener.hear_some()

        engine.send(CancelSequence(submit.sequence_id))
        is_closed = server.num_closed.acquire(timeout=PATIENCE_S)
    later = [listener.outputs.get() for _ in range(listener.outputs.qsize())]

    assert is_closed
    assert not any(later)


@pytest.mark.parametrize(("fault", "kind"), FAILURES)
def test_a_failure_is_counted_and_logged_by_its_kind(
    server: ScriptedEngine, fault: Fault, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    server.faults = [fault]
    with running(server) as (engine, listener):
        engine.send(new_submit(1000))
        wait_until(lambda: not (listener.failed.empty() and listener.outputs.empty()))
        wait_for(engine, 0, 0)
        failures = engine.load().num_failures

    (said,) = [vars(one) for one in caplog.records if one.message == "engine failed a sequence"]
    assert failures == {kind: 1}
    assert (said["kind"], said["engine"], said["request_id"]) == (kind, "llama-server", "r1000")


def test_a_token_that_was_not_allowed_is_counted_and_drawn_again(
    server: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    only_1001 = bytes(125) + bytes([2]) + bytes(server.tokenizer.vocab_size // 8)
    server.script = [1500]
    sampling = SamplingParams(max_tokens=8, logprobs=0)  # otherwise there is no choice to ask for
    with running(server) as (engine, listener):
        engine.send(new_submit(1000, sampling=sampling, allowed=only_1001))
        outputs = listener.hear_ends(1)
        failures = engine.load().num_failures

    assert {one.token_id for one in outputs if isinstance(one, StepOutput)} == {1001}
    assert failures == {"constraint": 1}
    assert [vars(one)["kind"] for one in caplog.records] == ["constraint"]


def test_a_constraint_that_the_engine_refuses_is_left_to_the_worker(
    server: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    server.faults = ["400"]
    with running(server) as (engine, listener):
        sampling = SamplingParams(max_tokens=8, ignore_eos=True, constraint=BOOLEAN)
        engine.send(new_submit(1000, sampling=sampling))
        listener.hear_ends(1)
        failures = engine.load().num_failures

    assert ["json_schema" in body for body in server.bodies] == [True, False]
    assert failures == {"refused_constraint": 1}
    assert [vars(one)["kind"] for one in caplog.records] == ["refused_constraint"]


def test_an_absence_is_counted_and_logged(
    server: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    with running(server) as (engine, listener):
        server.is_healthy = False
        is_ready = listener.ready.get(timeout=PATIENCE_S)
        failures = engine.load().num_failures

    (said,) = (vars(one) for one in caplog.records)
    assert (is_ready, failures) == (False, {"away": 1})
    assert (said["message"], said["kind"]) == ("engine is away", "away")
    assert said["reason"] == "/health answers 503"


def test_an_engine_that_cannot_be_reached_is_away(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    with engine_server("llama-server", tokenizer) as server:
        pass
    with running(server) as (engine, listener):
        engine.send(new_submit(1000))
        assert not listener.ready.get(timeout=PATIENCE_S)
        wait_for(engine, 0, 1)  # it waits until the engine is back

    assert {vars(one)["kind"] for one in caplog.records} <= {"unreachable", "away"}
    assert listener.failed.empty()


def test_another_model_is_noticed_after_a_broken_stream_and_said_once(
    server: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    num_checks = 0

    def recheck() -> None:
        nonlocal num_checks
        num_checks += 1
        if num_checks < 4:
            raise StartupError("another model")

    server.faults = ["break"]
    with running(server, recheck=recheck) as (engine, listener):
        engine.send(new_submit(1000))
        listener.failed.get(timeout=PATIENCE_S)
        engine.send(new_submit(1001))
        assert not listener.ready.get(timeout=PATIENCE_S)
        num_before = len(server.bodies)
        assert listener.ready.get(timeout=PATIENCE_S)
        listener.hear_ends(1)
        failures = engine.load().num_failures

    assert (num_before, prompts(server)) == (1, [1000, 1001])
    assert failures == {"failed": 1, "unfit": 1}
    assert caplog.messages.count("engine answers, and is not used") == 1


def test_another_model_is_noticed_when_the_server_closes_an_idle_connection(
    server: ScriptedEngine,
) -> None:
    def recheck() -> None:
        raise StartupError("another model")

    with running(server, recheck=recheck) as (engine, listener):
        wait_until(lambda: server.num_looks >= 3)
        num_before = listener.ready.qsize()
        server.closes_connections = True
        is_ready = listener.ready.get(timeout=PATIENCE_S)
        failures = engine.load().num_failures

    assert (num_before, is_ready, failures) == (0, False, {"unfit": 1})


def test_a_server_that_closes_each_connection_is_not_checked_again(
    server: ScriptedEngine,
) -> None:
    checks: list[None] = []
    server.closes_connections = True
    with running(server, recheck=lambda: checks.append(None)):
        wait_until(lambda: server.num_looks >= 5)

    assert checks == []


def test_an_engine_is_checked_again_until_it_answers(server: ScriptedEngine) -> None:
    answers: list[Exception | None] = [EngineFailed("no"), None]

    def recheck() -> None:
        if (error := answers.pop(0)) is not None:
            raise error

    server.faults = ["break"]
    with running(server, recheck=recheck) as (engine, listener):
        engine.send(new_submit(1000))
        listener.failed.get(timeout=PATIENCE_S)
        engine.send(new_submit(1001))
        listener.hear_ends(1)

    assert answers == []


def test_an_engine_that_is_asked_too_often_is_not_away(
    server: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(http_engine, "_BUSY_LOOK_INTERVAL_S", 0.01)
    server.is_asked_too_often, server.paused_after = True, 0
    with running(server) as (engine, listener):
        engine.send(new_submit(1000))
        wait_until(lambda: server.num_looks > 5)
        server.may_continue.set()
        listener.hear_ends(1)

    assert "engine is away" not in caplog.messages
