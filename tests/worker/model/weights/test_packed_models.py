"""Models whose matrices are packed as published checkpoints have them compute what they compute
with expanded matrices."""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from kernels.native.library import choose_products, library
from kernels.scaled_floats import VALUES
from tests.support.models.tiny import write_tiny_model
from tests.worker.model.decoders.test_native_families import STEPS, load, stepwise_logits
from tests.worker.model.weights.formats.test_coded import FLOAT4, compressed, groups_of, words
from worker.checkpoints.checkpoint import Checkpoint
from worker.model.config import read_json_config
from worker.model.families import spec_of
from worker.model.loading import load_decoder, rehearse
from worker.model.weights.formats.interface import Target
from worker.model.weights.formats.registry import format_of
from worker.model.weights.layers import DecoderWeights, ExpertWeights, WeightReader, read_weights
from worker.model.weights.recurrences.delta_net import DeltaNetLayer
from worker.model.weights.recurrences.mamba2 import Mamba2Layer

CPU = torch.device("cpu")
GROUP = 32
SMALL = r".*\.(?:in_proj_ba?|in_proj_a|(?:mlp|mixer)\.gate|shared_expert_gate)\.weight"
"""The matrices that published checkpoints leave as they are."""
NONE = r"(?!)"
WIDE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4}
SIZES: dict[str, dict[str, Any]] = {
    "qwen3_next": {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128},
    "qwen3_5_text": {"linear_value_head_dim": 32},
    "qwen3_5_moe_text": {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128},
    "nemotron_h": {"mamba_num_heads": 8, "moe_intermediate_size": 128, "num_attention_heads": 8}
    | {"moe_shared_expert_intermediate_size": 128},
}

Stored = tuple[dict[str, Tensor], Tensor]
"""The tensors of a matrix by their suffixes, and its values."""


class Packing(NamedTuple):
    """A format as a checkpoint has it."""

    declared: Mapping[str, Any]
    """The ``quantization_config``."""
    pack: Callable[[str, Tensor], Stored]
    """Packs a matrix with this name, which ends with a dot."""


def fp8_blocks(weight: Tensor) -> Stored:
    """A scale for each block of 16 outputs and 32 inputs, of which the last may be cut off."""
    most = functional.max_pool2d(weight.abs()[None], (16, 32), stride=(16, 32), ceil_mode=True)[0]
    scales = (most / 448).bfloat16()
    wide = scales.float().repeat_interleave(16, 0)[: len(weight)]
    wide = wide.repeat_interleave(32, 1)[:, : weight.shape[1]]
    codes = (weight / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scales}, codes.float() * wide


def fp8_tensor(weight: Tensor) -> Stored:
    """One scale for the matrix."""
    scale = weight.abs().amax() / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    stored = {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(1.0)}
    return stored, codes.float() * scale


