"""A few seconds of the traffic of `python -m tests.system.soak`, and tests of its checks."""

from pathlib import Path
from typing import Any

import pytest

from tests.support import PATIENCE_S
from tests.support.deployment.broker import RabbitNode
from tests.system.soak.answers import Gathering, answer_of
from tests.system.soak.run import Plan, soak
from tests.system.soak.traces import logged, logged_by_broker
from tests.system.soak.watch import MAX_GROWTH_BYTES, Course, Sample

DURATION_S = 1800
BUSY_BYTES = 100 << 20


@pytest.mark.rabbit
@pytest.mark.timeout(300)
async def test_rude_traffic_ends_no_process_and_leaves_nothing(
    own_broker: RabbitNode, tmp_path: Path
) -> None:
    plan = Plan(
        duration_s=8, num_users=8, num_questions=16, detach_ttl_s=20, worker_silence_s=PATIENCE_S
    )

    findings = await soak(own_broker, tmp_path, plan)

    assert findings.faults == []
    assert findings.tally.errors == []
    assert findings.tally.num("exact") > 0


def test_a_log_is_searched_for_errors_incidents_and_what_is_no_log_line() -> None:
    lines = logged(
        '{"event": "slow", "level": "warning"}\n'
        '{"event": "slow", "level": "warning"}\n'
        '{"event": "job failed", "level": "error"}\n'
        '{"event": "broker connection lost", "level": "error", "incident": "connection"}\n'
        "Traceback (most recent call last):\n"
        "RuntimeError\n"
    )

    assert lines.unexpected() == ["2 times 'slow'"]
    assert [error.split("\n")[0] for error in lines.errors] == [
        '{"event": "job failed", "level": "error"}',
        "Traceback (most recent call last):",
    ]
    assert [incident.kind for incident in lines.incidents] == ["connection"]


def test_refusals_that_warren_lives_by_are_no_errors_of_the_broker() -> None:
    at = "2026-01-01 00:00:00+00:00 [error] <0.1.0>"
    lines = logged_by_broker(
        f"{at} Channel error on connection <0.1.0>, channel 1:\n"
        f"{at} operation queue.declare caused a channel exception not_found: no queue\n"
        f"{at} operation basic.ack caused a channel exception precondition_failed: unknown tag\n"
        f"{at} operation channel.close caused a connection exception channel_error\n"
    )

    assert lines.unexpected() == ["1 times 'basic.ack: precondition_failed'"]
    assert [error.split()[-1] for error in lines.errors] == ["channel_error"]


def test_memory_that_grows_is_distinguished_from_memory_that_goes_up_and_down() -> None:
    times = range(0, DURATION_S, 5)
    restless = Course([Sample(at, BUSY_BYTES * (1 + at % 3)) for at in times])
    warming_up = Course([Sample(at, BUSY_BYTES * min(at, 300)) for at in times])
    leaking = Course([Sample(at, BUSY_BYTES + at * (20 << 10)) for at in times])

    assert abs(restless.growth_bytes(DURATION_S)) < MAX_GROWTH_BYTES / 8
    assert warming_up.growth_bytes(DURATION_S) == 0
    assert leaking.growth_bytes(DURATION_S) > MAX_GROWTH_BYTES


def test_a_stream_and_a_whole_answer_say_the_same() -> None:
    call = {"function": {"name": "route", "arguments": "{}"}}
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    chunks: list[dict[str, Any]] = [
        {"choices": [{"index": 1, "delta": {"content": "b"}, "finish_reason": "stop"}]},
        {"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": None}]},
        {
            "choices": [
                {
                    "index": 0,
                    "delta": {"tool_calls": [{"index": 0, **call}]},
                    "finish_reason": "tool_calls",
                }
            ]
        },
        {"choices": [], "usage": usage},
    ]
    gathering = Gathering()

    for chunk in chunks:
        gathering.take(chunk)

    assert gathering.answer == answer_of(
        {
            "choices": [
                {
                    "index": 0,
                    "message": {"content": "a", "tool_calls": [call]},
                    "finish_reason": "tool_calls",
                },
                {"index": 1, "message": {"content": "b"}, "finish_reason": "stop"},
            ],
            "usage": usage,
        }
    )
