"""A synthetic model: its next token is a hash of the tokens before it, read back from its cache.

It needs no torch, costs microseconds, and is as strict about blocks as a real model, because a slot
that was freed too early, shared wrongly or never written changes the tokens that follow or raises.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from shared.stream import EMPTY_HASH, extend_hash
from worker.engine.interface import ScheduledBatch, ScheduledSequence, StepHandle

_MASK = (1 << 64) - 1


def next_token(context: Iterable[int], seed: int, choice: int, position: int, vocab: int) -> int:
    """What `EchoRunner` draws after ``context``, computed without any cache."""
    return _draw(extend_hash(EMPTY_HASH, context), (seed, choice, position), vocab)


def _draw(context_hash: int, key: tuple[int, int, int], vocab_size: int) -> int:
    mixed = extend_hash(context_hash, key)
    # The low bits of FNV-1a depend on the low bits of its input alone; the finalizer of MurmurHash3
    # spreads the high ones over them.
    mixed = ((mixed ^ (mixed >> 33)) * 0xFF51AFD7ED558CCD) & _MASK
    return (mixed ^ (mixed >> 33)) % vocab_size


class _Slot(NamedTuple):
    """What one slot of the cache holds in the place of keys and values."""

    token_id: int
    context_hash: int
    """Of all tokens of the context up to this one."""


@dataclass(frozen=True, slots=True)
class _EchoHandle:
    token_ids: list[int]
    done_at: float

    def result(self) -> list[int]:
        # A sleep of 0 lets other threads run, as the wait for a device does.
        time.sleep(max(0.0, self.done_at - time.monotonic()))
        return self.token_ids


class EchoRunner:
    """A `ModelRunner` whose steps take ``step_s`` each, one after another.

    A step reads only the last slot of a context, so that it costs no more than its new tokens.
    With ``is_thorough`` it reads them all, as attention does, and raises `ValueError` where one of
    them does not hold its token, or where two sequences of a step write one slot.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int = 16,
        vocab_size: int = 256,
        max_seq_len: int = 1 << 20,
        step_s: float = 0.0,
        is_thorough: bool = False,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.max_seq_len = max_seq_len
        self._step_s = step_s
        self._is_thorough = is_thorough
        self._slots: list[_Slot | None] = [None] * (num_blocks * block_size)
        self._previous: list[int] = []
        self._done_at = 0.0

    def launch(self, batch: ScheduledBatch) -> StepHandle:
        if self._is_thorough:
            self._check_writes(batch)
        token_ids = [
            token_id
            for sequence in batch.sequences
            if (token_id := self._compute(sequence)) is not None
        ]
        self._previous = token_ids
        self._done_at = max(self._done_at, time.monotonic()) + self._step_s
        return _EchoHandle(token_ids, self._done_at)

    def close(self) -> None:
        """Nothing to release."""

    def _compute(self, sequence: ScheduledSequence) -> int | None:
        """Write the sequence's new slots; returns its next token if one is wanted."""
        end = sequence.start + sequence.num_tokens
        if not sequence.token_ids:
            raise ValueError(f"{sequence.sequence_id} has no tokens in this step")
        if end > self.max_seq_len or len(sequence.block_table) != -(-end // self.block_size):
            raise ValueError(f"{len(sequence.block_table)} blocks for a context of {end} tokens")
        context_hash = self._read_context(sequence)
        for at, token_id in enumerate(self._token_ids(sequence), sequence.start):
            context_hash = extend_hash(context_hash, (token_id,))
            self._slots[self._slot(sequence, at)] = _Slot(token_id, context_hash)
        if not sequence.is_sampled:
            return None
        key = (sequence.seed, sequence.sequence_id.choice, sequence.position)
        return _draw(context_hash, key, self.vocab_size)

    def _token_ids(self, sequence: ScheduledSequence) -> list[int]:
        token_ids = list(sequence.token_ids)
        if sequence.previous_row is not None:
            token_ids[-1] = self._previous[sequence.previous_row]
        return token_ids

    def _read_context(self, sequence: ScheduledSequence) -> int:
        """The hash of the tokens before ``start``, as the cache has it."""
        context_hash = EMPTY_HASH
        first = 0 if self._is_thorough else max(0, sequence.start - 1)
        for at in range(first, sequence.start):
            slot = self._slots[self._slot(sequence, at)]
            if slot is None:
                raise ValueError(f"{sequence.sequence_id}: the slot of token {at} is empty")
            if self._is_thorough and slot.context_hash != extend_hash(
                context_hash, (slot.token_id,)
            ):
                raise ValueError(f"{sequence.sequence_id}: the slot of token {at} holds another")
            context_hash = slot.context_hash
        return context_hash

    def _slot(self, sequence: ScheduledSequence, at: int) -> int:
        block = sequence.block_table[at // self.block_size]
        return block * self.block_size + at % self.block_size

    def _check_writes(self, batch: ScheduledBatch) -> None:
        slots = [
            self._slot(sequence, at)
            for sequence in batch.sequences
            for at in range(sequence.start, sequence.start + sequence.num_tokens)
        ]
        if len(set(slots)) < len(slots):
            raise ValueError("two tokens of one step were given the same slot")
