"""Models whose matrices are used in another form than they are stored, from packed checkpoints."""

import json
import logging
import re
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shared.errors import StartupError
from tests.support.models.numerics import assert_close, relative_error
from tests.support.models.tiny import reference_logits, write_tiny_model
from tests.worker.model.decoders.test_native_families import (
    PROMPTS,
    STEPS,
    load,
    stepwise_logits,
)
from tests.worker.model.weights.formats.test_awq import quantized as awq_quantized
from tests.worker.model.weights.formats.test_coded import compressed, groups_of, words
from tests.worker.model.weights.formats.test_mxfp4 import greedy
from worker.model.loading import load_decoder, rehearse

CPU = torch.device("cpu")
GROUP = 32
MATRICES = r"(_proj(_with_mqa|_qkvz?|_z)?|\.w[123])\.weight$"
"""The matrices of layers, without routers."""
Packed = tuple[dict[str, Tensor], Tensor]
"""The tensors of a matrix, by the end of their names in place of ``weight``, and its values."""


def fp8_blocks(weight: Tensor) -> Packed:
    """As DeepSeek publishes it."""
    rows, columns = (-(-size // 128) for size in weight.shape)
    wide = torch.zeros(rows * 128, columns * 128)
    wide[: weight.shape[0], : weight.shape[1]] = weight
    scales = wide.view(rows, 128, columns, 128).abs().amax(dim=(1, 3)) / 448
    grid = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    grid = grid[: weight.shape[0], : weight.shape[1]]
    codes = (weight / grid).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scales}, codes.float() * grid


def fp8_tensors(weight: Tensor) -> Packed:
    """As Mistral publishes it, with the experts of a layer in one tensor."""
    most = weight.abs().amax(dim=(-2, -1), keepdim=True)
    scale = (most if weight.ndim == 3 else most.view(())) / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    tensors = {"weight": codes, "weight_scale_inv": scale}
    if weight.ndim == 3:
        tensors = {"": codes, "_scale_inv": scale, "_activation_scale": torch.ones(len(weight))}
    return tensors, codes.float() * scale


def in_groups(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Integers from -8 to 7, scales for groups of inputs, and their products."""
    groups = weight.view(len(weight), -1, GROUP)
    scales = (groups.abs().amax(dim=2) / 7).bfloat16()
    codes = (groups / scales.float().unsqueeze(2)).round().clamp(-8, 7)
    return codes.flatten(1).int(), scales, (codes * scales.float().unsqueeze(2)).flatten(1)


def int4(weight: Tensor) -> Packed:
    """As Moonshot publishes Kimi K2."""
    codes, scales, values = in_groups(weight)
    shape = torch.tensor(weight.shape, dtype=torch.int32)
    tensors = {"weight_packed": words(codes + 8, 4), "weight_scale": scales, "weight_shape": shape}
    return tensors, values


def gptq(weight: Tensor) -> Packed:
    codes, scales, values = in_groups(weight)
    zeros = torch.full(scales.t().shape, 7, dtype=torch.int32)
    tensors = {
        "qweight": words(codes + 8, 4).t(),
        "qzeros": words(zeros, 4),
        "scales": scales.half().t(),
    }
    return tensors, values


def awq(weight: Tensor) -> Packed:
    return awq_quantized(weight, GROUP)


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
INT4 = compressed("pack-quantized", 4, **groups_of(GROUP))
LATENT: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}
RANKED = LATENT | {"q_lora_rank": 128}
MIXED = RANKED | {"mlp_layer_types": ["dense", "sparse"]}


@dataclass(frozen=True)
class Case:
    family: str
    pack: Callable[[Tensor], Packed]
    config: dict[str, Any]
    sizes: dict[str, Any] = field(default_factory=dict)
    packed: str = MATRICES
    """The names of the matrices that are packed."""
    model_type: str | None = None
    """What config.json says in place of the family."""
    num_bits: int = 32
    """The significant bits to which the native kernels round the inputs of products."""


CASES = {
    "DeepSeek V3 in FP8": Case("deepseek_v3", fp8_blocks, FP8, RANKED, num_bits=8),
    "Mistral Small 4 in FP8": Case(
        "mistral4",
        fp8_tensors,
        {"quant_method": "fp8", "weight_block_size": None},
        RANKED,
        rf"{MATRICES}|experts\.\w+_proj$",
        num_bits=8,
    ),
    "GLM 4.7 Flash in GPTQ": Case(
        "glm4_moe_lite",
        gptq,
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True},
        MIXED,
        num_bits=16,
    ),
    "GLM 4.7 Flash in AWQ": Case(
        "glm4_moe_lite",
        awq,
        {"quant_method": "awq", "bits": 4, "group_size": GROUP},
        MIXED | {"rope_interleave": True},
        num_bits=16,
    ),
    "Kimi K2 with experts of INT4": Case(
        "deepseek_v3", int4, INT4, RANKED, r"experts\.\d+\.\w+_proj\.weight$", "kimi_k2", 16
    ),
    "DeepSeek V2 in INT4": Case("deepseek_v2", int4, INT4, LATENT, num_bits=16),
    "GLM 4.5 in FP8": Case("glm4_moe", fp8_blocks, FP8),
    "MiniMax M2 in FP8": Case("minimax_m2", fp8_blocks, FP8),
    "Qwen3-Next in FP8": Case("qwen3_next", fp8_blocks, FP8, num_bits=8),
    "Qwen 3.5 with experts in FP8": Case("qwen3_5_moe_text", fp8_blocks, FP8, num_bits=8),
    "Gemma 4 in INT4": Case(
        "gemma4_text", int4, INT4, packed=r"self_attn\.\w_proj\.weight$", num_bits=16
    ),
}


def write_models(directory: Path, case: Case) -> Any:
    """A model packed, and with the same values as floats; returns transformers' model of them."""
    packed, expanded = directory / "packed", directory / "expanded"
    models = type(write_tiny_model(expanded, case.family, **case.sizes))
    values = load_file(expanded / "model.safetensors")
    stored = {}
    for name, tensor in values.items():
        if not re.search(case.packed, name):
            stored[name] = tensor
            continue
        parts, values[name] = case.pack(tensor)
        stem = name.removesuffix("weight")
        stored |= {f"{stem}{end}": part.contiguous() for end, part in parts.items()}
    save_file(values, expanded / "model.safetensors", metadata={"format": "pt"})
    packed.mkdir()
    save_file(stored, packed / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((expanded / "config.json").read_text())
    config |= {"quantization_config": case.config, "model_type": case.model_type or case.family}
    (packed / "config.json").write_text(json.dumps(config))
    return models.from_pretrained(expanded, experts_implementation="eager").eval()


@pytest.mark.parametrize("name", CASES)
def test_a_packed_model_computes_what_it_does_expanded(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    model = write_models(tmp_path, case).double()
    right = [reference_logits(model, prompt) for prompt in PROMPTS]
    assert rehearse(tmp_path / "packed") == "natively"

    for kernels in ("native-int16", "reference")[case.num_bits == 8 :]:
        packed, expanded = (
            stepwise_logits(load(tmp_path / stored, kernels), STEPS)
            for stored in ("packed", "expanded")
        )

        is_exact = kernels == "reference" or case.num_bits == 32
        for ours, theirs, logits in zip(packed, expanded, right, strict=True):
            assert not is_exact or torch.equal(ours, theirs)
            assert_close(ours, logits, 1e-4 if is_exact else 1e-3)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.num_bits == 8])
def test_packed_floats_are_closer_than_weights_expanded_to_bfloat16(
    tmp_path: Path, name: str
) -> None:
    model = write_models(tmp_path, CASES[name]).double()
    right = [reference_logits(model, prompt) for prompt in PROMPTS]
    packed = load(tmp_path / "packed", "native-int16")
    expanded = load_decoder(tmp_path / "expanded", device=CPU, dtype="bfloat16")

    ours, theirs = (typical_error(stepwise_logits(one, STEPS), right) for one in (packed, expanded))

    assert ours < 0.7 * theirs


def typical_error(logits: list[Tensor], right: list[Tensor]) -> float:
    """The median over all tokens, because a token for which other experts are chosen differs from
    the right logits by any amount."""
    errors = [
        relative_error(mine, theirs)
        for ours, expected in zip(logits, right, strict=True)
        for mine, theirs in zip(ours, expected, strict=True)
    ]
    return statistics.median(errors)


@pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if case.num_bits < 32 and case.sizes]
)
def test_packed_products_choose_the_tokens_of_the_expanded_model(tmp_path: Path, name: str) -> None:
    write_models(tmp_path, CASES[name])
    packed, expanded = (
        load(tmp_path / stored, "native-int16") for stored in ("packed", "expanded")
    )
    assert greedy(packed, 8) == greedy(expanded, 8)


