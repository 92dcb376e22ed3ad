"""Formats of codes with scales: each against a direct reading of its definition, whether it is kept
in blocks or expanded."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from kernels.providers import Provider, load_ops
from kernels.quantized import BLOCK_SIZES
from kernels.scaled_floats import VALUES
from shared.errors import StartupError
from worker.checkpoints.checkpoint import Checkpoint
from worker.model.weights.formats.interface import Format, Target
from worker.model.weights.formats.registry import format_of
from worker.model.weights.weight import Weight

TARGET = Target(torch.float32, torch.device("cpu"), "native")
STEM = "model.layers.0.mlp.down_proj."
OUTPUTS, INPUTS, GROUP = 48, 128, 16


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
    weight, scales = random(OUTPUTS, INPUTS).to(kind), random(3, 6).abs()
    expected = torch.empty(OUTPUTS, INPUTS)
    for row in range(OUTPUTS):
        for column in range(INPUTS):
            expected[row, column] = weight[row, column].float() * scales[row // 20, column // 24]
    config = {"quant_method": "fp8", "weight_block_size": [20, 24]}
    return config, {"weight": weight, "weight_scale_inv": scales}, expected


def fp8_wide_blocks() -> Case:
    weight, scales = random(OUTPUTS, INPUTS).to(torch.float8_e4m3fn), random(3, 1).bfloat16()
    config = {"quant_method": "fp8", "weight_block_size": [16, 128]}
    expected = weight.float() * scales.float().repeat_interleave(16, 0)
    return config, {"weight": weight, "weight_scale_inv": scales}, expected


def fp8_tensor(kind: torch.dtype = torch.float8_e5m2) -> Case:
    weight, scale = random(OUTPUTS, INPUTS).to(kind), torch.tensor(0.37)
    tensors = {"weight": weight, "weight_scale": scale, "input_scale": torch.tensor(1.0)}
    return {"quant_method": "fp8"}, tensors, weight.float() * 0.37


def gptq(
    bits: int, *, is_ordered: bool, layout: str, group: int = GROUP, is_symmetric: bool = False
) -> Case:
    codes = integers(0, 1 << bits, INPUTS, OUTPUTS)
    zeros = integers(1, 1 << bits, INPUTS // group, OUTPUTS)
    if is_symmetric:
        zeros[:] = 1 << bits - 1
    scales = random(INPUTS // group, OUTPUTS).half()
    groups = torch.arange(INPUTS) // group
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
    config |= {"group_size": group, "sym": is_symmetric}
    return config, tensors, expected


def compressed(layout: str, bits: int, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"weights": {"num_bits": bits, **weights}}}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups}


def groups_of(size: int) -> dict[str, Any]:
    """What compressed-tensors says of weights with a scale for so many inputs."""
    return {"strategy": "group", "group_size": size}


def packed(bits: int, *, has_zeros: bool, group: int = GROUP) -> Case:
    low, high = -(1 << bits - 1), 1 << bits - 1
    codes = integers(low, high, OUTPUTS, INPUTS)
    scales = random(OUTPUTS, INPUTS // group).bfloat16()
    tensors = {
        "weight_packed": words(codes - low, bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor([OUTPUTS, INPUTS]),
    }
    numbers = codes.bfloat16()
    if has_zeros:
        zeros = integers(low, high, OUTPUTS, INPUTS // group)
        tensors["weight_zero_point"] = words((zeros - low).t().contiguous(), bits).t().contiguous()
        numbers = numbers - zeros.repeat_interleave(group, 1).bfloat16()
    expected = numbers * scales.repeat_interleave(group, 1)
    return compressed("pack-quantized", bits, **groups_of(group)), tensors, expected


def int8_channels(dtype: torch.dtype = torch.float32) -> Case:
    weight = integers(-128, 128, OUTPUTS, INPUTS).to(torch.int8)
    tensors = {"weight": weight, "weight_scale": random(OUTPUTS, 1).to(dtype)}
    config = compressed("int-quantized", 8, strategy="channel")
    return config, tensors, weight.to(dtype) * tensors["weight_scale"]


def fp8_channels() -> Case:
    weight, scales = random(OUTPUTS, INPUTS).to(torch.float8_e4m3fn), random(OUTPUTS)
    tensors = {"weight": weight, "weight_scale": scales}
    config = compressed("float-quantized", 8, strategy="channel")
    return config, tensors, weight.float() * scales[:, None]


def fp8_compressed() -> Case:
    _, tensors, expected = fp8_tensor()
    config = compressed("float-quantized", 8, strategy="tensor")
    return config, tensors | {"weight_scale": tensors["weight_scale"].view(1)}, expected


def nf4(*, is_nested: bool, kind: str = "nf4", is_usual: bool = False) -> Case:
    table, codes = VALUES[kind] if is_usual else random(16), integers(0, 16, OUTPUTS * INPUTS)
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
    name = f"weight.quant_state.bitsandbytes__{kind}"
    tensors[name] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    expected = (table[codes] * most.repeat_interleave(64)).view(OUTPUTS, INPUTS)
    return {"quant_method": "bitsandbytes", "load_in_4bit": True}, tensors, expected


def mxfp4() -> Case:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = integers(0, 256, OUTPUTS, INPUTS // 32, 16).to(torch.uint8)
    exponents = integers(0, 253, OUTPUTS, INPUTS // 32).to(torch.uint8)
    expected = convert_moe_packed_tensors(blocks[None], exponents[None], dtype=torch.bfloat16)
    return {"quant_method": "mxfp4"}, {"blocks": blocks, "scales": exponents}, expected[0].t()


def mxfp4_compressed() -> Case:
    _, stored, expected = mxfp4()
    tensors = {"weight_packed": stored["blocks"].flatten(1), "weight_scale": stored["scales"]}
    return compressed("mxfp4-pack-quantized", 4), tensors, expected


FLOAT4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def nvfp4(*, is_compressed: bool) -> Case:
    codes, scales = integers(0, 16, OUTPUTS, INPUTS), random(OUTPUTS, INPUTS // 16).abs()
    pairs = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    short = (scales * 100).to(torch.float8_e4m3fn)
    if is_compressed:
        whole, config = torch.tensor([371.5]), compressed("nvfp4-pack-quantized", 4)
        names, own = ("weight_packed", "weight_global_scale"), short.bfloat16() / whole
    else:
        whole, config = torch.tensor(0.0027), {"quant_method": "modelopt", "quant_algo": "NVFP4"}
        names, own = ("weight", "weight_scale_2"), short.float() * whole
    tensors = {names[0]: pairs, "weight_scale": short, names[1]: whole}
    assert own.dtype == torch.float32
    return config, tensors, (FLOAT4[codes] * own.repeat_interleave(16, 1)).bfloat16()


def fp8_model_opt() -> Case:
    _, tensors, expected = fp8_tensor()
    return {"quant_method": "modelopt", "quant_algo": "FP8"}, tensors, expected


CASES: dict[str, Callable[[], Case]] = {
    "FP8 in blocks": fp8_blocks,
    "FP8 with one scale": fp8_tensor,
    "FP8 in wide blocks": fp8_wide_blocks,
    "FP8 with one scale, E4M3": lambda: fp8_tensor(torch.float8_e4m3fn),
    "GPTQ, 4 bits": lambda: gptq(4, is_ordered=True, layout="gptq"),
    "GPTQ, 8 bits": lambda: gptq(8, is_ordered=True, layout="gptq"),
    "GPTQ, act-order": lambda: gptq(4, is_ordered=False, layout="gptq"),
    "GPTQ, version 2": lambda: gptq(4, is_ordered=True, layout="gptq_v2"),
    "W4A16": lambda: packed(4, has_zeros=False),
    "W4A16 with zero points": lambda: packed(4, has_zeros=True),
    "W8A16": lambda: packed(8, has_zeros=False),
    "int8 for each output": int8_channels,
    "FP8 for each output": fp8_channels,
    "FP8 of compressed-tensors with one scale": fp8_compressed,
    "NF4": lambda: nf4(is_nested=False),
    "NF4, nested": lambda: nf4(is_nested=True),
    "NF4 with its values": lambda: nf4(is_nested=False, is_usual=True),
    "NF4 with its values, nested": lambda: nf4(is_nested=True, is_usual=True),
    "FP4 with its values": lambda: nf4(is_nested=False, kind="fp4", is_usual=True),
    "GPTQ in blocks": lambda: gptq(4, is_ordered=True, layout="gptq", group=32, is_symmetric=True),
    "GPTQ in blocks, with zero points": lambda: gptq(4, is_ordered=True, layout="gptq", group=64),
    "GPTQ in blocks, 8 bits": lambda: gptq(
        8, is_ordered=True, layout="gptq_v2", group=32, is_symmetric=True
    ),
    "GPTQ of whole blocks, act-order": lambda: gptq(4, is_ordered=False, layout="gptq", group=32),
    "W4A16 in blocks": lambda: packed(4, has_zeros=False, group=32),
    "W4A16 in blocks, with zero points": lambda: packed(4, has_zeros=True, group=32),
    "W8A16 in blocks": lambda: packed(8, has_zeros=False, group=64),
    "int8 in blocks": lambda: int8_channels(torch.bfloat16),
    "MXFP4": mxfp4,
    "MXFP4 of compressed-tensors": mxfp4_compressed,
    "NVFP4": lambda: nvfp4(is_compressed=True),
    "NVFP4 of ModelOpt": lambda: nvfp4(is_compressed=False),
    "FP8 of ModelOpt": fp8_model_opt,
}


BLOCKS_OF = {
    "GPTQ in blocks": "q4_0",
    "GPTQ in blocks, with zero points": "q5_0",
    "GPTQ in blocks, 8 bits": "q8_0",
    "GPTQ of whole blocks, act-order": "q5_0",
    "FP8 in wide blocks": "float8",
    "FP8 with one scale, E4M3": "float8",
    "FP8 for each output": "float8",
    "NF4 with its values": "nf4",
    "NF4 with its values, nested": "nf4",
    "FP4 with its values": "fp4",
    "W4A16 in blocks": "q4_0",
    "W4A16 in blocks, with zero points": "q5_0",
    "W8A16 in blocks": "q8_0",
    "int8 in blocks": "q8_0",
    "MXFP4": "mxfp4",
    "MXFP4 of compressed-tensors": "mxfp4",
}
"""The formats of the blocks in which cases are kept."""
OTHER_VALUES = ("NF4", "NF4, nested")
"""Names and shapes do not tell that these have no blocks."""
BITS_ON_GPU = {
    **dict.fromkeys(("FP8 with one scale", "FP8 for each output", "FP8 of ModelOpt"), 8),
    **dict.fromkeys(("FP8 in wide blocks", "FP8 with one scale, E4M3"), 8),
    "FP8 of compressed-tensors with one scale": 8,
    **dict.fromkeys(("GPTQ, 4 bits", "GPTQ, version 2"), 4),
    **dict.fromkeys(("GPTQ in blocks", "GPTQ in blocks, with zero points"), 4),
    **dict.fromkeys(("W4A16", "W4A16 with zero points", "W4A16 in blocks"), 4),
    "W4A16 in blocks, with zero points": 4,
    **dict.fromkeys(("GPTQ in blocks, 8 bits", "W8A16 in blocks"), 8),
    **dict.fromkeys(("int8 for each output", "int8 in blocks"), 8),
    **dict.fromkeys(("MXFP4", "MXFP4 of compressed-tensors"), 4),
    **dict.fromkeys(("NVFP4", "NVFP4 of ModelOpt"), 4),
}
"""The bits of the codes that a GPU multiplies."""


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
    provider: Provider = "native",
) -> Weight:
    stored_as, source = opened(directory, config, tensors)
    target = Target(torch.float32, torch.device("cpu"), provider)
    return stored_as.read(source, [f"{STEM}weight"], shape, target)


@pytest.mark.parametrize("provider", ["native", "reference", "triton"])
@pytest.mark.parametrize("name", CASES)
def test_a_matrix_is_what_its_format_defines(tmp_path: Path, name: str, provider: Provider) -> None:
    config, tensors, expected = CASES[name]()
    weight = read(tmp_path, config, tensors, provider=provider)
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
    num_others = 8 * INPUTS + INPUTS
    kept = BLOCKS_OF.get(name) or ("nf4" if name in OTHER_VALUES else None)
    size = 4.0 if kept is None else BLOCK_SIZES[kept].bytes_per_weight
    assert stored_as.num_bytes(source, TARGET) == size * OUTPUTS * INPUTS + 4 * num_others
    expanded = stored_as.num_bytes(source, Target(torch.float32, TARGET.device, "reference"))
    assert expanded == 4 * (OUTPUTS * INPUTS + num_others)


@pytest.mark.parametrize("name", CASES)
def test_codes_stay_in_blocks_that_have_their_values(tmp_path: Path, name: str) -> None:
    config, tensors, _ = CASES[name]()
    weight = read(tmp_path, config, tensors)
    assert ("native" in weight.providers) == (name in BLOCKS_OF)
    if name in BLOCKS_OF:
        assert [rows.format for rows in weight.native_rows()] == [BLOCKS_OF[name]]
        size = BLOCK_SIZES[BLOCKS_OF[name]].bytes_per_weight
        assert weight.num_bytes == size * OUTPUTS * INPUTS


@pytest.mark.parametrize("name", CASES)
def test_codes_that_a_gpu_multiplies_are_not_expanded(tmp_path: Path, name: str) -> None:
    config, tensors, _ = CASES[name]()
    stored_as, source = opened(tmp_path, config, tensors)
    target = Target(torch.bfloat16, torch.device("cpu"), "triton")

    weight = stored_as.read(source, [f"{STEM}weight"] * 2, (2 * OUTPUTS, INPUTS), target)

    assert ("triton" in weight.providers) == (name in BITS_ON_GPU)
    if name not in BITS_ON_GPU:
        return
    hidden = random(3, INPUTS)
    product = weight.linear(hidden, None, load_ops("reference"))
    assert torch.allclose(product, hidden @ weight.dense(torch.float32).t(), atol=1e-4)
    num_others = 8 * INPUTS + INPUTS
    assert weight.num_bytes < OUTPUTS * INPUTS * BITS_ON_GPU[name] / 8 * 2.8
    assert stored_as.num_bytes(source, target) < OUTPUTS * INPUTS * 1.2 + 2 * num_others


def in_squares(declared: dict[str, Any], scale: str, weight: Tensor) -> Case:
    """A matrix with a scale for 128 outputs and 128 inputs, whose last squares are cut off."""
    rows, columns = (torch.arange(size) // 128 for size in weight.shape)
    scales = random(int(rows[-1]) + 1, int(columns[-1]) + 1).abs()
    expected = weight.float() * scales[rows][:, columns]
    return declared, {"weight": weight, scale: scales}, expected


SQUARES = {"strategy": "block", "block_structure": [128, 128]}
IN_SQUARES: dict[str, Callable[[Tensor], Case]] = {
    "FP8": lambda weight: in_squares(
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        "weight_scale_inv",
        weight.to(torch.float8_e4m3fn),
    ),
    "FP8 of compressed-tensors": lambda weight: in_squares(
        compressed("float-quantized", 8, **SQUARES),
        "weight_scale",
        weight.to(torch.float8_e4m3fn),
    ),
    "int8 of compressed-tensors": lambda weight: in_squares(
        compressed("int-quantized", 8, strategy="block", block_structure="128x128"),
        "weight_scale",
        (weight * 40).round().clamp(-128, 127).to(torch.int8),
    ),
}


@pytest.mark.parametrize("provider", ["native", "reference", "triton"])
@pytest.mark.parametrize("shape", [(576, 192), (192, 576)])
@pytest.mark.parametrize("name", IN_SQUARES)
def test_squares_have_the_declared_size(
    tmp_path: Path, name: str, shape: tuple[int, int], provider: Provider
) -> None:
    config, tensors, expected = IN_SQUARES[name](random(*shape))

    weight = read(tmp_path, config, tensors, shape, provider)

    assert ("triton" in weight.providers) == (provider == "triton")
    assert torch.equal(weight.dense(torch.float32), expected)


def test_squares_that_do_not_cover_a_matrix_are_refused_by_name(tmp_path: Path) -> None:
    config, tensors, _ = IN_SQUARES["FP8 of compressed-tensors"](random(576, 192))
    tensors["weight_scale"] = tensors["weight_scale"][:4]
    message = r"scales have the shape \(4, 2\), not \(5, 2\)"
    with pytest.raises(StartupError, match=rf"down_proj\.weight cannot be read as .*{message}"):
        read(tmp_path, config, tensors, (576, 192))


@pytest.mark.parametrize("name", CASES)
def test_another_shape_is_refused_by_name(tmp_path: Path, name: str) -> None:
    config, tensors, _ = CASES[name]()
    message = r"down_proj\.weight has shape \(48, 128\), config.json says \(48, 64\)"
    with pytest.raises(StartupError, match=message):
        read(tmp_path, config, tensors, (OUTPUTS, INPUTS // 2))


def damaged(tensors: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Without a tensor, or with a shorter tensor."""
    for name, tensor in tensors.items():
        yield {other: tensors[other] for other in tensors if other != name}
        if tensor.ndim and "quant_state" not in name:  # a description of a matrix is read
            yield {**tensors, name: tensor[1:]}


