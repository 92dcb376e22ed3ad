"""The cost of a cache that is smaller than its sequences."""

import random
from typing import NamedTuple

import pytest

from tests.support.models.engine import new_submit
from tests.worker.engine.simulation import Device, serve
from worker.engine.interface import Submit
from worker.engine.scheduler import SchedulerLimits

NUM_USERS = 24
NUM_REQUESTS = 96
PLENTY = 50_000


class Workload(NamedTuple):
    """Lengths in tokens; the first ``num_common`` of each prompt are the same."""

    prompt: tuple[int, int]
    output: tuple[int, int]
    num_common: int = 0


WORKLOADS = {
    "equal": Workload((128, 128), (128, 128)),
    "mixed": Workload((1, 600), (1, 400)),
    "long answers": Workload((30, 100), (200, 600)),
    "long prompts": Workload((600, 1200), (16, 96)),
    "common prompt": Workload((300, 400), (50, 250), num_common=256),
}


class Served(NamedTuple):
    tokens_per_s: float
    num_computed: int
    num_preemptions: int
    max_num_held: int
    """The maximum number of blocks in use."""


def requests(workload: Workload, seed: int) -> list[Submit]:
    rng = random.Random(seed)
    return [
        new_submit(
            str(k),
            prompt_ids=[
                at if at < workload.num_common else rng.randrange(60_000)
                for at in range(rng.randint(*workload.prompt))
            ],
            max_tokens=rng.randint(*workload.output),
            ignore_eos=True,
        )
        for k in range(NUM_REQUESTS)
    ]


def run(submits: list[Submit], num_blocks: int, *, prefix_cache: bool) -> Served:
    device = Device(num_blocks)
    limits = SchedulerLimits(64, 512, prefix_cache=prefix_cache, max_step_s=0.1)
    engine, streams = serve(device, limits, submits, NUM_USERS)
    return Served(
        tokens_per_s=streams.num_tokens / device.now,
        num_computed=sum(work.num_prompt_tokens + work.num_decodes for work in device.works),
        num_preemptions=engine.load().num_preemptions,
        max_num_held=streams.max_num_held,
    )


@pytest.mark.parametrize("prefix_cache", [False, True], ids=["alone", "prefix cache"])
@pytest.mark.parametrize("name", WORKLOADS)
def test_a_cache_that_is_a_tenth_too_small_costs_hardly_more_than_a_tenth(
    name: str, *, prefix_cache: bool
) -> None:
    submits = requests(WORKLOADS[name], seed=sum(name.encode()))
    free = run(submits, PLENTY, prefix_cache=prefix_cache)

    pressed = run(submits, int(free.max_num_held / 1.1), prefix_cache=prefix_cache)

    share = pressed.tokens_per_s / free.tokens_per_s
    computed = pressed.num_computed / free.num_computed
    print(
        f"{share:.3f} of the speed, {computed:.3f} of the work, {pressed.num_preemptions} preempted"
    )
    assert free.num_preemptions == 0
    assert share > 0.85
    assert computed < 1.15
