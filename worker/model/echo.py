"""A synthetic model: the next token is a hash of the previous tokens, read back from its cache.

It needs no torch, takes microseconds, and checks blocks as strictly as a real model: a slot that
was freed too early, shared incorrectly or never written changes the following tokens or raises.
"""

import time
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shared.log import EMPTY_HASH, extend_hash
from worker.engine.cache.layout import ONE_FULL, CacheGroup, StateCache, TokenCache
from worker.engine.interface import (
    LogitEdits,
    ScheduledBatch,
    ScheduledSequence,
    StepHandle,
    StepScores,
    TokenScore,
)

_MASK = (1 << 64) - 1
_EMPTY = -1
_STATE = -2
"""The token id in a slot that holds a part of a state."""


def next_token(
    context: Iterable[int],
    seed: int,
    choice: int,
    position: int,
    vocab: int,
    edits: LogitEdits | None = None,
) -> int:
    """The token that `EchoRunner` draws after ``context``, computed without a cache."""
    return _draw(extend_hash(EMPTY_HASH, context), (seed, choice, position), vocab, edits)


def next_score(context: Iterable[int], token_id: int, depth: int, vocab: int) -> TokenScore:
    """The score of ``token_id`` after ``context``, with the ``depth`` most likely tokens."""
    return _score(extend_hash(EMPTY_HASH, context), token_id, depth, vocab)


def _draw(
    context_hash: int, key: tuple[int, int, int], vocab_size: int, edits: LogitEdits | None
) -> int:
    """Draw a token. Every edit changes it, and a banned token is replaced by the next allowed
    token."""
    mixed = _mix(extend_hash(context_hash, key if edits is None else (*key, *_marks(edits))))
    first = mixed % vocab_size
    if edits is None:
        return first
    open_ids = _open_ids(edits, vocab_size)
    from_first = open_ids >> first
    return first + _lowest(from_first) if from_first else _lowest(open_ids)


def _score(context_hash: int, token_id: int, depth: int, vocab_size: int) -> TokenScore:
    first = _mix(context_hash) % vocab_size
    top_ids = [(first + k) % vocab_size for k in range(depth)]
    place = (token_id - first) % vocab_size
    return TokenScore(_logprob(place), top_ids, [_logprob(k) for k in range(depth)])


def _logprob(place: int) -> float:
    return -(1 + place) / 8


def _marks(edits: LogitEdits) -> Iterable[int]:
    for token_id, bias in edits.biases.items():
        yield from (token_id, _fixed(bias))
    if edits.penalties is not None:
        token_ids, subtracted, repetition = edits.penalties
        yield from (*token_ids, *map(_fixed, subtracted), _fixed(repetition))


def _fixed(value: float) -> int:
    return round(value * 256) & _MASK


def _open_ids(edits: LogitEdits, vocab_size: int) -> int:
    """The tokens that may be drawn: bit t is set for token t."""
    open_ids = (1 << vocab_size) - 1
    if edits.mask is not None:
        open_ids &= int.from_bytes(edits.mask, "little")
    for token_id in edits.banned_ids:
        open_ids &= ~(1 << token_id)
    return open_ids


def _lowest(bits: int) -> int:
    """The position of the lowest set bit. Raises ValueError if there is none."""
    if not bits:
        raise ValueError("no token is allowed")
    return (bits & -bits).bit_length() - 1


def _mix(state: int) -> int:
    # The low bits of FNV-1a depend only on the low bits of its input; the finalizer of MurmurHash3
    # mixes the high bits into them.
    state = ((state ^ (state >> 33)) * 0xFF51AFD7ED558CCD) & _MASK
    return state ^ (state >> 33)


class _SlotArrays:
    """The contents of the cache's slots, in place of keys and values. They take 16 bytes each from
    the start, so that the memory of a worker does not grow while it fills its cache."""

    def __init__(self, num_slots: int) -> None:
        self._token_ids = array("q", [_EMPTY]) * num_slots
        self._context_hashes = array("Q", [0]) * num_slots

    def write(self, slot: int, token_id: int, context_hash: int) -> None:
        """``context_hash``: the hash of all tokens of the context up to this token."""
        self._token_ids[slot] = token_id
        self._context_hashes[slot] = context_hash

    def clear(self, slot: int) -> None:
        self._token_ids[slot] = _EMPTY

    def read(self, slot: int) -> tuple[int, int] | None:
        """The token of a slot and the hash of its context; None if it is empty."""
        token_id = self._token_ids[slot]
        return None if token_id == _EMPTY else (token_id, self._context_hashes[slot])


@dataclass(frozen=True, slots=True)
class _EchoHandle:
    token_ids: list[int]
    step_scores: StepScores
    done_at: float

    def scores(self) -> StepScores:
        return self.step_scores

    def result(self) -> list[int]:
        # A sleep of 0 yields to other threads, like waiting for a device.
        time.sleep(max(0.0, self.done_at - time.monotonic()))
        return self.token_ids


