"""Tiny random models on disk, and their output according to transformers."""

import copy
import json
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
_LATENT = {"kv_lora_rank": 32, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16, "v_head_dim": 32} | {
    "num_key_value_heads": 6,
    "moe_intermediate_size": 40,
}
_DELTA = {"head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4} | {
    # transformers computes the delta rule in float32. Where a head has nearly nothing for a query,
    # a small epsilon would make its rounding visible.
    "rms_norm_eps": 1e-3,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 32,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
_MAMBA = {"mamba_n_heads": 6, "mamba_d_head": 32, "mamba_n_groups": 2, "mamba_d_state": 20} | {
    "mamba_expand": 2,
    "mamba_d_conv": 4,
}
_SELECTIVE = {"intermediate_size": 192, "state_size": 12, "tie_word_embeddings": True}
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
    | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "final_logit_softcapping": 4.0}
    | {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "use_double_wide_mlp": True}
    | {"layer_types": ["sliding_attention", "full_attention"] * 2}
    | {"hidden_size_per_layer_input": 24, "vocab_size_per_layer_input": VOCAB_SIZE}
    | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 40},
    "gemma4_unified_text": {"head_dim": 16, "global_head_dim": 32, "sliding_window": 6}
    | {"num_hidden_layers": 4, "num_kv_shared_layers": 1}
    | {"layer_types": ["sliding_attention", "full_attention"] * 2},
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
    "phimoe": {"num_local_experts": 5, "num_experts_per_tok": 2, "attention_bias": True}
    | {"lm_head_bias": True, "router_jitter_noise": 0.3, "sliding_window": 30}
    | {
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "original_max_position_embeddings": 256,
            "short_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5],
            "long_factor": [2.0] * 8,
            "short_mscale": 1.2,
            "long_mscale": 1.3,
        }
    },
    "apertus": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
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
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 16},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention"], "num_dense_layers": 1}
    | {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
    | {"conv_bias": True, "conv_L_cache": 4},
    "qwen3_next": _DELTA
    | {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
    | {"shared_expert_intermediate_size": 56, "mlp_only_layers": [1]},
    "qwen3_5_text": _DELTA | {"linear_value_head_dim": 48, "linear_conv_kernel_dim": 3},
    "qwen3_5_moe_text": _DELTA
    | {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
    | {"shared_expert_intermediate_size": 56},
    "olmo_hybrid": _DELTA
    # The epsilon of linear attention is not that of the configuration. With long keys, heads have
    # less for a query: see _DELTA.
    | {"linear_key_head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": None}},
    "kimi_linear": _LATENT
    | {"q_lora_rank": None, "num_local_experts": 8, "num_experts_per_tok": 3, "n_group": 4}
    | {"topk_group": 2, "routed_scaling_factor": 1.5, "mlp_layer_types": ["dense", *["sparse"] * 2]}
    | {"linear_num_heads": 4, "linear_head_dim": 32, "linear_conv_kernel_dim": 3}
    | {"layer_types": _DELTA["layer_types"], "rms_norm_eps": _DELTA["rms_norm_eps"]},
    "bamba": _MAMBA | {"attn_layer_indices": [1], "mamba_proj_bias": True},
    "granitemoehybrid": _MAMBA
    | {"layer_types": ["mamba", "attention", "mamba"], "shared_intermediate_size": 40}
    | {"embedding_multiplier": 3.0, "logits_scaling": 2.0}
    | {"residual_multiplier": 0.4, "attention_multiplier": 0.2}
    | {"num_local_experts": 5, "num_experts_per_tok": 2, "time_step_limit": [0.3, 1.5]},
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "mlp", "moe", "mamba"]}
    | {"mamba_num_heads": 6, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 20}
    | {"head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4}
    | {"topk_group": 2, "moe_intermediate_size": 40, "routed_scaling_factor": 1.5}
    | {"moe_shared_expert_intermediate_size": 48, "mlp_bias": True, "use_bias": True},
    "mamba": _SELECTIVE | {"use_bias": True},
    "falcon_mamba": _SELECTIVE,
    "jamba": {"attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 5}
    | {"mamba_d_state": 10, "mamba_dt_rank": 16, "mamba_conv_bias": False, "mamba_d_conv": 3}
    | {"rms_norm_eps": 1e-3},  # as in _DELTA
    "mamba2": {"num_heads": 6, "head_dim": 32, "n_groups": 2, "state_size": 20},
    "falcon_h1": _MAMBA
    | {"mamba_d_ssm": 96, "mamba_d_head": 16, "mamba_d_state": 8}
    | {"mamba_rms_norm": True, "projectors_bias": True}
    | {"embedding_multiplier": 3.0, "lm_head_multiplier": 0.5, "mlp_multipliers": [0.5, 0.7]}
    | {"key_multiplier": 0.6, "attention_in_multiplier": 1.2, "attention_out_multiplier": 0.8}
    | {"ssm_multipliers": [0.5, 1.2, 0.7, 0.8, 0.9], "ssm_in_multiplier": 1.25}
    | {"ssm_out_multiplier": 0.75},
    "bloom": {},
    "mpt": {"max_seq_len": 256},
    "cohere2": {"sliding_window": 6}
    | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "deepseek_v3": _LATENT
    | {"q_lora_rank": 40, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4}
    | {"topk_group": 2, "first_k_dense_replace": 1, "attention_bias": True}
    | {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "mscale": 0.7,
            "mscale_all_dim": 1.0,
        }
    },
    "deepseek_v2": _LATENT
    | {"q_lora_rank": None, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4}
    | {"topk_group": 2, "first_k_dense_replace": 1, "topk_method": "group_limited_greedy"}
    | {"routed_scaling_factor": 1.5},
    "mistral4": _LATENT
    | {"q_lora_rank": 40, "n_routed_experts": 5, "num_experts_per_tok": 2}
    | {"first_k_dense_replace": 1, "routed_scaling_factor": 1.5}
    | {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 8,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.3,
        }
    },
    "glm4_moe_lite": _LATENT
    | {"q_lora_rank": 40, "n_routed_experts": 5, "num_experts_per_tok": 2}
    | {"mlp_layer_types": ["sparse", "dense", "sparse"], "rope_interleave": False},
}


