"""Checks whether a text matches a constraint, with a tokenizer whose tokens are bytes."""

from collections.abc import Sequence

import llguidance

from shared.grammars import grammar_source
from shared.messages import Constraint

_END = 256


class _Bytes:
    eos_token_id = _END
    bos_token_id = None
    tokens: Sequence[bytes] = [*(bytes([k]) for k in range(_END)), b"<end>"]
    special_token_ids: Sequence[int] = [_END]

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


_TOKENIZER = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes()))


def matches(constraint: Constraint, text: str) -> bool:
    """Whether ``text`` matches the whole constraint. Raises `AssertionError` if the constraint is
    invalid."""
    running = llguidance.LLMatcher(_TOKENIZER, grammar_source(constraint), log_level=0)
    assert not running.is_error(), running.get_error()
    encoded = list(text.encode())
    return running.try_consume_tokens(encoded) == len(encoded) and running.is_accepting()
