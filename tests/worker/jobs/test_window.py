"""The order in which the jobs that a worker holds begin."""

import time
from contextlib import ExitStack

from msgspec.structs import replace

from shared.messages import GenerationJob
from tests.support.workers.jobs import new_job
from worker.jobs.window import JobWindow, Place, Turn


class Jobs(ExitStack):
    """Jobs in a window, by default of two jobs at once and none that is set aside."""

    def __init__(
        self,
        max_begun: int = 2,
        max_waiting: int = 0,
        *,
        fills_slots: bool = False,
        **weights: float,
    ) -> None:
        super().__init__()
        self.window = JobWindow(max_begun, weights, max_waiting, fills_slots=fills_slots)

    def add(self, *tenants: str, is_fresh: bool = True, was_set_aside: bool = False) -> list[Place]:
        return [
            self.add_job(
                replace(new_job("m"), tenant=t), is_fresh=is_fresh, was_set_aside=was_set_aside
            )
            for t in tenants
        ]

    def add_job(
        self,
        job: GenerationJob,
        *,
        is_fresh: bool = True,
        at_once: bool = False,
        was_set_aside: bool = False,
    ) -> Place:
        return self.enter_context(
            self.window.place(job, is_fresh=is_fresh, at_once=at_once, was_set_aside=was_set_aside)
        )


def begun(places: list[Place]) -> list[int]:
    return [number for number, place in enumerate(places) if place.is_decided]


async def test_jobs_of_one_tenant_begin_in_order_while_there_is_room() -> None:
    with Jobs() as jobs:
        places = jobs.add("a", "a", "a")

        assert begun(places) == [0, 1]
        assert jobs.window.num_waiting == 1


async def test_the_next_job_begins_when_one_ends() -> None:
    with Jobs() as jobs:
        with jobs.window.place(new_job("m"), is_fresh=True, at_once=False):
            places = jobs.add("", "")
            assert begun(places) == [0]

        assert begun(places) == [0, 1]


async def test_the_jobs_of_another_tenant_begin_although_all_slots_are_in_use() -> None:
    with Jobs() as jobs:
        flood = jobs.add(*"aaaaa")
        others = jobs.add(*"bbbb")

        assert begun(others) == [0, 1]
        assert begun(flood) == [0, 1, 2, 3]


async def test_a_tenant_begins_another_job_once_one_has_a_token() -> None:
    with Jobs() as jobs:
        jobs.add(*"aaaaa")
        others = jobs.add(*"bbbb")

        others[0].progress()
        others[0].progress()

        assert begun(others) == [0, 1, 2]


async def test_the_tenant_that_has_begun_the_least_for_its_weight_is_next() -> None:
    with Jobs(8, large=3.0) as jobs:
        jobs.window.yields = True
        with ExitStack() as earlier:
            for _ in range(8):
                earlier.enter_context(jobs.window.place(new_job("m"), is_fresh=True, at_once=False))
            small, large = jobs.add(*8 * ["small"]), jobs.add(*8 * ["large"])

        assert (len(begun(small)), len(begun(large))) == (2, 6)


async def test_no_job_begins_that_a_free_worker_can_run_at_once() -> None:
    with Jobs() as jobs:
        jobs.add(*"aa")
        jobs.window.yields = True

        assert begun(jobs.add(*"bb")) == []


async def test_a_few_jobs_of_one_tenant_begin_before_a_slot_is_free_where_none_is_to_be_empty() -> (
    None
):
    with Jobs(32, fills_slots=True) as jobs:
        places = jobs.add(*40 * "a")
        num_at_first = len(begun(places))

        for place in places[30:33]:
            place.progress()

        assert (num_at_first, len(begun(places))) == (36, 37)


async def test_a_tenant_whose_jobs_begin_early_leaves_room_for_others() -> None:
    with Jobs(1000, fills_slots=True) as jobs:
        flood = jobs.add(*1100 * "a")

        others = [begun(jobs.add(*4 * [tenant])) for tenant in "bcdefghi"]

        assert len(begun(flood)) == 1016
        assert others == 8 * [[0, 1]]


