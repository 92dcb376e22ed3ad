"""Compiles output constraints for the model's vocabulary."""

import functools
import re
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from copy import copy
from itertools import takewhile

from llguidance import LLMatcher

from shared.errors import InvalidRequest
from shared.grammars import CALL_CAPTURE, LIMITS, TRIALS, explained, grammar_source
from shared.messages import Constraint
from shared.turns import TenantThreads
from worker.decode.grammar_vocabulary import vocabulary_of
from worker.decode.json_keys import JsonKeys, Quoted, quoted_tokens, without
from worker.text import Tokenizer

_MAX_COMPILED = 64
"""The number of compiled grammars that are kept; the largest take a few MB."""
_NUM_COMPILERS = 2
_MAX_EQUAL_CALLS = 3
"""The number of equal tool calls in a row after which a choice ends."""
_MAX_REASON_CHARS = 500
_JSON = "%json"
"""The mark before a schema in a grammar."""
_TAG = re.compile(rb"<[^<>=]*>|\[[A-Z_]+\]")
_CALL_ID = re.compile(
    rb"(?<=[\w.-]):[0-9]+(?=<\|tool_call_argument_begin\|>)|\[CALL_ID\][A-Za-z0-9]+(?=[\[{])"
)
"""What distinguishes equal calls, as Kimi and Mistral write them."""
_WORD = re.compile(rb"\w")
_TOKENS_AT_ONCE = 16
_MAX_AHEAD_S = 0.005
"""Maximum time for the masks after drafted tokens, in seconds, except for the last mask. Once they
have taken twice as long, nothing is drafted with the grammar any more."""
_MAX_MASK_S = 0.25
"""Maximum time for computing a mask, in seconds, because all sequences of the step wait for it.
Grammars in common use stay far below; llguidance's own limits do not exclude all others."""


_MAX_FORCING_S = 0.005
"""Seconds of a search for forced tokens after which the grammar is not searched any more: a text of
thousands of tokens is found as a whole, again and again."""


