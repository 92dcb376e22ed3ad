"""The time of the machine is charged to the sequences that use it, to the last second.

That the parts of every step add up to its duration is checked in `test_engine_properties`.
"""

from collections import Counter
from math import isclose

from hypothesis import given
from hypothesis import strategies as st

from shared.messages import SamplingParams
from tests.support.models.engine import new_submit
from tests.worker.engine.simulation import Device
from worker.engine.charges import SharedTime
from worker.engine.engine import Engine
from worker.engine.interface import Submit
from worker.engine.scheduler import SchedulerLimits


def new_engine(step_s: float) -> Engine:
    device = Device(num_blocks=4096, step_s=lambda work: step_s)
    limits = SchedulerLimits(max_num_seqs=64, max_num_batched_tokens=64)
    return Engine(device, limits, clock=lambda: device.now)


def charges_of_steps(engine: Engine, submits: list[Submit], num_steps: int) -> list[dict[str, int]]:
    """Whose each completed step was, in microseconds."""
    charges = []
    for number in range(num_steps):
        engine.step(submits if number == 0 else ())
        charges.append({key.request_id: round(s * 1e6) for key, s in engine.take_charges().items()})
    return charges


def test_sequences_that_decode_share_a_step_equally() -> None:
    submits = [new_submit(str(number), num_prompt=1) for number in range(20)]

    _, _, charges = charges_of_steps(new_engine(step_s=0.040), submits, 3)

    assert charges == {str(number): 2000 for number in range(20)}


def test_each_token_of_a_step_counts_alike() -> None:
    submits = [new_submit("long", num_prompt=30), new_submit("short", num_prompt=10)]

    _, prompts, decodes = charges_of_steps(new_engine(step_s=0.040), submits, 3)

    assert prompts == {"long": 30_000, "short": 10_000}
    assert decodes == {"long": 20_000, "short": 20_000}


def test_the_steps_of_a_long_prompt_are_charged_before_its_first_token() -> None:
    long = new_submit("long", num_prompt=150)

    charges = charges_of_steps(new_engine(step_s=0.040), [long], 3)

    assert charges == [{}, {"long": 40_000}, {"long": 40_000}]


def test_others_pay_for_the_step_of_a_sequence_that_has_ended() -> None:
    ends_early = new_submit(
        "early", num_prompt=1, max_tokens=9, sampling=SamplingParams(stop_token_ids=(0,))
    )
    late = new_submit("late", num_prompt=1, max_tokens=9)

    charges = charges_of_steps(new_engine(step_s=0.040), [ends_early, late], 3)

    assert charges == [{}, {"early": 20_000, "late": 20_000}, {"late": 40_000}]


actions = st.lists(
    st.tuples(st.sampled_from(["enter", "settle", "leave"]), st.integers(0, 4), st.floats(0, 9)),
    max_size=40,
)


@given(actions)
def test_shared_time_adds_up_to_the_time_of_work(actions: list[tuple[str, int, float]]) -> None:
    now, busy_s, parts = 0.0, 0.0, Counter[int]()
    time = SharedTime[int](lambda: now)
    at_work: set[int] = set()

    for action, key, passed_s in actions:
        now += passed_s
        busy_s += passed_s * bool(at_work)
        if action == "enter" and key not in at_work:
            time.enter(key)
            at_work.add(key)
        elif action == "settle" and key in at_work:
            time.settle(key)
        elif action == "leave" and key in at_work:
            time.leave(key)
            at_work.remove(key)
        parts.update(time.take())
    time.settle_all()
    parts.update(time.take())

    assert isclose(parts.total(), busy_s, abs_tol=1e-9)


def test_what_runs_alone_has_all_the_time_and_two_have_half_each() -> None:
    now = 0.0
    time = SharedTime[str](lambda: now)

    time.enter("long")
    now = 10.0
    time.enter("short")
    now = 14.0
    time.leave("short")
    now = 15.0
    time.leave("long")

    assert time.take() == {"long": 13.0, "short": 2.0}
    assert time.take() == {}
