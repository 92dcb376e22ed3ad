"""The kinds of requests that can be answered again: how each asks for logprobs, and what its answer
says."""

import codecs
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

_NUM_ALTERNATIVES = 20
"""The most that a request may ask for."""


class SpokenToken(NamedTuple):
    """A token of an answer."""

    start: int
    """The number of characters of the answer's text before it."""
    logprob: float | None
    alternatives: Mapping[str, float]
    """The logprobs of the likeliest tokens at its place, by their texts."""


class SpokenChoice(NamedTuple):
    """A choice of an answer."""

    parts: Mapping[str, str]
    """What it says, by the names of its parts. Answers to the same request have the same names, and
    the last part says how the choice ended."""
    spelled: str = ""
    """The text that `tokens` spell, which contains parts of the choice; empty without logprobs."""
    tokens: tuple[SpokenToken, ...] = ()


class RequestKind(NamedTuple):
    """The requests of an endpoint."""

    logprobs: Mapping[str, Any]
    """The fields of a body that ask for logprobs."""
    read: Callable[[Any], list[SpokenChoice]]
    """The choices in the body of an answer. Raises `KeyError` and `TypeError` if it has another
    form."""


def _chat(answer: Any) -> list[SpokenChoice]:
    return [_chat_choice(choice) for choice in answer["choices"]]


def _chat_choice(choice: Any) -> SpokenChoice:
    message = choice["message"]
    calls = [*(message.get("tool_calls") or ()), message.get("function_call")]
    parts = {
        "reasoning": message.get("reasoning_content") or "",
        "text": message.get("content") or "",
        "calls": _calls(
            call.get("function") or call.get("custom") or call for call in calls if call
        ),
        "ending": choice["finish_reason"] or "",
    }
    return _with_tokens(parts, (choice.get("logprobs") or {}).get("content") or ())


def _completion(answer: Any) -> list[SpokenChoice]:
    return [_text_choice(choice) for choice in answer["choices"]]


def _text_choice(choice: Any) -> SpokenChoice:
    parts = {"text": choice["text"], "ending": choice["finish_reason"] or ""}
    words = choice.get("logprobs")
    if not words:
        return SpokenChoice(parts)
    columns = (words["text_offset"], words["token_logprobs"], words["top_logprobs"])
    tokens = tuple(
        SpokenToken(start, logprob, alternatives or {})
        for start, logprob, alternatives in zip(*columns, strict=True)
    )
    return SpokenChoice(parts, choice["text"], tokens)


def _response(answer: Any) -> list[SpokenChoice]:
    said: dict[str, list[Any]] = {}
    for item in answer["output"]:
        said.setdefault(item["type"], []).append(item)
    texts = [part for item in said.get("message", ()) for part in item["content"]]
    thoughts = [part for item in said.get("reasoning", ()) for part in item.get("content") or ()]
    calls = (*said.get("function_call", ()), *said.get("custom_tool_call", ()))
    parts = {
        "reasoning": "".join(part["text"] for part in thoughts),
        "text": "".join(part.get("text", "") for part in texts),
        "calls": _calls(calls),
        "ending": answer["status"],
    }
    return [_with_tokens(parts, [word for part in texts for word in part.get("logprobs") or ()])]


def _calls(calls: Iterable[Any]) -> str:
    """The calls as text, without the ids, which differ with each answer."""
    said = [(call["name"], call.get("arguments", call.get("input"))) for call in calls]
    return msgspec.json.encode(said).decode() if said else ""


def _with_tokens(parts: Mapping[str, str], words: Iterable[Any]) -> SpokenChoice:
    """A choice with the logprobs ``words`` of a chat, whose tokens may end within a character."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    spelled, length, tokens = list[str](), 0, list[SpokenToken]()
    for word in words:
        alternatives = {one["token"]: one["logprob"] for one in word["top_logprobs"]}
        tokens.append(SpokenToken(length, word["logprob"], alternatives))
        spelled.append(decoder.decode(bytes(word["bytes"])))
        length += len(spelled[-1])
    return SpokenChoice(parts, "".join(spelled), tuple(tokens))


KINDS: Mapping[str, RequestKind] = {
    "/v1/chat/completions": RequestKind(
        {"logprobs": True, "top_logprobs": _NUM_ALTERNATIVES}, _chat
    ),
    "/v1/completions": RequestKind({"logprobs": _NUM_ALTERNATIVES}, _completion),
    "/v1/responses": RequestKind(
        {"include": ["message.output_text.logprobs"], "top_logprobs": _NUM_ALTERNATIVES}, _response
    ),
}
"""By the path of the endpoint."""
