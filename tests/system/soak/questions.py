"""The questions of the whole traffic, each with its only right answer."""

import asyncio
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
LONG = "long"
SEVERAL = "several prompts"
MAX_PROMPT_LEN = 2000
_MAX_TOKENS = 120
_LAST_ID = 49_000
_AT_ONCE = 16
_PAUSE_S = 0.5
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
    """A request, without the parameters that choose how its answer is delivered."""

    kind: str
    number: int
    path: str
    body: Body

    @property
    def name(self) -> str:
        return f"{self.kind} {self.number}"


def draw_questions(dice: random.Random, num_questions: int) -> list[Question]:
    """Questions of every kind, with prompts of 1 to `MAX_PROMPT_LEN` tokens."""
    return [_draw(dice, number) for number in range(num_questions)]


async def answered(
    http: httpx.AsyncClient, urls: Sequence[str], questions: Sequence[Question]
) -> dict[Question, Answer]:
    """The undisturbed answer to each question. Afterwards all gateways have heard of the workers
    and have checked all constraints."""
    at_once = asyncio.Semaphore(_AT_ONCE)

    async def ask(question: Question) -> Answer:
        async with at_once:
            answers = [await _answer(http, url, question) for url in urls]
        assert len(set(answers)) == 1, (question, answers)
        return answers[0]

    for url in urls:
        while not (await http.get(f"{url}/v1/models")).json()["data"]:  # noqa: ASYNC110
            await asyncio.sleep(_PAUSE_S)
    answers = await asyncio.gather(*map(ask, questions))
    return dict(zip(questions, answers, strict=True))


async def _answer(http: httpx.AsyncClient, url: str, question: Question) -> Answer:
    """Ask with a long timeout, because the first check of a constraint takes a gateway some
    time."""
    while (response := await http.post(f"{url}{question.path}", json=question.body)).is_error:
        assert response.status_code == 429, (question, response.text)
        await asyncio.sleep(_PAUSE_S)
    return answer_of(response.json())


def _draw(dice: random.Random, number: int) -> Question:
    kinds = [*_KINDS]
    # The first questions include one of each kind, however few there are.
    kind = kinds[number] if number < len(kinds) else dice.choices(kinds, _WEIGHTS)[0]
    path, asked = _KINDS[kind](dice)
    body = {"model": MODEL, "seed": number, "temperature": 1.0, **_manner(dice, path), **asked}
    return Question(kind, number, path, body)


def _manner(dice: random.Random, path: str) -> Body:
    """The parameters that decide how an answer is drawn and reported."""
    num_choices = dice.choice(range(3, 9)) if dice.random() < 0.15 else dice.choice((1, 1, 2))
    max_tokens = round(_MAX_TOKENS ** dice.random())  # a mix of short and long answers
    manner: Body = {"n": num_choices, "max_tokens": max_tokens}
    if dice.random() < 0.1:
        manner |= {"logprobs": True, "top_logprobs": 2} if path == CHAT else {"logprobs": 2}
    if dice.random() < 0.1:
        manner |= {"stop": ["e", "zz"]}
    if dice.random() < 0.1:
        manner |= {"presence_penalty": 0.5, "frequency_penalty": 0.25}
    return manner


def _token_ids(dice: random.Random) -> tuple[str, Body]:
    # A mix of short and long prompts, sometimes with limits.
    size = round(MAX_PROMPT_LEN ** min(1.0, 1.05 * dice.random()))
    prompt = dice.choices(range(FIRST_ID, _LAST_ID), k=size)
    return COMPLETIONS, {"prompt": prompt, "ignore_eos": True}


def _text(dice: random.Random) -> tuple[str, Body]:
    return COMPLETIONS, {"prompt": _sentence(dice), "ignore_eos": True}


def _several(dice: random.Random) -> tuple[str, Body]:
    prompts = [_sentence(dice) for _ in range(dice.randint(2, 4))]
    return COMPLETIONS, {"prompt": prompts, "ignore_eos": True, "n": 1}


def _long(dice: random.Random) -> tuple[str, Body]:
    """A question whose answer fills the buffers of a client that does not read."""
    return COMPLETIONS, {"prompt": _sentence(dice), "ignore_eos": True, "n": 8, "max_tokens": 250}


def _chat(dice: random.Random) -> tuple[str, Body]:
    return CHAT, {"messages": _messages(dice), "ignore_eos": True}


def _tools(dice: random.Random) -> tuple[str, Body]:
    names = ["weather", "route"]
    tools = [{"type": "function", "function": {"name": n, "parameters": _SCHEMA}} for n in names]
    named = {"type": "function", "function": {"name": dice.choice(names)}}
    choice = dice.choice(["required", named])
    asked = {"messages": _messages(dice), "tools": tools, "tool_choice": choice}
    return CHAT, asked | {"max_tokens": _MAX_TOKENS}


def _schema(dice: random.Random) -> tuple[str, Body]:
    wanted = {"type": "json_schema", "json_schema": {"name": "trip", "schema": _SCHEMA}}
    asked = {"messages": _messages(dice), "response_format": wanted}
    return CHAT, asked | {"max_tokens": _MAX_TOKENS}


def _regex(dice: random.Random) -> tuple[str, Body]:
    regex = f"[a-f]{{4,{dice.randint(8, 30)}}}"
    return COMPLETIONS, {"prompt": _sentence(dice), "structured_outputs": {"regex": regex}}


_KINDS: Mapping[str, Callable[[random.Random], tuple[str, Body]]] = {
    "token ids": _token_ids,
    "text": _text,
    SEVERAL: _several,
    LONG: _long,
    "chat": _chat,
    "tools": _tools,
    "schema": _schema,
    "regex": _regex,
}
_WEIGHTS = (16, 10, 2, 0, 10, 2, 2, 2)
"""The weight of each kind, after its first question."""


def _sentence(dice: random.Random) -> str:
    return " ".join(dice.choices(_WORDS, k=dice.randint(1, 60)))


def _messages(dice: random.Random) -> list[Body]:
    roles = ["user", "assistant"] * dice.randint(0, 2) + ["user"]
    return [{"role": role, "content": _sentence(dice)} for role in roles]