async def test_jobs_begin_early_again_when_other_workers_have_no_free_slot_left() -> None:
    with Jobs(fills_slots=True) as jobs:
        jobs.window.yields = True
        places = jobs.add(*"aaaaaa")
        num_at_first = len(begun(places))

        jobs.window.yields = False

        assert (num_at_first, len(begun(places))) == (2, 4)


async def test_jobs_that_were_never_returned_are_given_back() -> None:
    with Jobs() as jobs:
        jobs.add(*"aa")
        [returned] = jobs.add("a", is_fresh=False)
        waiting = jobs.add(*"aaa")

        num_given = jobs.window.give_back(2)

        assert num_given == 2
        assert begun([returned, *waiting]) == [1, 2]
        assert await waiting[0].turn() is Turn.GIVE_BACK


async def test_a_closed_window_gives_all_jobs_back() -> None:
    with Jobs() as jobs:
        jobs.add(*"aa")
        waiting = jobs.add("a")

        jobs.window.close()
        waiting += jobs.add("a")

        assert [await place.turn() for place in waiting] == [Turn.GIVE_BACK, Turn.GIVE_BACK]


async def test_a_job_that_may_not_wait_begins_at_once_or_is_given_back() -> None:
    with Jobs() as jobs:
        places = [
            jobs.enter_context(
                jobs.window.place(new_job("m"), is_fresh=True, at_once=False, may_wait=False)
            )
            for _ in range(3)
        ]

        assert await turns(places) == [Turn.BEGIN, Turn.BEGIN, Turn.GIVE_BACK]


async def test_lost_jobs_do_not_begin() -> None:
    with Jobs() as jobs:
        jobs.add(*"aa")
        waiting = jobs.add(*"aa")

        jobs.window.lose()

        assert await waiting[0].turn() is Turn.LOST
        assert jobs.window.num_waiting == 0


async def turns(places: list[Place]) -> list[Turn | None]:
    """None for jobs that wait."""
    return [await place.turn() if place.is_decided else None for place in places]


async def test_a_tenant_takes_half_of_the_room_and_the_next_half_of_what_is_left() -> None:
    with Jobs(max_waiting=8) as jobs:
        jobs.window.yields = True
        flood = jobs.add(*10 * "a")
        others = jobs.add(*10 * "b")
        late = jobs.add("c")

        assert await turns(flood) == [*2 * [Turn.BEGIN], *4 * [None], *4 * [Turn.SET_ASIDE]]
        assert await turns(others) == [*2 * [None], *8 * [Turn.SET_ASIDE]]
        assert await turns(late) == [None]


async def test_a_tenants_new_jobs_do_not_overtake_those_that_were_set_aside() -> None:
    with Jobs(max_waiting=8) as jobs:
        jobs.window.yields = True
        jobs.add(*"aa")
        with jobs.window.place(
            new_job("m"), is_fresh=True, at_once=False, was_set_aside=True
        ) as earlier:
            later = jobs.add("", "b")
            assert not earlier.is_decided
        last = jobs.add("")

        assert await turns([*later, *last]) == [Turn.SET_ASIDE, None, None]


async def test_a_job_that_was_returned_is_not_set_aside() -> None:
    with Jobs(max_waiting=2) as jobs:
        jobs.add(*"aaa")

        assert await turns(jobs.add("a", is_fresh=False)) == [None]


async def test_jobs_are_lost_with_the_channel_of_their_own_queue() -> None:
    with Jobs(max_waiting=8) as jobs:
        jobs.add(*"aa")
        new, aside = jobs.add("a"), jobs.add("a", was_set_aside=True)

        jobs.window.lose(were_set_aside=True)

        assert await turns([*new, *aside]) == [None, Turn.LOST]


async def test_a_job_begins_at_its_deadline_to_fail() -> None:
    with Jobs() as jobs:
        jobs.add(*"aa")
        place = jobs.add_job(new_job("m", deadline=time.time()))

        assert await place.turn() is Turn.BEGIN