def integers(weight: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [outputs, inputs] around 0, scales [outputs, groups], and the values."""
    high = (1 << bits - 1) - 1
    groups = weight.view(len(weight), -1, GROUP)
    scales = (groups.abs().amax(-1) / high).bfloat16()
    wide = scales.float().repeat_interleave(GROUP, 1)
    codes = (weight / wide).round().clamp(-high - 1, high).int()
    return codes, scales, codes * wide


def gptq(weight: Tensor) -> Stored:
    codes, scales, values = integers(weight, 4)
    stored = {
        "qweight": words(codes + 8, 4).t(),
        "qzeros": words(torch.full(scales.t().shape, 7), 4),
        "scales": scales.half().t(),
        "g_idx": (torch.arange(weight.shape[1]) // GROUP).int(),
    }
    return stored, values


def gptq_in_another_order(name: str, weight: Tensor) -> Stored:
    """The groups of inputs that are not neighbours (act-order), in an order of each expert."""
    expert = re.search(r"experts\.(\d+)", name)
    seed = 0 if expert is None else int(expert[1])
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(seed))
    stored, values = gptq(weight[:, order])
    places = order.argsort()
    codes, _, _ = integers(weight[:, order], 4)
    stored["qweight"] = words(codes[:, places] + 8, 4).t()
    stored["g_idx"] = stored["g_idx"][places]
    return stored, values[:, places]


def scaled_blocks(weight: Tensor) -> Stored:
    """A scale for each block of 16 outputs and 128 inputs."""
    blocks = weight.view(len(weight), -1, 128)
    most = functional.max_pool1d(blocks.abs().amax(-1).t()[None], 16, 16, ceil_mode=True)[0].t()
    scales = most / 448
    wide = scales.repeat_interleave(16, 0)[: len(weight)].repeat_interleave(128, 1)
    codes = (weight / wide).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scales}, codes.float() * wide


def nf4(weight: Tensor) -> Stored:
    most = weight.view(-1, 64).abs().amax(-1)
    wide = most.repeat_interleave(64).view(weight.shape)
    codes = ((weight / wide).unsqueeze(-1) - VALUES["nf4"]).abs().argmin(-1)
    pairs = codes.view(-1, 2)
    state = json.dumps({"blocksize": 64, "shape": list(weight.shape)}).encode()
    stored = {
        "weight": (pairs[:, :1] << 4 | pairs[:, 1:]).to(torch.uint8),
        "weight.absmax": most,
        "weight.quant_map": VALUES["nf4"].clone(),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(state), dtype=torch.uint8),
    }
    return stored, VALUES["nf4"][codes] * wide


def awq(weight: Tensor) -> Stored:
    codes, scales, values = integers(weight, 4)

    def packed(numbers: Tensor) -> Tensor:
        """[rows, outputs], eight outputs in a word."""
        ordered = numbers.reshape(len(numbers), -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]]
        return words(ordered.flatten(1), 4)

    zeros = torch.full(scales.t().shape, 8)
    stored = {"qweight": packed(codes.t() + 8), "qzeros": packed(zeros)}
    return stored | {"scales": scales.half().t()}, values


def packed_integers(weight: Tensor, bits: int) -> Stored:
    codes, scales, values = integers(weight, bits)
    shape = torch.tensor(weight.shape)
    stored = {"weight_packed": words(codes + (1 << bits - 1), bits), "weight_scale": scales}
    return stored | {"weight_shape": shape}, values


def nvfp4(weight: Tensor, *, is_model_opt: bool) -> Stored:
    whole = weight.abs().amax() / (6 * 448)
    most = weight.view(len(weight), -1, 16).abs().amax(-1)
    scales = (most / 6 / whole).to(torch.float8_e4m3fn)
    own = scales.float() * whole if is_model_opt else scales.float() / (1 / whole)
    wide = own.repeat_interleave(16, 1)
    codes = ((weight / wide).unsqueeze(-1) - FLOAT4).abs().argmin(-1)
    pairs = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    if is_model_opt:
        stored = {"weight": pairs, "weight_scale_2": whole, "input_scale": torch.tensor(1.0)}
    else:
        stored = {"weight_packed": pairs, "weight_global_scale": (1 / whole).view(1)}
    return stored | {"weight_scale": scales}, FLOAT4[codes] * wide


def same(pack: Callable[[Tensor], Stored]) -> Callable[[str, Tensor], Stored]:
    """All matrices in one format."""
    return lambda _, weight: pack(weight)


PACKINGS = {
    "FP8": Packing({"quant_method": "fp8", "weight_block_size": [16, 32]}, same(fp8_blocks)),
    "FP8 of ModelOpt": Packing({"quant_method": "modelopt", "quant_algo": "FP8"}, same(fp8_tensor)),
    "NVFP4 of ModelOpt": Packing(
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        same(lambda weight: nvfp4(weight, is_model_opt=True)),
    ),
    "GPTQ": Packing(
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True}, same(gptq)
    ),
    "GPTQ, act-order": Packing(
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": True},
        gptq_in_another_order,
    ),
    "FP8 in wide blocks": Packing(
        {"quant_method": "fp8", "weight_block_size": [16, 128]}, same(scaled_blocks)
    ),
    "NF4": Packing({"quant_method": "bitsandbytes", "load_in_4bit": True}, same(nf4)),
    "AWQ": Packing({"quant_method": "awq", "bits": 4, "group_size": GROUP}, same(awq)),
    "W4A16": Packing(
        compressed("pack-quantized", 4, **groups_of(GROUP)),
        same(lambda weight: packed_integers(weight, 4)),
    ),
}


def fp8_channels(weight: Tensor) -> Stored:
    """A scale for each output."""
    scales = weight.abs().amax(1, keepdim=True) / 448
    codes = (weight / scales).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scales}, codes.float() * scales


def in_groups(name: str, weight: Tensor) -> Stored:
    """The formats of `GROUPS`."""
    if name.endswith(".q_proj."):
        return nvfp4(weight, is_model_opt=False)
    bits = 8 if name.endswith(".down_proj.") else 4
    return packed_integers(weight, bits) if ".mlp." in name else fp8_channels(weight)


GROUPS = {
    "group_0": {
        "format": "pack-quantized",
        "targets": ["re:.*mlp.*(gate|up)_proj$"],
        "weights": {"num_bits": 4, **groups_of(GROUP)},
    },
    "group_1": {
        "format": "pack-quantized",
        "targets": [r"re:.*\.down_proj"],
        "weights": {"num_bits": 8, **groups_of(GROUP)},
    },
    "group_2": {
        "format": "float-quantized",
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
    },
    "group_3": {
        "format": "nvfp4-pack-quantized",
        "targets": ["model.layers.1.self_attn.q_proj"],
        "weights": {"num_bits": 4, "type": "float"},
    },
    "cache": {"format": None, "targets": ["re:.*self_attn"], "weights": None},
}
IN_GROUPS = Packing(
    {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": GROUPS},
    in_groups,
)
LAYERS = {
    "backbone.layers.3.mixer.experts": {"quant_algo": "NVFP4", "group_size": 16},
    **{
        f"backbone.layers.{index}.mixer.{name}_proj": {"quant_algo": "FP8"}
        for index in (0, 4)
        for name in ("in", "out")
    },
}
"""As Nemotron 3 is published: experts of 4 bits, and state spaces of 8 bits."""
IN_LAYERS = Packing(
    {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": LAYERS},
    lambda name, weight: (
        nvfp4(weight, is_model_opt=True) if ".experts." in name else fp8_tensor(weight)
    ),
)
NOT_IN_LAYERS = r"(?!.*\.(?:experts\.\d+\.|in_proj|out_proj)).*"


def write_packed(
    directory: Path, family: str, packing: Packing, *, kept: str = SMALL, **sizes: Any
) -> tuple[Path, Path]:
    """Write a model whose layers have packed matrices, except those whose names match ``kept``,
    and the same model with expanded matrices."""
    packed, expanded = directory / "packed", directory / "expanded"
    write_tiny_model(expanded, family, **WIDE | SIZES.get(family, {}) | sizes)
    shutil.copytree(expanded, packed)
    stored: dict[str, Tensor] = {}
    plain = load_file(expanded / "model.safetensors")
    for name, tensor in plain.items():
        is_matrix = ".layers." in name and name.endswith(".weight") and tensor.ndim == 2
        if not is_matrix or re.fullmatch(kept, name):
            stored[name] = tensor
            continue
        stem = name.removesuffix("weight")
        tensors, values = packing.pack(stem, tensor)
        plain[name] = values.contiguous()
        stored |= {f"{stem}{suffix}": part.contiguous() for suffix, part in tensors.items()}
    save_file(plain, expanded / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, packed / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"] = dict(packing.declared)
    (packed / "config.json").write_text(json.dumps(config))
    return packed, expanded


TIE = 0.02
"""The most by which two logits differ in a tie, as a share of the logits' deviation."""


def assert_same_results(packed: Path, expanded: Path) -> None:
    """The reference operations expand everything. The native library multiplies some formats, with
    its own rounding, after which the best tokens are still the best, but for ties."""
    assert rehearse(packed) == "natively"
    for kernels in ("reference", "native-int16"):
        ours, theirs = (
            stepwise_logits(load(directory, kernels), STEPS) for directory in (packed, expanded)
        )
        for mine, right in zip(ours, theirs, strict=True):
            if kernels == "reference":
                assert torch.equal(mine, right)
            chosen = right.gather(-1, mine.argmax(-1, keepdim=True)).squeeze(-1)
            assert (right.amax(-1) - chosen).max() <= TIE * right.std()


@pytest.mark.parametrize(
    ("family", "name"),
    [
        *(("qwen3_next", name) for name in ("FP8", "GPTQ", "AWQ", "W4A16")),
        *(("qwen3_5_text", name) for name in ("FP8", "AWQ")),
        *(("qwen3_5_moe_text", name) for name in ("FP8", "W4A16")),
        *(("nemotron_h", name) for name in ("FP8 of ModelOpt", "NVFP4 of ModelOpt", "W4A16")),
    ],
)
def test_a_packed_model_with_states_computes_what_it_does_with_expanded_matrices(
    tmp_path: Path, family: str, name: str
) -> None:
    assert_same_results(*write_packed(tmp_path, family, PACKINGS[name]))


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("GPTQ, act-order", {("q4_0", True)}),
        ("FP8 in wide blocks", {("float8", False)}),
        ("NF4", {("nf4", False)}),
    ],
)
def test_experts_stay_packed(tmp_path: Path, name: str, kept: set[tuple[str, bool]]) -> None:
    sizes = {"moe_intermediate_size": 128, "head_dim": 32, "num_key_value_heads": 2}
    packed, expanded = write_packed(tmp_path, "qwen3_moe", PACKINGS[name], kept=SMALL, **sizes)
    assert_same_results(packed, expanded)
    parts = [layer.feed_forward for layer in weights_of(packed).layers]
    found = {
        (rows.format, rows.order is not None)
        for part in parts
        if isinstance(part, ExpertWeights)
        for expert in part.experts
        for linear in (expert.gate_up, expert.down)
        for rows in linear.weight.native_rows()
    }
    assert found == kept


