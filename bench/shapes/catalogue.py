"""The published shapes that are measured."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from worker.model.families import spec_of
from worker.model.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model, and the number of its layers that are measured."""

    config: Mapping[str, Any]
    """The parts of config.json that say what is computed, with all layers."""
    num_layers: int

    def spec(self) -> ModelSpec:
        """The model with its first layers, without a layer that predicts."""
        spec = spec_of({**self.config, "num_hidden_layers": self.num_layers})
        assert spec is not None, f"{self.config['model_type']} is no native family"
        return replace(spec, predictor=None)


SHAPES: Mapping[str, Shape] = {
    "Llama-3.2-1B": Shape(
        num_layers=16,
        config={
            "model_type": "llama",
            "vocab_size": 128_256,
            "num_hidden_layers": 16,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131_072,
            "rope_theta": 500_000.0,
            "tie_word_embeddings": True,
        },
    ),
    "Qwen3-4B": Shape(
        num_layers=12,
        config={
            "model_type": "qwen3",
            "vocab_size": 151_936,
            "num_hidden_layers": 36,
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40_960,
            "rope_theta": 1_000_000.0,
            "tie_word_embeddings": True,
        },
    ),
    "Llama-3.1-8B": Shape(
        num_layers=8,
        config={
            "model_type": "llama",
            "vocab_size": 128_256,
            "num_hidden_layers": 32,
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131_072,
            "rope_theta": 500_000.0,
            "tie_word_embeddings": False,
        },
    ),
    "Qwen3.5-0.8B": Shape(
        num_layers=24,
        config={
            "model_type": "qwen3_5_text",
            "vocab_size": 248_320,
            "num_hidden_layers": 24,
            "hidden_size": 1024,
            "intermediate_size": 3584,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 16,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "full_attention_interval": 4,
            "max_position_embeddings": 262_144,
            "rope_theta": 10_000_000.0,
            "partial_rotary_factor": 0.25,
            "tie_word_embeddings": True,
        },
    ),
    "Qwen3-30B-A3B": Shape(
        num_layers=8,
        config={
            "model_type": "qwen3_moe",
            "vocab_size": 151_936,
            "num_hidden_layers": 48,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "max_position_embeddings": 40_960,
            "rope_theta": 1_000_000.0,
            "tie_word_embeddings": False,
        },
    ),
    "gpt-oss-20b": Shape(
        num_layers=6,
        config={
            "model_type": "gpt_oss",
            "vocab_size": 201_088,
            "num_hidden_layers": 24,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "sliding_window": 128,
            "max_position_embeddings": 131_072,
            "rope_theta": 150_000.0,
            "tie_word_embeddings": False,
        },
    ),
}


def with_attention_alone(spec: ModelSpec) -> ModelSpec:
    """The same model with its attention in place of recurrences."""
    attention = spec.attentions[0]
    layers = (replace(layer, attention=attention, recurrence=None) for layer in spec.layers)
    return replace(spec, layers=tuple(layers))
