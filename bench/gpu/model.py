"""A model with random weights, created on the device, and a runner for it."""

from collections.abc import Callable

import torch

from bench.dense_shape import DenseShape
from bench.gpu.random_weights import RandomWeights
from bench.gpu.scale import Scale
from kernels.providers import Ops
from worker.model.decoders.stack import StackDecoder
from worker.model.runner import TorchRunner
from worker.model.start import RunnerLimits, start_runner
from worker.model.weights.layers import (
    AttentionWeights,
    DecoderWeights,
    LayerWeights,
    MlpWeights,
    NormWeights,
)
from worker.model.weights.weight import Linear, Weight

NUM_LAYERS = 8
"""The number of layers in `linears`, whose weights exceed every cache."""


def decoder(
    scale: Scale, ops: Ops, device: torch.device, dtype: torch.dtype, *, is_awq: bool = False
) -> StackDecoder:
    """A decoder with the scale's shape. With ``is_awq`` its layers have 4-bit weights."""
    random = weights(scale, device, dtype, is_awq=is_awq)
    return StackDecoder(scale.model.spec, random, ops, scale.model.max_seq_len)


def weights(
    scale: Scale, device: torch.device, dtype: torch.dtype, *, is_awq: bool = False
) -> DecoderWeights:
    config, random = scale.model, RandomWeights(device, dtype)

    def linear(outputs: int, inputs: int) -> Linear:
        make = random.awq if is_awq else random.dense
        return Linear(make(outputs, inputs), None)

    def layer() -> LayerWeights:
        hidden, mlp = config.hidden_size, config.intermediate_size
        attended = config.num_heads * config.head_dim
        return LayerWeights(
            attention=AttentionWeights(
                qkv=linear(attended + 2 * config.num_kv_heads * config.head_dim, hidden),
                output=linear(hidden, attended),
            ),
            feed_forward=MlpWeights(linear(2 * mlp, hidden), linear(hidden, mlp)),
            before_attention=NormWeights(random.norm(hidden)),
            before_feed_forward=NormWeights(random.norm(hidden)),
        )

    embedding = random.dense(config.vocab_size, config.hidden_size)
    return DecoderWeights(
        embedding=embedding,
        layers=tuple(layer() for _ in range(config.num_layers)),
        norm=NormWeights(random.norm(config.hidden_size)),
        lm_head=random.dense(config.vocab_size, config.hidden_size),
        dtype=dtype,
    )


def runner(scale: Scale, model: StackDecoder, ops: Ops) -> TorchRunner:
    """A runner as in a worker, whose context length suffices for all measurements."""
    longest = max(scale.context_len, scale.max_request_len, scale.prefill_len)
    limits = RunnerLimits(
        block_size=scale.block_size,
        max_num_seqs=scale.max_num_seqs,
        max_num_batched_tokens=scale.max_num_batched_tokens,
        max_seq_len=longest,
    )
    return start_runner(model, ops, limits, has_graphs=model.device.type == "cuda")


def step_bytes(scale: Scale, dtype: torch.dtype, num_seqs: int) -> int:
    """The bytes that a decode step has to move: each weight of the layers and of the head is read
    once, and a row of the embedding for each sequence; the keys and values of all contexts are
    read, and the keys and values of the new tokens are written."""
    config = scale.model
    token = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    weights = _layer_elements(config) + _head_elements(config)
    rows = num_seqs * config.hidden_size
    return (weights + rows + num_seqs * scale.context_len * token) * dtype.itemsize


def prompt_flops(scale: Scale, num_tokens: int) -> int:
    """The operations of a prompt: all layers for each token, attention from each token to itself
    and to all tokens before it, and the head for the last token."""
    config = scale.model
    pairs = num_tokens * (num_tokens + 1) // 2
    attention = 4 * pairs * config.num_heads * config.head_dim * config.num_layers
    return 2 * num_tokens * _layer_elements(config) + attention + 2 * _head_elements(config)


def _layer_elements(config: DenseShape) -> int:
    """The elements of the matrices of all layers."""
    attended = config.num_heads * config.head_dim
    qkv = attended + 2 * config.num_kv_heads * config.head_dim
    layer = config.hidden_size * (qkv + attended + 3 * config.intermediate_size)
    return config.num_layers * layer


def _head_elements(config: DenseShape) -> int:
    return config.vocab_size * config.hidden_size


def linears(
    scale: Scale,
    ops: Ops,
    device: torch.device,
    dtype: torch.dtype,
    num_tokens: int,
    *,
    is_awq: bool,
) -> Callable[[], None]:
    """The products of `NUM_LAYERS` layers, without the operations between them."""
    random, config = RandomWeights(device, dtype), scale.model
    hidden, mlp = config.hidden_size, config.intermediate_size
    attended = config.num_heads * config.head_dim
    qkv = attended + 2 * config.num_kv_heads * config.head_dim
    shapes = [(qkv, hidden), (hidden, attended), (2 * mlp, hidden), (hidden, mlp)] * NUM_LAYERS
    inputs = {size: torch.randn(num_tokens, size, device=device).to(dtype) for _, size in shapes}
    make = random.awq if is_awq else random.dense
    matrices: list[Weight] = [make(*shape) for shape in shapes]

    def work() -> None:
        for weight in matrices:
            weight.linear(inputs[weight.shape[1]], None, ops)

    return work
