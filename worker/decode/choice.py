"""Converts the tokens of one choice into its events."""

from collections.abc import Sequence

from shared.log import LogWriter, TokenChain
from shared.messages import Finished, FinishReason, SamplingParams, TokenDelta, TokenLogprobs
from worker.decode.scores import told
from worker.engine.interface import StepOutput
from worker.text import Tokenizer


class ChoiceWriter:
    """Detokenizes one choice and detects its end.

    The tokens that the log already holds are replayed first, so that the text continues exactly as
    it would have without the interruption.
    """

    def __init__(
        self,
        choice: int,
        log: LogWriter,
        tokenizer: Tokenizer,
        sampling: SamplingParams,
        *,
        max_tokens: int,
        eos_ids: frozenset[int],
    ) -> None:
        self._choice = choice
        self._log = log
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._max_tokens = max_tokens
        self._end_ids = eos_ids.union(sampling.stop_token_ids)
        self._num_cached_tokens = 0
        self._text = tokenizer.text_stream(
            sampling.stop,
            includes_stop=sampling.include_stop_in_output,
            skips_special=sampling.skip_special_tokens,
        )
        for token_id in self._chain.token_ids:
            self._push(token_id)

    @property
    def is_finished(self) -> bool:
        return self._chain.is_finished

    def close(self) -> list[Finished]:
        """The final event, if the tokens in the log already end the choice but the event is
        missing."""
        token_ids = self._chain.token_ids
        if self.is_finished:
            return []
        if self._text.stop_reason is not None:
            return [self._finish([], [], [], "stop")]
        if token_ids and token_ids[-1] in self._end_ids:
            return [self._finish([], [], [], "stop", self._stop_id(token_ids[-1]))]
        if len(token_ids) >= self._max_tokens:
            return [self._finish([], [], [], "length")]
        return []

    def advance(self, outputs: Sequence[StepOutput]) -> TokenDelta | Finished:
        """The event for the next tokens; tokens after the end of the choice are dropped."""
        token_ids: list[int] = []
        texts: list[str] = []
        logprobs: list[TokenLogprobs] = []
        for output in outputs:
            token_id = output.token_id
            self._num_cached_tokens = output.num_cached_tokens
            token_ids.append(token_id)
            if output.score is not None:
                logprobs.append(told(token_id, output.score, self._tokenizer))
            texts.append(self._push(token_id))
            if self._text.stop_reason is not None:
                return self._finish(token_ids, texts, logprobs, "stop")
            if output.finish_reason is not None:
                stop_id = self._stop_id(token_id)
                return self._finish(token_ids, texts, logprobs, output.finish_reason, stop_id)
        return self._log.delta(
            self._choice,
            token_ids,
            "".join(texts),
            num_chars=[len(text) for text in texts[:-1]],
            logprobs=logprobs,
        )

    @property
    def _chain(self) -> TokenChain:
        return self._log.chains[self._choice]

    def _push(self, token_id: int) -> str:
        if token_id in self._end_ids and not self._sampling.include_stop_in_output:
            return ""
        return self._text.push(token_id)

    def _stop_id(self, token_id: int) -> int | None:
        return token_id if token_id in self._sampling.stop_token_ids else None

    def _finish(
        self,
        token_ids: list[int],
        texts: list[str],
        logprobs: list[TokenLogprobs],
        reason: FinishReason,
        stop_id: int | None = None,
    ) -> Finished:
        # The held-back text may complete a stop string; after a match nothing is held back.
        text = "".join(texts) + self._text.flush()
        stop = self._text.stop_reason
        return self._log.finish(
            self._choice,
            token_ids,
            text,
            reason if stop is None else "stop",
            stop_id if stop is None else stop,
            num_cached_tokens=self._num_cached_tokens,
            num_chars=[len(text) for text in texts[:-1]],
            logprobs=logprobs,
        )