@pytest.mark.parametrize("name", CASES)
def test_without_data_the_same_is_refused(tmp_path: Path, name: str) -> None:
    config, tensors, _ = CASES[name]()

    def refusal(source: Checkpoint, target: Target) -> str | None:
        stored_as = format_of({"quantization_config": config}, source)
        try:
            weight = stored_as.read(source, [f"{STEM}weight"], (OUTPUTS, INPUTS), target)
        except StartupError as error:
            return str(error)
        assert weight.dense(torch.float32).shape == (OUTPUTS, INPUTS)
        return None

    for parts in (tensors, *damaged(tensors)):
        opened(tmp_path, config, parts)
        told = refusal(Checkpoint(tmp_path), TARGET)
        without_data = Checkpoint(tmp_path, has_data=False)
        assert refusal(without_data, Target(torch.float32, torch.device("meta"))) == told


@pytest.mark.parametrize("exponent", [253, 255])
def test_an_exponent_without_finite_weights_is_refused_by_name(
    tmp_path: Path, exponent: int
) -> None:
    config, tensors, _ = mxfp4()
    tensors["scales"][-1, -1] = exponent
    with pytest.raises(StartupError, match=r"down_proj\.weight cannot be read as MXFP4: .* NaN"):
        read(tmp_path, config, tensors)


