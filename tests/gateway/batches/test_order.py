import json
import random
from collections.abc import Sequence
from contextlib import closing
from itertools import groupby
from typing import Any

import pytest

from gateway.batches.lines import InputLine
from gateway.batches.order import LineOrder, rank
from tests.support.gateway.batches import chat, jsonl

MODEL = "m"
WINDOW = 8
SYSTEM_PROMPTS = [f"You are assistant {k}. " * 100 for k in range(10)]


def body(system: str = "", **more: Any) -> bytes:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "Hello"}]
    return json.dumps({"model": MODEL, "messages": messages, **more}).encode()


async def arranged(order: LineOrder, lines: Sequence[dict[str, Any]]) -> list[int]:
    """Add the lines, numbered from 1, in any order; returns the numbers in the order of the
    batch."""
    numbered = list(enumerate(lines, start=1))
    random.Random(len(lines)).shuffle(numbered)
    for number, line in numbered:
        await order.add(InputLine(number, json.dumps(line).encode()), MODEL)
    return [place.number for place in order.of_model(MODEL)]


def shared_lines(num_lines: int, **more: Any) -> list[dict[str, Any]]:
    """Lines whose system prompts alternate."""
    lines = []
    for k in range(num_lines):
        line = chat(str(k), f"Question {k}", **more)
        prompt = {"role": "system", "content": SYSTEM_PROMPTS[k % len(SYSTEM_PROMPTS)]}
        line["body"]["messages"].insert(0, prompt)
        lines.append(line)
    return lines


async def test_lines_with_equal_beginnings_follow_each_other() -> None:
    with closing(LineOrder()) as order:
        numbers = await arranged(order, shared_lines(100))

    prompts = [prompt for prompt, _ in groupby(numbers, lambda number: number % 10)]
    assert sorted(prompts) == list(range(10))


async def test_the_longest_answers_start_first() -> None:
    lengths = [3, 4000, 17, 900, 1, 64, 250]
    lines = [chat(str(k), max_tokens=length) for k, length in enumerate(lengths)]
    with closing(LineOrder()) as order:
        numbers = await arranged(order, lines)

    assert [lengths[number - 1] for number in numbers] == sorted(lengths, reverse=True)


async def test_lines_can_have_the_order_of_the_file() -> None:
    with closing(LineOrder(is_ranked=False)) as order:
        numbers = await arranged(order, shared_lines(30))

    assert numbers == list(range(1, 31))


async def test_answers_of_similar_lengths_do_not_separate_equal_beginnings() -> None:
    lines = [
        {**line, "body": {**line["body"], "max_tokens": 64 + k}}
        for k, line in enumerate(shared_lines(60))
    ]
    with closing(LineOrder()) as order:
        numbers = await arranged(order, lines)

    groups = [list(group) for _, group in groupby(numbers, lambda number: number % 10)]
    assert len(groups) == 10
    assert all(group == sorted(group, reverse=True) for group in groups)


@pytest.mark.parametrize(
    "more",
    [{}, {"max_tokens": None}, {"max_tokens": -1}, {"max_tokens": "many"}, {"max_tokens": 1 << 40}],
)
def test_an_answer_without_a_limit_starts_first(more: dict[str, Any]) -> None:
    assert rank(body(**more)) < rank(body(max_tokens=100_000))


@pytest.mark.parametrize("name", ["max_completion_tokens", "max_output_tokens"])
def test_every_name_of_the_limit_counts(name: str) -> None:
    limit: dict[str, Any] = {name: 10}

    assert rank(body(**limit)) == rank(body(max_tokens=10))


def test_the_longer_the_equal_beginnings_the_closer_are_the_ranks() -> None:
    texts = ["x" * (4000 - k * 100) + f"{k}" * k * 100 for k in range(0, 40, 5)]
    ranks = [rank(body(text)) for text in texts]

    def num_common(other: bytes) -> int:
        return next((k for k, (a, b) in enumerate(zip(ranks[0], other, strict=True)) if a != b), 99)

    common = [num_common(other) for other in ranks]
    assert common == sorted(common, reverse=True)
    assert len(set(common)) > 3


def test_the_order_of_names_does_not_separate_prompts() -> None:
    one = b'{"messages": [{"role": "user", "content": "Hello"}]}'
    other = b'{"messages":[{"content":"Hello","role":"user"}]}'

    assert rank(one) == rank(other)


@pytest.mark.parametrize("text", [b"", b"not JSON", b"[" * 5000, b'{"messages": "\xff"}', b"[1]"])
def test_a_body_that_cannot_be_read_has_a_rank(text: bytes) -> None:
    assert len(rank(text)) == len(rank(body()))


async def test_lines_of_other_models_are_apart() -> None:
    with closing(LineOrder()) as order:
        for number, model in enumerate(("a", "b", "a"), start=1):
            await order.add(InputLine(number, jsonl([chat(str(number))])), model)

        assert [place.number for place in order.of_model("a")] == [1, 3]
        assert [place.number for place in order.of_model("b")] == [2]


@pytest.mark.parametrize("seed", range(20))
async def test_each_line_runs_once_wherever_a_restart_falls(seed: int) -> None:
    draw = random.Random(seed)
    lines = [
        {**line, "body": {**line["body"], "max_tokens": draw.choice((1, 10, 1000))}}
        for line in shared_lines(draw.randrange(1, 60))
    ]
    left = dict(enumerate(lines, start=1))
    answered: list[int] = []
    published: set[int] = set()
    while left:
        with closing(LineOrder()) as order:
            for number, line in left.items():
                await order.add(InputLine(number, json.dumps(line).encode()), MODEL)
            numbers = [place.number for place in order.of_model(MODEL)]
            # Jobs of the run before are among the first lines, where they are found or stopped.
            assert published <= set(numbers[:WINDOW])
            running, waiting = numbers[:WINDOW], iter(numbers[WINDOW:])
            published = set(running)
            for _ in range(draw.randrange(1, 30)):
                if not running:
                    break
                done = running.pop(draw.randrange(len(running)))
                answered.append(done)
                del left[done]
                published.discard(done)
                if (following := next(waiting, None)) is not None:
                    running.append(following)
                    published.add(following)

    assert sorted(answered) == list(range(1, len(lines) + 1))
