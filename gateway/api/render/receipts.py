"""The receipt of an answer, collected from the log."""

from dataclasses import dataclass, field
from typing import Self

from gateway.api.render.formats import ReceiptTerms, Rendering, TokenCounts
from gateway.log.visiting import LogObserver
from shared.messages import (
    Finished,
    FinishReason,
    Receipt,
    ReceiptChoice,
    ReceiptRun,
    ReceiptUsage,
    Started,
    TokenDelta,
    hash_text,
)
from shared.version import VERSION


@dataclass(slots=True)
class _ChoiceRecord:
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    def read(self, event: TokenDelta | Finished) -> None:
        self.token_ids += event.token_ids
        self.texts.append(event.text)

    def facts(self) -> ReceiptChoice:
        assert self.finish_reason is not None, "the answer has not ended"
        return ReceiptChoice(
            token_ids=tuple(self.token_ids),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            text_sha256=hash_text(self.texts),
        )


class ReceiptRecorder(LogObserver):
    """Records the facts that the receipt of an answer states."""

    def __init__(self, rendering: Rendering, terms: ReceiptTerms) -> None:
        self._rendering = rendering
        self._terms = terms
        self._counts = TokenCounts(rendering.num_drawn)
        self._choices = [_ChoiceRecord() for _ in range(rendering.total_drawn)]
        self._executions: list[ReceiptRun] = []

    @classmethod
    def of(cls, rendering: Rendering) -> Self | None:
        """The recorder of a request; None if it asks for no receipt."""
        return None if rendering.receipt is None else cls(rendering, rendering.receipt)

    def on_start(self, event: Started) -> None:
        self._counts.on_start(event)
        self._executions.append(self._execution(event))

    def on_tokens(self, event: TokenDelta) -> None:
        self._counts.on_tokens(event)
        self._choices[event.choice].read(event)

    def on_finish(self, event: Finished) -> None:
        self._counts.on_finish(event)
        choice = self._choices[event.choice]
        choice.read(event)
        choice.finish_reason, choice.stop_reason = event.finish_reason, event.stop_reason

    def receipt(self, issued_at: float) -> Receipt:
        """The receipt of the complete answer, issued at this Unix time."""
        usage, terms = self._counts.usage, self._terms
        return Receipt(
            id=self._rendering.request_id,
            endpoint=self._rendering.endpoint,
            model=self._rendering.model,
            request_sha256=terms.request_sha256,
            sampling=terms.sampling,
            seed=terms.seed,
            num_choices=self._rendering.num_drawn,
            num_given_tokens=terms.num_given_tokens,
            choices=tuple(choice.facts() for choice in self._choices),
            usage=ReceiptUsage(
                prompt_tokens=usage.prompt_tokens,
                cached_tokens=usage.prompt_tokens_details.cached_tokens,
                completion_tokens=usage.completion_tokens,
            ),
            executions=tuple(self._executions),
            created_at=terms.created_at,
            issued_at=issued_at,
            gateway_version=VERSION,
        )

    def _execution(self, event: Started) -> ReceiptRun:
        return ReceiptRun(
            worker=event.worker,
            attempt=len(self._executions) + 1,
            numerics=event.numerics,
            num_tokens_before=tuple(len(choice.token_ids) for choice in self._choices),
            provenance=event.provenance,
        )