_TOWER = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2} | {
    "out_hidden_size": 96,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
_NO_TOWERS = {"vision_config": None, "audio_config": None}
WITH_TOWERS: dict[str, dict[str, Any]] = {
    "gemma4": _NO_TOWERS | {"text_config": SIZES | FAMILIES["gemma4_text"]},
    "qwen3_vl": {"text_config": SIZES | {"head_dim": 16}, "vision_config": _TOWER},
    "qwen3_vl_moe": {"text_config": SIZES | FAMILIES["qwen3_moe"], "vision_config": _TOWER},
    "gemma4_unified": {"text_config": SIZES | FAMILIES["gemma4_unified_text"]},
}
"""The families whose language model stands beside other models in a checkpoint."""
LIKE: dict[str, tuple[str, dict[str, Any]]] = {
    "kimi_k2": ("deepseek_v3", {}),
    "mimo": ("qwen2", {"use_sliding_window": False}),
}
"""The families that transformers does not have: the family with the same layers, and values of the
configuration."""
_ADD_ONE = (
    *("gemma", "gemma2", "gemma3_text", "nemotron"),
    *("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
)
"""The families whose norms are stored as the difference from 1."""


def write_tiny_model(
    directory: Path, model_type: str, *, max_shard_size: str = "1GB", **overrides: Any
) -> Any:
    """Write a model in which every weight matters, and return it as transformers' module."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    if model_type in LIKE:
        other, values = LIKE[model_type]
        model = write_tiny_model(
            directory, other, max_shard_size=max_shard_size, **{**values, **overrides}
        )
        path = directory / "config.json"
        config = json.loads(path.read_text()) | {"model_type": model_type}
        path.write_text(json.dumps(config))
        return model
    own = WITH_TOWERS.get(model_type) or {**SIZES, **FAMILIES.get(model_type, {})}
    # transformers completes the dictionaries that it gets.
    sizes = copy.deepcopy({**own, **overrides})
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **sizes)
    config._experts_implementation = "eager"  # the others compute no float64
    is_causal = type(config) in AutoModelForCausalLM._model_mapping
    kind: Any = AutoModelForCausalLM if is_causal else AutoModelForImageTextToText
    model = kind.from_config(config).eval()
    adds_one = model_type in _ADD_ONE
    with torch.no_grad():
        for parameter in model.parameters():
            # Biases start as 0 and norms as 1, so that a decoder without them would pass.
            parameter.normal_(mean=float(parameter.ndim == 1 and not adds_one), std=0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.fill_(0.7)
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.normal_(std=0.2)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return model


def native_spec(config: dict[str, Any]) -> ModelSpec:
    """The spec of a configuration of a native family."""
    spec = spec_of(config)
    assert spec is not None
    return spec


def reference_logits(model: Any, token_ids: list[int]) -> Tensor:
    """The logits [len(token_ids), vocab_size] of a prompt, computed at once and without a cache."""
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([token_ids]), use_cache=False).logits[0]
    return logits
