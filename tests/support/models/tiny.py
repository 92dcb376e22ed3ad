"""Tiny random models on disk, and their output according to transformers."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from worker.model.families import spec_of
from worker.model.spec import ModelSpec

VOCAB_SIZE = 131
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 96,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 7},
    "qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {"head_dim": 16, "num_experts": 5, "num_experts_per_tok": 2}
    | {"moe_intermediate_size": 40, "norm_topk_prob": True, "mlp_only_layers": [1]},
    "qwen2_moe": {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    | {"shared_expert_intermediate_size": 56},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "gpt_oss": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}
    | {"sliding_window": 6},
    "gemma": {"head_dim": 32, "num_key_value_heads": 1},
    "gemma2": {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 24}
    | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0},
    "gemma3_text": {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 24}
    | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "gemma4_text": {"head_dim": 16, "global_head_dim": 32, "sliding_window": 6}
    | {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True}
    | {"num_global_key_value_heads": 1, "final_logit_softcapping": 4.0}
    | {"layer_types": ["sliding_attention", "full_attention", "full_attention"]},
    "phi3": {"original_max_position_embeddings": 256}
    | {
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
            "short_factor": [1.0, 1.5, 2.0, 2.5],
            "long_factor": [2.0] * 4,
        }
    },
    "llama4_text": {"head_dim": 16, "num_local_experts": 4, "intermediate_size_mlp": 64}
    | {"attention_chunk_size": 8, "no_rope_layer_interval": 2, "interleave_moe_layer_step": 2}
    | {"floor_scale": 4, "num_experts_per_tok": 1},
    "olmo2": {},
    "granite": {"embedding_multiplier": 3.0, "logits_scaling": 2.0}
    | {"residual_multiplier": 0.4, "attention_multiplier": 0.2},
    "smollm3": {"no_rope_layer_interval": 2},
    "glm4": {"head_dim": 16},
    "exaone4": {"sliding_window": 6}
    | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "ernie4_5": {"head_dim": 16, "use_bias": True},
    "starcoder2": {"sliding_window": 7},
    "seed_oss": {"head_dim": 16, "attention_out_bias": True},
    "arcee": {},
    "helium": {"head_dim": 16},
    "ministral3": {"head_dim": 16}
    | {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 8,
            "llama_4_scaling_beta": 0.3,
        }
    },
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "glm": {"head_dim": 16},
    "glm4_moe": {"head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4}
    | {"topk_group": 2, "moe_intermediate_size": 40, "use_qk_norm": True}
    | {"routed_scaling_factor": 1.5},
    "minimax_m2": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}
    | {"rotary_dim": 8},
    "nemotron": {},
    "olmo3": {"sliding_window": 6}
    | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    | {
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        }
    },
    "granitemoe": {"embedding_multiplier": 3.0, "logits_scaling": 2.0}
    | {"residual_multiplier": 0.4, "attention_multiplier": 0.2}
    | {"num_local_experts": 5, "num_experts_per_tok": 2},
    "ernie4_5_moe": {"moe_num_experts": 5, "moe_k": 2, "moe_intermediate_size": 40},
    "hunyuan_v1_dense": {"head_dim": 16, "attention_bias": True}
    | {
        "rope_parameters": {
            "rope_type": "dynamic",
            "factor": 1.0,
            "alpha": 1000.0,
            "rope_theta": 1e4,
        }
    },
    "cohere2": {"sliding_window": 6}
    | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
}


_ADD_ONE = ("gemma", "gemma2", "gemma3_text", "nemotron")
"""The families whose norms are stored as the difference from one."""


def write_tiny_model(
    directory: Path, model_type: str, *, max_shard_size: str = "1GB", **overrides: Any
) -> Any:
    """Write a model in which every weight matters, and return it as transformers' module."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {**SIZES, **FAMILIES.get(model_type, {}), **overrides}
    build: Any = AutoModelForCausalLM.from_config
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **sizes)
    config._experts_implementation = "eager"  # the others compute no float64
    model = build(config).eval()
    adds_one = model_type in _ADD_ONE
    with torch.no_grad():
        for parameter in model.parameters():
            # Biases start as zeros and norms as ones, so that a decoder without them would pass.
            parameter.normal_(mean=float(parameter.ndim == 1 and not adds_one), std=0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.fill_(0.7)
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.2)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return model


def native_spec(config: dict[str, Any]) -> ModelSpec:
    """The spec of a configuration of a native family."""
    spec = spec_of(config)
    assert spec is not None
    return spec


def reference_logits(model: Any, token_ids: list[int]) -> Tensor:
    """The logits [len(token_ids), vocab_size] of one prompt, computed at once and without a
    cache."""
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([token_ids]), use_cache=False).logits[0]
    return logits
