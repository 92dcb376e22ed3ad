"""DeepSeek V2 and V3, and GLM 4.7 Flash, with attention over latent vectors."""

from typing import Any

from shared.errors import StartupError
from worker.checkpoints.architectures.interface import Architecture, GgufModel

_SOFTMAX, _SIGMOID = 1, 2
_GROWTH = 0.1
"""What files multiply ``mscale_all_dim`` with."""


def read(model: GgufModel) -> dict[str, Any]:
    if model.get("attention.kv_lora_rank") is None or not model.size("expert_count", 0):
        raise StartupError("the GGUF file's deepseek2 has no latent vectors or no experts")
    if model.number("attention.temperature_scale", 0.0):
        raise StartupError(
            "the queries of the GGUF file's deepseek2 grow with their positions "
            "(deepseek2.attention.temperature_scale), which neither DeepSeek V2 nor V3 has"
        )
    config = {
        **model.decoder(),
        **model.routed_experts(),
        "attention_bias": model.has("blk.attn_kv_a_mqa.bias"),
        "norm_topk_prob": bool(model.get("expert_weights_norm")),
        "rope_parameters": model.yarn(scale=_GROWTH),
        "rope_interleave": True,
        **latent(model),
    }
    return config | (_sigmoid(model) if _scores(model) == _SIGMOID else _softmax(config))


def latent(model: GgufModel) -> dict[str, Any]:
    """The sizes of attention over latent vectors. Files from before 2025-04 store the lengths of
    heads where later files store what the cache holds."""
    rotated = model.size("rope.dimension_count")
    key = model.size("attention.key_length_mla", 0) or model.size("attention.key_length")
    value = model.size("attention.value_length_mla", 0) or model.size("attention.value_length")
    return {
        "num_key_value_heads": model.size("attention.head_count"),
        "q_lora_rank": model.get("attention.q_lora_rank"),
        "kv_lora_rank": model.size("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key - rotated,
        "v_head_dim": value,
    }


def _scores(model: GgufModel) -> int:
    """What the router's outputs become, which old files do not say."""
    default = _SIGMOID if model.has("blk.exp_probs_b.bias") else _SOFTMAX
    return model.size("expert_gating_func", 0) or default


def _sigmoid(model: GgufModel) -> dict[str, Any]:
    if not model.has("blk.exp_probs_b.bias"):
        raise StartupError("the GGUF file's deepseek2 has no exp_probs_b.bias")
    return {"model_type": "deepseek_v3"}


def _softmax(config: dict[str, Any]) -> dict[str, Any]:
    method = "group_limited_greedy" if config["n_group"] > 1 else "greedy"
    return {"model_type": "deepseek_v2", "topk_method": method}


ARCHITECTURE = Architecture(name="deepseek2", read=read, rotates_pairs=True)