@pytest.mark.parametrize("family", ["qwen3_next", "jamba"])
def test_small_matrices_are_expanded_if_they_are_packed(tmp_path: Path, family: str) -> None:
    assert_same_results(*write_packed(tmp_path, family, PACKINGS["FP8"], kept=NONE))


@pytest.mark.parametrize(
    ("family", "packing", "kept"),
    [("qwen3_next", IN_GROUPS, SMALL), ("nemotron_h", IN_LAYERS, NOT_IN_LAYERS)],
    ids=["groups", "layers"],
)
def test_each_module_is_read_in_its_format(
    tmp_path: Path, family: str, packing: Packing, kept: str
) -> None:
    assert_same_results(*write_packed(tmp_path, family, packing, kept=kept))


def test_experts_of_latent_vectors_are_packed_without_the_products_around_them(
    tmp_path: Path,
) -> None:
    kept = f"{SMALL}|.*_latent_proj.*"
    packing = PACKINGS["GPTQ"]
    assert_same_results(
        *write_packed(tmp_path, "nemotron_h", packing, kept=kept, moe_latent_size=64)
    )


def weights_of(directory: Path) -> DecoderWeights:
    """The weights as the native library multiplies them."""
    config, source = read_json_config(directory), Checkpoint(directory)
    spec = spec_of(config)
    assert spec is not None
    target = Target(torch.float32, CPU, "native")
    return read_weights(WeightReader(source, spec, format_of(config, source), target))


