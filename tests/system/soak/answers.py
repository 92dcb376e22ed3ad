"""The content of an answer, whether it came whole, as a stream, or as a line of a batch."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Choice:
    """A choice of an answer."""

    text: str
    calls: tuple[tuple[str, str], ...]
    """Names and arguments of its tool calls."""
    logprobs: tuple[float | None, ...]
    finish_reason: str | None


@dataclass(frozen=True)
class Answer:
    """Everything that must be equal in two answers to the same question."""

    choices: tuple[Choice, ...]
    num_prompt_tokens: int
    num_tokens: int


@dataclass
class _Parts:
    """The parts of a choice so far."""

    texts: list[str] = field(default_factory=list)
    calls: defaultdict[int, list[str]] = field(
        default_factory=lambda: defaultdict(lambda: ["", ""])
    )
    logprobs: list[float | None] = field(default_factory=list)
    finish_reason: str | None = None

    def choice(self) -> Choice:
        calls = tuple((name, arguments) for _, (name, arguments) in sorted(self.calls.items()))
        return Choice("".join(self.texts), calls, tuple(self.logprobs), self.finish_reason)


class Gathering:
    """Assembles an answer from the chunks of a stream, or from the body of a whole response."""

    def __init__(self) -> None:
        self._choices: defaultdict[int, _Parts] = defaultdict(_Parts)
        self._usage = {"prompt_tokens": 0, "completion_tokens": 0}

    @property
    def answer(self) -> Answer:
        choices = (parts.choice() for _, parts in sorted(self._choices.items()))
        usage = self._usage
        return Answer(tuple(choices), usage["prompt_tokens"], usage["completion_tokens"])

    def take(self, chunk: dict[str, Any]) -> None:
        self._usage = chunk.get("usage") or self._usage
        for choice in chunk["choices"]:
            parts = self._choices[choice["index"]]
            said = choice.get("message") or choice.get("delta") or choice
            parts.texts.append(said.get("content") or said.get("text") or "")
            for number, call in enumerate(said.get("tool_calls") or ()):
                gathered = parts.calls[call.get("index", number)]
                gathered[0] += call["function"].get("name") or ""
                gathered[1] += call["function"].get("arguments") or ""
            parts.logprobs += _logprobs(choice.get("logprobs") or {})
            parts.finish_reason = choice["finish_reason"] or parts.finish_reason


def answer_of(body: dict[str, Any]) -> Answer:
    """The answer of a response that was not streamed."""
    gathering = Gathering()
    gathering.take(body)
    return gathering.answer


def _logprobs(told: dict[str, Any]) -> Iterator[float | None]:
    yield from told.get("token_logprobs") or ()
    for token in told.get("content") or ():
        yield token["logprob"]
