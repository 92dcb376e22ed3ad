"""A log that is told again in other pieces: the client is given each token once."""

import random

import pytest

from gateway.log.framing import ClientPosition
from shared.log import LogWriter
from shared.messages import Finished, Logprob, PromptScores, TokenDelta, TokenLogprobs

TOKENS = [(k, f"{'ab' * (k % 3)}{k} "[: 1 + k % 5] if k % 4 else "") for k in range(40)]
"""Ids and texts; some tokens have none."""


def scored(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(Logprob(token_id, -1.0, b""))


def told(dice: random.Random, num_choices: int) -> list[TokenDelta | Finished]:
    """The whole log, cut anywhere, its choices in any order."""
    writer = LogWriter(1, num_choices)
    events: list[TokenDelta | Finished] = []
    places = [0] * num_choices
    while open_choices := [c for c in range(num_choices) if places[c] < len(TOKENS)]:
        choice = dice.choice(open_choices)
        first, last = places[choice], min(len(TOKENS), places[choice] + dice.randint(1, 9))
        ids = [token_id for token_id, _ in TOKENS[first:last]]
        text = "".join(text for _, text in TOKENS[first:last])
        if last == len(TOKENS):
            events.append(writer.finish(choice, ids, text, "stop"))
        else:
            events.append(writer.delta(choice, ids, text))
        places[choice] = last
    return events


@pytest.mark.parametrize("num_choices", [1, 3])
@pytest.mark.parametrize("seed", range(50))
def test_each_token_and_character_is_passed_on_once(seed: int, num_choices: int) -> None:
    dice, passed = random.Random(seed), ClientPosition()
    ids: list[list[int]] = [[] for _ in range(num_choices)]
    texts = [""] * num_choices
    num_ends = 0

    for _ in range(4):
        passed = ClientPosition.at(passed.place)
        log = told(dice, num_choices)
        for event in log[: dice.randint(0, len(log))]:
            if (news := passed.split(event)[1]) is not None:
                assert isinstance(news, TokenDelta | Finished)
                assert news.index == len(ids[news.choice])
                ids[news.choice] += news.token_ids
                texts[news.choice] += news.text
                num_ends += isinstance(news, Finished)

    passed = ClientPosition.at(passed.place)
    for event in told(dice, num_choices):
        if (news := passed.split(event)[1]) is not None:
            assert isinstance(news, TokenDelta | Finished)
            ids[news.choice] += news.token_ids
            texts[news.choice] += news.text
            num_ends += isinstance(news, Finished)
    assert ids == [[token_id for token_id, _ in TOKENS]] * num_choices
    assert texts == ["".join(text for _, text in TOKENS)] * num_choices
    assert num_ends == num_choices


def test_the_scores_of_a_prompt_are_passed_on_once() -> None:
    def scores(first: int, last: int) -> PromptScores:
        logprobs = tuple(scored(k) for k in range(first, last))
        ids = tuple(range(first, last))
        return PromptScores(prompt=0, attempt=1, start=first, token_ids=ids, logprobs=logprobs)

    passed = ClientPosition()

    first = [passed.split(scores(0, 3)), passed.split(scores(3, 6))]
    passed = ClientPosition.at(passed.place)
    again = [passed.split(scores(0, 5)), passed.split(scores(5, 9))]

    assert first == [(None, scores(0, 3)), (None, scores(3, 6))]
    assert again == [(scores(0, 5), None), (scores(5, 6), scores(6, 9))]
