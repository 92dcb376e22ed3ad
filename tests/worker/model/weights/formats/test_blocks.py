"""The matrices of GGUF files, and floats that are quantized as they are read."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import save_file
from torch import Tensor

from kernels.native.library import library
from kernels.native.packed import PACKED_BLOCKS, OddScale, Packer
from kernels.providers import Provider, load_ops
from kernels.quantized import BLOCKS, QuantFormat, QuantizedWeight, dequantize, quantize
from shared.errors import StartupError
from tests.kernels.blocks import SCALES, random_blocks
from worker.model.weights.formats.blocks import BlockWeight, Gguf, Quantized
from worker.model.weights.formats.device_weights import DEVICE_BLOCKS
from worker.model.weights.formats.interface import Target
from worker.model.weights.sources import open_source
from worker.model.weights.weight import Weight

CPU = torch.device("cpu")
FLOAT = torch.float32
TARGET = Target(torch.bfloat16, CPU, "native")
PROVIDERS = get_args(Provider)
INPUTS = 256
NUM_ROWS = {"blk.0.attn_q": 32, "blk.0.attn_k": 16, "blk.0.attn_v": 16}
NAMES = (
    *("token_embd", "output", *NUM_ROWS, "blk.0.attn_output"),
    *("blk.0.ffn_gate", "blk.0.ffn_up", "blk.0.ffn_down"),
)
QKV = [f"{name}.weight" for name in NUM_ROWS]
DOWN, EMBEDDING, HEAD = "blk.0.ffn_down.weight", "token_embd.weight", "output.weight"
UP, GATE = "blk.0.ffn_up.weight", "blk.0.ffn_gate.weight"


def write_model(directory: Path, kinds: dict[str, Kind], main: Kind) -> dict[str, Tensor]:
    """Write a GGUF file; returns what it holds.

    ``kinds`` are the kinds of matrices that are not of the ``main`` kind.
    """
    matrices, held = {}, {}
    for seed, name in enumerate(NAMES):
        kind, num_rows = kinds.get(name, main), NUM_ROWS.get(name, 24)
        packed = stored(kind, num_rows, seed)
        held[f"{name}.weight"] = torch.tensor(gguf.dequantize(packed, kind))
        matrices[f"{name}.weight"] = (packed, kind)
    write_file(directory / "model.gguf", matrices)
    return held


def write_file(path: Path, matrices: dict[str, tuple[np.ndarray[Any, Any], Kind]]) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    for name, (packed, kind) in matrices.items():
        writer.add_tensor(name, packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def stored(kind: Kind, num_rows: int, seed: int) -> np.ndarray[Any, Any]:
    if kind.name.lower() in BLOCKS:
        return random_blocks(kind.name.lower(), num_rows, INPUTS, seed).blocks.flatten(1).numpy()
    weight = torch.randn(num_rows, INPUTS, generator=torch.Generator().manual_seed(seed))
    return np.asarray(gguf.quantize(weight.numpy(), kind))


def read(directory: Path, *names: str, target: Target = TARGET) -> Weight:
    source = open_source(directory)
    num_rows = sum(source.shape(name)[0] for name in names)
    return Gguf().read(source, [*names], (num_rows, INPUTS), target)


def formats(weight: Weight) -> list[str]:
    return [rows.format for rows in weight.native_rows()]


@pytest.mark.parametrize("kind", [*sorted(PACKED_BLOCKS), "f32", "f16", "bf16"])
def test_a_file_is_read_as_it_is(tmp_path: Path, kind: str) -> None:
    held = write_model(tmp_path, {}, Kind[kind.upper()])
    floats = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
    target = Target(torch.float32, CPU, "native") if kind == "f32" else TARGET
    for names in (QKV, [DOWN], [EMBEDDING], [HEAD]):
        weight = read(tmp_path, *names, target=target)
        assert set(formats(weight)) == {floats.get(kind, kind)}
        assert torch.equal(weight.dense(torch.float32), torch.cat([held[name] for name in names]))


@pytest.mark.parametrize("kind", BLOCKS)
def test_the_shape_of_every_format_is_known_without_data(tmp_path: Path, kind: str) -> None:
    write_model(tmp_path, {"blk.0.attn_k": Kind.F16}, Kind[kind.upper()])
    target = Target(torch.float32, torch.device("meta"))
    source = open_source(tmp_path, has_data=False)

    for names, num_rows in ((QKV, 64), ([DOWN], 24)):
        weight = Gguf().read(source, names, (num_rows, INPUTS), target)
        assert weight.dense(torch.float32).shape == weight.shape == (num_rows, INPUTS)

    with pytest.raises(StartupError, match=r"has shape \(24, 256\), config.json says \(24, 512\)"):
        Gguf().read(source, [DOWN], (24, 512), target)


def test_each_matrix_of_a_mixed_file_keeps_its_own_format(tmp_path: Path) -> None:
    kinds = {"blk.0.attn_v": Kind.Q6_K, "token_embd": Kind.Q5_K, "output": Kind.Q8_0}
    held = write_model(tmp_path, kinds, Kind.Q4_K)
    for names, expected in (
        (QKV, ["q4_k", "q4_k", "q6_k"]),
        ([EMBEDDING], ["q5_k"]),
        ([HEAD], ["q8_0"]),
    ):
        weight = read(tmp_path, *names)
        values = torch.cat([held[name] for name in names])
        assert formats(weight) == expected
        assert torch.equal(weight.dense(torch.float32), values)
        assert torch.equal(weight.rows(torch.tensor([0, 23])), values[[0, 23]])


def test_floats_beside_blocks_in_one_product_are_expanded(tmp_path: Path) -> None:
    held = write_model(tmp_path, {"blk.0.attn_k": Kind.F16}, Kind.Q4_K)
    weight = read(tmp_path, *QKV)
    assert formats(weight) == ["bfloat16"]
    assert torch.equal(
        weight.dense(torch.bfloat16), torch.cat([held[name] for name in QKV]).bfloat16()
    )


def test_floats_become_the_data_type_except_for_float16_which_is_computed_in_float32(
    tmp_path: Path,
) -> None:
    kinds = {"blk.0.ffn_down": Kind.BF16, "token_embd": Kind.F16}
    write_model(tmp_path, kinds, Kind.F32)
    source, wide = open_source(tmp_path), Target(torch.float32, CPU, "native")
    for target, dtype in ((TARGET, "bfloat16"), (wide, "float32")):
        weights = [read(tmp_path, name, target=target) for name in (DOWN, HEAD, EMBEDDING)]
        assert [formats(weight) for weight in weights] == [[dtype], [dtype], ["float16"]]
        num_bytes = sum(weight.num_bytes for weight in weights)
        rest = (24 * 3 + 32 + 16 * 2) * INPUTS * target.dtype.itemsize
        assert Gguf().num_bytes(source, target) == num_bytes + rest


def test_what_no_kernel_multiplies_is_expanded_and_counted_so(tmp_path: Path) -> None:
    write_model(tmp_path, {"blk.0.ffn_down": Kind.IQ2_XS}, Kind.Q4_K)
    source = open_source(tmp_path)
    down = read(tmp_path, DOWN)
    num_weights = {name: 24 * INPUTS for name in source.names if name not in QKV}
    others = (sum(num_weights.values()) - 24 * INPUTS + 64 * INPUTS) * 144 / 256
    assert not down.providers
    assert Gguf().num_bytes(source, TARGET) == others + 24 * INPUTS * 2
    on_gpu = Target(torch.bfloat16, CPU, "triton")
    assert not read(tmp_path, DOWN, target=on_gpu).providers
    tables = 2 * 24 * INPUTS
    packed = (others - tables * 144 / 256) * 148 / 144
    assert Gguf().num_bytes(source, on_gpu) == packed + (tables + 24 * INPUTS) * 2


def test_a_matrix_in_blocks_is_not_copied(tmp_path: Path) -> None:
    write_model(tmp_path, {}, Kind.Q4_K)
    source = open_source(tmp_path)
    weight = Gguf().read(source, [DOWN], (24, INPUTS), TARGET)
    assert isinstance(weight, BlockWeight)
    mapped = source.get(DOWN)
    assert weight.packed.blocks.data_ptr() == mapped.data_ptr()


def test_parts_of_a_model_are_one_source(tmp_path: Path) -> None:
    held = write_model(tmp_path, {}, Kind.Q8_0)
    whole = (tmp_path / "model.gguf").rename(tmp_path / "model-00001-of-00002.gguf")
    second = {"blk.1.ffn_up.weight": (np.ones((24, INPUTS), np.float32), Kind.F32)}
    write_file(tmp_path / "model-00002-of-00002.gguf", second)

    source = open_source(tmp_path)

    assert whole.exists()
    assert source.has("blk.1.ffn_up.weight")
    assert torch.equal(read(tmp_path, DOWN).dense(torch.float32), held[DOWN])


def test_another_shape_is_refused_by_name(tmp_path: Path) -> None:
    write_model(tmp_path, {}, Kind.Q8_0)
    with pytest.raises(StartupError, match=r"ffn_down\.weight has shape \(24, 256\), config.json"):
        Gguf().read(open_source(tmp_path), [DOWN], (24, 512), TARGET)


def quantized(directory: Path, quant_format: QuantFormat, *names: str) -> Weight:
    source = open_source(directory, quant_format)
    num_rows = sum(source.shape(name)[0] for name in names)
    return Quantized(quant_format).read(source, [*names], (num_rows, INPUTS), TARGET)


def assert_equal(weight: Weight, expected: QuantizedWeight) -> None:
    assert isinstance(weight, BlockWeight)
    assert weight.packed.format == expected.format
    assert torch.equal(weight.packed.blocks, expected.blocks)


def test_a_file_beside_its_conversion_is_preferred_if_it_is_in_the_format(tmp_path: Path) -> None:
    held = write_model(tmp_path, {"blk.0.ffn_down": Kind.Q4_0}, Kind.Q4_1)
    save_file({name: w.bfloat16() for name, w in held.items()}, tmp_path / "model.safetensors")
    assert formats(quantized(tmp_path, "q4_1", *QKV)) == ["q4_1"] * 3
    assert formats(quantized(tmp_path, "q4_1", DOWN)) == ["q4_0"]
    rounded = torch.cat([held[name] for name in QKV]).bfloat16()
    assert_equal(quantized(tmp_path, "q8_0", *QKV), quantize(rounded, "q8_0"))


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.F32])
def test_floats_are_quantized(tmp_path: Path, kind: Kind) -> None:
    held = write_model(tmp_path, {"blk.0.ffn_down": kind, "token_embd": kind}, Kind.Q4_1)
    assert_equal(quantized(tmp_path, "q4_0", DOWN), quantize(held[DOWN], "q4_0"))
    table = Quantized("q4_0").read_table(open_source(tmp_path), EMBEDDING, (24, INPUTS), TARGET)
    assert_equal(table, quantize(held[EMBEDDING], "q8_0"))


@pytest.mark.parametrize(
    ("kind", "stored_as"),
    [
        *((kind, Gguf()) for kind in DEVICE_BLOCKS),
        *((kind, Quantized(to)) for kind in ("q8_0", "q4_0") for to in get_args(QuantFormat)),
    ],
)
def test_blocks_that_a_gpu_multiplies_have_the_same_values_there(
    tmp_path: Path, kind: str, stored_as: Gguf | Quantized
) -> None:
    write_model(tmp_path, {}, Kind[kind.upper()])
    source = open_source(tmp_path)

    on_gpu, on_cpu = (
        stored_as.read(source, QKV, (64, INPUTS), Target(torch.bfloat16, CPU, provider))
        for provider in ("triton", "native")
    )

    assert on_gpu.providers == {"triton"}
    assert on_gpu.num_bytes < 1.2 * 64 * INPUTS
    assert torch.equal(on_gpu.dense(torch.float32), on_cpu.dense(torch.float32))
    num_weights = sum(math.prod(source.shape(name)) for name in source.names)
    num_bytes = stored_as.num_bytes(source, replace(TARGET, provider="triton"))
    floats = 2 * 24 * INPUTS if isinstance(stored_as, Gguf) else 0
    assert num_bytes - 2 * floats < 1.2 * (num_weights - floats)


def test_matrices_of_a_mixed_file_are_stacked_on_a_gpu(tmp_path: Path) -> None:
    kinds = {"blk.0.attn_k": Kind.Q8_0, "blk.0.attn_v": Kind.Q6_K}
    held = write_model(tmp_path, kinds, Kind.Q4_K)
    weight = read(tmp_path, *QKV, target=Target(torch.float32, CPU, "triton"))
    values, hidden = torch.cat([held[name] for name in QKV]), torch.randn(3, INPUTS)

    assert weight.providers == {"triton"}
    assert weight.num_bytes < 0.8 * values.numel()
    assert torch.equal(weight.dense(torch.float32), values)
    product = weight.linear(hidden, torch.ones(64), load_ops("reference"))
    assert torch.allclose(product, hidden @ values.t() + 1, atol=1e-4)


def test_floats_are_quantized_for_a_gpu(tmp_path: Path) -> None:
    held = write_model(tmp_path, {}, Kind.F32)
    target = replace(TARGET, provider="triton")
    weight = Quantized("q4_1").read(open_source(tmp_path), [DOWN], (24, INPUTS), target)
    assert weight.providers == {"triton"}
    assert torch.equal(weight.dense(torch.float32), dequantize(quantize(held[DOWN], "q4_1")))


def test_in_a_stack_of_floats_and_blocks_all_are_quantized(tmp_path: Path) -> None:
    held = write_model(tmp_path, {"blk.0.attn_v": Kind.F32}, Kind.Q4_1)
    expected = quantize(torch.cat([held[name] for name in QKV]), "q4_1")
    assert_equal(quantized(tmp_path, "q4_1", *QKV), expected)


def test_inputs_that_do_not_fill_blocks_are_refused(tmp_path: Path) -> None:
    save_file({DOWN: torch.ones(8, 48)}, tmp_path / "model.safetensors")
    with pytest.raises(StartupError, match=r"ffn_down.* has 48 inputs, q4_1 needs a multiple of"):
        Quantized("q4_1").read(open_source(tmp_path), [DOWN], (8, 48), TARGET)


def test_weights_that_are_not_finite_are_refused_by_name(tmp_path: Path) -> None:
    save_file({DOWN: torch.full((8, 64), torch.nan)}, tmp_path / "model.safetensors")
    with pytest.raises(StartupError, match=r"ffn_down\.weight cannot be packed as q4_0: .* NaN"):
        Quantized("q4_0").read(open_source(tmp_path), [DOWN], (8, 64), TARGET)


def odd_matrices(kind: str) -> Iterator[Tensor]:
    """A matrix in blocks, the last of which has a scale or a minimum that is infinite or NaN."""
    for half in (b"\x00\x7c", b"\x00\xfc", b"\x01\x7e"):
        for at in SCALES.get(kind, ()):
            blocks = random_blocks(kind, 24, INPUTS).blocks
            blocks[-1, -1, at : at + 2] = torch.tensor([*half])
            yield blocks
        if kind == "iq1_m":
            blocks = random_blocks(kind, 24, INPUTS).blocks
            for place, byte in enumerate((half[0] << 4, half[0], half[1] << 4, half[1])):
                blocks[-1, -1, 49 + 2 * place] = byte & 0xF0
            yield blocks
    if kind == "mxfp4":
        blocks = random_blocks(kind, 24, INPUTS).blocks
        blocks[-1, -1] = 255
        yield blocks


@pytest.mark.parametrize("kind", [kind for kind in BLOCKS if kind != "nvfp4"])
def test_a_scale_that_is_not_finite_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    matrices = list(odd_matrices(kind))
    for blocks in matrices:
        rows = blocks.flatten(1).numpy()
        with np.errstate(all="ignore"):
            assert not np.isfinite(gguf.dequantize(rows, Kind[kind.upper()])).all()
        write_file(tmp_path / "model.gguf", {DOWN: (rows, Kind[kind.upper()])})
        for stored_as, provider in itertools.product((Gguf(), Quantized("q8_0")), PROVIDERS):
            target, message = replace(TARGET, provider=provider), "infinite or NaN"
            with pytest.raises(StartupError, match=rf"ffn_down\.weight cannot be .*{message}"):
                stored_as.read(open_source(tmp_path), [DOWN], (24, INPUTS), target).dense(FLOAT)
    assert matrices


@pytest.mark.parametrize("kind", sorted(PACKED_BLOCKS))
def test_a_scale_that_is_not_finite_is_refused_by_name_as_it_is_packed(
    tmp_path: Path, kind: str
) -> None:
    for blocks in odd_matrices(kind):
        sound = random_blocks(kind, 24, INPUTS).blocks
        tensors = {UP: sound, DOWN: blocks, GATE: blocks}
        write_file(
            tmp_path / "model.gguf",
            {name: (one.flatten(1).numpy(), Kind[kind.upper()]) for name, one in tensors.items()},
        )
        packer = Packer(library())
        for name in tensors:
            weight = Gguf().read(open_source(tmp_path), [name], (24, INPUTS), TARGET)
            packer.pack(weight.native_rows())

        with pytest.raises(OddScale, match=rf"ffn_down\.weight cannot be read as {kind}: a scale"):
            packer.finish()


def test_nan_is_zero_in_the_scales_of_nvfp4(tmp_path: Path) -> None:
    blocks = random_blocks("nvfp4", 24, INPUTS).blocks
    blocks[..., :4] = 127
    write_file(tmp_path / "model.gguf", {DOWN: (blocks.flatten(1).numpy(), Kind.NVFP4)})
    assert not read(tmp_path, DOWN).dense(torch.float32).any()
