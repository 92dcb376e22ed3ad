"""The arguments of queue declarations that do not show in the broker's behaviour."""

from shared.bus.rabbit.encoding import queue_arguments
from shared.topology import jobs_queue, near_queue, reply_queue, resumed_queue


def test_jobs_are_dead_lettered_at_least_once() -> None:
    assert queue_arguments(jobs_queue("m", "batch")) == {
        "x-queue-type": "quorum",
        "x-max-length": 50_000,
        "x-overflow": "reject-publish",
        "x-delivery-limit": 20,
        "x-dead-letter-exchange": "warren.dead",
        "x-dead-letter-routing-key": "",
        "x-dead-letter-strategy": "at-least-once",
    }


def test_a_job_that_no_worker_of_its_numerics_takes_returns_to_the_others() -> None:
    arguments = queue_arguments(resumed_queue("m", "cpu fused bfloat16"))

    assert (
        arguments.items()
        >= {
            "x-message-ttl": 5_000,
            "x-dead-letter-exchange": "warren.jobs",
            "x-dead-letter-routing-key": "m.interactive",
            "x-dead-letter-strategy": "at-least-once",
        }.items()
    )
    assert resumed_queue("m", "cuda").name != resumed_queue("m", "cpu").name


def test_a_job_that_its_affinity_target_does_not_take_goes_to_the_others() -> None:
    queue = near_queue("m", "worker.1a")

    assert queue.name == "jobs.m.near-1a"
    assert (
        queue_arguments(queue).items()
        >= {
            "x-message-ttl": 50,
            "x-dead-letter-exchange": "warren.jobs",
            "x-dead-letter-routing-key": "m.interactive",
            "x-dead-letter-strategy": "at-least-once",
        }.items()
    )


def test_a_reply_queue_expires_in_milliseconds() -> None:
    assert queue_arguments(reply_queue("r", 1.5)) == {"x-queue-type": "classic", "x-expires": 1500}