@pytest.mark.parametrize("scale", [0.0, -1.0, torch.nan])
@pytest.mark.parametrize("name", ["NVFP4", "NVFP4 of ModelOpt"])
def test_a_global_scale_that_no_matrix_has_is_refused_by_name(
    tmp_path: Path, name: str, scale: float
) -> None:
    config, tensors, _ = CASES[name]()
    (whole,) = tensors.keys() & {"weight_global_scale", "weight_scale_2"}
    tensors[whole] = torch.full_like(tensors[whole], scale)
    with pytest.raises(StartupError, match=r"down_proj\.weight cannot be read as NVFP4: "):
        read(tmp_path, config, tensors)


def test_a_group_that_does_not_divide_the_inputs_is_refused(tmp_path: Path) -> None:
    config, tensors, _ = CASES["NVFP4"]()
    tensors["weight_packed"] = tensors["weight_packed"][:, :28]
    with pytest.raises(StartupError, match=r"NVFP4: 56 inputs are not in groups of 16"):
        read(tmp_path, config, tensors, (OUTPUTS, 56))


@pytest.mark.parametrize("scale", [1e-39, 2.0**120])
@pytest.mark.parametrize("name", ["FP8 for each output", "NF4 with its values"])
def test_scales_that_products_do_not_have_are_expanded(
    tmp_path: Path, name: str, scale: float
) -> None:
    config, tensors, _ = CASES[name]()
    scales = next(tensors[kind] for kind in SCALES if kind in tensors)
    scales[0] = scale
    assert not read(tmp_path, config, tensors).providers