class GrammarMatcher:
    """A `TokenConstraint`: the position of a choice in its grammar.

    A model that cannot stop calling tools ends after some equal calls.
    """

    def __init__(
        self,
        grammar: "Grammar",
        matcher: LLMatcher,
        tokenizer: Tokenizer,
        allowed: bytes | None,
        output_ids: Sequence[int] = (),
        keys: JsonKeys | None = None,
    ) -> None:
        """The matcher of a choice that already has ``output_ids``. ``keys``: for a grammar with
        JSON, at the beginning of the output."""
        self._grammar = grammar
        self._matcher = matcher
        self._tokenizer = tokenizer
        self._num_mask_bytes = tokenizer.num_mask_bytes
        self._allowed = None if allowed is None else int.from_bytes(allowed, "little")
        self._text = b"".join(map(tokenizer.token_bytes, output_ids))
        self._is_repeating = self._repeats()
        self._keys = keys
        if keys is not None:
            keys.read(self._text)

    @property
    def is_complete(self) -> bool:
        """See `TokenConstraint.is_complete`."""
        return self._is_repeating or bool(self._matcher.is_stopped())

    def advance(self, token_id: int) -> None:
        """See `TokenConstraint.advance`."""
        if not self._matcher.consume_token(token_id):
            raise _stuck(explained(self._matcher.get_error()))
        text = self._tokenizer.token_bytes(token_id)
        self._text += text
        if self._keys is not None:
            self._keys.read(text)
        self._is_repeating = self._repeats()

    def _repeats(self) -> bool:
        call = self._matcher.get_capture(CALL_CAPTURE)
        if not call:  # a client's own grammar may have an empty capture of this name
            return False
        return num_repeats(self._text, call) >= _MAX_EQUAL_CALLS

    def mask(self) -> bytes:
        """See `TokenConstraint.mask`. Raises `InvalidRequest` if a limit is exceeded."""
        if self._is_repeating:  # it was continued at its end
            return token_mask(self._tokenizer.eos_ids, self._num_mask_bytes)
        began = time.thread_time()
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise _stuck(explained(self._matcher.get_error()))
        if time.thread_time() - began > _MAX_MASK_S:
            raise _refusal("a step takes too long")
        mask = mask[: self._num_mask_bytes].ljust(self._num_mask_bytes, b"\0")
        if self._keys is not None and (repeating := list(self._keys.repeating())):
            mask = without(mask, repeating)
            if not any(mask):
                raise _stuck("each property that may follow has been written")
        if self._allowed is None:
            return mask
        both = int.from_bytes(mask, "little") & self._allowed
        return both.to_bytes(self._num_mask_bytes, "little")

    def forced_tokens(self) -> Sequence[int]:
        """See `TokenConstraint.forced_tokens`."""
        grammar = self._grammar
        if self.is_complete or grammar.is_slow_to_force or grammar.is_slow_ahead:
            return []
        began = time.thread_time()
        forced = self._matcher.compute_ff_tokens()
        grammar.is_slow_to_force = time.thread_time() - began > _MAX_FORCING_S
        keys = None if self._keys is None else self._keys.copy()
        return list(takewhile(lambda token_id: self._is_possible(token_id, keys), forced))

    def _is_possible(self, token_id: int, keys: JsonKeys | None) -> bool:
        """Whether the model generates a token, and it repeats none of the ``keys``."""
        if token_id >= self._tokenizer.vocab_size:
            return False
        return keys is None or not keys.read(self._tokenizer.token_bytes(token_id))

    def masks_after(self, token_ids: Sequence[int]) -> Sequence[bytes]:
        """See `TokenConstraint.masks_after`."""
        if self._grammar.is_slow_ahead:
            return []
        ahead = copy(self)
        ahead._matcher = self._matcher.deep_copy()
        ahead._keys = None if self._keys is None else self._keys.copy()
        masks: list[bytes] = []
        until = time.thread_time() + _MAX_AHEAD_S
        with suppress(InvalidRequest):
            for token_id in token_ids:
                ahead.advance(token_id)
                if ahead.is_complete or time.thread_time() > until:
                    break
                masks.append(ahead.mask())
        self._grammar.is_slow_ahead = time.thread_time() > until + _MAX_AHEAD_S
        return masks


class Grammar:
    """A compiled constraint, shared by choices and jobs."""

    def __init__(
        self,
        matcher: LLMatcher,
        tokenizer: Tokenizer,
        quoted: Quoted | None = None,
        *,
        is_json: bool = False,
    ) -> None:
        """``quoted``: for a grammar with JSON; ``is_json``: that is nothing else."""
        self.is_slow_to_force = False
        """Whether a search for forced tokens took too long."""
        self.is_slow_ahead = False
        """Whether a mask after drafted tokens took too long."""
        self._matcher = matcher
        self._tokenizer = tokenizer
        self._quoted = quoted
        self._is_json = is_json
        self._known: bytes | None = None
        """The tokens that the model generates, if the tokenizer has others."""
        if tokenizer.num_entries > tokenizer.vocab_size:
            self._known = token_mask(range(tokenizer.vocab_size), tokenizer.num_mask_bytes)

    def matcher(self, output_ids: Sequence[int], allowed: bytes | None) -> GrammarMatcher:
        """A matcher for a choice that already has ``output_ids``. Raises `InvalidRequest`."""
        matcher = self._matcher.deep_copy()
        # A costly grammar takes milliseconds for a token, during which no other thread runs.
        for start in range(0, len(output_ids), _TOKENS_AT_ONCE):
            if not matcher.consume_tokens(list(output_ids[start : start + _TOKENS_AT_ONCE])):
                raise _stuck(explained(matcher.get_error()))
        allowed = self._known if allowed is None else allowed
        keys = None if self._quoted is None else JsonKeys(self._quoted, is_json=self._is_json)
        return GrammarMatcher(self, matcher, self._tokenizer, allowed, output_ids, keys)


