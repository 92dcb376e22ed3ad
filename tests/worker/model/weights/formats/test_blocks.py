"""The blocks of a packed matrix: those of the GGUF file beside it, or quantized ones."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import save_file
from torch import Tensor

from kernels.quantized import QuantFormat, QuantizedWeight, dequantize, quantize
from shared.errors import StartupError
from tests.support.models.numerics import assert_close
from worker.checkpoints.checkpoint import Checkpoint
from worker.model.weights.formats.blocks import Quantized
from worker.model.weights.formats.interface import Target

CPU = torch.device("cpu")
TARGET = Target(torch.bfloat16, CPU, "native")
HEAD_DIM, INPUTS = 8, 64
LAYER = "model.layers.0."
NAMES = {
    "token_embd": "model.embed_tokens",
    "output": "lm_head",
    "blk.0.attn_q": f"{LAYER}self_attn.q_proj",
    "blk.0.attn_k": f"{LAYER}self_attn.k_proj",
    "blk.0.attn_v": f"{LAYER}self_attn.v_proj",
    "blk.0.attn_output": f"{LAYER}self_attn.o_proj",
    "blk.0.ffn_gate": f"{LAYER}mlp.gate_proj",
    "blk.0.ffn_up": f"{LAYER}mlp.up_proj",
    "blk.0.ffn_down": f"{LAYER}mlp.down_proj",
}
NUM_ROWS = {"blk.0.attn_q": 32, "blk.0.attn_k": 16, "blk.0.attn_v": 16}
QKV = [f"{LAYER}self_attn.{name}_proj.weight" for name in "qkv"]
DOWN, EMBEDDING = f"{LAYER}mlp.down_proj.weight", "model.embed_tokens.weight"


def weights() -> dict[str, Tensor]:
    """By their names in a GGUF file."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(NUM_ROWS.get(name, 24), INPUTS, generator=generator) for name in NAMES
    }


def write_model(
    directory: Path, kinds: dict[str, Kind], main: Kind, architecture: str = "llama"
) -> dict[str, Tensor]:
    """Write a GGUF file and its conversion; returns what the file holds, by Hugging Face's names.

    ``kinds`` are those of matrices that are not of the ``main`` kind.
    """
    writer = gguf.GGUFWriter(directory / "model.gguf", architecture)
    held = {}
    for name, weight in weights().items():
        kind = kinds.get(name, main)
        packed = gguf.quantize(weight.numpy(), kind)
        held[f"{NAMES[name]}.weight"] = torch.tensor(gguf.dequantize(packed, kind))
        if architecture == "llama" and name in ("blk.0.attn_q", "blk.0.attn_k"):
            packed = interleaved(packed)
        writer.add_tensor(f"{name}.weight", packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_file({name: w.bfloat16() for name, w in held.items()}, directory / "model.safetensors")
    return held


def interleaved(rows: np.ndarray) -> np.ndarray:
    """As llama.cpp's ``convert_hf_to_gguf.py`` permutes queries and keys."""
    heads = rows.reshape(-1, 2, HEAD_DIM // 2, rows.shape[-1])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(rows.shape)


def read(directory: Path, weight_format: QuantFormat, *names: str) -> QuantizedWeight:
    shape = (sum(len(stored(directory, name)) for name in names), INPUTS)
    is_table = names[0] in (EMBEDDING, "lm_head.weight")
    quantized, source = Quantized(weight_format, directory, HEAD_DIM), Checkpoint(directory)
    if is_table:
        return quantized.read_table(source, names[0], shape, TARGET).packed
    return quantized.read(source, [*names], shape, TARGET).packed


def stored(directory: Path, name: str) -> Tensor:
    size = NUM_ROWS.get(next(key for key, value in NAMES.items() if f"{value}.weight" == name), 24)
    return Checkpoint(directory).read([name], (size, INPUTS), torch.float32, CPU)


def assert_equal(packed: QuantizedWeight, expected: QuantizedWeight) -> None:
    assert packed.format == expected.format
    assert torch.equal(packed.blocks, expected.blocks)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("quant_format", ["q8_0", "q4_0", "q4_1"])
def test_blocks_of_a_gguf_file_are_kept(
    tmp_path: Path, quant_format: QuantFormat, architecture: str
) -> None:
    held = write_model(tmp_path, {}, Kind[quant_format.upper()], architecture)
    for names in (QKV, [DOWN], [EMBEDDING], ["lm_head.weight"]):
        packed = read(tmp_path, quant_format, *names)
        assert packed.format == quant_format
        assert torch.equal(dequantize(packed), torch.cat([held[name] for name in names]))


def test_a_matrix_of_another_known_kind_is_kept_in_it(tmp_path: Path) -> None:
    kinds = {"blk.0.ffn_down": Kind.Q4_0, "token_embd": Kind.Q8_0}
    held = write_model(tmp_path, kinds, Kind.Q4_1)
    for name, kept in ((DOWN, "q4_0"), (EMBEDDING, "q8_0")):
        packed = read(tmp_path, "q4_1", name)
        assert packed.format == kept
        assert torch.equal(dequantize(packed), held[name])


def test_in_a_stack_of_two_kinds_the_other_one_gives_way(tmp_path: Path) -> None:
    held = write_model(tmp_path, {"blk.0.attn_v": Kind.Q8_0}, Kind.Q4_1)
    query, key, value = (held[name] for name in QKV)
    packed = read(tmp_path, "q4_1", *QKV)
    assert packed.format == "q4_1"
    assert torch.equal(dequantize(packed)[:48], torch.cat([query, key]))
    assert_equal(packed.rows(torch.arange(48, 64)), quantize(value, "q4_1"))


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q5_0])
def test_a_matrix_of_no_known_kind_is_quantized_from_the_checkpoint(
    tmp_path: Path, kind: Kind
) -> None:
    write_model(tmp_path, {"blk.0.ffn_down": kind, "token_embd": kind}, Kind.Q4_1)
    assert_equal(read(tmp_path, "q4_1", DOWN), quantize(stored(tmp_path, DOWN), "q4_1"))
    assert_equal(read(tmp_path, "q4_1", EMBEDDING), quantize(stored(tmp_path, EMBEDDING), "q8_0"))


