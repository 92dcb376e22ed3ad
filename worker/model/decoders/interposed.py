"""Runs a transformers model with our attention in place of its own."""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeAlias

from torch import Tensor
from transformers import AttentionInterface

NAME = "warren"
"""The name under which our attention is registered; models build no masks for it."""
NAME_WITH_MASKS = "warren_with_masks"
"""The same for models that build their masks, which the probe reads."""


AttentionFunction: TypeAlias = Callable[
    [Any, Tensor, Tensor, Tensor, Tensor | None, dict[str, Any]], Tensor
]
"""The function that transformers calls once per layer: (module, query, key, value, mask, arguments)
-> output.

``query`` is [1, num_heads, num_tokens, head_dim], key and value have num_kv_heads; the output is
[1, num_tokens, num_heads, head_dim].
"""

# This is not an argument of the model's forward, because StableLM, Nemotron and others do not
# forward arguments.
_attention: ContextVar[AttentionFunction] = ContextVar("attention")


def logits_with(
    attention: AttentionFunction, model: Any, token_ids: Tensor, positions: Tensor, rows: Tensor
) -> Tensor:
    """Logits [len(rows), vocab_size] of packed tokens [num_tokens], computed with ``attention``."""
    token = _attention.set(attention)
    try:
        logits: Tensor = model(
            input_ids=token_ids[None],
            position_ids=positions[None],
            logits_to_keep=rows,
            use_cache=False,
        ).logits
    finally:
        _attention.reset(token)
    return logits[0]


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    return _attention.get()(module, query, key, value, attention_mask, arguments), None


AttentionInterface.register(NAME, _attend)
AttentionInterface.register(NAME_WITH_MASKS, _attend)