def test_floats_of_8_bits_with_nan_are_expanded(tmp_path: Path) -> None:
    config, tensors, _ = CASES["FP8 for each output"]()
    tensors["weight"][3, 5] = torch.nan
    weight = read(tmp_path, config, tensors)
    assert not weight.providers
    assert weight.dense(torch.float32)[3].isnan().sum() == 1


def test_groups_of_different_sizes_are_expanded(tmp_path: Path) -> None:
    config, tensors, _ = CASES["GPTQ of whole blocks, act-order"]()
    tensors["g_idx"][(tensors["g_idx"] == 0).nonzero()[0]] = 1
    assert not read(tmp_path, config, tensors).providers


def test_scales_beyond_float16_are_expanded(tmp_path: Path) -> None:
    config, tensors, _ = CASES["W4A16 in blocks"]()
    tensors["weight_scale"][0, 0] = 2.0**17
    weight = read(tmp_path, config, tensors)
    assert not weight.providers
    assert weight.dense(torch.float32).isfinite().all()


def test_integers_beyond_the_blocks_are_expanded(tmp_path: Path) -> None:
    config, tensors, expected = CASES["GPTQ in blocks, with zero points"]()
    weight = read(tmp_path, config | {"sym": True}, tensors)
    assert not weight.providers
    assert torch.equal(weight.dense(torch.float16), expected)


