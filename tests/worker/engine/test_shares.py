"""Tenants are served in proportion to their weights, however much any of them asks for.

Times come from a simulated device, so they do not depend on the machine.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Mapping

import pytest

from shared.messages import SamplingParams
from tests.support.models.engine import SmallEngine, by_sequence, expected_outputs, new_submit
from tests.worker.engine.simulation import Device
from worker.engine.engine import Engine
from worker.engine.interface import SequenceId, StepOutput, Submit
from worker.engine.scheduler import SchedulerLimits
from worker.engine.shares import OUTPUT_TOKEN_COST, PROMPT_TOKEN_COST, Shares

NUM_SLOTS = 16


class Service:
    """An engine, and tenants that each keep a number of jobs in it.

    Lengths are drawn between two bounds.
    """

    def __init__(self, weights: Mapping[str, float] | None = None, seed: int = 0) -> None:
        self.device = Device(num_blocks=4096)
        limits = SchedulerLimits(NUM_SLOTS, 512, max_step_s=0.2, tenant_weights=weights or {})
        self.engine = Engine(self.device, limits, clock=lambda: self.device.now)
        self.first_token_s: defaultdict[str, list[float]] = defaultdict(list)
        self.cost: Counter[str] = Counter()
        """Of the tokens that each tenant was served."""
        self._draw = random.Random(seed)
        self._lengths: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {}
        self._num_sent = 0
        self._new: list[Submit] = []
        self._sent: dict[SequenceId, tuple[Submit, float]] = {}
        self._waits: set[SequenceId] = set()

    def add(
        self, tenant: str, num_jobs: int, prompt: tuple[int, int], answer: tuple[int, int]
    ) -> None:
        """Let ``tenant`` always have ``num_jobs`` jobs with such lengths of prompt and answer."""
        self._lengths[tenant] = prompt, answer
        for _ in range(num_jobs):
            self._submit(tenant)

    def stop(self, tenant: str) -> None:
        """Let ``tenant`` submit no further jobs."""
        del self._lengths[tenant]

    def run(self, seconds: float) -> None:
        end = self.device.now + seconds
        while self.device.now < end:
            new, self._new = self._new, []
            for output in self.engine.step(new):
                assert isinstance(output, StepOutput)
                self._receive(output)
        self.engine.check_invariants()

    def _submit(self, tenant: str) -> None:
        prompt, answer = self._lengths[tenant]
        self._num_sent += 1
        submit = Submit(
            sequence_id=SequenceId(f"{tenant}-{self._num_sent}", 0),
            prompt_ids=self._draw.choices(range(1 << 16), k=self._draw.randint(*prompt)),
            sampling=SamplingParams(ignore_eos=True),
            seed=1,
            max_tokens=self._draw.randint(*answer),
            tenant=tenant,
        )
        self._new.append(submit)
        self._sent[submit.sequence_id] = submit, self.device.now
        self._waits.add(submit.sequence_id)

    def _receive(self, output: StepOutput) -> None:
        submit, sent_at = self._sent[output.sequence_id]
        if output.sequence_id in self._waits:
            self._waits.remove(output.sequence_id)
            self.first_token_s[submit.tenant].append(self.device.now - sent_at)
            self.cost[submit.tenant] += int(PROMPT_TOKEN_COST * len(submit.prompt_ids))
        self.cost[submit.tenant] += int(OUTPUT_TOKEN_COST)
        if output.finish_reason is not None:
            del self._sent[output.sequence_id]
            if submit.tenant in self._lengths:
                self._submit(submit.tenant)


def p95_of_single_jobs(service: Service) -> float:
    """The p95 of the time to first token of nine tenants that each send jobs in sequence."""
    tenants = [f"single-{number}" for number in range(9)]
    for tenant in tenants:
        service.add(tenant, 1, prompt=(100, 150), answer=(20, 60))
    service.run(40)
    times = sorted(time_s for tenant in tenants for time_s in service.first_token_s[tenant])
    assert len(times) > 100
    return times[int(0.95 * len(times))]


@pytest.mark.parametrize("seed", range(2))
def test_weights_of_one_to_three_give_tokens_of_one_to_three(seed: int) -> None:
    service = Service(weights={"large": 3.0}, seed=seed)
    for tenant in ("small", "large"):
        service.add(tenant, 40, prompt=(10, 200), answer=(5, 150))

    service.run(120)

    assert service.cost["large"] / service.cost["small"] == pytest.approx(3, rel=0.05)


def test_tenants_of_one_weight_are_served_equally_whatever_they_ask_for() -> None:
    service = Service()
    service.add("long prompts", 50, prompt=(900, 900), answer=(10, 10))
    service.add("long answers", 50, prompt=(10, 10), answer=(700, 700))
    service.add("fewer jobs", 12, prompt=(100, 100), answer=(100, 100))

    service.run(120)

    assert max(service.cost.values()) / min(service.cost.values()) < 1.1


def test_a_flood_of_long_jobs_does_not_delay_single_jobs_of_others() -> None:
    without_flood = p95_of_single_jobs(Service())
    service = Service()
    service.add("flood", 100, prompt=(128, 128), answer=(500, 500))
    service.run(10)

    with_flood = p95_of_single_jobs(service)

    assert with_flood < 1.3 * without_flood


def test_the_first_job_of_a_tenant_waits_for_no_answer_of_a_full_batch() -> None:
    service = Service()
    service.add("flood", 100, prompt=(128, 128), answer=(2000, 2000))
    service.run(10)

    service.add("other", 1, prompt=(128, 128), answer=(20, 20))
    service.run(1)

    assert service.first_token_s["other"][0] < 0.3


def test_more_tenants_than_sequences_are_all_served() -> None:
    service = Service()
    for number in range(3 * NUM_SLOTS):
        service.add(f"tenant-{number}", 3, prompt=(50, 50), answer=(50, 50))

    service.run(60)

    assert len(service.cost) == 3 * NUM_SLOTS
    assert max(service.cost.values()) - min(service.cost.values()) <= 2 * (50 + 2 * 50)


def test_an_idle_tenant_earns_no_credit() -> None:
    service = Service()
    service.add("busy", 40, prompt=(20, 20), answer=(100, 100))
    service.add("idle", 1, prompt=(20, 20), answer=(10, 10))
    service.stop("idle")
    service.run(60)
    before = service.cost.copy()

    service.add("idle", 40, prompt=(20, 20), answer=(100, 100))
    service.run(60)

    gained = service.cost - before
    assert gained["idle"] / gained["busy"] == pytest.approx(1, rel=0.1)


def test_sequences_that_are_preempted_for_another_tenant_yield_the_same_tokens() -> None:
    engine = SmallEngine(max_num_seqs=4, max_num_batched_tokens=32)
    ours = [new_submit(f"a{k}", max_tokens=30, tenant="a") for k in range(6)]
    theirs = [new_submit(f"b{k}", max_tokens=30, tenant="b") for k in range(6)]
    outputs = engine.step(ours) + engine.step()

    outputs += engine.run(*theirs)

    assert engine.load().num_preemptions > 0
    streams = by_sequence(outputs)
    for submit in (*ours, *theirs):
        assert streams[submit.sequence_id] == expected_outputs(submit)


def test_tenants_preempt_few_sequences_of_each_other() -> None:
    service = Service()
    service.add("a", 40, prompt=(10, 200), answer=(5, 150))
    service.run(5)

    service.add("b", 40, prompt=(10, 200), answer=(5, 150))
    service.run(60)

    num_answers = sum(map(len, service.first_token_s.values()))
    assert 0 < service.engine.load().num_preemptions < 0.05 * num_answers


def test_a_tenant_keeps_its_oldest_sequence() -> None:
    engine = SmallEngine(max_num_seqs=2, max_num_batched_tokens=32)
    oldest, youngest = (new_submit(name, max_tokens=40, tenant="a") for name in ("old", "young"))
    engine.step([oldest, youngest])
    engine.step()

    engine.step([new_submit(name, max_tokens=40, tenant=name) for name in ("b", "c", "d")])
    engine.step()

    names = [share.sequence_id.request_id for share in engine.runner.batches[-1].sequences]
    assert names == ["old", "b"]


def test_counters_are_forgotten_when_no_tenant_is_active() -> None:
    shares = Shares({})
    shares.enter("a")
    shares.charge("a", 100)
    shares.leave("a")

    shares.enter("a")
    shares.enter("b")

    assert shares.counter("a") == shares.counter("b") == 0
