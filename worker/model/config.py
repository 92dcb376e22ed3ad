"""Reads ``config.json`` of a decoder: the parts that most families share."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from shared.errors import StartupError
from shared.model_files import check_fields, read_json_object
from worker.model.spec import (
    Activation,
    Attention,
    Experts,
    Layer,
    Mlp,
    ModelSpec,
    Names,
    Norm,
    Predictor,
    Rope,
)

_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "xielu": "xielu",
}
_THETA = 10_000.0
_NAME = "the model's config.json"
_KINDS = ("full_attention", "sliding_attention", "chunked_attention")


class NotNative(Exception):
    """The reason why the operations cannot compute a configuration, as the end of a sentence."""


class _CommonFields(Struct):
    """The fields of any model's config.json that are read here."""

    model_type: str | None = None
    quantization_config: dict[str, Any] | None = None
    compression_config: dict[str, Any] | None = None
    text_config: dict[str, Any] | None = None


class _Fields(Struct):
    """The fields of a decoder's config.json whose types are the same in all families. Null has a
    meaning of its own where it is allowed."""

    rms_norm_eps: float = 1e-6
    hidden_act: str | None = None
    tie_word_embeddings: bool | None = None
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    sliding_window: int | None = None
    use_sliding_window: bool | None = None
    max_window_layers: int | None = None
    layer_types: list[str] | None = None
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    partial_rotary_factor: float | None = None
    original_max_position_embeddings: int | None = None


class _RopeFields(Struct):
    """The parameters of a scaling of rotary positions."""

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
    short_factor: list[float] | None = None
    long_factor: list[float] | None = None
    short_mscale: float | None = None
    long_mscale: float | None = None


def read_json_config(directory: Path) -> dict[str, Any]:
    """Read ``config.json``.

    Raises `StartupError` if it is missing or not JSON, or if tokens attend to later tokens, which
    is not supported.
    """
    config = read_json_object(directory / "config.json")
    if config is None:
        raise StartupError("the model's directory has no config.json")
    check_fields(config, _CommonFields, _NAME)
    inner = config.get("text_config") or {}
    # With "vision", only the tokens of an image attend to one another.
    if any(
        one.get("is_causal") is False or one.get("use_bidirectional_attention") in (True, "all")
        for one in (config, inner)
    ):
        raise StartupError("the model's attention is not causal, which is not supported")
    return config


