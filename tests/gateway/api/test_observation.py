"""What is counted of a request while it is in flight."""

import pytest

from gateway.api.observation import Observation
from gateway.metrics import Metrics
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
