"""How long running streams pause during prefills, on a simulated device."""

import itertools
import random
from collections.abc import Callable

import pytest

from shared.messages import JobClass
from tests.support.models.engine import RecordingRunner, by_sequence, expected_outputs, new_submit
from tests.worker.engine.simulation import Device, StepSeconds, Streams, serve, two_cores
from worker.engine.engine import Engine
from worker.engine.interface import Submit
from worker.engine.scheduler import MIN_PROMPT_TOKENS, SchedulerLimits
from worker.engine.step_cost import StepWork

LIMIT_S = 0.08
NUM_USERS = 32
BUDGET = 512


def scattered(seed: int, step_s: StepSeconds = two_cores) -> StepSeconds:
    """Step times with random deviations."""
    rng = random.Random(seed)
    return lambda work: step_s(work) * rng.lognormvariate(0, 0.05)


def requests(
    seed: int, num_requests: int, *, every: int = 0, job_class: JobClass = "interactive"
) -> list[Submit]:
    """Prompts of 128 tokens, and each ``every``-th prompt of 4,000 tokens; answers of 64 tokens."""
    rng = random.Random(seed)
    return [
        new_submit(
            str(k),
            prompt_ids=[rng.randrange(60_000) for _ in range(4000 if is_long(k, every) else 128)],
            max_tokens=64,
            ignore_eos=True,
            job_class=job_class,
        )
        for k in range(num_requests)
    ]


def is_long(k: int, every: int) -> bool:
    return every > 0 and k % every == every - 1


def serve_all(device: Device, submits: list[Submit], limit_s: float | None = LIMIT_S) -> Streams:
    limits = SchedulerLimits(64, BUDGET, max_step_s=limit_s)
    _, streams = serve(device, limits, submits, NUM_USERS)
    return streams


def pause(streams: Streams, share: float) -> float:
    """A percentile of the pauses, in seconds."""
    return streams.pauses_s[int(share * (len(streams.pauses_s) - 1))]


@pytest.mark.parametrize("seed", range(3))
def test_long_prompts_do_not_halt_running_streams(seed: int) -> None:
    submits = requests(seed, 96, every=40)

    free = serve_all(Device(20_000, scattered(seed)), submits, limit_s=None)
    limited = serve_all(Device(20_000, scattered(seed)), submits)

    assert pause(free, 0.98) > 2 * LIMIT_S
    assert pause(limited, 0.99) < 1.05 * LIMIT_S
    assert pause(limited, 1) < 1.25 * LIMIT_S


def test_the_limit_costs_little_throughput() -> None:
    submits = requests(5, 96)
    speed = {}
    for limit_s in (None, LIMIT_S):
        device = Device(20_000, scattered(5))
        speed[limit_s] = serve_all(device, submits, limit_s).num_tokens / device.now

    assert speed[LIMIT_S] > 0.95 * speed[None]


def test_short_prompts_do_not_wait_for_the_whole_of_a_long_one() -> None:
    submits = requests(6, 96, every=40)

    streams = serve_all(Device(20_000, scattered(6)), submits)

    # Without the pauses of the initial burst, in which requests wait for each other.
    later = [s.sequence_id for k, s in enumerate(submits) if k >= 32 and not is_long(k, 40)]
    to_first_token = sorted(map(streams.first_token_s, later))
    long_s = streams.first_token_s(submits[39].sequence_id)
    assert to_first_token[len(later) // 2] < 0.25 * long_s


def test_prompts_that_nobody_waits_beside_take_the_whole_budget() -> None:
    device = Device(20_000)

    serve_all(device, [new_submit(prompt_ids=range(4000), max_tokens=1)])

    assert [work.num_prompt_tokens for work in device.works] == [512] * 7 + [416]


def test_batch_jobs_are_not_waited_for() -> None:
    device = Device(20_000)

    serve_all(device, requests(7, 64, every=40, job_class="batch"))

    assert max(work.num_prompt_tokens for work in device.works if work.num_decodes) > 400


def slow(work: StepWork) -> float:
    return 5 * two_cores(work)


def test_prompts_go_on_where_decodes_alone_take_longer_than_the_limit() -> None:
    device = Device(20_000, slow)

    serve_all(device, requests(8, 40, every=40))

    busy = [work for work in device.works if work.num_decodes > 16 and work.num_prompt_tokens > 1]
    assert busy
    assert all(work.num_prompt_tokens >= MIN_PROMPT_TOKENS / 2 for work in busy[:-2])


def test_a_step_of_unknown_length_is_a_short_one() -> None:
    """The second step is planned before the time of the first step is known."""
    device = Device(20_000, slow)

    serve_all(device, requests(9, 12))

    assert [work.num_prompt_tokens for work in device.works[:2]] == [512, MIN_PROMPT_TOKENS]


@pytest.mark.parametrize("seed", range(3))
def test_prompts_that_are_cut_by_time_yield_what_they_yield_alone(seed: int) -> None:
    rng = random.Random(seed)
    times = itertools.accumulate(iter(lambda: rng.expovariate(100), None))
    clock: Callable[[], float] = times.__next__
    limits = SchedulerLimits(6, 128, max_step_s=0.02)
    engine = Engine(RecordingRunner(num_blocks=200, block_size=4), limits, clock)
    submits = [
        new_submit(str(k), num_prompt=rng.randint(1, 300), max_tokens=rng.randint(1, 40))
        for k in range(12)
    ]

    outputs = [*engine.step(submits)]
    while engine.has_work:
        engine.check_invariants()
        outputs += engine.step()

    streams = by_sequence(outputs)
    for submit in submits:
        expected = [output.token_id for output in expected_outputs(submit)]
        assert [output.token_id for output in streams[submit.sequence_id]] == expected