def test_only_the_matrices_of_latent_heads_are_expanded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_models(tmp_path, CASES["DeepSeek V2 in INT4"])
    with caplog.at_level(logging.WARNING):
        load_decoder(tmp_path / "packed", device=CPU, dtype="bfloat16")
    (record,) = (one for one in caplog.records if "expanded" in one.message)
    num_layers, num_heads, rank, size = 2, 4, 128, 64
    assert vars(record)["bytes"] == 2 * num_layers * num_heads * rank * size


def test_floats_beside_packed_experts_are_not_expanded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_models(tmp_path, CASES["Kimi K2 with experts of INT4"])
    with caplog.at_level(logging.WARNING):
        load_decoder(tmp_path / "packed", device=CPU)
    assert [one for one in caplog.records if "expanded" in one.message] == []


def test_a_language_model_beside_a_tower_has_its_own_format(tmp_path: Path) -> None:
    write_models(tmp_path, CASES["Kimi K2 with experts of INT4"])
    path = tmp_path / "packed" / "model.safetensors"
    renamed = {
        name.replace("model.", "language_model.model.", 1): tensor
        for name, tensor in load_file(path).items()
    }
    save_file(renamed | {"vision_tower.patch.weight": torch.ones(2, 2)}, path)
    config = path.with_name("config.json")
    described = {"model_type": "kimi_k25", "text_config": json.loads(config.read_text())}
    config.write_text(json.dumps(described))

    packed, expanded = (load(tmp_path / stored) for stored in ("packed", "expanded"))

    assert greedy(packed, 8) == greedy(expanded, 8)


