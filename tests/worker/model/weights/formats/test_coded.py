"""Formats whose matrices are expanded: each against a direct reading of its definition."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from shared.errors import StartupError
from worker.checkpoints.checkpoint import Checkpoint
from worker.model.weights.formats.interface import Format, Target
from worker.model.weights.formats.registry import format_of
from worker.model.weights.weight import Weight

TARGET = Target(torch.float32, torch.device("cpu"), "native")
STEM = "model.layers.0.mlp.down_proj."
OUTPUTS, INPUTS, GROUP = 48, 64, 16


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def integers(low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(high))


def words(codes: Tensor, bits: int) -> Tensor:
    """[rows, codes] of unsigned integers as words [rows, codes * bits / 32], the lowest first."""
    per_word = 32 // bits
    packed = torch.zeros(len(codes), codes.shape[1] // per_word, dtype=torch.int64)
    for place in range(per_word):
        packed |= codes[:, place::per_word].long() << bits * place
    return torch.where(packed < 1 << 31, packed, packed - (1 << 32)).int()


Case = tuple[dict[str, Any], dict[str, Tensor], Tensor]
"""What config.json says, the tensors of a matrix, and its values."""


def fp8_blocks(kind: torch.dtype = torch.float8_e4m3fn) -> Case:
    weight, scales = random(OUTPUTS, INPUTS).to(kind), random(3, 3).abs()
    expected = torch.empty(OUTPUTS, INPUTS)
    for row in range(OUTPUTS):
        for column in range(INPUTS):
            expected[row, column] = weight[row, column].float() * scales[row // 20, column // 24]
    config = {"quant_method": "fp8", "weight_block_size": [20, 24]}
    return config, {"weight": weight, "weight_scale_inv": scales}, expected


def fp8_tensor() -> Case:
    weight, scale = random(OUTPUTS, INPUTS).to(torch.float8_e5m2), torch.tensor(0.37)
    tensors = {"weight": weight, "weight_scale": scale, "input_scale": torch.tensor(1.0)}
    return {"quant_method": "fp8"}, tensors, weight.float() * 0.37


def gptq(bits: int, *, is_ordered: bool, layout: str) -> Case:
    codes = integers(0, 1 << bits, INPUTS, OUTPUTS)
    zeros = integers(1, 1 << bits, INPUTS // GROUP, OUTPUTS)
    scales = random(INPUTS // GROUP, OUTPUTS).half()
    groups = torch.arange(INPUTS) // GROUP
    if not is_ordered:
        groups = groups[torch.randperm(INPUTS, generator=torch.Generator().manual_seed(0))]
    tensors = {
        "qweight": words(codes.t().contiguous(), bits).t().contiguous(),
        "qzeros": words(zeros - int(layout == "gptq"), bits),
        "scales": scales,
        "g_idx": groups.int(),
    }
    expected = (scales[groups] * (codes - zeros[groups]).half()).t()
    config = {"quant_method": "gptq", "bits": bits, "checkpoint_format": layout}
    return config, tensors, expected


def compressed(layout: str, bits: int) -> dict[str, Any]:
    weights = {"num_bits": bits}
    groups = {"group_0": {"weights": weights}}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups}


def packed(bits: int, *, has_zeros: bool) -> Case:
    low, high = -(1 << bits - 1), 1 << bits - 1
    codes = integers(low, high, OUTPUTS, INPUTS)
    scales = random(OUTPUTS, INPUTS // GROUP).bfloat16()
    tensors = {
        "weight_packed": words(codes - low, bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor([OUTPUTS, INPUTS]),
    }
    numbers = codes.bfloat16()
    if has_zeros:
        zeros = integers(low, high, OUTPUTS, INPUTS // GROUP)
        tensors["weight_zero_point"] = words((zeros - low).t().contiguous(), bits).t().contiguous()
        numbers = numbers - zeros.repeat_interleave(GROUP, 1).bfloat16()
    expected = numbers * scales.repeat_interleave(GROUP, 1)
    return compressed("pack-quantized", bits), tensors, expected


def int8_channels() -> Case:
    weight, scales = integers(-128, 128, OUTPUTS, INPUTS).to(torch.int8), random(OUTPUTS, 1)
    tensors = {"weight": weight, "weight_scale": scales}
    return compressed("int-quantized", 8), tensors, weight.float() * scales


def fp8_channels() -> Case:
    weight, scales = random(OUTPUTS, INPUTS).to(torch.float8_e4m3fn), random(OUTPUTS)
    tensors = {"weight": weight, "weight_scale": scales}
    return compressed("float-quantized", 8), tensors, weight.float() * scales[:, None]


def nf4(*, is_nested: bool) -> Case:
    table, codes = random(16), integers(0, 16, OUTPUTS * INPUTS)
    pairs = codes.view(-1, 2)
    state = {"blocksize": 64, "shape": [OUTPUTS, INPUTS], "dtype": "float32"}
    tensors = {
        "weight": (pairs[:, :1] << 4 | pairs[:, 1:]).to(torch.uint8),
        "weight.quant_map": table,
    }
    most = random(OUTPUTS * INPUTS // 64).abs()
    if is_nested:
        coded, levels = integers(0, 256, len(most)).to(torch.uint8), random(256)
        outer = random(-(-len(most) // 16)).abs()
        most = levels[coded.long()] * outer.repeat_interleave(16)[: len(most)] + 0.25
        state |= {"nested_blocksize": 16, "nested_offset": 0.25}
        tensors |= {"weight.nested_absmax": outer, "weight.nested_quant_map": levels}
        tensors["weight.absmax"] = coded
    else:
        tensors["weight.absmax"] = most
    name = "weight.quant_state.bitsandbytes__nf4"
    tensors[name] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    expected = (table[codes] * most.repeat_interleave(64)).view(OUTPUTS, INPUTS)
    return {"quant_method": "bitsandbytes", "load_in_4bit": True}, tensors, expected


CASES: dict[str, Callable[[], Case]] = {
    "FP8 in blocks": fp8_blocks,
    "FP8 with one scale": fp8_tensor,
    "GPTQ, 4 bits": lambda: gptq(4, is_ordered=True, layout="gptq"),
    "GPTQ, 8 bits": lambda: gptq(8, is_ordered=True, layout="gptq"),
    "GPTQ, act-order": lambda: gptq(4, is_ordered=False, layout="gptq"),
    "GPTQ, version 2": lambda: gptq(4, is_ordered=True, layout="gptq_v2"),
    "W4A16": lambda: packed(4, has_zeros=False),
    "W4A16 with zero points": lambda: packed(4, has_zeros=True),
    "W8A16": lambda: packed(8, has_zeros=False),
    "int8 for each output": int8_channels,
    "FP8 for each output": fp8_channels,
    "NF4": lambda: nf4(is_nested=False),
    "NF4, nested": lambda: nf4(is_nested=True),
}


def opened(
    directory: Path, config: dict[str, Any], tensors: dict[str, Tensor]
) -> tuple[Format, Checkpoint]:
    plain = {"model.norm.weight": torch.ones(INPUTS), f"{STEM}other.weight": random(8, INPUTS)}
    named = {f"{STEM}{suffix}": tensor.contiguous() for suffix, tensor in tensors.items()}
    save_file(plain | named, directory / "model.safetensors")
    source = Checkpoint(directory)
    return format_of({"quantization_config": config}, source), source


def read(
    directory: Path,
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    shape: tuple[int, int] = (OUTPUTS, INPUTS),
) -> Weight:
    stored_as, source = opened(directory, config, tensors)
    return stored_as.read(source, [f"{STEM}weight"], shape, TARGET)


@pytest.mark.parametrize("name", CASES)
def test_a_matrix_is_what_its_format_defines(tmp_path: Path, name: str) -> None:
    config, tensors, expected = CASES[name]()
    weight = read(tmp_path, config, tensors)
    assert weight.shape == (OUTPUTS, INPUTS)
    assert torch.equal(weight.dense(expected.dtype), expected)


@pytest.mark.parametrize("name", CASES)
def test_everything_is_read_and_ignored_modules_stay_as_they_are(tmp_path: Path, name: str) -> None:
    config, tensors, expected = CASES[name]()
    stored_as, source = opened(tmp_path, config, tensors)
    names = [f"{STEM}weight", f"{STEM}other.weight"]

    both = stored_as.read(source, names, (OUTPUTS + 8, INPUTS), TARGET)

    assert torch.equal(both.dense(torch.float32)[OUTPUTS:], random(8, INPUTS))
    assert torch.equal(both.dense(expected.dtype)[:OUTPUTS], expected)
    assert source.unread == ["model.norm.weight"]
    num_weights = (OUTPUTS + 8) * INPUTS + INPUTS
    assert stored_as.num_bytes(source, TARGET) == 4 * num_weights


@pytest.mark.parametrize("name", CASES)
def test_another_shape_is_refused_by_name(tmp_path: Path, name: str) -> None:
    config, tensors, _ = CASES[name]()
    message = r"down_proj\.weight has shape \(48, 64\), config.json says \(48, 32\)"
    with pytest.raises(StartupError, match=message):
        read(tmp_path, config, tensors, (OUTPUTS, INPUTS // 2))


SCALES = ("weight_scale_inv", "weight_scale", "scales", "weight.absmax")


@pytest.mark.parametrize("name", [name for name in CASES if name != "NF4, nested"])
def test_a_scale_that_is_not_finite_is_refused_by_name(tmp_path: Path, name: str) -> None:
    config, tensors, _ = CASES[name]()
    scale = next(kind for kind in SCALES if kind in tensors)
    tensors[scale] = torch.full_like(tensors[scale], torch.inf)
    with pytest.raises(StartupError, match=r"down_proj\.weight cannot be read as .* infinite"):
        read(tmp_path, config, tensors)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("FP8 in blocks", "weight_scale_inv", r"scales have the shape \(2, 3\), not \(3, 3\)"),
        ("GPTQ, 4 bits", "scales", "qzeros has the shape"),
        ("GPTQ, 4 bits", "g_idx", "g_idx names groups that do not exist, or not one for each"),
        ("W4A16", "weight_scale", r"scales of shape \(47, 4\) for a matrix of \(48, 64\)"),
        ("FP8 for each output", "weight_scale", r"scales of shape \(47, 1\) for a matrix"),
        ("NF4", "weight.absmax", "47 blocks of 64 do not cover 3072 weights"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused(
    tmp_path: Path, name: str, tensor: str, message: str
) -> None:
    config, tensors, _ = CASES[name]()
    tensors[tensor] = tensors[tensor][1:]
    with pytest.raises(StartupError, match=rf"down_proj\.weight cannot be read as .*{message}"):
        read(tmp_path, config, tensors)
