"""gpt-oss with its experts in MXFP4, compared with the expanded model."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from kernels.providers import Provider, load_ops
from shared.errors import StartupError
from tests.support.models.batches import batch, share
from tests.support.models.numerics import assert_close
from tests.support.models.tiny import native_spec, reference_logits, write_tiny_model
from worker.checkpoints.checkpoint import Checkpoint
from worker.model.config import read_json_config
from worker.model.decoders.stack import StackDecoder
from worker.model.forward import Decoder
from worker.model.inputs import build_inputs
from worker.model.kv_cache import BlockShape, KVCache
from worker.model.loading import load_decoder, rehearse, weight_room
from worker.model.weights.formats.interface import Target
from worker.model.weights.formats.mxfp4 import Mxfp4
from worker.model.weights.layers import ExpertWeights, WeightReader, read_weights
from worker.model.weights.stacked import PlaneMatrices

CPU = torch.device("cpu")
PROMPT = [(7 * i) % 131 for i in range(20)]
PROJECTIONS = ("gate_up_proj", "down_proj")
SIZES: dict[str, Any] = {"intermediate_size": 64, "tie_word_embeddings": False}


def write_models(packed: Path, expanded: Path) -> Any:
    """gpt-oss as it is published, and with the values of its experts as floats; returns
    transformers' model of these values."""
    model = write_tiny_model(packed, "gpt_oss", **SIZES)
    file, generator = packed / "model.safetensors", torch.Generator().manual_seed(1)
    tensors = load_file(file)
    for index, layer in enumerate(model.model.layers):
        for projection in PROJECTIONS:
            name = f"model.layers.{index}.mlp.experts.{projection}"
            count, inputs, outputs = tensors.pop(name).shape
            shape = (count, outputs, inputs // 32, 16)
            blocks = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
            exponents = torch.randint(121, 125, shape[:3], dtype=torch.uint8, generator=generator)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": exponents}
            values = convert_moe_packed_tensors(blocks, exponents, dtype=torch.float32)
            getattr(layer.mlp.experts, projection).data.copy_(values)
    save_file(tensors, file, metadata={"format": "pt"})
    path = packed / "config.json"
    declared = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
    }
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": declared}))
    model.save_pretrained(expanded)
    return model


def change(directory: Path, tensor: str, changed: Tensor | None) -> None:
    """Replace a tensor of the second layer's experts, or remove it."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    name = f"model.layers.1.mlp.experts.{tensor}"
    del tensors[name]
    save_file(tensors if changed is None else tensors | {name: changed}, path)


def logits_of(decoder: Decoder, tokens: list[int]) -> Tensor:
    """The logits of the last token."""
    block = BlockShape(decoder.num_layers, 8, decoder.num_kv_heads, decoder.head_dim, decoder.dtype)
    inputs = build_inputs(batch(share(tokens, range(4))), 8, decoder.device).forward
    with torch.inference_mode():
        return decoder.forward(inputs, KVCache.allocate(block, 4, decoder.device)).clone()


def greedy(decoder: Decoder, num_tokens: int) -> list[int]:
    tokens = [*PROMPT]
    for _ in range(num_tokens):
        tokens.append(int(logits_of(decoder, tokens).argmax()))
    return tokens[len(PROMPT) :]


@pytest.mark.parametrize("kernels", ["native-int16", "reference"])
def test_the_tokens_are_those_of_the_expanded_model(tmp_path: Path, kernels: str) -> None:
    model = write_models(tmp_path / "packed", tmp_path / "expanded")
    packed, expanded = (
        load_decoder(tmp_path / name, device=CPU, kernels=kernels, dtype="float32")
        for name in ("packed", "expanded")
    )
    assert greedy(packed, 8) == greedy(expanded, 8)
    assert_close(logits_of(packed, PROMPT), reference_logits(model, PROMPT)[-1:], 1e-4)


def test_experts_stay_in_blocks_on_the_native_kernels(tmp_path: Path) -> None:
    model = write_models(tmp_path / "packed", tmp_path / "expanded")
    spec = native_spec(read_json_config(tmp_path / "packed"))
    target = Target(torch.float32, CPU, "native")
    reader = WeightReader(Checkpoint(tmp_path / "packed"), spec, Mxfp4(), target)

    layer = read_weights(reader).layers[1].feed_forward

    assert isinstance(layer, ExpertWeights)
    both = model.model.layers[1].mlp.experts.gate_up_proj.data[3].t()
    for weight, values in (
        (layer.experts[3].gate_up.weight, torch.cat((both[::2], both[1::2]))),
        (layer.experts[3].down.weight, model.model.layers[1].mlp.experts.down_proj.data[3].t()),
    ):
        assert [rows.format for rows in weight.native_rows()] == ["mxfp4"]
        assert torch.equal(weight.dense(torch.float32), values)


def test_experts_stay_packed_on_a_gpu(tmp_path: Path) -> None:
    """On the reference operations, which have the products of the GPU's kernels."""
    model = write_models(tmp_path / "packed", tmp_path / "expanded")
    spec = native_spec(read_json_config(tmp_path / "packed"))
    target = Target(torch.float32, CPU, "triton")
    reader = WeightReader(Checkpoint(tmp_path / "packed"), spec, Mxfp4(), target)

    weights = read_weights(reader)

    for layer in weights.layers:
        assert isinstance(layer.feed_forward, ExpertWeights)
        together = layer.feed_forward.stacked
        assert together is not None
        for product in (together.gate_up, together.down):
            assert isinstance(product.matrices, PlaneMatrices)
    decoder = StackDecoder(spec, weights, load_ops("reference"), max_seq_len=64)
    assert_close(logits_of(decoder, PROMPT), reference_logits(model, PROMPT)[-1:], 1e-4)


