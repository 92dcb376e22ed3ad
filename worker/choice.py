"""One choice's tokens become one choice's events."""

from collections.abc import Sequence

import msgspec

from shared.messages import Finished, FinishReason, TokenDelta
from shared.stream import LogWriter
from worker.engine.interface import StepOutput
from worker.text import TextStream


class ChoiceWriter:
    """Detokenizes one choice and finds its end.

    The tokens that the log already holds are replayed first, so that what follows has the text it
    would have had without the interruption.
    """

    def __init__(
        self,
        choice: int,
        log: LogWriter,
        text: TextStream,
        *,
        max_tokens: int,
        eos_ids: frozenset[int],
    ) -> None:
        self._choice = choice
        self._log = log
        self._text = text
        self._max_tokens = max_tokens
        self._eos_ids = eos_ids
        self._num_cached_tokens = 0
        for token_id in self.output_ids:
            if token_id not in eos_ids:
                text.push(token_id)

    @property
    def output_ids(self) -> list[int]:
        return self._log.chains[self._choice].token_ids

    @property
    def is_finished(self) -> bool:
        return self._log.chains[self._choice].is_finished

    def close(self) -> Finished | None:
        """The choice's end if the tokens of the log already reach it, else None."""
        if self._text.stop_reason is not None:
            return self._finish([], "", "stop")
        if self.output_ids and self.output_ids[-1] in self._eos_ids:
            return self._finish([], "", "stop")
        if len(self.output_ids) >= self._max_tokens:
            return self._finish([], "", "length")
        return None

    def advance(self, outputs: Sequence[StepOutput]) -> TokenDelta | Finished:
        """The event for the next tokens; those after the end of the choice are dropped."""
        token_ids: list[int] = []
        text = ""
        for output in outputs:
            self._num_cached_tokens = output.num_cached_tokens
            token_ids.append(output.token_id)
            if output.token_id not in self._eos_ids:
                text += self._text.push(output.token_id)
            if self._text.stop_reason is not None:
                return self._finish(token_ids, text, "stop")
            if output.finish_reason is not None:
                return self._finish(token_ids, text, output.finish_reason)
        return self._log.delta(self._choice, token_ids, text)

    def _finish(self, token_ids: list[int], text: str, reason: FinishReason) -> Finished:
        # What was held back may complete a stop string; after one nothing is held back.
        text += self._text.flush()
        stop_reason = self._text.stop_reason
        reason = reason if stop_reason is None else "stop"
        finished = self._log.finish(self._choice, token_ids, text, reason, stop_reason)
        return msgspec.structs.replace(finished, num_cached_tokens=self._num_cached_tokens)
