"""The parts of OpenAI's ``/v1/completions`` that several servers share."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from shared.errors import EngineFailed
from worker.engine.interface import TokenScore
from worker.engines.adapter import Ask, End, JsonObject

PATH = "/v1/completions"
NEUTRAL = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
BAN = -100.0
"""The bias of a banned token: the lowest that OpenAI's interface has."""


def named(models: Iterable[JsonObject], names: Collection[str]) -> JsonObject | None:
    """The first of a server's models whose id is one of these names."""
    return next((model for model in models if model["id"] in names), None)


def body_of(ask: Ask, model: str) -> dict[str, Any]:
    """The fields that all servers have. Every parameter is set, because servers have defaults of
    their own."""
    return {
        "model": model,
        "stream": True,
        "max_tokens": ask.max_tokens,
        "seed": ask.seed,
        **{name: getattr(ask.sampling, name) for name in NEUTRAL},
    }


def choice_of(event: JsonObject) -> JsonObject:
    """The only choice of an event; empty for an event of another kind, such as the usage."""
    choices = event.get("choices")
    if not isinstance(choices, list):
        raise EngineFailed("The engine's event has no choices.")
    return choices[0] if choices else {}


def end_of(choice: JsonObject) -> End | None:
    reason = choice.get("finish_reason")
    if reason is None:
        return None
    if reason not in ("stop", "length"):
        raise EngineFailed(f"The engine ended the stream with {reason!r}.")
    return "stop" if reason == "stop" else "length"


def token_ids_of(choice: JsonObject) -> Sequence[int]:
    """The new token ids of a choice."""
    token_ids = choice.get("token_ids") or []
    if not isinstance(token_ids, list) or not all(type(one) is int for one in token_ids):
        raise EngineFailed("The engine's event has no token ids.")
    return token_ids


def scores_of(choice: JsonObject, num_top: int | None) -> Sequence[TokenScore]:
    """The scores of a choice whose tokens are named ``token_id:N``; empty if none are
    requested."""
    if num_top is None or not choice.get("token_ids"):
        return ()
    given = choice.get("logprobs")
    if not isinstance(given, Mapping):
        raise EngineFailed("The engine's event has no logprobs.")
    tops = given.get("top_logprobs") or [None] * len(given["token_logprobs"])
    return [
        score_of(logprob, {_token_id(name): value for name, value in (top or {}).items()}, num_top)
        for logprob, top in zip(given["token_logprobs"], tops, strict=True)
    ]


def prompt_scores_of(
    choice: JsonObject, token_ids: Sequence[int], num_top: int
) -> list[TokenScore]:
    """The scores of vLLM's ``prompt_logprobs``, which have an entry for each token."""
    given = choice["prompt_logprobs"]
    scores: list[TokenScore] = []
    for token_id, entries in zip(token_ids[1:], given[1:], strict=True):
        values = {int(known): entry["logprob"] for known, entry in entries.items()}
        scores.append(score_of(values[token_id], values, num_top))
    return scores


def score_of(logprob: float, top: Mapping[int, float], num_top: int) -> TokenScore:
    best = sorted(top.items(), key=lambda item: -item[1])[:num_top]
    return TokenScore(logprob, [token for token, _ in best], [value for _, value in best])


def biases_of(ask: Ask, vocab_size: int, ban: float = BAN) -> dict[int, float]:
    """The biases of an ask, with a ban for each token that must not be drawn."""
    biases = dict(ask.sampling.logit_bias)
    if ask.allowed_ids is not None:
        biases.update(dict.fromkeys(set(range(vocab_size)).difference(ask.allowed_ids), ban))
    biases.update(dict.fromkeys(ask.banned_ids, ban))
    return biases


def _token_id(name: str) -> int:
    prefix, _, number = name.partition(":")
    if prefix != "token_id" or not number.isdecimal():
        raise EngineFailed("The engine's logprobs do not name token ids.")
    return int(number)
