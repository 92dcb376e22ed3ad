"""The choices of a whole answer, collected from the log or from the single message of a job."""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from gateway.api.render.choice_reader import ChoiceReader, Part
from gateway.api.render.formats import Rendering, TokenCounts, Usage, system_fingerprint
from gateway.api.render.receipts import ReceiptRecorder
from gateway.log.visiting import LogObserver
from gateway.text.pieces import CallArguments, CallInput, CallStart, Content, Piece, Reasoning
from shared import messages
from shared.messages import (
    Completed,
    Finished,
    FinishReason,
    PromptScores,
    Receipt,
    Started,
    TokenDelta,
    TokenLogprobs,
)


@dataclass(slots=True)
class Call:
    name: str
    arguments: str = ""
    """Or the input of a custom tool."""
    is_custom: bool = False


@dataclass(slots=True)
class AnswerChoice:
    """The current state of a choice."""

    index: int
    """The index among all generated choices."""
    reader: ChoiceReader
    keeps_order: bool = False
    text: str = ""
    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    """All parts in order, if the endpoint needs the order."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """The logprobs of the tokens that the client is shown."""
    scores: list[float] = field(default_factory=list)
    """The logprobs of all its tokens."""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    def read(self, event: TokenDelta | Finished | messages.Choice) -> None:
        """Take the next tokens; all but `TokenDelta` are the last."""
        self.text += event.text
        self.scores += [token.chosen.logprob for token in event.logprobs]
        if not isinstance(event, TokenDelta):
            self.finish_reason, self.stop_reason = event.finish_reason, event.stop_reason
        parts = self.reader.read_parts(event)
        for pieces, logprobs in parts:
            self._add(pieces)
            self.logprobs += logprobs
        if self.keeps_order:
            self.parts += parts

    @property
    def mean_logprob(self) -> float:
        """The mean logprob of its tokens."""
        return math.fsum(self.scores) / len(self.scores) if self.scores else -math.inf

    def _add(self, pieces: list[Piece]) -> None:
        for piece in pieces:
            match piece:
                case Content(text):
                    self.content += text
                case Reasoning(text):
                    self.reasoning += text
                case CallStart(_, name, is_custom):
                    self.calls.append(Call(name, is_custom=is_custom))
                case CallArguments(index, text) | CallInput(index, text):
                    self.calls[index].arguments += text


class AnswerBuilder(LogObserver):
    """The whole answer to a request."""

    def __init__(self, rendering: Rendering) -> None:
        self.rendering = rendering
        self.has_started = False
        self.prompt_texts: tuple[str, ...] = ()
        self.prompt_ids: list[list[int]] = [[] for _ in range(rendering.num_prompts)]
        self.prompt_scores: list[list[TokenLogprobs | None]] = [
            [] for _ in range(rendering.num_prompts)
        ]
        keeps_order = rendering.endpoint in ("responses", "messages")
        self._drawn = [
            AnswerChoice(k, ChoiceReader(rendering), keeps_order)
            for k in range(rendering.total_drawn)
        ]
        self._counts = TokenCounts(rendering.num_drawn)
        self.recorder = ReceiptRecorder.of(rendering)
        """None: the answer has no receipt."""
        self.receipt: str | None = None
        """The signed receipt, once it is issued."""
        self.num_logprobs = 0
        """The logprobs of tokens and of their alternatives in the log so far."""

    def on_start(self, event: Started) -> None:
        self._counts.on_start(event)
        if self.recorder is not None:
            self.recorder.on_start(event)
        self.has_started = True
        self.prompt_texts = self.prompt_texts or event.prompt_texts

    def on_scores(self, event: PromptScores) -> None:
        self.num_logprobs += _num_logprobs(event.logprobs)
        self.prompt_ids[event.prompt] += event.token_ids
        self.prompt_scores[event.prompt] += event.logprobs

    def on_tokens(self, event: TokenDelta) -> None:
        self._counts.on_tokens(event)
        if self.recorder is not None:
            self.recorder.on_tokens(event)
        self.num_logprobs += _num_logprobs(event.logprobs)
        self._drawn[event.choice].read(event)

    def on_finish(self, event: Finished) -> None:
        self._counts.on_finish(event)
        if self.recorder is not None:
            self.recorder.on_finish(event)
        self.num_logprobs += _num_logprobs(event.logprobs)
        self._drawn[event.choice].read(event)

    def take(self, completed: Completed) -> None:
        """Read the answer to a job of mode ``final``."""
        self._counts.take(completed)
        self.prompt_texts = completed.prompt_texts
        for prompt, scores in enumerate(completed.prompt_logprobs):
            self.prompt_scores[prompt] += scores
            self.prompt_ids[prompt] += [token.chosen.token_id if token else 0 for token in scores]
        for drawn, choice in zip(self._drawn, completed.choices, strict=True):
            drawn.read(choice)

    def issue_receipt(self, sign: Callable[[Receipt], str]) -> None:
        """Have the receipt of the complete answer signed, if the request asks for one."""
        if self.recorder is not None:
            self.receipt = sign(self.recorder.receipt(time.time()))

    @property
    def is_complete(self) -> bool:
        """Whether all choices have ended."""
        return all(choice.finish_reason is not None for choice in self._drawn)

    @property
    def usage(self) -> Usage:
        self._counts.num_reasoning_tokens = sum(
            choice.reader.num_reasoning_tokens for choice in self._drawn
        )
        return self._counts.usage

    @property
    def system_fingerprint(self) -> str | None:
        return system_fingerprint(self.rendering, self._counts)

    @property
    def choices(self) -> list[AnswerChoice]:
        """The choices to return: the most likely choices of each prompt, if more were generated."""
        wanted, drawn = self.rendering.num_choices, self.rendering.num_drawn
        if wanted == drawn:
            return self._drawn
        prompts = (self._drawn[k : k + drawn] for k in range(0, len(self._drawn), drawn))
        return [
            choice
            for choices in prompts
            for choice in sorted(choices, key=lambda choice: -choice.mean_logprob)[:wanted]
        ]


def _num_logprobs(logprobs: Iterable[TokenLogprobs | None]) -> int:
    """The logprobs of tokens and of their alternatives."""
    return sum(1 + len(one.top) for one in logprobs if one is not None)
