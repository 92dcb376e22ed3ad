"""The logits processing of a sequence, updated incrementally with each token."""

from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from contextlib import suppress

from shared.errors import InvalidRequest
from shared.messages import SamplingParams
from worker.engine.interface import LogitEdits, Submit, TokenPenalties


class LogitEditor:
    """Maintains the `LogitEdits` of a sequence. The cost per token is independent of its length."""

    def __init__(self, submit: Submit) -> None:
        self._submit = submit
        self._end_ids = (*submit.eos_ids, *submit.sampling.stop_token_ids)
        self._penalties = _Penalties(submit) if _has_penalties(submit.sampling) else None
        self._bad_words = _BadWords(submit)
        self.needs_last_token = (
            self._penalties is not None
            or self._bad_words.has_phrases
            or submit.constraint is not None
        )
        """Whether a draw depends on the previous token."""
        self._next: LogitEdits | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the constraint allows no further token."""
        return self._submit.constraint is not None and self._submit.constraint.is_complete

    def take(self, token_id: int) -> None:
        """Add the next token. Raises `InvalidRequest` if the constraint does not allow it."""
        if self.needs_last_token:
            self._next = None
        if self._penalties is not None:
            self._penalties.count(token_id)
        self._bad_words.take(token_id)
        if self._submit.constraint is not None:
            self._submit.constraint.advance(token_id)

    @property
    def is_prepared(self) -> bool:
        """Whether the edits of the next draw can be taken."""
        return self._next is not None

    def prepare(self, position: int) -> None:
        """Prepare the edits for output token ``position``, once all tokens before it are known.

        Raises `InvalidRequest` if they leave no token to draw.
        """
        self._next = self._edits(position)

    def edits(self, position: int) -> LogitEdits:
        """The edits for output token ``position``, for which the editor must be prepared."""
        assert self._next is not None
        return self._next if self.needs_last_token else self._edits(position)

    def forced_tokens(self) -> Sequence[int]:
        """The next tokens, as far as the constraint leaves no choice."""
        constraint = self._submit.constraint
        return () if constraint is None else constraint.forced_tokens()

    def edits_after(self, drafts: Sequence[int], position: int) -> list[LogitEdits]:
        """The edits for the tokens after each of ``drafts``, which begin at output token
        ``position``, as far as the edits can be known in advance."""
        if self._penalties is not None or self._bad_words.has_phrases:
            return []
        constraint, allowed = self._submit.constraint, self._submit.allowed
        masks = [allowed] * len(drafts) if constraint is None else constraint.masks_after(drafts)
        edits: list[LogitEdits] = []
        with suppress(InvalidRequest):
            for k, mask in enumerate(masks, position + 1):
                edits.append(self._edits_with(mask, k))
        return edits

    def _edits(self, position: int) -> LogitEdits:
        return self._edits_with(self._mask(), position)

    def _edits_with(self, mask: bytes | None, position: int) -> LogitEdits:
        banned_ids = self._bad_words.banned_ids()
        if position < self._submit.sampling.min_tokens:
            banned_ids = [*banned_ids, *self._end_ids]
        if mask is not None:
            mask, banned_ids = _without(mask, banned_ids), ()
        penalties = None if self._penalties is None else self._penalties.by_token
        return LogitEdits(self._submit.sampling.logit_bias, penalties, banned_ids, mask)

    def _mask(self) -> bytes | None:
        constraint = self._submit.constraint
        return self._submit.allowed if constraint is None else constraint.mask()


def editor(submit: Submit) -> LogitEditor | None:
    """The editor of a sequence, or None if its logits need no processing."""
    sampling = submit.sampling
    has_edits = (
        _has_penalties(sampling)
        or sampling.logit_bias
        or sampling.min_tokens > len(submit.output_ids)
        or submit.bad_words
        or submit.allowed is not None
        or submit.constraint is not None
    )
    return LogitEditor(submit) if has_edits else None


def _has_penalties(sampling: SamplingParams) -> bool:
    return (
        sampling.repetition_penalty != 1
        or sampling.presence_penalty != 0
        or sampling.frequency_penalty != 0
    )


class _Penalties:
    """Counts the tokens of prompt and output, or of the output only if that is sufficient."""

    def __init__(self, submit: Submit) -> None:
        sampling = submit.sampling
        self._presence = sampling.presence_penalty
        self._frequency = sampling.frequency_penalty
        repeated = submit.prompt_ids if sampling.repetition_penalty != 1 else ()
        token_ids = array("q", dict.fromkeys(repeated))
        self._places = {token_id: place for place, token_id in enumerate(token_ids)}
        self._counts: Counter[int] = Counter()
        subtracted = array("f", bytes(4 * len(token_ids)))
        self.by_token = TokenPenalties(token_ids, subtracted, sampling.repetition_penalty)
        for token_id in submit.output_ids:
            self.count(token_id)

    def count(self, token_id: int) -> None:
        token_ids, subtracted, _ = self.by_token
        place = self._places.setdefault(token_id, len(token_ids))
        if place == len(token_ids):
            token_ids.append(token_id)
            subtracted.append(0.0)
        self._counts[token_id] += 1
        # Computed from the count instead of accumulated, so that it does not depend on where the
        # sequence started.
        subtracted[place] = self._presence + self._frequency * self._counts[token_id]


class _BadWords:
    """Finds the bad words whose tokens, except the last, have been generated."""

    def __init__(self, submit: Submit) -> None:
        self._single_ids = [word[0] for word in submit.bad_words if len(word) == 1]
        self._phrases: defaultdict[int, list[Sequence[int]]] = defaultdict(list)
        """Indexed by the token before the last."""
        for word in submit.bad_words:
            if len(word) > 1:
                self._phrases[word[-2]].append(tuple(word))
        longest = max(map(len, submit.bad_words), default=1)
        self._tail = deque(submit.output_ids, maxlen=longest - 1)

    @property
    def has_phrases(self) -> bool:
        return bool(self._phrases)

    def take(self, token_id: int) -> None:
        self._tail.append(token_id)

    def banned_ids(self) -> Sequence[int]:
        """The tokens that would complete a bad word."""
        if not self._tail or self._tail[-1] not in self._phrases:
            return self._single_ids
        tail = tuple(self._tail)
        words = self._phrases[tail[-1]]
        return self._single_ids + [word[-1] for word in words if tail[1 - len(word) :] == word[:-1]]


def _without(mask: bytes, banned_ids: Sequence[int]) -> bytes:
    """The mask without these tokens. Raises `InvalidRequest` if none remains."""
    if banned_ids:
        bits = bytearray(mask)
        for token_id in banned_ids:
            bits[token_id // 8] &= ~(1 << token_id % 8) & 0xFF
        mask = bytes(bits)
    if mask.count(0) == len(mask):
        raise InvalidRequest("The constraints on the output allow no next token.")
    return mask
