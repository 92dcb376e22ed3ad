"""Determines how a transformers model uses attention by running it, or rejects the model.

A model that bypasses the registered attention function, or needs a feature that our attention
lacks, would run without an error and produce wrong tokens. Each model is therefore run twice at
load time:

1. With a recording attention. It must be called once per layer, with the right shapes and supported
   arguments, and the mask that the model builds for the layer must be causal, with or without a
   sliding window or fixed chunks.
2. With the same tokens in other rows, one of them replaced and moved far away. All others must
   have the same logits. This proves that only attention mixes tokens, and that positions are the
   ones passed in, not a token's index in the batch. Recurrent layers, convolutions and rotary
   frequencies that depend on the longest sequence fail here.

In both runs attention returns a token's own query + key + value, which depends on nothing else.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import AttentionMaskInterface

from shared.errors import StartupError
from worker.model.decoders.interposed import NAME, NAME_WITH_MASKS, AttentionFunction, logits_with

_NUM_TOKENS = 16
_SHIFT = 8
_FAR = (1 << 20) + 4321
_OTHER_MASK = -1
_IRRELEVANT = {
    *("scaling", "sliding_window", "softcap", "s_aux"),
    *("is_causal", "position_ids", "cache_position"),
}
"""Arguments that are read below, or that follow from the step's positions."""


class Visible(NamedTuple):
    """The tokens that a token attends to: of the last ``window``, or of its own ``chunk``."""

    window: int | None = None
    chunk: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerAttention:
    """The kind of attention in a layer."""

    scale: float
    visible: Visible
    softcap: float | None
    num_kv_heads: int
    head_dim: int
    """Of keys and values, whichever are longer: the others are filled up with zeros."""

    @property
    def key_size(self) -> int:
        """The elements of a token's key in all heads, as the cache keeps it."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The attention parameters that a decoder needs."""

    layers: tuple[LayerAttention, ...]
    vocab_size: int
    max_seq_len: int
    dtype: torch.dtype

    @property
    def longest(self) -> LayerAttention:
        """The layer with the longest keys."""
        return max(self.layers, key=lambda layer: layer.key_size)

    @property
    def head_dims(self) -> frozenset[int]:
        return frozenset(layer.head_dim for layer in self.layers)


class Unsupported(Exception):
    """The reason why a model cannot use our attention, as the end of a sentence about it."""


def examine(model: Any) -> AttentionShape:
    """Probe a model that was loaded with `NAME_WITH_MASKS`, and switch it to `NAME`.

    Raises `StartupError`.
    """
    try:
        with torch.inference_mode():
            shape = _record(model)
            model.set_attn_implementation(NAME)
            _check_independence(model, shape.max_seq_len)
    except Unsupported as reason:
        raise refusal(model.config, str(reason)) from None
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise refusal(model.config, f"it fails on packed tokens ({error})") from error
    return shape


def refusal(config: Any, reason: str) -> StartupError:
    return StartupError(f"model type {config.model_type} cannot be served: {reason}")


@dataclass(slots=True)
class Recorder:
    """An attention that checks its arguments and returns values that depend only on the token
    itself."""

    layers: dict[int, LayerAttention] = field(default_factory=dict)
    dtypes: set[torch.dtype] = field(default_factory=set)

    def __call__(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        arguments: dict[str, Any],
    ) -> Tensor:
        _check_shapes(query, key, value)
        _check_arguments(arguments)
        layer = getattr(module, "layer_idx", None)
        if layer is None or layer in self.layers:
            raise Unsupported("it does not call attention exactly once a layer")
        self.layers[layer] = LayerAttention(
            scale=float(arguments.get("scaling") or query.shape[-1] ** -0.5),
            visible=_visible(module, mask, arguments),
            softcap=arguments.get("softcap") or None,
            num_kv_heads=key.shape[1],
            head_dim=max(key.shape[3], value.shape[3]),
        )
        self.dtypes.add(key.dtype)
        return own_values(module, query, key, value)


def own_values(_: Any, query: Tensor, key: Tensor, value: Tensor, *__: Any) -> Tensor:
    """[1, heads, tokens, dim] to [1, tokens, heads, dim of values]: the sum of a token's query, key
    and value. Longer queries and keys are cut, shorter ones filled up with zeros."""
    groups = query.shape[1] // key.shape[1]
    query, key = (pad(one, (0, value.shape[3] - one.shape[3])) for one in (query, key))
    return (query + (key + value).repeat_interleave(groups, dim=1)).transpose(1, 2)


def _record(model: Any) -> AttentionShape:
    config = model.config.get_text_config()
    recorder = Recorder()
    logits = _run(model, _tokens(model), torch.arange(_NUM_TOKENS), recorder)
    if sorted(recorder.layers) != list(range(config.num_hidden_layers)):
        raise Unsupported(
            f"of its {config.num_hidden_layers} layers {len(recorder.layers)} call a registered "
            "attention"
        )
    if len(recorder.dtypes) != 1:
        raise Unsupported("its layers differ in the type of their keys")
    (dtype,) = recorder.dtypes
    return AttentionShape(
        layers=tuple(recorder.layers[layer] for layer in range(config.num_hidden_layers)),
        vocab_size=logits.shape[-1],
        max_seq_len=config.max_position_embeddings,
        dtype=dtype,
    )