class EchoRunner:
    """A `ModelRunner` whose steps take ``step_s`` each, and ``token_s`` for each of their tokens,
    one after another.

    A step reads only the last slot of a context, so its cost depends on the new tokens only. With
    ``is_thorough`` it reads all that its layers read, as a model does, and raises `ValueError` if a
    slot does not hold its token, if groups hold different contexts, or if a step writes a slot
    twice or reads what another sequence writes.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int = 16,
        groups: Sequence[CacheGroup] = ONE_FULL,
        vocab_size: int = 256,
        max_seq_len: int = 1 << 20,
        step_s: float = 0.0,
        token_s: float = 0.0,
        is_thorough: bool = False,
    ) -> None:
        """The state of a group of states is the hash of the tokens before it.

        At least one group must read the token before each step.
        """
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.groups = groups
        self.vocab_size = vocab_size
        self.max_seq_len = max_seq_len
        self._step_s = step_s
        self._token_s = token_s
        self._is_thorough = is_thorough
        self._slots = _SlotArrays(num_blocks * block_size)
        self._previous: list[int] = []
        self._done_at = 0.0

    def launch(self, batch: ScheduledBatch) -> StepHandle:
        for sequence in batch.sequences:
            self._check(sequence)
        if self._is_thorough:
            self._check_writes(batch)
        hashes = [self._write(sequence) for sequence in batch.sequences]
        token_ids: list[int] = []
        drawn: dict[int, TokenScore] = {}
        predicted: list[int] = []
        for sequence, sequence_hashes in zip(batch.sequences, hashes, strict=True):
            num_rows = 1 + sequence.num_drafts if sequence.is_sampled else 0
            for k, row_hash in enumerate(sequence_hashes[len(sequence_hashes) - num_rows :]):
                token_id = self._draw(sequence, k, row_hash)
                if (depth := sequence.sampling.logprobs) is not None:
                    drawn[len(token_ids)] = self._score(row_hash, token_id, depth)
                token_ids.append(token_id)
            if sequence.is_predicted:
                drawn_ids = token_ids[len(token_ids) - num_rows :]
                predicted.append(self._predict(sequence, sequence_hashes[-num_rows:], drawn_ids))
        prompts = [
            self._score_prompt(sequence, sequence_hashes)
            for sequence, sequence_hashes in zip(batch.sequences, hashes, strict=True)
            if sequence.scored_ids
        ]
        self._previous = token_ids
        step_s = self._step_s + self._token_s * sum(one.num_tokens for one in batch.sequences)
        self._done_at = max(self._done_at, time.monotonic()) + step_s
        return _EchoHandle(token_ids, StepScores(drawn, prompts, predicted), self._done_at)

    def close(self) -> None:
        """Nothing to release."""

    def _check(self, sequence: ScheduledSequence) -> None:
        if not sequence.token_ids:
            raise ValueError(f"{sequence.sequence_id} has no tokens in this step")
        end = sequence.start + sequence.num_tokens
        if end > self.max_seq_len:
            raise ValueError(f"a context of {end} tokens, at most {self.max_seq_len}")
        for table, group in zip(sequence.block_tables, self.groups, strict=True):
            if isinstance(group, StateCache):
                expected = group.num_blocks * (2 if sequence.start else 1)
            else:
                expected = -(-end // self.block_size)
            if len(table) != expected:
                raise ValueError(f"{len(table)} blocks for a context of {end} tokens")

    def _write(self, sequence: ScheduledSequence) -> list[int]:
        """Write the sequence's new slots; returns the hash of its context up to each of them."""
        hashes = [self._read_context(sequence)]
        token_ids = self._token_ids(sequence)
        for token_id in token_ids:
            hashes.append(extend_hash(hashes[-1], (token_id,)))
        for table, group in zip(sequence.block_tables, self.groups, strict=True):
            if isinstance(group, StateCache):
                for slot in self._state_slots(table[-group.num_blocks :]):
                    self._slots.write(slot, _STATE, hashes[-1])
            else:
                for k, token_id in enumerate(token_ids):
                    slot = self._slot(table, sequence.start + k)
                    self._slots.write(slot, token_id, hashes[k + 1])
        return hashes[1:]

    def _draw(self, sequence: ScheduledSequence, k: int, context_hash: int) -> int:
        """Draw the token of row k of the sequence."""
        key = (sequence.seed, sequence.sequence_id.choice, sequence.position + k)
        edits = (sequence.edits, *sequence.draft_edits)[k] if sequence.edits else None
        return _draw(context_hash, key, self.vocab_size, edits)

    def _score(self, context_hash: int, token_id: int, depth: int) -> TokenScore:
        return _score(context_hash, token_id, depth, self.vocab_size)

    def _predict(
        self, sequence: ScheduledSequence, hashes: Sequence[int], drawn_ids: Sequence[int]
    ) -> int:
        """The token after the last drawn token that counts; another token after half of all
        contexts."""
        drafts = sequence.token_ids[sequence.num_tokens - sequence.num_drafts :]
        pairs = enumerate(zip(drafts, drawn_ids, strict=False))
        k = next((k for k, (draft, drawn) in pairs if draft != drawn), len(drafts))
        context_hash = extend_hash(hashes[k], (drawn_ids[k],))
        key = (sequence.seed, sequence.sequence_id.choice, sequence.position + k + 1)
        right = _draw(context_hash, key, self.vocab_size, None)
        return (right + _mix(context_hash) % 2) % self.vocab_size

    def _score_prompt(self, sequence: ScheduledSequence, hashes: list[int]) -> list[TokenScore]:
        first = sequence.scored_start - sequence.start
        last = first + len(sequence.scored_ids)
        if first < 0 or last > len(hashes):
            raise ValueError(f"{sequence.sequence_id}: scores of tokens that are not computed")
        depth = sequence.sampling.prompt_logprobs or 0
        return [
            self._score(context_hash, token_id, depth)
            for context_hash, token_id in zip(hashes[first:last], sequence.scored_ids, strict=True)
        ]

    def _token_ids(self, sequence: ScheduledSequence) -> list[int]:
        token_ids = list(sequence.token_ids)
        if sequence.previous_row is not None:
            token_ids[-1 - sequence.num_drafts] = self._previous[sequence.previous_row]
        return token_ids

    def _read_context(self, sequence: ScheduledSequence) -> int:
        """The hash of the tokens before ``start``, as stored in every group of the cache."""
        if not sequence.start:
            return EMPTY_HASH
        hashes = {
            self._read_state(sequence, table[: group.num_blocks])
            if isinstance(group, StateCache)
            else self._read_tokens(sequence, table, group)
            for table, group in zip(sequence.block_tables, self.groups, strict=True)
        } - {None}
        context_hash = hashes.pop()
        if hashes or context_hash is None:
            raise ValueError(f"{sequence.sequence_id}: the groups hold different contexts")
        return context_hash

    def _read_state(self, sequence: ScheduledSequence, blocks: Sequence[int]) -> int:
        held = {self._slots.read(slot) for slot in self._state_slots(blocks)}
        marker, context_hash = held.pop() or (_EMPTY, EMPTY_HASH)
        if held or marker != _STATE:
            raise ValueError(f"{sequence.sequence_id}: its blocks hold no whole state")
        return context_hash

    def _read_tokens(
        self, sequence: ScheduledSequence, table: Sequence[int], group: TokenCache
    ) -> int | None:
        """None if the first token of the step reads no token before it."""
        context_hash = None if group.first_read(sequence.start) else EMPTY_HASH
        for at in self._read_positions(sequence, group):
            held = self._slots.read(self._slot(table, at))
            if held is None or held[0] == _STATE:
                raise ValueError(f"{sequence.sequence_id}: the slot of token {at} is empty")
            token_id, held_hash = held
            is_next = context_hash is None or held_hash == extend_hash(context_hash, (token_id,))
            if self._is_thorough and not is_next:
                raise ValueError(f"{sequence.sequence_id}: the slot of token {at} holds another")
            context_hash = held_hash
        return context_hash

    def _read_positions(self, sequence: ScheduledSequence, group: TokenCache) -> range:
        """The tokens before the step that it reads; only the last token without ``is_thorough``."""
        first = group.first_read(sequence.start)
        return range(first if self._is_thorough else max(first, sequence.start - 1), sequence.start)

    def _state_slots(self, blocks: Sequence[int]) -> list[int]:
        """The slots that hold a state: without ``is_thorough`` the first slot of each block."""
        num_slots = self.block_size if self._is_thorough else 1
        return [block * self.block_size + k for block in blocks for k in range(num_slots)]

    def _slot(self, table: Sequence[int], at: int) -> int:
        block = table[at // self.block_size]
        if block < 0:
            raise ValueError(f"the block of token {at} has been released")
        return block * self.block_size + at % self.block_size

    def _check_writes(self, batch: ScheduledBatch) -> None:
        """Check that no slot that a sequence writes is written or read by another sequence."""
        written: dict[int, ScheduledSequence] = {}
        for sequence in batch.sequences:
            slots = self._written_slots(sequence)
            if len(set(slots)) < len(slots) or not written.keys().isdisjoint(slots):
                raise ValueError("two tokens of one step were given the same slot")
            written |= dict.fromkeys(slots, sequence)
        for sequence in batch.sequences:
            if any(written.get(slot, sequence) is not sequence for slot in self._read(sequence)):
                raise ValueError("a step reads what another sequence writes")

    def _written_slots(self, sequence: ScheduledSequence) -> list[int]:
        slots: list[int] = []
        for table, group in zip(sequence.block_tables, self.groups, strict=True):
            if isinstance(group, StateCache):
                slots += self._state_slots(table[-group.num_blocks :])
            else:
                end = sequence.start + sequence.num_tokens
                slots += [self._slot(table, at) for at in range(sequence.start, end)]
        return slots

    def _read(self, sequence: ScheduledSequence) -> list[int]:
        slots: list[int] = []
        for table, group in zip(sequence.block_tables, self.groups, strict=True):
            if not sequence.start:
                continue
            if isinstance(group, StateCache):
                slots += self._state_slots(table[: group.num_blocks])
            else:
                slots += [self._slot(table, at) for at in self._read_positions(sequence, group)]
        return slots
