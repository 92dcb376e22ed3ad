"""A model with random weights, created on the device, and a runner for it."""

from collections.abc import Callable

import torch
from torch import Tensor

from bench.gpu.scale import Scale
from kernels.providers import Ops
from worker.model.decoders.native import NativeDecoder
from worker.model.runner import TorchRunner
from worker.model.start import RunnerLimits, start_runner
from worker.model.weights.awq import AwqWeight
from worker.model.weights.layers import DecoderWeights, LayerWeights, Linear

AWQ_GROUP = 128
NUM_LAYERS = 8
"""The number of layers in `linears`, whose weights exceed every cache."""
_STD = 0.02


class RandomWeights:
    """Random matrices of one device and dtype."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype

    def dense(self, outputs: int, inputs: int) -> Tensor:
        """[outputs, inputs]."""
        matrix = torch.empty(outputs, inputs, dtype=self._dtype, device=self._device)
        return matrix.normal_(std=_STD)

    def awq(self, outputs: int, inputs: int) -> AwqWeight:
        """[outputs, inputs] in 4 bits."""
        groups = (inputs // AWQ_GROUP, outputs)
        words = (inputs // 8, outputs)
        least = -(1 << 31)
        return AwqWeight(
            torch.randint(least, 1 << 31, words, dtype=torch.int32, device=self._device),
            torch.rand(groups, device=self._device).mul_(_STD / 4).half(),
            torch.randint(6, 10, groups, device=self._device).to(torch.uint8),
        )

    def norm(self, size: int) -> Tensor:
        return torch.rand(size, device=self._device).add_(0.5).to(self._dtype)


def decoder(
    scale: Scale, ops: Ops, device: torch.device, dtype: torch.dtype, *, is_awq: bool = False
) -> NativeDecoder:
    """A decoder with the scale's shape. With ``is_awq`` its layers have 4-bit weights."""
    config, random = scale.model, RandomWeights(device, dtype)

    def linear(outputs: int, inputs: int) -> Linear[Tensor | AwqWeight]:
        make = random.awq if is_awq else random.dense
        return Linear(make(outputs, inputs), None)

    def layer() -> LayerWeights[Tensor | AwqWeight]:
        hidden, mlp = config.hidden_size, config.intermediate_size
        attended = config.num_heads * config.head_dim
        return LayerWeights(
            input_norm=random.norm(hidden),
            qkv=linear(attended + 2 * config.num_kv_heads * config.head_dim, hidden),
            query_norm=None,
            key_norm=None,
            attention_output=linear(hidden, attended),
            mlp_norm=random.norm(hidden),
            gate_up=linear(2 * mlp, hidden),
            down=linear(hidden, mlp),
        )

    weights = DecoderWeights(
        embedding=random.dense(config.vocab_size, config.hidden_size),
        layers=tuple(layer() for _ in range(config.num_layers)),
        norm=random.norm(config.hidden_size),
        lm_head=random.dense(config.vocab_size, config.hidden_size),
    )
    return NativeDecoder(config, weights, ops, config.max_seq_len)


def runner(scale: Scale, model: NativeDecoder, ops: Ops) -> TorchRunner:
    """A runner as in a worker, whose cache holds the largest decode step and the requests."""
    longest = max(scale.context_len + scale.block_size, scale.max_request_len)
    limits = RunnerLimits(
        block_size=scale.block_size,
        max_num_seqs=scale.max_num_seqs,
        max_num_batched_tokens=scale.max_num_batched_tokens,
        max_seq_len=longest,
    )
    return start_runner(model, ops, limits, has_graphs=model.device.type == "cuda")


def weight_bytes(scale: Scale, dtype: torch.dtype) -> int:
    """Of all matrices in ``dtype``."""
    config = scale.model
    attended = config.num_heads * config.head_dim
    qkv = attended + 2 * config.num_kv_heads * config.head_dim
    layer = config.hidden_size * (qkv + attended + 3 * config.intermediate_size)
    tables = 2 * config.vocab_size * config.hidden_size
    return (config.num_layers * layer + tables) * dtype.itemsize


def step_bytes(scale: Scale, dtype: torch.dtype, num_seqs: int) -> int:
    """The bytes that a decode step has to read: all weights, and the keys and values of all
    contexts."""
    config = scale.model
    token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize
    return weight_bytes(scale, dtype) + num_seqs * scale.context_len * token


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
    if is_awq:
        packed = [random.awq(*shape) for shape in shapes]

        def work() -> None:
            for weight, (_, size) in zip(packed, shapes, strict=True):
                tensors = (weight.qweight, weight.scales, weight.zeros)
                ops.awq_linear(inputs[size], *tensors, group_size=AWQ_GROUP)

        return work
    dense = [random.dense(*shape) for shape in shapes]

    def work_dense() -> None:
        for weight in dense:
            ops.projection(inputs[weight.shape[1]], weight, None)

    return work_dense
