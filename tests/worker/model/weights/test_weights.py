"""The weights of a native decoder in every format, and its output with them."""

import json
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from kernels.providers import Provider, load_ops
from kernels.quantized import QuantFormat, dequantize, quantize
from shared.errors import StartupError
from tests.support.models.batches import batch, share
from tests.support.models.numerics import assert_close
from tests.support.models.tiny import native_spec, reference_logits, write_tiny_model
from tests.worker.model.weights.formats.test_coded import words
from worker.checkpoints.checkpoint import Checkpoint
from worker.model.config import read_json_config
from worker.model.decoders.stack import StackDecoder
from worker.model.inputs import build_inputs
from worker.model.kv_cache import BlockShape, KVCache
from worker.model.loading import load_decoder
from worker.model.spec import ModelSpec
from worker.model.weights.formats.blocks import BlockWeight
from worker.model.weights.formats.dense import Dense
from worker.model.weights.formats.interface import Target
from worker.model.weights.formats.registry import format_of
from worker.model.weights.gguf_names import as_stored
from worker.model.weights.layers import (
    DecoderWeights,
    ExpertWeights,
    LayerWeights,
    MlpWeights,
    WeightReader,
    read_weights,
)
from worker.model.weights.sources import open_source
from worker.model.weights.weight import DenseWeight, Linear, Weight

CPU = torch.device("cpu")
FORMATS: tuple[QuantFormat, ...] = get_args(QuantFormat)
PROMPT = [(7 * i) % 131 for i in range(20)]
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}


def config_of(directory: Path) -> ModelSpec:
    return native_spec(read_json_config(directory))


def reader_of(
    directory: Path,
    weight_format: QuantFormat | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    provider: Provider = "native",
    vector_dtype: torch.dtype | None = None,
) -> WeightReader:
    source = open_source(directory, weight_format)
    config = as_stored(config_of(directory), source)
    stored_as = format_of({}, source, weight_format)
    target = Target(dtype, CPU, provider)
    return WeightReader(source, config, stored_as, target, vector_dtype=vector_dtype)


def read(directory: Path, *args: Any, **options: Any) -> DecoderWeights:
    return read_weights(reader_of(directory, *args, **options))


def linears_of(layer: LayerWeights) -> list[Linear]:
    """The products of a layer without experts."""
    assert isinstance(layer.feed_forward, MlpWeights)
    assert layer.attention is not None
    attention, mlp = layer.attention, layer.feed_forward
    return [attention.qkv, attention.output, mlp.gate_up, mlp.down]


def norms_of(layer: LayerWeights) -> list[Tensor]:
    norms = (layer.before_attention, layer.before_feed_forward)
    return [norm.weight for norm in norms if norm is not None and norm.weight is not None]


def matrices(weights: DecoderWeights) -> list[Weight]:
    """All of them, the tables first."""
    layers = [linear.weight for layer in weights.layers for linear in linears_of(layer)]
    return [weights.embedding, weights.lm_head, *layers]


def formats(weights: list[Weight]) -> set[str]:
    return {rows.format for weight in weights for rows in weight.native_rows()}


def dtypes(weights: list[Weight]) -> set[torch.dtype]:
    """Of matrices that are stored as floats."""
    return {weight.tensor.dtype for weight in weights if isinstance(weight, DenseWeight)}


def last_logits(directory: Path, weights: DecoderWeights) -> Tensor:
    """The logits of the prompt's last token, by the reference ops."""
    decoder = StackDecoder(config_of(directory), weights, load_ops(), 32)
    block = BlockShape(decoder.num_layers, 8, decoder.num_kv_heads, decoder.head_dim, decoder.dtype)
    inputs = build_inputs(batch(share(PROMPT, range(3))), 8, CPU).forward
    with torch.inference_mode():
        return decoder.forward(inputs, KVCache.allocate(block, 3, CPU))


