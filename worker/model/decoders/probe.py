"""Determines how a transformers model uses attention by running it, or rejects the model.

A model that bypasses the registered attention function, or needs a feature that our attention
lacks, would run without an error and produce wrong tokens. Each model is therefore run twice at
load time:

1. With a recording attention. It must be called once per layer, with the right shapes and supported
   arguments, and the mask that the model builds for the layer must be causal, with or without a
   sliding window.
2. With the same tokens in other rows, one of them replaced and moved far away. All others must
   have the same logits. This proves that only attention mixes tokens, and that positions are the
   ones passed in, not a token's index in the batch. Recurrent layers, convolutions and rotary
   frequencies that depend on the longest sequence fail here.

In both runs attention returns a token's own query + key + value, which depends on nothing else.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionMaskInterface

from shared.errors import StartupError
from worker.model.decoders.interposed import NAME, NAME_WITH_MASKS, Attention, logits_with

_NUM_TOKENS = 16
_SHIFT = 8
_FAR = (1 << 20) + 4321
_OTHER_MASK = -1
_IRRELEVANT = {"scaling", "sliding_window", "is_causal", "position_ids", "cache_position"}
"""Arguments that are read below, or that follow from the step's positions."""


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """The kind of attention in a layer."""

    scale: float
    sliding_window: int | None


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The attention parameters that a decoder needs."""

    layers: tuple[LayerAttention, ...]
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_seq_len: int
    dtype: torch.dtype


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
    kv_shapes: set[tuple[int, int, torch.dtype]] = field(default_factory=set)
    """(num_kv_heads, head_dim, dtype) of all layers."""

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
            sliding_window=_window(module, mask, arguments),
        )
        self.kv_shapes.add((key.shape[1], key.shape[3], key.dtype))
        return own_values(module, query, key, value)


def own_values(_: Any, query: Tensor, key: Tensor, value: Tensor, *__: Any) -> Tensor:
    """[1, heads, tokens, dim] to [1, tokens, heads, dim]: the sum of a token's query, key and
    value."""
    groups = query.shape[1] // key.shape[1]
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
    if len(recorder.kv_shapes) != 1:
        raise Unsupported("its layers differ in their heads")
    ((num_kv_heads, head_dim, dtype),) = recorder.kv_shapes
    return AttentionShape(
        layers=tuple(recorder.layers[layer] for layer in range(config.num_hidden_layers)),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
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


def _run(model: Any, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
    """Logits [num_tokens, vocab_size]."""
    device = next(iter(model.parameters())).device
    inputs = (token_ids, positions, torch.arange(_NUM_TOKENS))
    return logits_with(attention, model, *(tensor.to(device) for tensor in inputs))


def _check_shapes(query: Tensor, key: Tensor, value: Tensor) -> None:
    if not query.shape[-1] == key.shape[-1] == value.shape[-1]:
        sizes = (query.shape[-1], key.shape[-1], value.shape[-1])
        raise Unsupported(f"its heads of query, key and value have unequal sizes {sizes}")
    heads, kv_heads, dim = query.shape[1], key.shape[1], key.shape[3]
    expected = (1, kv_heads, _NUM_TOKENS, dim)
    if (
        key.shape != expected
        or value.shape != expected
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


def _window(module: Any, mask: Tensor | None, arguments: dict[str, Any]) -> int | None:
    """The layer's sliding window, from the mask or, if there is none, from the argument."""
    window: int | None = arguments.get("sliding_window")
    if mask is None:
        is_causal = arguments.get("is_causal")
        if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
            raise Unsupported("its attention is not causal")
        return window
    if mask.dtype != torch.int64 or mask.numel() != 1 or mask.item() == _OTHER_MASK:
        raise Unsupported("its attention mask is not causal, or neither full nor a sliding window")
    masked = int(mask.item()) or None
    if window not in (None, masked):
        raise Unsupported(f"its mask has a window of {masked}, its attention one of {window}")
    return masked


def window_of_mask(*, mask_function: Any, device: torch.device, **_: Any) -> Tensor:
    """The mask that `Recorder` reads: [1, 1, 1, 1] int64, a sliding window, 0 for full attention or
    `_OTHER_MASK`.

    The mask function is evaluated for tokens a million positions ahead, beyond any window, and at
    two neighbours, which distinguishes a sliding window from fixed chunks.
    """
    try:
        windows = {_window_at(position, mask_function, device) for position in (_FAR, _FAR + 1)}
    except (IndexError, RuntimeError):
        # It indexes tables of this step, so it is a mask for these tokens only.
        windows = {_OTHER_MASK}
    window = windows.pop() if len(windows) == 1 else _OTHER_MASK
    return torch.tensor(window, device=device).view(1, 1, 1, 1)


def _window_at(position: int, mask_function: Any, device: torch.device) -> int:
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


AttentionMaskInterface.register(NAME_WITH_MASKS, window_of_mask)
