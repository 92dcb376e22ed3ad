"""The language model of Gemma 4."""

from typing import Any

from worker.checkpoints.architectures.interface import Architecture, GgufModel


def read(model: GgufModel) -> dict[str, Any]:
    """The part of full layers' heads that is rotated follows from the divisors of the file."""
    kinds = model.layer_types()
    sizes = model.each("feed_forward_length")
    num_inputs = model.size("embedding_length_per_layer_input", 0)
    return {
        **model.decoder(),
        **_attention(model, kinds),
        "model_type": "gemma4_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": kinds,
        "rope_parameters": {
            "full_attention": model.rope(rope_type="proportional", partial_rotary_factor=0.25),
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": model.number("rope.freq_base_swa", 10_000.0),
            },
        },
        "final_logit_softcapping": model.get("final_logit_softcapping"),
        "intermediate_size": min(sizes),
        "use_double_wide_mlp": min(sizes) < max(sizes),
        "hidden_size_per_layer_input": num_inputs or None,
        "vocab_size_per_layer_input": model.shape("per_layer_token_embd.weight")[0]
        if num_inputs
        else None,
        "enable_moe_block": bool(model.size("expert_count", 0)),
        "num_experts": model.size("expert_count", 0) or None,
        "top_k_experts": model.size("expert_used_count", 0) or None,
        "moe_intermediate_size": model.size("expert_feed_forward_length", 0) or None,
    }


def _attention(model: GgufModel, kinds: list[str]) -> dict[str, Any]:
    """The heads of layers with and without a window."""
    num_shared = model.size("attention.shared_kv_layers", 0)
    counts = dict(zip(kinds, model.each("attention.head_count_kv"), strict=True))
    with_own = list(enumerate(kinds))[: len(kinds) - num_shared]
    return {
        "sliding_window": model.size("attention.sliding_window"),
        "head_dim": model.size("attention.key_length_swa"),
        "global_head_dim": model.size("attention.key_length"),
        "num_key_value_heads": counts.get("sliding_attention", max(counts.values())),
        "num_global_key_value_heads": counts.get("full_attention"),
        "num_kv_shared_layers": num_shared,
        "attention_k_eq_v": any(
            kind == "full_attention" and not model.has(f"blk.{index}.attn_v.weight")
            for index, kind in with_own
        ),
    }


ARCHITECTURE = Architecture(name="gemma4", read=read)