def round_matrices(model: Any, quant_format: QuantFormat) -> None:
    """Replace each weight of a transformers model by its value after rounding to the format."""
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            is_table = name.startswith(("lm_head", "model.embed_tokens"))
            packed = quantize(parameter.data, "q8_0" if is_table else quant_format)
            parameter.data.copy_(dequantize(packed))


@pytest.mark.parametrize("quant_format", FORMATS)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_quantized_model_computes_what_transformers_does_with_its_weights(
    tmp_path: Path, family: str, quant_format: QuantFormat
) -> None:
    """Tied and untied tables, with and without biases."""
    model = write_tiny_model(tmp_path, family, **SIZES)
    weights = read(tmp_path, quant_format)
    logits = last_logits(tmp_path, read(tmp_path, quant_format, provider="reference"))

    round_matrices(model, quant_format)

    assert_close(logits, reference_logits(model, PROMPT)[-1:], 1e-5)
    assert formats(matrices(weights)) == {"q8_0", quant_format}


@pytest.mark.parametrize("is_copy", [True, False], ids=["copy", "other"])
def test_a_stored_output_counts_if_it_differs_from_the_embedding_that_it_is_tied_to(
    tmp_path: Path, is_copy: bool
) -> None:
    write_tiny_model(tmp_path, "llama", **SIZES)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    head = tensors["model.embed_tokens.weight"].clone()
    head[-1] += not is_copy
    save_file({**tensors, "lm_head.weight": head}, file, metadata={"format": "pt"})
    models: Any = AutoModelForCausalLM
    model = models.from_pretrained(tmp_path).eval()

    weights = read(tmp_path)

    assert (weights.lm_head is weights.embedding) == is_copy
    assert_close(last_logits(tmp_path, weights), reference_logits(model, PROMPT)[-1:], 1e-5)


def test_layers_are_read_one_after_another(tmp_path: Path) -> None:
    """Packing does not require memory for a second copy of the model."""
    write_tiny_model(tmp_path, "llama", **SIZES)
    checkpoint = Checkpoint(tmp_path)
    target = Target(torch.float32, CPU)
    layers = WeightReader(checkpoint, config_of(tmp_path), Dense(), target).layers()
    for index in range(3):
        next(layers)
        unread = {name.split(".")[2] for name in checkpoint.unread if ".layers." in name}
        assert unread == {str(later) for later in range(index + 1, 3)}


def test_experts_in_different_formats_are_expanded(tmp_path: Path) -> None:
    """The native library computes experts of one format."""
    model = write_tiny_model(tmp_path, "qwen3_moe", moe_intermediate_size=64)
    path, name = tmp_path / "model.safetensors", "model.layers.0.mlp.experts.1.down_proj."
    tensors = load_file(path)
    codes = (tensors.pop(f"{name}weight") * 10).round().clamp(-8, 7)
    scale = torch.full((len(codes), 2), 0.125, dtype=torch.bfloat16)
    packed = {"weight_packed": words(codes.int() + 8, 4), "weight_scale": scale}
    save_file(tensors | {f"{name}{suffix}": tensor for suffix, tensor in packed.items()}, path)
    model.model.layers[0].mlp.experts.down_proj.data[1] = codes * 0.125
    groups = {"group_0": {"weights": {"num_bits": 4, "group_size": 32}}}
    declared = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    source, target = Checkpoint(tmp_path), Target(torch.float32, CPU, "native")
    stored_as = format_of({"quantization_config": declared | {"config_groups": groups}}, source)

    weights = read_weights(WeightReader(source, config_of(tmp_path), stored_as, target))

    part = weights.layers[0].feed_forward
    assert isinstance(part, ExpertWeights)
    assert formats([expert.down.weight for expert in part.experts]) == {"float32"}
    assert_close(last_logits(tmp_path, weights), reference_logits(model, PROMPT)[-1:], 1e-5)


