"""Which requests are equal."""

from typing import Any

import pytest
from msgspec.structs import replace

from gateway.once.sameness import sameness_of
from shared.messages import (
    Announcement,
    ChatMessage,
    ChatPrompt,
    GenerationJob,
    SamplingParams,
    TextPrompt,
)

DAY_S = 86400.0
WORKER = Announcement(
    worker="worker.a",
    model="m",
    vocab_size=9,
    max_seq_len=9,
    fingerprint="f",
    numerics="cpu",
    max_num_seqs=1,
)
JOB = GenerationJob(
    request_id="cmpl-1",
    model="m",
    prompts=(TextPrompt(text="a prompt"),),
    sampling=SamplingParams(temperature=0.0, max_tokens=4),
    created_at=10 * DAY_S,
)
SAME = sameness_of(JOB, b"rendering", [WORKER])


@pytest.mark.parametrize(
    "changes",
    [
        {"request_id": "cmpl-2"},
        {"created_at": 10 * DAY_S + 3600},
        {"deadline": 11 * DAY_S},
        {"key_id": "ab"},
        {"is_counted": True},
        {"context": b"other"},
        {"trace": {"traceparent": "x"}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_facts_about_a_single_request_do_not_count(changes: dict[str, Any]) -> None:
    assert sameness_of(replace(JOB, **changes), b"rendering", [WORKER, WORKER]) == SAME


@pytest.mark.parametrize(
    "changes",
    [
        {"prompts": (TextPrompt(text="another prompt"),)},
        {"num_choices": 2},
        {"sampling": replace(JOB.sampling, max_tokens=5)},
        {"sampling": replace(JOB.sampling, temperature=0.7, seed=1)},
        {"tenant": "other"},
        {"max_total_tokens": 7},
        {"given_ids": (1,)},
        {"created_at": 11 * DAY_S},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_changes_an_answer_counts(changes: dict[str, Any]) -> None:
    other = sameness_of(replace(JOB, **changes), b"rendering", [WORKER])

    assert other is not None
    assert other != SAME


def test_another_rendering_counts() -> None:
    assert sameness_of(JOB, b"another rendering", [WORKER]) != SAME


@pytest.mark.parametrize("field", ["fingerprint", "numerics"])
def test_workers_with_another_arithmetic_have_other_answers(field: str) -> None:
    other = replace(WORKER, **{field: "other"})

    assert sameness_of(JOB, b"rendering", [other]) != SAME
    assert sameness_of(JOB, b"rendering", [WORKER, other]) is None


def test_other_engines_and_absent_workers_promise_nothing() -> None:
    assert sameness_of(JOB, b"rendering", [replace(WORKER, engine="vllm 1")]) is None
    assert sameness_of(JOB, b"rendering", []) is None


def test_a_sampled_answer_without_a_seed_is_not_determined() -> None:
    sampled = replace(JOB, sampling=SamplingParams(temperature=0.7))

    assert sameness_of(sampled, b"rendering", [WORKER]) is None


@pytest.mark.parametrize(
    ("now", "has_equals"), [(0.0, False), (5e8, True)], ids=["of the request", "of the prompt"]
)
def test_a_chat_whose_template_prints_the_time_of_the_request_has_no_equals(
    now: float, has_equals: bool
) -> None:
    prompt = ChatPrompt(messages=(ChatMessage(role="user", content="?"),), now=now)
    chat = replace(JOB, prompts=(prompt,))
    timed = replace(WORKER, template_tells_time=True)

    same = sameness_of(chat, b"rendering", [WORKER, timed])

    assert (same is not None) == has_equals


def test_a_text_has_equals_whatever_the_chat_template_prints() -> None:
    timed = replace(WORKER, template_tells_time=True)

    assert sameness_of(JOB, b"rendering", [timed]) == SAME
