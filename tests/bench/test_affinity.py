"""What is computed from conversations, and what no run may show."""

import pytest

from bench.affinity import AffinityRun, FleetSetup, UserConversation, UserTurn, check, summary
from bench.load import LoadError

ANSWERS = ("first", "second")


def run_of(
    name: str,
    num_cached: int,
    ttft_s: float,
    prompt_tokens: tuple[float, ...],
    answers: tuple[str, ...] = ANSWERS,
) -> AffinityRun:
    """A conversation of two turns, of which the first found nothing."""
    conversation = UserConversation(0)
    for answer in answers:
        conversation.ask("Why?", max_tokens=1)
        conversation.messages.append({"role": "assistant", "content": answer})
    conversation.turns = [
        UserTurn(ttft_s=9.0, num_prompt_tokens=100, num_cached_tokens=0),
        UserTurn(ttft_s=ttft_s, num_prompt_tokens=200, num_cached_tokens=num_cached),
    ]
    return AffinityRun(
        system=FleetSetup(name=name, num_workers=len(prompt_tokens)),
        conversations=[conversation],
        prompt_tokens=prompt_tokens,
        seconds=1.0,
        other_cores=0.0,
    )


def test_later_turns_are_compared_with_one_worker_and_with_the_shared_queue() -> None:
    whole = run_of("whole", num_cached=160, ttft_s=0.1, prompt_tokens=(300,))
    shared = run_of("shared", num_cached=40, ttft_s=0.4, prompt_tokens=(150, 150))
    targets = run_of("affinity targets", num_cached=150, ttft_s=0.1, prompt_tokens=(100, 200))

    row = summary([whole, shared, targets])[-1]

    assert row["hit_rate"] == 0.75
    assert row["hits_ratio_to_one_worker"] == 0.9375
    assert row["ttft_p50_ratio_to_shared"] == 0.25
    assert row["highest_load"] == pytest.approx(4 / 3)


def test_systems_that_answer_differently_are_not_compared() -> None:
    whole = run_of("whole", num_cached=0, ttft_s=0.1, prompt_tokens=(300,))
    other = run_of("other", 0, 0.1, (300,), answers=("first", "changed"))

    with pytest.raises(LoadError, match="other: answers differ"):
        check([whole, other])