@pytest.mark.parametrize(
    ("name", "tensor", "num_rows", "message"),
    [
        (
            "DeepSeek V3 in FP8",
            "self_attn.kv_b_proj.weight_scale_inv",
            3,
            r"kv_b_proj\.weight cannot be read as FP8: .* the shape \(3, 1\), not \(2, 1\)",
        ),
        (
            "DeepSeek V3 in FP8",
            "self_attn.q_b_proj.weight",
            191,
            r"q_b_proj\.weight has shape \(191, 128\), config\.json says \(192, 128\)",
        ),
        (
            "Mistral Small 4 in FP8",
            "mlp.experts.down_proj_scale_inv",
            4,
            r"down_proj_scale_inv has 4 experts, config\.json says more",
        ),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused_by_name(
    tmp_path: Path, name: str, tensor: str, num_rows: int, message: str
) -> None:
    write_models(tmp_path, CASES[name])
    path, full = tmp_path / "packed" / "model.safetensors", f"model.layers.1.{tensor}"
    tensors = load_file(path)
    twice = torch.cat((tensors[full].float(), tensors[full].float()))[:num_rows]
    save_file(tensors | {full: twice.to(tensors[full].dtype)}, path)
    for refuse in (rehearse, load):
        with pytest.raises(StartupError, match=message):
            refuse(tmp_path / "packed")


def test_experts_together_in_a_format_of_single_matrices_are_refused_by_name(
    tmp_path: Path,
) -> None:
    write_tiny_model(tmp_path, "mistral4", **RANKED)
    path, name = tmp_path / "model.safetensors", "model.layers.1.mlp.experts.down_proj"
    tensors = load_file(path)
    save_file(tensors | {name: tensors[name].to(torch.int8)}, path)
    config = tmp_path / "config.json"
    declared = {"quantization_config": compressed("int-quantized", 8)}
    config.write_text(json.dumps(json.loads(config.read_text()) | declared))
    with pytest.raises(StartupError, match=r"experts\.down_proj holds all experts as I8"):
        rehearse(tmp_path)
