"""What an architecture of llama.cpp is, and what a GGUF file says about a model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from shared.errors import StartupError
from worker.checkpoints.gguf_file import GgufHeader, GgufValue

_THETA = 10_000.0
"""The base of rotary frequencies of files that do not say it."""


class GgufModel:
    """The metadata of a model's GGUF files. Keys are without the name of the architecture.

    All methods raise `StartupError` naming an entry that is missing or whose value no model has.
    """

    def __init__(self, headers: Sequence[GgufHeader]) -> None:
        self.architecture = headers[0].architecture
        self._entries = headers[0].entries
        self._shapes = {
            name: tensor.shape for one in headers for name, tensor in one.tensors.items()
        }

    def get(self, key: str, default: GgufValue | None = None) -> Any:
        """A value as it is."""
        return self._entries.get(f"{self.architecture}.{key}", default)

    def size(self, key: str, default: int | None = None) -> int:
        """An integer of at least 0; the greatest, if layers differ."""
        value = self.get(key, default)
        value = max(value, default=None) if isinstance(value, tuple) else value
        if not isinstance(value, int) or value < 0:
            said = "has no" if value is None else f"says {value!r} for"
            raise StartupError(f"the GGUF file {said} {self.architecture}.{key}")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.get(key, default)
        if not isinstance(value, int | float):
            raise StartupError(f"the GGUF file says {value!r} for {self.architecture}.{key}")
        return float(value)

    def each(self, key: str, default: int = 0) -> list[Any]:
        """A value for each layer, where a file may have one for all."""
        value = self.get(key, default)
        values = list(value) if isinstance(value, tuple) else [value] * self.num_layers
        if len(values) < self.num_layers:
            raise StartupError(
                f"the GGUF file has {len(values)} values of {self.architecture}.{key}, for "
                f"{self.num_layers} layers"
            )
        return values[: self.num_layers]

    def has(self, tensor: str) -> bool:
        """Whether there is a tensor of this name; that of any layer, if it has no number."""
        stem, _, part = tensor.partition("blk.")
        if stem or part[:1].isdigit() or not part:
            return tensor in self._shapes
        return any(f"blk.{index}.{part}" in self._shapes for index in range(self.num_layers))

    def shape(self, tensor: str) -> tuple[int, ...]:
        if tensor not in self._shapes:
            raise StartupError(f"the GGUF file has no tensor {tensor}")
        return self._shapes[tensor]

    @property
    def num_layers(self) -> int:
        """The layers of the decoder. The file counts layers that predict several tokens, too."""
        return self.size("block_count") - self.size("nextn_predict_layers", 0)

    @property
    def head_dim(self) -> int:
        """The length of a head, which old files do not say."""
        length = self.size("attention.key_length", 0)
        return length or self.size("embedding_length") // max(1, self.size("attention.head_count"))

    def token(self, role: str) -> int | None:
        """The id of the token of a role, such as ``eos``."""
        value = self._entries.get(f"tokenizer.ggml.{role}_token_id")
        return value if isinstance(value, int) else None

    def rope(self, **further: Any) -> dict[str, Any]:
        """The rotary positions, without their scaling."""
        theta = self.number("rope.freq_base", _THETA)
        return {"rope_type": "default", "rope_theta": theta} | further

    def partial_rope(self) -> dict[str, Any]:
        """The rotary positions of heads that are rotated in part."""
        rotated = self.size("rope.dimension_count", self.head_dim)
        return self.rope(partial_rotary_factor=rotated / self.head_dim)

    def yarn(self, *, scale: float) -> dict[str, Any]:
        """Rotary positions that YaRN extends. The file has ``mscale_all_dim`` times the scale:
        attention grows with it, and rotated elements do not, as it is ``mscale``, too, in the
        published configurations."""
        factor = self.number("rope.scaling.factor", 1.0)
        if self.get("rope.scaling.type") != "yarn" or factor <= 1:
            return self.rope()
        growth = round(self.number("rope.scaling.yarn_log_multiplier", 0.0) / scale, 6)
        return self.rope(
            rope_type="yarn",
            factor=factor,
            original_max_position_embeddings=self.size("rope.scaling.original_context_length"),
            beta_fast=self.number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=self.number("rope.scaling.yarn_beta_slow", 1.0),
            **({"mscale": growth, "mscale_all_dim": growth} if growth else {}),
        )

    def decoder(self) -> dict[str, Any]:
        """What config.json says about nearly every decoder."""
        vocab_size, hidden_size = self.shape("token_embd.weight")[:2]
        has_bias = self.has("blk.attn_q.bias") or self.has("blk.attn_qkv.bias")
        return {
            "vocab_size": vocab_size,
            "hidden_size": hidden_size,
            "intermediate_size": self.size("feed_forward_length", 0),
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.size("attention.head_count"),
            "num_key_value_heads": self.size(
                "attention.head_count_kv", self.size("attention.head_count")
            ),
            "head_dim": self.head_dim,
            "max_position_embeddings": self.size("context_length"),
            "rms_norm_eps": self.number("attention.layer_norm_rms_epsilon", 1e-6),
            "rope_parameters": self.rope(),
            "hidden_act": "silu",
            "attention_bias": has_bias,
            "mlp_bias": self.has("blk.ffn_up.bias"),
            "sliding_window": None,
            "tie_word_embeddings": not self.has("output.weight"),
            "bos_token_id": self.token("bos"),
            "eos_token_id": self.token("eos"),
            "pad_token_id": self.token("padding"),
        }

    def experts(self, count: str) -> dict[str, Any]:
        """The number of experts, which config.json calls ``count``, and of a token's experts."""
        return {
            count: self.size("expert_count"),
            "num_experts_per_tok": self.size("expert_used_count"),
        }

    def routed_experts(self) -> dict[str, Any]:
        """The experts of DeepSeek V3 and of models with routers of the same kind."""
        return {
            **self.experts("n_routed_experts"),
            "first_k_dense_replace": self.size("leading_dense_block_count", 0),
            "moe_intermediate_size": self.size("expert_feed_forward_length"),
            "n_shared_experts": self.size("expert_shared_count"),
            "n_group": self.size("expert_group_count", 1),
            "topk_group": self.size("expert_group_used_count", 1),
            "routed_scaling_factor": self.number("expert_weights_scale", 1.0),
        }

    def state_space(self) -> dict[str, Any]:
        """The sizes of Mamba 2 state spaces."""
        num_heads, size = self.size("ssm.time_step_rank"), self.size("ssm.inner_size")
        return {
            "mamba_n_heads": num_heads,
            "mamba_d_head": size // max(1, num_heads),
            "mamba_d_state": self.size("ssm.state_size"),
            "mamba_d_conv": self.size("ssm.conv_kernel"),
            "mamba_n_groups": self.size("ssm.group_count"),
            "mamba_expand": size // max(1, self.size("embedding_length")),
            "mamba_conv_bias": self.has("blk.ssm_conv1d.bias"),
            "mamba_proj_bias": self.has("blk.ssm_in.bias"),
        }

    def layer_types(self, period: int = 1) -> list[str]:
        """The kinds of attention of layers with and without a window. A file without a pattern has
        a window in all layers but the last of each ``period``."""
        pattern = self.get("attention.sliding_window_pattern")
        if pattern is None or (isinstance(pattern, int) and not isinstance(pattern, bool)):
            every = pattern or period
            has_window = [bool((index + 1) % every) for index in range(self.num_layers)]
        else:
            has_window = self.each("attention.sliding_window_pattern")
        return ["sliding_attention" if one else "full_attention" for one in has_window]


Read: TypeAlias = Callable[[GgufModel], Mapping[str, Any] | None]
"""Makes the config.json of a model; raises `StartupError`. None: transformers makes it as well, and
has always made it, so that workers of older versions have the same file and fingerprint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """An architecture of llama.cpp (``LLM_ARCH_NAMES``) whose files our own decoders read."""

    name: str
    read: Read
    rotates_pairs: bool = False
    """Whether llama.cpp rotates adjacent elements of heads together (``LLAMA_ROPE_TYPE_NORM``).
    Queries and keys are stored in the order that this needs."""
    has_tiled_values: bool = False
    """Whether the heads of values that share a key head are as far apart as possible, in linear
    attention, rather than side by side."""