@pytest.mark.parametrize(
    ("provider", "numerics"), [("triton", "native planes"), ("reference", "native")]
)
def test_products_in_planes_have_numerics_of_their_own(
    tmp_path: Path, provider: Provider, numerics: str
) -> None:
    write_models(tmp_path / "packed", tmp_path / "expanded")
    spec = native_spec(read_json_config(tmp_path / "packed"))
    target = Target(torch.float32, CPU, provider)
    weights = read_weights(WeightReader(Checkpoint(tmp_path / "packed"), spec, Mxfp4(), target))

    decoder = StackDecoder(spec, weights, load_ops("reference"), max_seq_len=64)

    assert decoder.traits.numerics == numerics


def test_the_memory_is_that_of_the_blocks_and_expanded_weights_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = write_models(tmp_path / "packed", tmp_path / "expanded")
    packed = tmp_path / "packed"
    config, source = read_json_config(packed), Checkpoint(packed)
    num_experts = sum(
        getattr(layer.mlp.experts, name).numel()
        for layer in model.model.layers
        for name in PROJECTIONS
    )
    others = sum(parameter.numel() for parameter in model.parameters()) - num_experts

    on_cpu = weight_room(config, source, CPU).needed
    on_gpu = Mxfp4().num_bytes(source, Target(torch.float32, CPU, "triton"))
    expanded = weight_room(config, source, CPU, kernels="reference").needed
    with caplog.at_level(logging.WARNING):
        load_decoder(packed, device=CPU, kernels="reference")

    assert on_gpu == on_cpu == 4 * others + num_experts * 17 / 32
    assert expanded == 4 * (others + num_experts)
    (record,) = (one for one in caplog.records if "expanded" in one.message)
    assert vars(record)["bytes"] == 4 * num_experts


@pytest.mark.parametrize(
    ("tensor", "changed", "message"),
    [
        ("down_proj_scales", None, r"no tensor model\.layers\.1\.mlp\.experts\.down_proj_scales"),
        ("gate_up_proj_blocks", None, r"no tensor .*gate_up_proj_blocks"),
        (
            "down_proj_scales",
            torch.zeros(4, 96, 1, dtype=torch.uint8),
            r"down_proj\.0\.weight cannot be read as MXFP4: scales have the shape \(96, 1\), not",
        ),
        (
            "down_proj_blocks",
            torch.zeros(4, 96, 2, 8, dtype=torch.uint8),
            r"down_proj\.0\.weight cannot be read as MXFP4: blocks have the shape \(96, 2, 8\)",
        ),
        (
            "down_proj_blocks",
            torch.zeros(3, 96, 2, 16, dtype=torch.uint8),
            r"down_proj_blocks has 3 experts, config\.json says more",
        ),
        (
            "down_proj_blocks",
            torch.zeros(4, 64, 2, 16, dtype=torch.uint8),
            r"cannot be read as MXFP4: scales have the shape \(96, 2\), not \(64, 2\)",
        ),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused_by_name(
    tmp_path: Path, tensor: str, changed: Tensor | None, message: str
) -> None:
    write_models(tmp_path / "packed", tmp_path / "expanded")
    assert rehearse(tmp_path / "packed") == "natively"
    change(tmp_path / "packed", tensor, changed)
    with pytest.raises(StartupError, match=message):
        rehearse(tmp_path / "packed")
