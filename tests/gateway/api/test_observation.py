"""What is counted of a request while it is in flight, and what is written about its end."""

import asyncio
import logging
from contextlib import suppress

import pytest

from gateway.api.observation import Observation
from gateway.metrics import Metrics
from shared.errors import Cancelled, DeadlineExceeded, LogLost, WarrenError
from shared.messages import GenerationJob, JobClass, TextPrompt


@pytest.mark.parametrize(("job_class", "num_interactive"), [("interactive", 1), ("batch", 0)])
def test_a_batch_does_not_make_a_tenant_one_of_many_interactive_requests(
    job_class: JobClass, num_interactive: int
) -> None:
    metrics = Metrics()
    job = GenerationJob(request_id="r", model="m", tenant="alice", prompts=(TextPrompt(text="a"),))

    with Observation(metrics, job, job_class, {}):
        (usage,) = metrics.tenant_usage.by_tenant.values()
        in_flight = usage.num_in_flight, metrics.tenant_usage.num_interactive("alice")

    assert in_flight == (1, num_interactive)
    assert (usage.num_in_flight, usage.num_interactive) == (0, 0)


@pytest.mark.parametrize(
    ("error", "counts"),
    [
        (asyncio.CancelledError(), (0, 1)),
        (Cancelled("The request was cancelled."), (0, 1)),
        (DeadlineExceeded("late"), (1, 0)),
        (RuntimeError(), (1, 0)),
    ],
)
def test_a_cancelled_request_did_not_fail(error: BaseException, counts: tuple[int, int]) -> None:
    metrics = Metrics()
    job = GenerationJob(request_id="r", model="m", tenant="alice", prompts=(TextPrompt(text="a"),))

    with suppress(type(error)), Observation(metrics, job, "batch", {}):
        raise error

    (usage,) = metrics.tenant_usage.by_tenant.values()
    assert (usage.num_failed, usage.num_cancelled) == counts


@pytest.mark.parametrize(
    ("error", "level"),
    [(None, "INFO"), (DeadlineExceeded("late"), "INFO"), (LogLost("gone"), "WARNING")],
)
def test_a_stream_that_the_service_ends_with_an_error_is_a_warning(
    error: WarrenError | None, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    job = GenerationJob(request_id="r", model="m", prompts=(TextPrompt(text="a"),))

    with Observation(Metrics(), job, "interactive", {}) as observation:
        if error is not None:
            observation.failed(error)

    assert [record.levelname for record in caplog.records] == [level]
