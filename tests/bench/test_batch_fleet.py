import json
from itertools import pairwise

import pytest

from bench.batch_fleet import FleetSample, bodies, idle_shares
from gateway.batches.order import rank


def test_a_worker_is_idle_for_a_share_of_the_end() -> None:
    looks = [
        FleetSample(float(at_s), (at_s < 97, at_s <= 100 and at_s != 95)) for at_s in range(1, 104)
    ]

    # From 91 to 100: the batch is at its end once no worker has a line.
    assert idle_shares(looks, end_s=9.0) == pytest.approx([0.4, 0.1])


def test_a_batch_that_nobody_was_seen_to_run_has_no_busy_worker() -> None:
    assert idle_shares([FleetSample(0.0, (False, False))], end_s=9.0) == [1.0, 1.0]


def test_the_lines_share_system_prompts_that_the_order_brings_together() -> None:
    lines = list(bodies(num_lines=60, num_prefixes=5, prefix_tokens=100))

    prompts = [line["messages"][0]["content"] for line in lines]
    ranked = sorted(lines, key=lambda line: rank(json.dumps(line).encode()))
    after = [line["messages"][0]["content"] for line in ranked]

    assert {prompts.count(prompt) for prompt in set(prompts)} == {12}
    assert _num_changes(after) < 0.6 * _num_changes(prompts)
    assert len({line["messages"][1]["content"] for line in lines}) == 60


def _num_changes(prompts: list[str]) -> int:
    return sum(one != other for one, other in pairwise(prompts))
