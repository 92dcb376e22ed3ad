"""How likely tokens were, in the words of the log."""

from collections.abc import Iterator, Sequence

from shared.messages import Logprob, PromptScores, TokenLogprobs
from worker.engine.interface import TokenScore
from worker.text import Tokenizer

CHUNK_TOKENS = 1024
"""Of one event. Every attempt cuts at the same places: else a reader who has some of an earlier
attempt's would find no place for this one's."""

_LEAST_LOGPROB = -9999.0
"""OpenAI's word for impossible; infinity has none in JSON."""


def told(token_id: int, score: TokenScore, tokenizer: Tokenizer) -> TokenLogprobs:
    """A token's score beside the bytes that it stands for."""
    top = zip(score.top_ids, score.top_logprobs, strict=True)
    return TokenLogprobs(
        _logprob(token_id, score.logprob, tokenizer),
        tuple(_logprob(other, logprob, tokenizer) for other, logprob in top),
    )


class PromptScorer:
    """Collects the scores of one prompt and cuts them into events."""

    def __init__(
        self, prompt: int, attempt: int, token_ids: Sequence[int], tokenizer: Tokenizer
    ) -> None:
        self._prompt = prompt
        self._attempt = attempt
        self._token_ids = token_ids
        self._tokenizer = tokenizer
        self._num_sent = 0
        # The first token follows nothing.
        self._logprobs: list[TokenLogprobs | None] = [None]

    @property
    def is_complete(self) -> bool:
        return self._num_sent == len(self._token_ids)

    def begin(self) -> Iterator[PromptScores]:
        """What can be said without any score: all, of a prompt of one token."""
        return self._cut()

    def add(self, scores: Sequence[TokenScore]) -> Iterator[PromptScores]:
        """Take the scores of the next tokens; the events that they complete."""
        start = self._num_sent + len(self._logprobs)
        token_ids = self._token_ids[start : start + len(scores)]
        self._logprobs += [
            told(token_id, score, self._tokenizer)
            for token_id, score in zip(token_ids, scores, strict=True)
        ]
        return self._cut()

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
                attempt=self._attempt,
                start=start,
                token_ids=tuple(self._token_ids[start : start + size]),
                logprobs=tuple(logprobs),
            )


def _logprob(token_id: int, logprob: float, tokenizer: Tokenizer) -> Logprob:
    # The negation is true for what is no number, too.
    if not logprob > _LEAST_LOGPROB:
        logprob = _LEAST_LOGPROB
    return Logprob(token_id, logprob, tokenizer.token_bytes(token_id))