def _check_independence(model: Any, max_seq_len: int) -> None:
    token_ids, positions = _tokens(model), torch.arange(_NUM_TOKENS)
    expected = _run(model, token_ids, positions, own_values)[1:]
    if not expected.isfinite().all():
        raise Unsupported("it computes NaN or infinite logits: its weights or config are damaged")
    moved_ids, moved_positions = token_ids.clone(), positions.clone()
    moved_ids[0], moved_positions[0] = token_ids[1], max_seq_len - 1
    moved = _run(model, moved_ids.roll(_SHIFT), moved_positions.roll(_SHIFT), own_values)
    difference = (moved.roll(-_SHIFT, dims=0)[1:] - expected).abs().max() / expected.abs().max()
    limit = 1e-4 if expected.dtype == torch.float32 else 2e-2
    if not difference.item() <= limit:
        raise Unsupported("tokens of different requests would influence each other")


def _tokens(model: Any) -> Tensor:
    vocab_size = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocab_size, (_NUM_TOKENS,), generator=generator)


def _run(model: Any, token_ids: Tensor, positions: Tensor, attention: AttentionFunction) -> Tensor:
    """Logits [num_tokens, vocab_size]."""
    device = next(iter(model.parameters())).device
    inputs = (token_ids, positions, torch.arange(_NUM_TOKENS))
    return logits_with(attention, model, *(tensor.to(device) for tensor in inputs))


def _check_shapes(query: Tensor, key: Tensor, value: Tensor) -> None:
    heads, kv_heads, dim = query.shape[1], key.shape[1], key.shape[3]
    if (
        key.shape != (1, kv_heads, _NUM_TOKENS, dim)
        or value.shape[:-1] != key.shape[:-1]
        or query.shape != (1, heads, _NUM_TOKENS, dim)
        or heads % kv_heads
    ):
        shapes = [tuple(tensor.shape) for tensor in (query, key, value)]
        raise Unsupported(f"its attention is called with shapes {shapes}")


def _check_arguments(arguments: dict[str, Any]) -> None:
    for name, argument in arguments.items():
        is_neutral = not isinstance(argument, Tensor) and argument in (None, False, 0)
        if name not in _IRRELEVANT and not is_neutral:
            raise Unsupported(f"its attention takes {name}, which is not implemented")


def _visible(module: Any, mask: Tensor | None, arguments: dict[str, Any]) -> Visible:
    """What a layer's mask allows, or, if there is none, its argument."""
    window: int | None = arguments.get("sliding_window")
    if mask is None:
        is_causal = arguments.get("is_causal")
        if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
            raise Unsupported("its attention is not causal")
        return Visible(window)
    if mask.dtype != torch.int64 or mask.numel() != 1 or mask.item() == _OTHER_MASK:
        raise Unsupported("its attention mask is not causal, or neither full, a window nor chunks")
    size = int(mask.item())
    masked = Visible(window=size or None) if size >= 0 else Visible(chunk=_OTHER_MASK - size)
    if window not in (None, masked.window):
        raise Unsupported(
            f"its mask has a window of {masked.window}, its attention one of {window}"
        )
    return masked


def visible_of_mask(*, mask_function: Any, device: torch.device, **_: Any) -> Tensor:
    """The mask that `Recorder` reads: [1, 1, 1, 1] int64, a sliding window, 0 for full attention,
    `_OTHER_MASK`, or that less the size of chunks.

    The mask function is evaluated for tokens a million positions ahead, beyond any window, and at
    two neighbours, which distinguishes a sliding window from fixed chunks.
    """
    try:
        first, second = (_num_visible(at, mask_function, device) for at in (_FAR, _FAR + 1))
    except (IndexError, RuntimeError):
        # It indexes tables of this step, so it is a mask for these tokens only.
        first = second = _OTHER_MASK
    found = first if first == second else _OTHER_MASK
    if first > 0 and second in (1, first + 1) and (chunk := _chunk(first, mask_function, device)):
        found = _OTHER_MASK - chunk
    return torch.tensor(found, device=device).view(1, 1, 1, 1)


def _num_visible(position: int, mask_function: Any, device: torch.device) -> int:
    """The number of visible tokens up to ``position``; 0 for all, `_OTHER_MASK` if there are
    gaps."""
    zero = torch.zeros((), dtype=torch.int64, device=device)
    keys = torch.arange(position + _NUM_TOKENS, device=device)
    visible = mask_function(zero, zero, zero + position, keys).expand(len(keys))
    past, future = visible[: position + 1], visible[position + 1 :]
    window = int(past.sum())
    if future.any() or not past[len(past) - window :].all():
        return _OTHER_MASK
    return 0 if window == len(past) else window


def _chunk(num_visible: int, mask_function: Any, device: torch.device) -> int:
    """The size of fixed chunks, of which the token at `_FAR` sees so many tokens; 0 if there are
    none."""
    start = _FAR + 1 - num_visible
    before = _num_visible(start - 1, mask_function, device)
    sees_chunks = before > 0 and start % before == 0
    return before if sees_chunks and _num_visible(start, mask_function, device) == 1 else 0


AttentionMaskInterface.register(NAME_WITH_MASKS, visible_of_mask)