class Config:
    """The values of a configuration, with the defaults of a family, and what most families make of
    them.

    All methods raise `StartupError` naming the first key that is missing or whose value no model
    can have, and `NotNative` for a value that the operations do not know.
    """

    def __init__(
        self, values: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
    ) -> None:
        """``defaults`` count for keys that are missing, but not for null."""
        self._defaults = defaults or {}
        self._values = {**self._defaults, **values}
        self._fields = check_fields(self._values, _Fields, _NAME)

    def within(self, key: str, defaults: Mapping[str, Any] | None = None) -> "Config":
        """The configuration of a model within this model, such as ``text_config``."""
        inner = self._values.get(key)
        return Config(inner if isinstance(inner, dict) else {}, defaults)

    def with_defaults(self, defaults: Mapping[str, Any]) -> "Config":
        return Config(self._values, defaults)

    def renamed(self, names: Mapping[str, str]) -> "Config":
        """The configuration with the values of the keys of ``names`` under the names of other
        families."""
        found = {new: self.get(old) for old, new in names.items() if self.get(old) is not None}
        return Config({**self._values, **found}, self._defaults)

    def get(self, key: str, default: Any = None) -> Any:
        """A value as it is; the default if it is missing or null."""
        value = self._values.get(key)
        return default if value is None else value

    def size(self, key: str, if_null: int | None = None) -> int:
        """A positive integer."""
        size = self._values.get(key, if_null)
        if size is None:
            size = if_null
        if size is None and key not in self._values:
            raise StartupError(f"{_NAME} has no '{key}'")
        if not isinstance(size, int) or size < 1:
            raise StartupError(f"{_NAME} says {key} {size!r}, which no model can have")
        return size

    def number(self, key: str, default: float = 0.0) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise StartupError(f"{_NAME} says {key} {value!r}, which is no number")
        return float(value)

    def numbers(self, key: str, default: Sequence[float]) -> list[float]:
        """As many numbers as the default has; transformers writes infinity as an object."""
        values = self.get(key, default)
        try:
            numbers = [float(one["__float__"] if isinstance(one, dict) else one) for one in values]
        except (KeyError, TypeError, ValueError):
            numbers = []
        if len(numbers) != len(default):
            raise StartupError(f"{_NAME} says {key} {values!r}, expected {len(default)} numbers")
        return numbers

    def flag(self, key: str) -> bool:
        return bool(self._values.get(key))

    def require(self, key: str, value: float) -> None:
        """Accept no other value of a constant that the kernels do not take as an argument."""
        if self.number(key, value) != value:
            raise NotNative(f"{key} is {self.get(key)}")

    @property
    def num_layers(self) -> int:
        return self.size("num_hidden_layers")

    @property
    def head_dim(self) -> int:
        return self.size("head_dim", self.size("hidden_size") // self.size("num_attention_heads"))

    def activation(self, key: str = "hidden_act") -> Activation:
        name = self.get(key, "silu")
        if name not in _ACTIVATIONS:
            raise NotNative(f"{key} is {name}")
        return _ACTIVATIONS[name]

    def attention(self, **overrides: Any) -> Attention:
        """Grouped attention of the usual keys; ``overrides`` are fields of `Attention`."""
        num_heads = self.size("num_attention_heads")
        num_kv_heads = overrides.pop("num_kv_heads", None)
        num_kv_heads = num_kv_heads or self.size("num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise StartupError(
                f"{_NAME} says that {num_heads} heads share {num_kv_heads} key-value heads, which "
                "is not a divisor"
            )
        head_dim = overrides.pop("head_dim", None) or self.head_dim
        if "rope" not in overrides:
            overrides["rope"] = self.rope(head_dim)
        overrides.setdefault("scale", head_dim**-0.5)
        return Attention(
            num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, **overrides
        )

    def mlp(self, size: str | int = "intermediate_size", **overrides: Any) -> Mlp:
        """A feed-forward part of this size, or of the size that this key names."""
        overrides.setdefault("activation", self.activation())
        return Mlp(size=self.size(size) if isinstance(size, str) else size, **overrides)

    def model(
        self,
        layers: Sequence[Layer],
        final_norm: Norm,
        names: Names | None = None,
        **overrides: Any,
    ) -> ModelSpec:
        if not any(layer.has_mixer for layer in layers):
            raise NotNative("no layer has attention or a recurrence")
        overrides.setdefault("has_tied_embeddings", self.flag("tie_word_embeddings"))
        if names is not None and names.has_further_layers:
            overrides.setdefault("predictor", Predictor.behind(layers, final_norm))
        return ModelSpec(
            vocab_size=self.size("vocab_size"),
            hidden_size=self.size("hidden_size"),
            max_seq_len=self._longest(),
            layers=tuple(layers),
            final_norm=final_norm,
            names=names or Names(),
            **overrides,
        )

    def mixture(
        self, attention: Attention, experts: Experts, norm: Norm, names: Names, num_dense: int = 0
    ) -> ModelSpec:
        """A model whose layers have experts, except the first ``first_k_dense_replace``, which are
        ``num_dense`` if the configuration does not say how many."""
        num_dense = self.get("first_k_dense_replace", num_dense)
        layers = [
            Layer(
                attention=attention,
                feed_forward=self.mlp() if index < num_dense else experts,
                before_attention=norm,
                before_feed_forward=norm,
            )
            for index in range(self.num_layers)
        ]
        return self.model(layers, norm, names)

    def kinds(self, default: Sequence[str], further: Sequence[str] = ()) -> Sequence[str]:
        """The kind of each layer's attention, or a ``further`` kind of a family."""
        kinds = self._fields.layer_types or default
        if len(kinds) != self.num_layers or not set(kinds) <= {*_KINDS, *further}:
            raise StartupError(f"{_NAME} says layer_types {kinds}, for {self.num_layers} layers")
        return kinds

    def kv_sources(self, kinds: Sequence[str]) -> list[int | None]:
        """For each layer of these kinds, the layer whose keys and values it reads, None for its
        own: the last ``num_kv_shared_layers`` read those of the last layer of their kind before."""
        num_shared = self._values.get("num_kv_shared_layers") or 0
        own = kinds[: len(kinds) - num_shared] if num_shared in range(len(kinds)) else ()
        last = {kind: index for index, kind in enumerate(own)}
        if not set(kinds) <= set(last):
            raise StartupError(
                f"{_NAME} says num_kv_shared_layers {num_shared}, which leaves a layer without "
                "keys and values"
            )
        return [last[kind] if index >= len(own) else None for index, kind in enumerate(kinds)]

    def window(self) -> int | None:
        """The sliding window of the layers that have a window."""
        window = self._fields.sliding_window
        if window is not None and window < 1:
            raise StartupError(f"{_NAME} says sliding_window {window}, which no model can have")
        return window

    def windows(self, default: Sequence[str]) -> list[int | None]:
        """The sliding window of each layer; None for full attention."""
        window = self.window()
        return [window if kind == "sliding_attention" else None for kind in self.kinds(default)]

    def rope(
        self,
        head_dim: int,
        kind: str | None = None,
        *,
        theta: float = _THETA,
        is_partial: bool = False,
        is_whole: bool = False,
        is_interleaved: bool = False,
    ) -> Rope:
        """The rotary positions, of a kind of layers if these differ.

        ``theta`` is the family's default; ``is_partial``: its heads may be rotated in part;
        ``is_whole``: the angles cover a whole head, and some may be zero.
        """
        parameters = self._rope(theta, kind)
        if is_whole:
            return Rope(parameters=parameters, dim=head_dim, is_interleaved=is_interleaved)
        factor = parameters["partial_rotary_factor"]
        if factor not in (None, 1.0) and not is_partial:
            raise NotNative("heads are rotated in part")
        dim = head_dim if factor is None or not is_partial else int(head_dim * factor)
        return Rope(parameters=parameters, dim=dim, is_interleaved=is_interleaved)

    @property
    def _stated_len(self) -> int:
        key = "max_position_embeddings"
        return self.size(key, self._defaults.get(key))

    def _longest(self) -> int:
        """The longest context, to which YaRN extends the original context: Qwen's configurations
        with YaRN keep the original number."""
        stated = self._stated_len
        parameters = self._fields.rope_parameters or {}
        kind = "full_attention" if isinstance(parameters.get("full_attention"), dict) else None
        rope = self._rope(_THETA, kind)
        original = rope["original_max_position_embeddings"]
        if rope["rope_type"] != "yarn" or not rope["has_original"]:
            return stated
        return max(stated, int(rope.get("factor", 1) * original))

    def _rope(self, theta: float, kind: str | None = None) -> dict[str, Any]:
        """Normalize both spellings: ``rope_parameters``, and ``rope_theta`` with ``rope_scaling``.

        As in transformers, ``rope_scaling`` counts if both are there, as does the length of the
        original context outside of them.
        """
        fields, max_seq_len = self._fields, self._stated_len
        rope = fields.rope_scaling or fields.rope_parameters or {}
        place = "rope_scaling" if fields.rope_scaling else "rope_parameters"
        if kind is not None and isinstance(rope.get(kind), dict):
            rope = rope[kind]
        if any(isinstance(value, dict) for value in rope.values()):
            raise StartupError(
                f"{_NAME} has {place} for each kind of layer, which is not supported"
            )
        known = check_fields(rope, _RopeFields, f"{_NAME}, in {place},")
        own_theta = (fields.rope_parameters or {}).get("rope_theta")
        stated = fields.rope_theta if known.rope_theta is None else known.rope_theta
        if fields.rope_scaling and stated is None and own_theta not in (None, theta):
            # transformers falls back to its default, which is not what anybody means.
            raise StartupError(
                f"{_NAME} has rope_theta {own_theta} in rope_parameters, which rope_scaling "
                "replaces: write rope_theta into rope_scaling"
            )
        normal = {
            "original_max_position_embeddings": max_seq_len,
            "max_position_embeddings": max_seq_len,
            "partial_rotary_factor": fields.partial_rotary_factor,
            **{key: value for key, value in rope.items() if value is not None},
            "rope_theta": theta if stated is None else stated,
            "rope_type": known.rope_type or known.type or "default",
        }
        if fields.original_max_position_embeddings is not None:
            normal["original_max_position_embeddings"] = fields.original_max_position_embeddings
        own = known.original_max_position_embeddings or fields.original_max_position_embeddings
        normal["has_original"] = own is not None
        if normal["rope_type"] == "yarn" and known.factor is None and "factor" in rope:
            normal["factor"] = max_seq_len / normal["original_max_position_embeddings"]
        return normal


def alibi_slopes(num_heads: int, greatest: float = 8.0) -> tuple[float, ...]:
    """The slopes of heads in attention with linear biases (Press et al., arXiv:2108.12409): powers
    of two, with equal steps of the exponent down to -``greatest``. If the number of heads is not a
    power of two, the last heads have every other slope of a finer sequence."""
    count = 1 << (num_heads.bit_length() - 1)
    steps = [index + 1.0 for index in range(count)]
    steps += [index + 0.5 for index in range(num_heads - count)]
    return tuple(2.0 ** (-greatest * step / count) for step in steps)
