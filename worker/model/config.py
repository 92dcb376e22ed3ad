"""Reads ``config.json`` of decoders of the Llama family."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from msgspec import Struct

from shared.errors import StartupError
from shared.model_files import check_fields, read_json_object

HasBias: TypeAlias = bool | Literal["as configured"]


@dataclass(frozen=True, slots=True)
class Family:
    """What the models of a family have, and the defaults of its configuration in transformers.

    None: a default that follows from other sizes.
    """

    num_kv_heads: int | None = None
    head_dim: int | None = None
    max_seq_len: int = 32_768
    has_windows: HasBias = "as configured"
    """Whether all layers have a sliding window: some do if the configuration says so."""
    has_qkv_bias: HasBias = "as configured"
    has_output_bias: HasBias = "as configured"
    has_mlp_bias: HasBias = False
    has_qk_norms: bool = False


FAMILIES: Mapping[str, Family] = {
    "llama": Family(max_seq_len=2048, has_windows=False, has_mlp_bias="as configured"),
    "mistral": Family(
        num_kv_heads=8,
        max_seq_len=131_072,
        has_windows=True,
        has_qkv_bias=False,
        has_output_bias=False,
    ),
    "qwen2": Family(num_kv_heads=32, has_qkv_bias=True, has_output_bias=False),
    "qwen3": Family(num_kv_heads=32, head_dim=128, has_qk_norms=True),
}
"""The families whose decoder is ours; all others run through transformers' modules, as far as they
can."""
_WINDOW = 4096
_FIRST_WINDOW_LAYER = 28
_EPS = 1e-6
_THETA = 10_000.0
_NAME = "the model's config.json"


class _CommonFields(Struct):
    """The fields of any model's config.json that are read here."""

    model_type: str | None = None
    quantization_config: dict[str, Any] | None = None
    compression_config: dict[str, Any] | None = None
    text_config: dict[str, Any] | None = None


class _Fields(Struct):
    """The fields of a native decoder's config.json, except for its sizes. Null has a meaning of its
    own where it is allowed."""

    hidden_act: str = "silu"
    rms_norm_eps: float = _EPS
    tie_word_embeddings: bool | None = False
    attention_bias: bool | None = False
    mlp_bias: bool | None = False
    sliding_window: int | None = _WINDOW
    use_sliding_window: bool | None = False
    max_window_layers: int = _FIRST_WINDOW_LAYER
    layer_types: list[str] | None = None
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    partial_rotary_factor: float | None = None
    max_position_embeddings: Any = None
    original_max_position_embeddings: int | None = None


