"""How stored requests are sent again."""

from collections.abc import Iterator

import httpx
import pytest

from cli.gateway_client import connect
from cli.replay import sending
from cli.replay.sending import Reply, asked, is_repeatable, send_all
from cli.replay.stored_requests import StoredRequest
from shared.errors import Unavailable

STORED = StoredRequest("batch_1/a", "/v1/completions", {"prompt": "a", "seed": 1}, {})


def sent(statuses: Iterator[int]) -> Reply:
    """The outcome of a request that a gateway answers with these statuses, one after the other."""
    outcomes: list[Reply] = []
    transport = httpx.MockTransport(lambda _: httpx.Response(next(statuses), json={"choices": []}))
    with connect("http://gateway", transport=transport) as client:
        send_all(
            client, [(STORED, {})], num_parallel=2, on_answer=lambda _, one: outcomes.append(one)
        )
    (outcome,) = outcomes
    return outcome


def test_a_request_that_is_refused_for_the_moment_is_sent_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sending, "_PAUSES_S", (0.0, 0.0))

    assert sent(iter([503, 429, 200])) == {"choices": []}


def test_a_request_that_is_always_refused_has_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "_PAUSES_S", (0.0,))

    assert isinstance(sent(iter([503, 503])), Unavailable)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"temperature": 0}, True),
        ({"temperature": 0.7, "top_k": 1}, True),
        ({"seed": 0}, True),
        ({"temperature": 0.7}, False),
        ({}, False),
    ],
)
def test_only_greedy_and_seeded_requests_are_repeatable(
    body: dict[str, float], expected: bool
) -> None:
    assert is_repeatable(body) is expected


def test_only_what_an_answer_says_is_asked_for_again() -> None:
    stored = STORED._replace(body={**STORED.body, "timeout": 5, "receipt": True, "model": "old"})

    assert asked(stored, "new", with_logprobs=False) == {
        "prompt": "a",
        "seed": 1,
        "model": "new",
        "service_tier": "flex",
        "on_limit": "wait",
        "store": False,
    }
