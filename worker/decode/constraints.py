"""Compiles output constraints for the model's vocabulary."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from llguidance import LLMatcher, LLTokenizer
from msgspec import structs

from shared.errors import InvalidRequest
from shared.grammars import CALLS_TAG, LIMITS, TRIALS, grammar_source
from shared.messages import Constraint
from worker.text import Tokenizer

_MAX_COMPILED = 64
"""The number of compiled grammars that are kept; the largest take a few MB."""
_MAX_REASON_CHARS = 500
_MAX_MASK_S = 0.25
"""Maximum time for computing one mask, in seconds, because all sequences of the step wait for it.
Grammars in common use stay far below; llguidance's own limits do not exclude all others."""


class GrammarMatcher:
    """A `TokenConstraint`: the position of one choice in its grammar."""

    def __init__(self, matcher: LLMatcher, num_mask_bytes: int, allowed: bytes | None) -> None:
        self._matcher = matcher
        self._num_mask_bytes = num_mask_bytes
        self._allowed = None if allowed is None else int.from_bytes(allowed, "little")

    @property
    def is_complete(self) -> bool:
        """See `TokenConstraint.is_complete`."""
        return bool(self._matcher.is_stopped())

    def advance(self, token_id: int) -> None:
        """See `TokenConstraint.advance`."""
        if not self._matcher.consume_token(token_id):
            raise _stuck(self._matcher)

    def mask(self) -> bytes:
        """See `TokenConstraint.mask`. Raises `InvalidRequest` if a limit is exceeded."""
        began = time.thread_time()
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise _stuck(self._matcher)
        if time.thread_time() - began > _MAX_MASK_S:
            raise _refusal("a step takes too long")
        mask = mask[: self._num_mask_bytes].ljust(self._num_mask_bytes, b"\0")
        if self._allowed is None:
            return mask
        both = int.from_bytes(mask, "little") & self._allowed
        return both.to_bytes(self._num_mask_bytes, "little")


class Grammar:
    """A compiled constraint, shared by choices and jobs."""

    def __init__(self, matcher: LLMatcher, num_mask_bytes: int) -> None:
        self._matcher = matcher
        self._num_mask_bytes = num_mask_bytes

    def matcher(self, output_ids: Sequence[int], allowed: bytes | None) -> GrammarMatcher:
        """A matcher for a choice that already has ``output_ids``. Raises `InvalidRequest`."""
        matcher = self._matcher.deep_copy()
        if not matcher.consume_tokens(list(output_ids)):
            raise _stuck(matcher)
        return GrammarMatcher(matcher, self._num_mask_bytes, allowed)


class Constraints:
    """Compiles the grammars of one model's jobs, one at a time and outside the event loop."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._vocabulary: LLTokenizer | None = None
        self._grammars: OrderedDict[Constraint, Grammar] = OrderedDict()
        self._compiler = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")

    async def compile(self, constraint: Constraint) -> Grammar:
        """Compile a constraint, or return it from the cache.

        Raises `InvalidRequest` if it is invalid or takes too much time or memory, and `Overloaded`.
        """
        grammar = self._grammars.get(constraint)
        if grammar is None:
            if problem := await TRIALS.problem(constraint):
                raise _refusal(problem)
            grammar = await asyncio.get_running_loop().run_in_executor(
                self._compiler, self._compile, constraint
            )
        self._grammars[constraint] = grammar
        self._grammars.move_to_end(constraint)
        while len(self._grammars) > _MAX_COMPILED:
            self._grammars.popitem(last=False)
        return grammar

    def _compile(self, constraint: Constraint) -> Grammar:
        if self._vocabulary is None:
            self._vocabulary = LLTokenizer(
                self._tokenizer.source,
                n_vocab=self._tokenizer.vocab_size,
                eos_token=sorted(self._tokenizer.eos_ids) or None,
            )
        source = grammar_source(self._with_token_ids(constraint))
        matcher = LLMatcher(self._vocabulary, source, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise _refusal(matcher.get_error())
        grammar = Grammar(matcher, self._tokenizer.num_mask_bytes)
        grammar.matcher((), None).mask()  # the first mask is the slowest
        return grammar

    def _with_token_ids(self, constraint: Constraint) -> Constraint:
        if constraint.kind != "lark" or CALLS_TAG not in constraint.source:
            return constraint
        entry = CALLS_TAG[1:-1]
        token_id = self._tokenizer.token_id(entry)
        written = f'"{entry}"' if token_id is None else f"<[{token_id}]>"
        return structs.replace(constraint, source=constraint.source.replace(CALLS_TAG, written))


def _refusal(reason: str) -> InvalidRequest:
    # llguidance's reason may quote the whole constraint.
    reason = reason[:_MAX_REASON_CHARS]
    return InvalidRequest(f"The constraint cannot be used: {reason}", param="response_format")


def _stuck(matcher: LLMatcher) -> InvalidRequest:
    return InvalidRequest(
        f"The output cannot continue within its constraint: {matcher.get_error()}",
        param="response_format",
    )
