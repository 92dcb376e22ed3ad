"""The choice of a worker for a conversation."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gateway.fleet.affinity import Candidate, root_of, target_of
from shared.messages import (
    Announcement,
    ChatMessage,
    ChatPrompt,
    GenerationJob,
    Prompt,
    TextPrompt,
    TokenPrompt,
)
from shared.messages.fields import Role
from tests.gateway.fleet.announcements import announcement
from tests.support.workers.jobs import new_job

SLOTS = 8
ROOTS = [bytes([number // 256, number % 256]) for number in range(2000)]
LONG = "word " * 500


def worker(
    name: str,
    num_running: int = 0,
    num_waiting: int = 0,
    *,
    max_num_seqs: int = SLOTS,
    mean_used: float = 0.0,
) -> Candidate:
    said = announcement(
        name,
        max_num_seqs=max_num_seqs,
        num_running=num_running,
        num_waiting=num_waiting,
        takes_near_jobs=True,
    )
    return Candidate(said, mean_used)


IDLE = [worker(name) for name in "abcde"]


def chat(*turns: str) -> ChatPrompt:
    """A conversation that begins with the user, in turns with the assistant."""
    roles: tuple[Role, ...] = ("user", "assistant")
    messages = (ChatMessage(role=roles[k % 2], content=turn) for k, turn in enumerate(turns))
    system = ChatMessage(role="system", content="Be brief.")
    return ChatPrompt(messages=(system, *messages))


def job(prompt: Prompt, tenant: str = "") -> GenerationJob:
    return replace(new_job("m", prompt), tenant=tenant)


def address(chosen: Announcement | None) -> str | None:
    return None if chosen is None else chosen.worker


def test_all_turns_of_a_conversation_have_one_root() -> None:
    second, third = chat("Hi", "Hello", "Why?"), chat("Hi", "Hello", "Why?", "Because", "Oh")

    assert root_of(job(second)) == root_of(job(third)) is not None


@pytest.mark.parametrize(
    "other",
    [
        job(chat("Hey", "Hello", "Why?")),
        job(chat("Hi", "Hello", "Why?"), tenant="acme"),
        replace(job(chat("Hi", "Hello", "Why?")), model="n"),
    ],
)
def test_other_conversations_tenants_and_models_have_other_roots(other: GenerationJob) -> None:
    assert root_of(other) not in (None, root_of(job(chat("Hi", "Hello", "Why?"))))


@pytest.mark.parametrize(
    ("prompt", "longer"),
    [
        (TextPrompt(text=LONG), TextPrompt(text=LONG + "end")),
        (TokenPrompt(token_ids=tuple(range(900))), TokenPrompt(token_ids=tuple(range(901)))),
        (chat(LONG), chat(LONG, "Hello", "Why?")),
    ],
)
def test_a_long_prompt_has_the_root_of_its_continuation(prompt: Prompt, longer: Prompt) -> None:
    assert root_of(job(prompt)) == root_of(job(longer)) is not None


@pytest.mark.parametrize(
    "prompt", [TextPrompt(text="Once"), TokenPrompt(token_ids=(1, 2)), chat("Hi")]
)
def test_a_short_prompt_without_history_has_no_root(prompt: Prompt) -> None:
    assert root_of(job(prompt)) is None


def test_a_job_of_several_prompts_has_no_root() -> None:
    prompts = (TextPrompt(text=LONG), TextPrompt(text=LONG))

    assert root_of(replace(job(prompts[0]), prompts=prompts)) is None


@given(workers=st.permutations(IDLE), root=st.binary(min_size=16, max_size=16))
def test_the_order_of_the_workers_changes_no_choice(workers: list[Candidate], root: bytes) -> None:
    assert target_of(root, workers) == target_of(root, IDLE)


@given(gone=st.integers(0, len(IDLE) - 1), root=st.binary(min_size=16, max_size=16))
def test_a_worker_that_leaves_moves_only_its_own_conversations(gone: int, root: bytes) -> None:
    before = target_of(root, IDLE)
    after = target_of(root, [*IDLE[:gone], *IDLE[gone + 1 :]])

    assert after == before or before == IDLE[gone].worker


@given(
    loads=st.lists(
        st.tuples(st.integers(0, 12), st.floats(0, 12), st.integers(1, 12)), min_size=2, max_size=8
    ),
    root=st.binary(min_size=16, max_size=16),
)
def test_an_affinity_target_has_a_free_slot_and_no_more_than_its_part_of_the_load(
    loads: list[tuple[int, float, int]], root: bytes
) -> None:
    workers = [
        worker(f"{k}", num_running, max_num_seqs=slots, mean_used=mean_used)
        for k, (num_running, mean_used, slots) in enumerate(loads)
    ]
    load = sum(num_running / slots for num_running, _, slots in loads) / len(loads)
    mean_load = sum(mean_used / slots for _, mean_used, slots in loads) / len(loads)

    found = target_of(root, workers)

    if found is not None:
        (chosen,) = (one for one in workers if one.worker == found)
        assert chosen.used < chosen.slots
        assert chosen.used <= (1.25 * load + 0.25) * chosen.slots
        assert chosen.mean_used <= max(1.25 * mean_load * chosen.slots, 1.0)


def test_idle_workers_share_conversations_by_their_slots() -> None:
    workers = [worker("small"), worker("large", max_num_seqs=3 * SLOTS)]

    shares = Counter(address(target_of(root, workers)) for root in ROOTS)

    assert shares["worker.large"] / len(ROOTS) == pytest.approx(0.75, abs=0.05)


@pytest.mark.parametrize("first", [worker("a", 5, 1), worker("a", mean_used=1.5)])
def test_the_conversations_of_a_crowded_worker_go_to_the_next_in_their_order(
    first: Candidate,
) -> None:
    crowded = [first, *IDLE[1:]]

    moved = {root for root in ROOTS if target_of(root, crowded) != target_of(root, IDLE)}

    assert moved == {root for root in ROOTS if address(target_of(root, IDLE)) == "worker.a"}


def test_a_single_conversation_keeps_its_worker() -> None:
    busy = [worker("a", 1, mean_used=0.9), *IDLE[1:]]

    assert [target_of(root, busy) for root in ROOTS] == [
        busy[0].worker if address(target_of(root, IDLE)) == "worker.a" else target_of(root, IDLE)
        for root in ROOTS
    ]


def test_a_worker_without_a_free_slot_is_no_affinity_target() -> None:
    full = [worker("a", SLOTS), worker("b", SLOTS - 1, 1)]

    assert {target_of(root, full) for root in ROOTS} == {None}


def test_only_workers_that_take_such_jobs_are_chosen() -> None:
    older = [one._replace(worker=replace(one.worker, takes_near_jobs=False)) for one in IDLE[:3]]

    chosen = {address(target_of(root, [*older, *IDLE[3:]])) for root in ROOTS}

    assert chosen == {"worker.d", "worker.e"}


def test_there_is_no_choice_of_one() -> None:
    assert target_of(ROOTS[0], IDLE[:1]) is None