@pytest.mark.parametrize("group_size", [16, 128, -1])
def test_groups_of_another_size_than_declared_are_refused_by_name(
    tmp_path: Path, group_size: int
) -> None:
    config, tensors, _ = CASES["GPTQ in blocks"]()
    message = rf"128 inputs in 4 groups, config\.json says groups of {group_size}"
    with pytest.raises(StartupError, match=rf"down_proj\.weight cannot be read as GPTQ: {message}"):
        read(tmp_path, config | {"group_size": group_size}, tensors)


def test_the_last_group_is_cut_off_only_if_the_groups_of_inputs_are_stored(tmp_path: Path) -> None:
    """Four scales are also those of groups of 40 inputs, the last of which has 8 inputs."""
    config, tensors, _ = CASES["GPTQ in blocks"]()
    groups = torch.arange(INPUTS) // 40
    cut_off = tensors | {"g_idx": groups.int()}
    codes = tensors["qweight"].view(-1, 1, OUTPUTS) >> 4 * torch.arange(8).view(1, 8, 1) & 15
    expected = (codes.flatten(0, 1) - 8) * tensors["scales"].float()[groups]

    weight = read(tmp_path, config | {"group_size": 40}, cut_off)

    assert torch.equal(weight.dense(torch.float32), expected.t())
    del cut_off["g_idx"]
    with pytest.raises(StartupError, match=r"128 inputs in 4 groups, .* groups of 40"):
        read(tmp_path, config | {"group_size": 40}, cut_off)


