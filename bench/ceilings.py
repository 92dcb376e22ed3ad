"""What limits a step on the CPU: the machine's peak rates, and torch's products of the same shapes.

A step reads all weights, and computes a multiply-add for each weight and token. With few tokens
memory is the limit, with many the multiply-adds.
"""

import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional

from bench.dense_shape import DenseShape
from kernels.quantized import BLOCKS

_SOURCE = Path(__file__).with_name("peak.cpp")
_FLAGS = ("-std=c++20", "-O3", "-march=native", "-ffp-contract=fast", "-pthread")
LINEARS = ("qkv", "attention output", "gate and up", "down")
"""The parts of a step that are products of all its tokens with weights."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Operations, and bytes read, per second."""

    flops: float
    num_bytes: float


@dataclass(frozen=True, kw_only=True)
class ModelWork:
    """What a part of a step has to compute and to read."""

    flops: float
    num_bytes: float


@dataclass(frozen=True, kw_only=True)
class Products:
    """The time of all linears of a step in torch, in milliseconds."""

    num_tokens: int
    float32_ms: float
    bfloat16_ms: float

    @property
    def best_ms(self) -> float:
        return min(self.float32_ms, self.bfloat16_ms)


def peak_rates(num_threads: int, seconds: float) -> Rates:
    """Measure the machine: float32 multiply-adds in registers, and reads from memory.

    Raises `RuntimeError` if there is no C++ compiler.
    """
    with measured_peak(num_threads, seconds) as measure:
        return measure()


@contextmanager
def measured_peak(num_threads: int, seconds: float) -> Iterator[Callable[[], Rates]]:
    """A function that measures the machine as `peak_rates` does, whenever it is called: the rates
    of a virtual machine change from one second to the next. Raises `RuntimeError` like it."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise RuntimeError("the machine's peak rates are measured with a C++ compiler: install one")
    with tempfile.TemporaryDirectory() as directory:
        program = Path(directory, "peak")
        subprocess.run([compiler, *_FLAGS, str(_SOURCE), "-o", str(program)], check=True)
        command = [str(program), str(num_threads), str(seconds)]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            asked, answers = process.stdin, process.stdout
            rates = [_rates(answers.readline())]

            def measure() -> Rates:
                if rates:
                    return rates.pop()
                asked.write("\n")
                asked.flush()
                return _rates(answers.readline())

            yield measure


def _rates(line: str) -> Rates:
    flops, num_bytes = map(float, line.split())
    return Rates(flops=flops, num_bytes=num_bytes)


def element_bytes(weights: str) -> float:
    """The bytes of a weight in a format: float32, bfloat16 or a packed format."""
    if weights in BLOCKS:
        return BLOCKS[weights].bytes_per_weight
    return float(getattr(torch, weights).itemsize)


def linear_shapes(config: DenseShape) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of each of a layer's `LINEARS`."""
    hidden, mlp = config.hidden_size, config.intermediate_size
    attended = config.num_heads * config.head_dim
    qkv = attended + 2 * config.num_kv_heads * config.head_dim
    shapes = ((qkv, hidden), (hidden, attended), (2 * mlp, hidden), (hidden, mlp))
    return dict(zip(LINEARS, shapes, strict=True))


def work_of(
    config: DenseShape,
    weights: str,
    kv_dtype: torch.dtype,
    *,
    num_seqs: int,
    num_new_tokens: int,
    context: int,
) -> dict[str, ModelWork]:
    """The work of a step's parts, in which each weight and each key and value is read once.

    Each sequence has ``num_new_tokens`` after ``context`` earlier tokens, and draws one token.
    """
    size, num_tokens = element_bytes(weights), num_seqs * num_new_tokens
    parts = {
        name: _product(num_tokens, config.num_layers * outputs * inputs, size)
        for name, (outputs, inputs) in linear_shapes(config).items()
    }
    parts["logits"] = _product(num_seqs, config.vocab_size * config.hidden_size, size)
    pairs = num_tokens * context + num_seqs * num_new_tokens * (num_new_tokens + 1) // 2
    heads = config.num_layers * config.num_heads * config.head_dim
    kv_heads = config.num_layers * config.num_kv_heads * config.head_dim
    kv_elements = 2 * num_seqs * (context + num_new_tokens) * kv_heads
    parts["attention"] = ModelWork(
        flops=4 * pairs * heads, num_bytes=kv_elements * kv_dtype.itemsize
    )
    return parts


def _product(num_tokens: int, num_weights: int, size: float) -> ModelWork:
    return ModelWork(flops=2 * num_tokens * num_weights, num_bytes=num_weights * size)


def torch_products(
    config: DenseShape, num_tokens: int, num_threads: int, seconds: float
) -> Products:
    """Measure torch's products of a step's shapes; every layer has weights of its own, which no
    cache holds."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        float32_ms, bfloat16_ms = (
            _best_ms(_linears(config, num_tokens, dtype), seconds)
            for dtype in (torch.float32, torch.bfloat16)
        )
    finally:
        torch.set_num_threads(before)
    return Products(num_tokens=num_tokens, float32_ms=float32_ms, bfloat16_ms=bfloat16_ms)


def _linears(config: DenseShape, num_tokens: int, dtype: torch.dtype) -> Callable[[], None]:
    shapes = linear_shapes(config).values()
    inputs = {size: torch.randn(num_tokens, size, dtype=dtype) for _, size in shapes}
    layer = [torch.randn(outputs, size, dtype=dtype) for outputs, size in shapes]
    layers = [weight.clone() for _ in range(config.num_layers) for weight in layer]

    def work() -> None:
        for weight in layers:
            functional.linear(inputs[weight.shape[1]], weight)

    return work


@torch.inference_mode()
def _best_ms(work: Callable[[], None], seconds: float) -> float:
    work()
    return min(_times(work, seconds)) * 1e3


def _times(work: Callable[[], None], seconds: float) -> Iterator[float]:
    """The seconds of each run. There is at least one run."""
    until = time.perf_counter() + seconds
    while True:
        began = time.perf_counter()
        work()
        yield time.perf_counter() - began
        if time.perf_counter() > until:
            return
