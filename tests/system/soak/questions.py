"""The questions that the whole traffic asks, each with the one answer that is right."""

import asyncio
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from bench.echo_worker import MODEL
from bench.load import FIRST_ID
from tests.system.soak.answers import Answer, answer_of

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MAX_PROMPT_LEN = 2000
_MAX_TOKENS = 120
_LAST_ID = 49_000
_AT_ONCE = 16
_WORDS = (
    "river", "stone", "light", "under", "seven", "birds", "quiet", "morning", "letter", "of", "the",
    "and", "to", "go",
)  # fmt: skip
_SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome", "Lima"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
        "sights": {"type": "array", "items": {"enum": ["river", "tower"]}, "maxItems": 3},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}

Body = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Question:
    """One request without what says how its answer comes."""

    name: str
    path: str
    body: Body


def draw_questions(dice: random.Random, num_questions: int) -> list[Question]:
    """Questions of every kind, with prompts of 1 to `MAX_PROMPT_LEN` tokens."""
    return [_draw(dice, number) for number in range(num_questions)]


async def answered(
    http: httpx.AsyncClient, urls: Sequence[str], questions: Sequence[Question]
) -> dict[Question, Answer]:
    """What each question is answered while nothing else happens, once all gateways have heard of
    the workers."""
    at_once = asyncio.Semaphore(_AT_ONCE)

    async def ask(number: int, question: Question) -> Answer:
        url = urls[number % len(urls)]
        async with at_once:
            response = await http.post(f"{url}{question.path}", json=question.body)
        assert response.status_code == 200, (question, response.text)
        return answer_of(response.json())

    for url in urls:
        while not (await http.get(f"{url}/v1/models")).json()["data"]:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    answers = await asyncio.gather(*itertools.starmap(ask, enumerate(questions)))
    return dict(zip(questions, answers, strict=True))


def _draw(dice: random.Random, number: int) -> Question:
    kinds = [*_KINDS]
    # The first questions are one of each kind, however few there are.
    kind = kinds[number] if number < len(kinds) else dice.choices(kinds, _WEIGHTS)[0]
    path, asked = _KINDS[kind](dice)
    body = {"model": MODEL, "seed": number, "temperature": 1.0, **_manner(dice, path), **asked}
    return Question(f"{kind} {number}", path, body)


def _manner(dice: random.Random, path: str) -> Body:
    """How the answer is drawn and told."""
    num_choices = dice.choice(range(3, 9)) if dice.random() < 0.15 else dice.choice((1, 1, 2))
    max_tokens = round(_MAX_TOKENS ** dice.random())  # short answers and long ones alike
    manner: Body = {"n": num_choices, "max_tokens": max_tokens}
    if dice.random() < 0.1:
        manner |= {"logprobs": True, "top_logprobs": 2} if path == CHAT else {"logprobs": 2}
    if dice.random() < 0.1:
        manner |= {"stop": ["e", "zz"]}
    if dice.random() < 0.1:
        manner |= {"presence_penalty": 0.5, "frequency_penalty": 0.25}
    return manner


def _token_ids(dice: random.Random) -> tuple[str, Body]:
    # Short and long prompts alike, and each limit now and then.
    size = round(MAX_PROMPT_LEN ** min(1.0, 1.05 * dice.random()))
    prompt = dice.choices(range(FIRST_ID, _LAST_ID), k=size)
    return COMPLETIONS, {"prompt": prompt, "ignore_eos": True}


def _text(dice: random.Random) -> tuple[str, Body]:
    return COMPLETIONS, {"prompt": _sentence(dice), "ignore_eos": True}


def _several(dice: random.Random) -> tuple[str, Body]:
    prompts = [_sentence(dice) for _ in range(dice.randint(2, 4))]
    return COMPLETIONS, {"prompt": prompts, "ignore_eos": True, "n": 1}


def _chat(dice: random.Random) -> tuple[str, Body]:
    return CHAT, {"messages": _messages(dice), "ignore_eos": True}


def _tools(dice: random.Random) -> tuple[str, Body]:
    names = ["weather", "route"]
    tools = [{"type": "function", "function": {"name": n, "parameters": _SCHEMA}} for n in names]
    named = {"type": "function", "function": {"name": dice.choice(names)}}
    choice = dice.choice(["required", named])
    return CHAT, {"messages": _messages(dice), "tools": tools, "tool_choice": choice}


def _schema(dice: random.Random) -> tuple[str, Body]:
    wanted = {"type": "json_schema", "json_schema": {"name": "trip", "schema": _SCHEMA}}
    return CHAT, {"messages": _messages(dice), "response_format": wanted}


def _regex(dice: random.Random) -> tuple[str, Body]:
    regex = f"[a-f]{{4,{dice.randint(8, 30)}}}"
    return COMPLETIONS, {"prompt": _sentence(dice), "structured_outputs": {"regex": regex}}


_KINDS: Mapping[str, Callable[[random.Random], tuple[str, Body]]] = {
    "token ids": _token_ids,
    "text": _text,
    "several prompts": _several,
    "chat": _chat,
    "tools": _tools,
    "schema": _schema,
    "regex": _regex,
}
_WEIGHTS = (8, 5, 1, 5, 1, 1, 1)


def _sentence(dice: random.Random) -> str:
    return " ".join(dice.choices(_WORDS, k=dice.randint(1, 60)))


def _messages(dice: random.Random) -> list[Body]:
    roles = ["user", "assistant"] * dice.randint(0, 2) + ["user"]
    return [{"role": role, "content": _sentence(dice)} for role in roles]
