"""A worker whose tokens are words that state the time, so that a client can compute their delay.

It is the worker of `bench.echo_worker` with another synthetic model. The clock is the machine's
monotonic clock, which all processes share.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from worker.engine.cache.layout import ONE_FULL
from worker.engine.interface import ScheduledBatch, StepHandle, StepScores
from worker.text import Tokenizer

TICK_S = 0.002
_WORDS = "abcdefghijklmnopqrstuvwxyz"


def words(tokenizer: Tokenizer) -> Mapping[str, int]:
    """The tokens that state the time: the text of each, and its id. Their order is that of
    time."""
    found: dict[str, int] = {}
    for token_id in range(tokenizer.vocab_size):
        text = tokenizer.token_bytes(token_id).decode(errors="replace")
        if text[:1] == " " and len(text) > 1 and not text[1:].strip(_WORDS):
            found.setdefault(text, token_id)
    return found


class ClockRunner:
    """A `ModelRunner` that computes nothing: each token states when its step ended."""

    def __init__(
        self,
        token_ids: Sequence[int],
        *,
        step_s: float,
        num_blocks: int,
        block_size: int,
        vocab_size: int,
        max_seq_len: int,
    ) -> None:
        """``token_ids`` are the ids of `words`."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.max_seq_len = max_seq_len
        self.groups = ONE_FULL
        self._token_ids = token_ids
        self._step_s = step_s
        self._done_at = 0.0

    def launch(self, batch: ScheduledBatch) -> StepHandle:
        num_sampled = sum(sequence.is_sampled for sequence in batch.sequences)
        self._done_at = max(self._done_at, time.monotonic()) + self._step_s
        return _Step(self._token_ids, num_sampled, self._done_at)

    def close(self) -> None:
        """Nothing to release."""


@dataclass(frozen=True, slots=True)
class _Step:
    token_ids: Sequence[int]
    num_sampled: int
    done_at: float

    def scores(self) -> StepScores:
        return StepScores({}, [])

    def result(self) -> list[int]:
        time.sleep(max(0.0, self.done_at - time.monotonic()))
        tick = int(time.monotonic() / TICK_S)
        return [self.token_ids[tick % len(self.token_ids)]] * self.num_sampled


class Clock:
    """Reads the time in the text of an event."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._ticks = {text[1:]: tick for tick, text in enumerate(words(tokenizer))}

    def read(self, text: bytes) -> tuple[float, int]:
        """When the first token of an event was generated, and the number of its tokens."""
        first, *others = text.decode().split()
        ticks = time.monotonic() / TICK_S
        age = (ticks - self._ticks[first]) % len(self._ticks)
        return (ticks - age) * TICK_S, 1 + len(others)