class _RopeFields(Struct):
    """The parameters of a scaling of rotary positions, except for lists, which longrope has."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: float | None = None
    partial_rotary_factor: float | None = None
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None


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
    sliding_windows: tuple[int | None, ...]
    """The sliding window of each layer; None for full attention."""
    rope: dict[str, Any]
    """``rope_theta``, ``rope_type`` and the parameters of that type."""
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_mlp_bias: bool = False
    has_qk_norms: bool = False


def read_json_config(directory: Path) -> dict[str, Any]:
    """Read ``config.json``.

    Raises `StartupError` if it is missing or not JSON, or if tokens attend to those after them,
    which is not supported.
    """
    config = read_json_object(directory / "config.json")
    if config is None:
        raise StartupError("the model's directory has no config.json")
    check_fields(config, _CommonFields, _NAME)
    if config.get("is_causal") is False or config.get("use_bidirectional_attention"):
        raise StartupError("the model's attention is not causal, which is not supported")
    return config


def is_native(config: dict[str, Any]) -> bool:
    """Whether `NativeDecoder` supports this configuration. Raises `StartupError` if it is malformed
    and of a family whose decoder is ours."""
    if config.get("model_type") not in FAMILIES:
        return False
    fields = check_fields(config, _Fields, _NAME)
    is_partial = _rope(fields).get("partial_rotary_factor") not in (None, 1.0)
    return fields.hidden_act == "silu" and not is_partial


def decoder_config(config: dict[str, Any]) -> DecoderConfig:
    """Parse the configuration, with the defaults of transformers. Raises `StartupError` naming the
    first key that is missing or whose value no model can have."""
    family = FAMILIES[config["model_type"]]
    fields = check_fields(config, _Fields, _NAME)
    try:
        num_heads = _size(config, "num_attention_heads")
        num_kv_heads = _size(config, "num_key_value_heads", num_heads, family.num_kv_heads)
        if num_heads % num_kv_heads:
            raise StartupError(
                f"the model's config.json says that {num_heads} heads share {num_kv_heads} "
                "key-value heads, which is not a divisor"
            )
        hidden_size = _size(config, "hidden_size")
        vocab_size = _size(config, "vocab_size")
        num_layers = _size(config, "num_hidden_layers")
        return DecoderConfig(
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=_size(config, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=_size(config, "head_dim", hidden_size // num_heads, family.head_dim),
            rms_norm_eps=fields.rms_norm_eps,
            max_seq_len=_max_seq_len(config, family, fields),
            has_tied_embeddings=bool(fields.tie_word_embeddings),
            sliding_windows=_sliding_windows(family, fields, num_layers),
            rope=_rope(fields, _size(config, "max_position_embeddings", family.max_seq_len)),
            has_qkv_bias=_has(family.has_qkv_bias, fields.attention_bias),
            has_output_bias=_has(family.has_output_bias, fields.attention_bias),
            has_mlp_bias=_has(family.has_mlp_bias, fields.mlp_bias),
            has_qk_norms=family.has_qk_norms,
        )
    except KeyError as error:
        raise StartupError(f"the model's config.json has no {error}") from None


def _has(of_family: HasBias, configured: bool | None) -> bool:
    return bool(configured) if of_family == "as configured" else of_family


def _size(
    config: dict[str, Any], key: str, if_null: int | None = None, if_missing: int | None = None
) -> int:
    """A number of at least one. Raises `KeyError` if it is missing without a default, and
    `StartupError` for another value.

    ``if_missing`` is by default ``if_null``.
    """
    if_missing = if_null if if_missing is None else if_missing
    size = config[key] if if_missing is None else config.get(key, if_missing)
    if size is None:
        size = if_null
    if not isinstance(size, int) or size < 1:
        raise StartupError(f"the model's config.json says {key} {size!r}, which no model can have")
    return size


def _sliding_windows(family: Family, fields: _Fields, num_layers: int) -> tuple[int | None, ...]:
    window = fields.sliding_window
    if window is not None and window < 1:
        raise StartupError(f"{_NAME} says sliding_window {window}, which no model can have")
    if not _has(family.has_windows, fields.use_sliding_window):
        return (None,) * num_layers
    # transformers reads a mistral with kinds of layers as a ministral.
    first = 0 if family.has_windows is True else fields.max_window_layers
    kinds = fields.layer_types or [
        "sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)
    ]
    if len(kinds) != num_layers or not set(kinds) <= {"sliding_attention", "full_attention"}:
        raise StartupError(f"{_NAME} says layer_types {kinds}, for {num_layers} layers")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _max_seq_len(config: dict[str, Any], family: Family, fields: _Fields) -> int:
    """The longest context, to which YaRN extends the original one: Qwen's configurations with YaRN
    keep the other number."""
    stated = _size(config, "max_position_embeddings", family.max_seq_len)
    rope = _rope(fields)
    if rope["rope_type"] != "yarn":
        return stated
    return max(stated, int(rope.get("factor", 1) * rope["original_max_position_embeddings"]))


def _rope(fields: _Fields, max_seq_len: int = 0) -> dict[str, Any]:
    """Normalize both spellings: ``rope_parameters``, and ``rope_theta`` with ``rope_scaling``.

    As in transformers, ``rope_scaling`` counts if both are there, as does the length of the
    original context outside of them. Raises `StartupError` for malformed parameters.
    """
    rope = fields.rope_scaling or fields.rope_parameters or {}
    place = "rope_scaling" if fields.rope_scaling else "rope_parameters"
    if any(isinstance(value, dict) for value in rope.values()):
        raise StartupError(f"{_NAME} has {place} for each kind of layer, which is not supported")
    known = check_fields(rope, _RopeFields, f"{_NAME}, in {place},")
    own_theta = (fields.rope_parameters or {}).get("rope_theta")
    theta = fields.rope_theta if known.rope_theta is None else known.rope_theta
    if fields.rope_scaling and theta is None and own_theta not in (None, _THETA):
        # transformers falls back to its default, which is not what anybody means.
        raise StartupError(
            f"{_NAME} has rope_theta {own_theta} in rope_parameters, which rope_scaling replaces: "
            "write rope_theta into rope_scaling"
        )
    normal = {
        "original_max_position_embeddings": max_seq_len,
        "partial_rotary_factor": fields.partial_rotary_factor,
        **{key: value for key, value in rope.items() if value is not None},
        "rope_theta": _THETA if theta is None else theta,
        "rope_type": known.rope_type or known.type or "default",
    }
    if fields.original_max_position_embeddings is not None:
        normal["original_max_position_embeddings"] = fields.original_max_position_embeddings
    if normal["rope_type"] == "yarn" and known.factor is None and "factor" in rope:
        normal["factor"] = max_seq_len / normal["original_max_position_embeddings"]
    return normal