def test_norms_and_biases_stay_floats(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "qwen2", **SIZES)
    plain, packed = read(tmp_path), read(tmp_path, "q4_0")
    for ours, theirs in zip(packed.layers, plain.layers, strict=True):
        assert torch.equal(norms_of(ours)[1], norms_of(theirs)[1])
        our_bias, their_bias = (linears_of(layer)[0].bias for layer in (ours, theirs))
        assert our_bias is not None
        assert their_bias is not None
        assert torch.equal(our_bias, their_bias)


def test_norms_and_biases_have_the_dtype_that_was_asked_for(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "qwen2", **SIZES)
    weights = read(tmp_path, dtype=torch.bfloat16, vector_dtype=torch.float32)
    layer = weights.layers[0]
    vectors = (weights.norm.weight, *norms_of(layer), linears_of(layer)[0].bias)
    assert {vector.dtype for vector in vectors if vector is not None} == {torch.float32}
    assert dtypes(matrices(weights)) == {torch.bfloat16}


@pytest.mark.parametrize("weight_format", [None, "q4_1"])
def test_expanded_weights_are_of_one_dtype_and_tied_ones_stay_tied(
    tmp_path: Path, weight_format: QuantFormat | None
) -> None:
    write_tiny_model(tmp_path, "llama", attention_bias=True, **SIZES)
    dense = read(tmp_path, weight_format, dtype=torch.float16, provider="reference")
    layer = dense.layers[-1]
    assert dense.lm_head is dense.embedding
    vectors = [dense.norm.weight, *norms_of(layer), linears_of(layer)[0].bias]
    assert {vector.dtype for vector in vectors if vector is not None} == {torch.float16}
    assert dtypes(matrices(dense)) == {torch.float16}


def test_smollm2_keeps_the_blocks_of_its_gguf_file(smollm2: Path) -> None:
    """Tables have the values of the conversion, before they were rounded to bfloat16."""
    packed, converted = read(smollm2, "q4_1"), read(smollm2, dtype=torch.bfloat16)
    tables, linears = matrices(packed)[:2], matrices(packed)[2:]
    assert (formats(tables), formats(linears)) == ({"q8_0"}, {"q4_1"})
    (gguf,) = smollm2.glob("*.gguf")
    down = linears_of(packed.layers[-1])[-1].weight
    assert isinstance(down, BlockWeight)
    assert down.packed.blocks.numpy().tobytes() in gguf.read_bytes()
    for ours, theirs in zip(matrices(packed), matrices(converted), strict=True):
        assert torch.equal(ours.dense(torch.bfloat16), theirs.dense(torch.bfloat16))


@pytest.mark.parametrize(
    ("declared", "method"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 3}}, r"gptq \(bits 3, .*\)"),
        ({"quantization_config": {"quant_method": "awq", "bits": 3}}, r"awq \(bits 3\)"),
        ({"quantization_config": {"load_in_8bit": True}}, r"bitsandbytes \(8 bits\)"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
        ({"text_config": {"quantization_config": {"quant_method": "quark"}}}, "quark"),
        ({"quantization_config": {"quant_method": "hqq"}}, "hqq"),
    ],
)
def test_a_checkpoint_in_a_layout_of_another_kind_is_refused_by_its_method(
    tmp_path: Path, declared: dict[str, Any], method: str
) -> None:
    write_tiny_model(tmp_path, "llama", **SIZES)
    with pytest.raises(StartupError, match=f"are quantized with {method}.*, which is not support"):
        format_of(declared, open_source(tmp_path))


def test_a_quantized_checkpoint_that_runs_through_transformers_is_refused(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "phi")
    path = tmp_path / "config.json"
    declared = {"quantization_config": {"quant_method": "fp8"}}
    path.write_text(json.dumps(json.loads(path.read_text()) | declared))
    with pytest.raises(StartupError, match="quantized with fp8, which is only supported for"):
        load_decoder(tmp_path, device=CPU)
