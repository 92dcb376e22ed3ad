"""The sizes of the model and of the measurements."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from bench.dense_shape import DenseShape
from bench.gpu.mixers import PUBLISHED, TINY, MixerShapes

_EPS = 1e-5
_THETA = 500_000.0


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The shape of a model and the sizes of its measurements."""

    model: DenseShape
    copy_bytes: int
    matmul_size: int
    num_tokens: int
    """Tokens of a step, for kernels that work on single tokens."""
    prefill_len: int
    context_len: int
    """The context of the decode steps."""
    batches: tuple[int, ...]
    num_requests: int
    mean_prompt_len: int
    mean_output_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    mixers: MixerShapes
    """The sizes of layers that Llama lacks."""
    block_size: int = 16

    @property
    def max_request_len(self) -> int:
        """The maximum of prompt and output together; see `bench.gpu.requests`."""
        return 4 * (self.mean_prompt_len + self.mean_output_len)


def _llama(*, vocab: int, hidden: int, mlp: int, layers: int, heads: int, kv: int) -> DenseShape:
    return DenseShape.of(
        {
            "model_type": "llama",
            "vocab_size": vocab,
            "hidden_size": hidden,
            "intermediate_size": mlp,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv,
            "rms_norm_eps": _EPS,
            "max_position_embeddings": 8192,
            "rope_theta": _THETA,
        }
    )


SCALES = {
    "llama-3.1-8b": Scale(
        model=_llama(vocab=128_256, hidden=4096, mlp=14_336, layers=32, heads=32, kv=8),
        copy_bytes=4 << 30,
        matmul_size=8192,
        num_tokens=8192,
        prefill_len=8192,
        context_len=1024,
        batches=(1, 16, 64, 256),
        num_requests=1000,
        mean_prompt_len=220,
        mean_output_len=200,
        max_num_seqs=512,
        max_num_batched_tokens=8192,
        mixers=PUBLISHED,
    ),
    "tiny": Scale(
        model=_llama(vocab=512, hidden=128, mlp=256, layers=2, heads=4, kv=2),
        copy_bytes=1 << 20,
        matmul_size=128,
        num_tokens=24,
        prefill_len=48,
        context_len=40,
        batches=(1, 4),
        num_requests=12,
        mean_prompt_len=12,
        mean_output_len=6,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        mixers=TINY,
    ),
}


def transformers_config(scale: Scale) -> dict[str, Any]:
    """The arguments of transformers' ``LlamaConfig`` for the same model."""
    model = scale.model
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "max_position_embeddings": model.max_seq_len,
        "rms_norm_eps": _EPS,
        "rope_parameters": {"rope_theta": _THETA, "rope_type": "default"},
        "tie_word_embeddings": False,
    }


def with_requests(scale: Scale, num_requests: int | None) -> Scale:
    """The scale with this number of requests, unless it is None."""
    return dataclasses.replace(scale, num_requests=num_requests or scale.num_requests)
