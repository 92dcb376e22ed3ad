"""The language model of Llama 4."""

from typing import Any

from worker.checkpoints.architectures.interface import Architecture, GgufModel

_CHUNK = 8192
_NO_POSITIONS = 4
"""One of so many layers has no positions, and sees all tokens."""


def read(model: GgufModel) -> dict[str, Any]:
    layers = range(model.num_layers)
    is_whole = model.get("attention.sliding_window") == 0
    return {
        **model.decoder(),
        **model.experts("num_local_experts"),
        "model_type": "llama4_text",
        "intermediate_size": model.size("expert_feed_forward_length"),
        "intermediate_size_mlp": model.size("feed_forward_length"),
        "moe_layers": [k for k in layers if model.has(f"blk.{k}.ffn_gate_inp.weight")],
        "attention_chunk_size": None if is_whole else _CHUNK,
        "layer_types": [
            "full_attention" if is_whole or (k + 1) % _NO_POSITIONS == 0 else "chunked_attention"
            for k in layers
        ],
        "no_rope_layers": [1 if is_whole or (k + 1) % _NO_POSITIONS else 0 for k in layers],
        # The model of 128 experts has no norms of queries and keys.
        "use_qk_norm": model.size("expert_count") != 128,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "attn_scale": 0.1,
    }


ARCHITECTURE = Architecture(name="llama4", read=read, rotates_pairs=True)