def inputs_of(directory: Path) -> list[str]:
    """The formats in which the native library multiplies by the first matrix of recurrences."""
    layers = weights_of(directory).layers
    mixers = [layer.recurrence for layer in layers if layer.recurrence is not None]
    assert mixers
    formats = set()
    for mixer in mixers:
        assert isinstance(mixer, DeltaNetLayer | Mamba2Layer)
        formats |= {rows.format for rows in mixer.inputs.weight.native_rows()}
    return sorted(formats)


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text", "nemotron_h"])
def test_matrices_of_recurrences_stay_packed(tmp_path: Path, family: str) -> None:
    packed, _ = write_packed(tmp_path, family, PACKINGS["GPTQ"])
    assert inputs_of(packed) == ["q4_0"]


def test_scales_of_the_cache_have_no_effect(tmp_path: Path) -> None:
    """Engines that keep the cache in float8 use them."""
    packed, _ = write_packed(tmp_path, "nemotron_h", PACKINGS["FP8 of ModelOpt"])
    file = packed / "model.safetensors"
    scales = {f"backbone.layers.1.mixer.{part}_proj.{part}_scale": 0.5 for part in "kv"}
    extra = {name: torch.tensor(scale) for name, scale in scales.items()}
    save_file(load_file(file) | extra, file, metadata={"format": "pt"})
    assert rehearse(packed) == "natively"


def test_experts_in_one_tensor_are_read_with_their_blocks(tmp_path: Path) -> None:
    packed, expanded = write_packed(tmp_path, "qwen3_5_moe_text", PACKINGS["FP8"])
    file = packed / "model.safetensors"
    stored = load_file(file)
    for layer in range(3):
        stem = f"model.layers.{layer}.mlp.experts."
        for suffix, ending in {"weight": "", "weight_scale_inv": "_scale_inv"}.items():
            parts = {
                part: [stored.pop(f"{stem}{index}.{part}_proj.{suffix}") for index in range(5)]
                for part in ("gate", "up", "down")
            }
            both = [torch.cat(pair) for pair in zip(parts["gate"], parts["up"], strict=True)]
            stored[f"{stem}gate_up_proj{ending}"] = torch.stack(both)
            stored[f"{stem}down_proj{ending}"] = torch.stack(parts["down"])
    save_file(stored, file, metadata={"format": "pt"})
    assert_same_results(packed, expanded)


def test_a_shared_expert_of_bfloat16_has_rounded_inputs_beside_packed_experts(
    tmp_path: Path,
) -> None:
    """The instruction for products of bfloat16 rounds its inputs, and other processors lack it."""
    native = library()
    if not native.has_bf16_dot:
        pytest.skip("the processor has no products of bfloat16")
    packed, _ = write_packed(
        tmp_path, "qwen3_next", PACKINGS["GPTQ"], kept=r"(?!.*mlp\.experts\.).*"
    )
    decoder = load_decoder(packed, dtype="bfloat16", kernels="native", device=CPU)
    results = []
    for is_used in (True, False):
        native.use_bf16_dot(is_used=is_used)
        results.append(stepwise_logits(decoder, STEPS))
    choose_products(native)
    assert all(map(torch.equal, *results))