@pytest.mark.parametrize("group_size", [32, 64])
def test_groups_of_compressed_tensors_have_the_declared_size(
    tmp_path: Path, group_size: int
) -> None:
    """Three scales would fit groups of 43 inputs, the last of which is cut off."""
    config, tensors, _ = packed(4, has_zeros=False, group=group_size)
    tensors["weight_scale"] = random(OUTPUTS, 3).bfloat16()
    message = rf"128 inputs in 3 groups, config\.json says groups of {group_size}"
    with pytest.raises(StartupError, match=rf"down_proj\.weight cannot be read as .*: {message}"):
        read(tmp_path, config, tensors)


@pytest.mark.parametrize("strategy", ["token", "block", "group"])
def test_a_strategy_that_names_no_parts_of_a_matrix_is_refused(
    tmp_path: Path, strategy: str
) -> None:
    _, tensors, _ = CASES["W4A16"]()
    config = compressed("pack-quantized", 4, strategy=strategy)
    with pytest.raises(StartupError, match=f"strategy {strategy}, .* is not supported"):
        opened(tmp_path, config, tensors)


SCALES = ("weight_scale_inv", "weight_scale", "scales", "weight.absmax")


@pytest.mark.parametrize(
    "name", [name for name in CASES if "nested" not in name and "MXFP4" not in name]
)
def test_a_scale_that_is_not_finite_is_refused_by_name(tmp_path: Path, name: str) -> None:
    config, tensors, _ = CASES[name]()
    scale = next(kind for kind in SCALES if kind in tensors)
    dtype = tensors[scale].dtype
    odd = torch.inf if dtype.itemsize > 1 else torch.nan  # float8 has no infinity
    tensors[scale] = torch.full(tensors[scale].shape, odd).to(dtype)
    with pytest.raises(StartupError, match=r"down_proj\.weight cannot be read as .* infinite"):
        read(tmp_path, config, tensors)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("FP8 in blocks", "weight_scale_inv", r"scales have the shape \(2, 6\), not \(3, 6\)"),
        ("GPTQ, 4 bits", "scales", "qzeros has the shape"),
        ("GPTQ, 4 bits", "g_idx", "g_idx names groups that do not exist, or not one for each"),
        ("W4A16", "weight_scale", r"scales have the shape \(47, 8\), not \(48, 8\)"),
        ("FP8 for each output", "weight_scale", r"scales have the shape \(47, 1\), not \(48, 1\)"),
        ("MXFP4", "scales", r"scales have the shape \(47, 4\), not \(48, 4\)"),
        ("MXFP4 of compressed-tensors", "weight_scale", r"scales have the shape \(47, 4\), not"),
        ("NVFP4", "weight_scale", r"scales have the shape \(47, 8\), not \(48, 8\)"),
        ("NVFP4", "weight_global_scale", r"its global scale has the shape \(0,\)"),
        ("NF4", "weight.absmax", "95 blocks of 64 do not cover 6144 weights"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused(
    tmp_path: Path, name: str, tensor: str, message: str
) -> None:
    config, tensors, _ = CASES[name]()
    tensors[tensor] = tensors[tensor][1:]
    with pytest.raises(StartupError, match=rf"down_proj\.weight cannot be read as .*{message}"):
        read(tmp_path, config, tensors)
