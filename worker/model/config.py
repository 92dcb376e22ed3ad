"""Reads ``config.json`` of decoders of the Llama family."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.errors import StartupError
from shared.model_files import read_json_object

AWQ: Mapping[str, Any] = {"bits": 4, "version": "gemm", "zero_point": True}
"""The only AWQ layout that is supported."""
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Those whose decoder is ours; all others run through transformers' modules, as far as they can."""


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """The sizes and constants of a native decoder."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_seq_len: int
    has_tied_embeddings: bool
    is_awq: bool
    """Whether the checkpoint's matrices are in AutoAWQ's layout."""
    sliding_windows: tuple[int | None, ...]
    """The sliding window of each layer; None for full attention."""
    rope: dict[str, Any]
    """``rope_theta``, ``rope_type`` and the parameters of that type."""


def read_json_config(directory: Path) -> dict[str, Any]:
    """Read ``config.json``.

    Raises `StartupError` if it is missing or not JSON, if the weights are quantized with another
    method than AWQ, or if tokens attend to those after them, neither of which is supported.
    """
    config = read_json_object(directory / "config.json")
    if config is None:
        raise StartupError("the model's directory has no config.json")
    if (method := _quantization(config)) and not (_is_awq(config) and is_native(config)):
        raise StartupError(
            f"the model's weights are quantized with {method}, which is not supported: use the "
            "model in its original precision, or as a GGUF file"
        )
    if config.get("is_causal") is False or config.get("use_bidirectional_attention"):
        raise StartupError("the model's attention is not causal, which is not supported")
    return config


def _quantization(config: dict[str, Any]) -> str | None:
    """The quantization method with its details, such as awq (bits 3) or fp8; None for plain
    weights."""
    for holder in (config, config.get("text_config") or {}):
        found = holder.get("quantization_config") or holder.get("compression_config")
        if found:
            # Older versions of bitsandbytes do not name the method.
            method = str(found.get("quant_method") or "bitsandbytes")
            odd = [f"{key} {found[key]}" for key in AWQ if found.get(key, AWQ[key]) != AWQ[key]]
            return f"{method} ({', '.join(odd)})" if method == "awq" and odd else method
    return None


def _is_awq(config: dict[str, Any]) -> bool:
    return "quantization_config" in config and _quantization(config) == "awq"


def is_native(config: dict[str, Any]) -> bool:
    """Whether `NativeDecoder` supports this configuration."""
    return (
        config.get("model_type") in FAMILIES
        and config.get("hidden_act") == "silu"
        and _rope(config).get("partial_rotary_factor", 1.0) == 1.0
    )


def decoder_config(config: dict[str, Any]) -> DecoderConfig:
    """Parse the configuration. Raises `StartupError` naming the first key that is missing or whose
    value no model can have."""
    try:
        num_heads = _size(config, "num_attention_heads")
        num_kv_heads = _size(config, "num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise StartupError(
                f"the model's config.json says that {num_heads} heads share {num_kv_heads} "
                "key-value heads, which is not a divisor"
            )
        hidden_size = _size(config, "hidden_size")
        return DecoderConfig(
            vocab_size=_size(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_size(config, "intermediate_size"),
            num_layers=_size(config, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=_size(config, "head_dim", hidden_size // num_heads),
            rms_norm_eps=config["rms_norm_eps"],
            max_seq_len=_max_seq_len(config),
            has_tied_embeddings=config.get("tie_word_embeddings", False),
            is_awq=_is_awq(config),
            sliding_windows=_sliding_windows(config),
            rope=_rope(config),
        )
    except KeyError as error:
        raise StartupError(f"the model's config.json has no {error}") from None


def _size(config: dict[str, Any], key: str, default: int | None = None) -> int:
    """A number of at least one; ``default`` if it is missing or null. Raises `KeyError` if there is
    no default either, and `StartupError` for another value."""
    size = config[key] if default is None else config.get(key)
    if size is None:
        size = default
    if not isinstance(size, int) or size < 1:
        raise StartupError(f"the model's config.json says {key} {size!r}, which no model can have")
    return size


def _sliding_windows(config: dict[str, Any]) -> tuple[int | None, ...]:
    num_layers: int = config["num_hidden_layers"]
    window: int | None = config.get("sliding_window")
    if config["model_type"] == "mistral":
        return (window,) * num_layers
    if config["model_type"] == "llama" or not config.get("use_sliding_window", False):
        return (None,) * num_layers
    first = config["max_window_layers"]
    kinds = config.get("layer_types") or [
        "sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)
    ]
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _max_seq_len(config: dict[str, Any]) -> int:
    """The longest context, to which YaRN extends the original one: Qwen's configurations with YaRN
    keep the other number."""
    stated = _size(config, "max_position_embeddings")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    original = rope.get("original_max_position_embeddings")
    if original is None or _rope(config)["rope_type"] != "yarn":
        return stated
    return max(stated, int(rope.get("factor", 1) * original))


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """Normalize both spellings: ``rope_parameters``, and ``rope_theta`` with ``rope_scaling``."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return {
        "rope_theta": config.get("rope_theta", 10_000.0),
        "rope_type": rope.get("type", "default"),
        "original_max_position_embeddings": config.get("max_position_embeddings"),
        "partial_rotary_factor": config.get("partial_rotary_factor", 1.0),
        **rope,
    }