class Constraints:
    """Compiles the grammars of a model's jobs, for each tenant one at a time, and outside the event
    loop."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._grammars: OrderedDict[tuple[str, Constraint], Grammar] = OrderedDict()
        """By tenant, too: the time of an answer would tell others what a tenant asks for."""
        self._compilers = TenantThreads(_NUM_COMPILERS, "grammars")

    def prepare(self) -> None:
        """Build what all grammars of a tokenizer share. It takes up to a second, in which no other
        thread runs: a worker calls this before it serves, because the first grammar would."""
        quoted_tokens(self._tokenizer)
        vocabulary_of(self._tokenizer)  # last: a thread that reads weights can proceed before it

    async def compile(self, constraint: Constraint, tenant: str = "") -> Grammar:
        """Compile a constraint in the tenant's turn, or return it from the cache.

        Raises `InvalidRequest` if it is invalid, takes too much time or memory, or if the tokenizer
        does not support constraints, and `Overloaded`.
        """
        key = tenant, constraint
        grammar = self._grammars.get(key)
        if grammar is None:
            if problem := await TRIALS.problem(constraint, tenant):
                raise _refusal(problem)
            compiling = functools.partial(self._known_or_compiled, key)
            grammar = await self._compilers.run(tenant, compiling)
        return self._keep(key, grammar)

    def compile_now(self, constraint: Constraint) -> Grammar:
        """Compile a program's own constraint in its own thread, without a trial in the sandbox.
        Raises `InvalidRequest`."""
        key = "", constraint
        return self._keep(key, self._known_or_compiled(key))

    def _keep(self, key: tuple[str, Constraint], grammar: Grammar) -> Grammar:
        self._grammars[key] = grammar
        self._grammars.move_to_end(key)
        while len(self._grammars) > _MAX_COMPILED:
            self._grammars.popitem(last=False)
        return grammar

    def _known_or_compiled(self, key: tuple[str, Constraint]) -> Grammar:
        # An equal grammar may have been compiled while this grammar waited for its turn.
        return self._grammars.get(key) or self._compile(key[1])

    def _compile(self, constraint: Constraint) -> Grammar:
        vocabulary = vocabulary_of(self._tokenizer)
        if vocabulary.llguidance is None:
            raise _refusal("the tokenizer of the model does not support constraints")
        source = grammar_source(vocabulary.with_token_ids(constraint))
        matcher = LLMatcher(vocabulary.llguidance, source, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise _refusal(explained(matcher.get_error()))
        is_json = constraint.kind == "json_schema"
        has_json = is_json or _JSON in constraint.source
        quoted = quoted_tokens(self._tokenizer) if has_json else None
        grammar = Grammar(matcher, self._tokenizer, quoted, is_json=is_json)
        grammar.matcher((), None).mask()  # the first mask is the slowest
        return grammar


def token_mask(token_ids: Iterable[int], num_bytes: int) -> bytes:
    """A mask as `TokenConstraint.mask`, of ``token_ids``."""
    mask = bytearray(num_bytes)
    for token_id in token_ids:
        mask[token_id // 8] |= 1 << token_id % 8
    return bytes(mask)


def num_repeats(text: bytes, call: bytes) -> int:
    """How many equal calls stand at the end of ``text``. ``call`` is the last whole call, and not
    empty. Between two calls there are only tags and separators. Their numbers and ids do not
    matter."""
    unnumbered = _CALL_ID.sub(b"", call)
    if unnumbered != call:
        text, call = _CALL_ID.sub(b"", text), unnumbered
    between = text.split(call)[1:-1]
    separators = takewhile(lambda gap: not _WORD.search(_TAG.sub(b"", gap)), reversed(between))
    return 1 + sum(1 for _ in separators)


def _refusal(reason: str) -> InvalidRequest:
    # llguidance's reason may quote the whole constraint.
    reason = reason[:_MAX_REASON_CHARS]
    return InvalidRequest(f"The constraint cannot be used: {reason}", param="response_format")


def _stuck(reason: str) -> InvalidRequest:
    return InvalidRequest(
        f"The output cannot continue within its constraint: {reason[:_MAX_REASON_CHARS]}",
        param="response_format",
    )