@pytest.mark.parametrize("quant_format", ["q8_0", "q4_0"])
def test_another_format_than_the_files_is_quantized_from_the_checkpoint(
    tmp_path: Path, quant_format: QuantFormat
) -> None:
    write_model(tmp_path, {}, Kind.Q4_1)
    expected = torch.cat([stored(tmp_path, name) for name in QKV])
    assert_equal(read(tmp_path, quant_format, *QKV), quantize(expected, quant_format))
    assert_equal(
        read(tmp_path, quant_format, EMBEDDING), quantize(stored(tmp_path, EMBEDDING), "q8_0")
    )


def test_a_gguf_file_of_another_model_is_not_used(tmp_path: Path) -> None:
    held = write_model(tmp_path, {}, Kind.Q4_1)
    other = {name: weight.neg().bfloat16() for name, weight in held.items()}
    save_file(other, tmp_path / "model.safetensors")
    assert_equal(read(tmp_path, "q4_1", DOWN), quantize(other[DOWN], "q4_1"))


def test_a_gguf_file_of_another_size_is_not_used(tmp_path: Path) -> None:
    held = write_model(tmp_path, {}, Kind.Q4_1)
    wider = {name: torch.cat([w, w]).bfloat16() for name, w in held.items()}
    save_file(wider, tmp_path / "model.safetensors")
    reader, source = Quantized("q4_1", tmp_path, 3 * HEAD_DIM), Checkpoint(tmp_path)
    for name in (DOWN, QKV[0]):
        weight = reader.read(source, [name], (len(wider[name]), INPUTS), TARGET)
        assert_equal(weight.packed, quantize(wider[name], "q4_1"))


def test_without_a_gguf_file_the_checkpoint_is_quantized(tmp_path: Path) -> None:
    held = write_model(tmp_path, {}, Kind.F32)
    (tmp_path / "model.gguf").unlink()
    packed = read(tmp_path, "q4_0", *QKV)
    assert packed.format == "q4_0"
    assert_close(dequantize(packed), torch.cat([held[name] for name in QKV]), 0.1)


def test_inputs_that_do_not_fill_blocks_are_refused(tmp_path: Path) -> None:
    save_file({DOWN: torch.ones(8, 48)}, tmp_path / "model.safetensors")
    reader, source = Quantized("q4_1", tmp_path, HEAD_DIM), Checkpoint(tmp_path)
    with pytest.raises(StartupError, match=r"down_proj.* has 48 inputs, q4_1 needs a multiple of"):
        reader.read(source, [DOWN], (8, 48), TARGET)


def test_weights_that_are_not_finite_are_refused_by_name(tmp_path: Path) -> None:
    save_file({DOWN: torch.full((8, 64), torch.nan)}, tmp_path / "model.safetensors")
    reader, source = Quantized("q4_0", tmp_path, HEAD_DIM), Checkpoint(tmp_path)
    with pytest.raises(StartupError, match=r"down_proj\.weight cannot be packed as q4_0: .* NaN"):
        reader.read(source, [DOWN], (8, 64), TARGET)
