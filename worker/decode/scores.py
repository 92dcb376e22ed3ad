"""Converts token scores into the log probabilities of events."""

from collections.abc import Iterator, Sequence

from shared.log import LogWriter
from shared.messages import Logprob, PromptScores, TokenLogprobs
from worker.engine.interface import TokenScore
from worker.text import Tokenizer
from worker.text.stream import TextStream

CHUNK_TOKENS = 1024
"""Prompt tokens in an event. All attempts use the same boundaries, so that a reader with some of an
earlier attempt's events can accept the next event of this attempt."""

_LEAST_LOGPROB = -9999.0
"""OpenAI's value for an impossible token; JSON has no infinity."""


def token_logprobs(
    token_id: int, score: TokenScore, tokenizer: Tokenizer, num_chars: int | None
) -> TokenLogprobs:
    """A token's score together with the bytes of the token, and with the number of characters that
    it completes."""
    top = zip(score.top_ids, score.top_logprobs, strict=True)
    return TokenLogprobs(
        _logprob(token_id, score.logprob, tokenizer),
        tuple(_logprob(other, logprob, tokenizer) for other, logprob in top),
        num_chars,
    )


class PromptScorer:
    """Collects the scores of a prompt and divides them into events."""

    def __init__(
        self,
        prompt: int,
        log: LogWriter,
        token_ids: Sequence[int],
        tokenizer: Tokenizer,
        stream: TextStream | None,
    ) -> None:
        """``stream`` makes the prompt's text from its tokens; None if the prompt is a text."""
        self._prompt = prompt
        self._stream = stream
        self._log = log
        self._token_ids = token_ids
        self._tokenizer = tokenizer
        self._num_sent = 0
        # The first token has no predecessor, and hence no score.
        self._logprobs: list[TokenLogprobs | None] = [None]

    @property
    def is_complete(self) -> bool:
        return self._num_sent == len(self._token_ids)

    def begin(self) -> Iterator[PromptScores]:
        """The events that need no scores: all events of a prompt of one token."""
        return self._cut()

    def add(self, scores: Sequence[TokenScore]) -> Iterator[PromptScores]:
        """Add the scores of the next tokens; returns the events that are now complete."""
        start = self._num_sent + len(self._logprobs)
        token_ids = self._token_ids[start : start + len(scores)]
        self._logprobs += [
            token_logprobs(token_id, score, self._tokenizer, self._num_chars(position))
            for position, (token_id, score) in enumerate(
                zip(token_ids, scores, strict=True), start=start
            )
        ]
        return self._cut()

    def _num_chars(self, position: int) -> int | None:
        """How many characters the token at ``position`` completes; the last token also completes
        what remains."""
        if self._stream is None:
            return None
        if position == 1:
            self._stream.push(self._token_ids[0])
        self._stream.push(self._token_ids[position])
        is_last = position == len(self._token_ids) - 1
        return self._stream.num_completed + (len(self._stream.flush()) if is_last else 0)

    def _cut(self) -> Iterator[PromptScores]:
        while not self.is_complete:
            size = min(CHUNK_TOKENS, len(self._token_ids) - self._num_sent)
            if len(self._logprobs) < size:
                return
            logprobs, self._logprobs = self._logprobs[:size], self._logprobs[size:]
            start = self._num_sent
            self._num_sent += size
            yield PromptScores(
                prompt=self._prompt,
                attempt=self._log.attempt,
                start=start,
                token_ids=tuple(self._token_ids[start : start + size]),
                logprobs=tuple(logprobs),
                execution=self._log.execution,
            )


def _logprob(token_id: int, logprob: float, tokenizer: Tokenizer) -> Logprob:
    # Negated, so that it is also true for NaN.
    if not logprob > _LEAST_LOGPROB:
        logprob = _LEAST_LOGPROB
    return Logprob(token_id, logprob, tokenizer.token_bytes(token_id))
