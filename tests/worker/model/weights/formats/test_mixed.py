"""Checkpoints whose modules are packed in different formats."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from kernels.quantized import BLOCK_SIZES
from shared.errors import StartupError
from tests.worker.model.weights.formats.test_coded import (
    CASES,
    INPUTS,
    OUTPUTS,
    TARGET,
    compressed,
    groups_of,
    random,
)
from worker.checkpoints.checkpoint import Checkpoint
from worker.model.weights.formats.interface import Format
from worker.model.weights.formats.registry import format_of

FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "W4A16 in blocks": ("pack-quantized", {"num_bits": 4, **groups_of(32)}),
    "FP8 for each output": ("float-quantized", {"num_bits": 8, "strategy": "channel"}),
    "NVFP4": ("nvfp4-pack-quantized", {"num_bits": 4}),
}
TARGETS = {
    "FP8 for each output": ["Linear"],
    "W4A16 in blocks": ["re:.*up_proj", "re:.*o_proj"],
    "NVFP4": ["model.layers.1.mlp.up_proj"],
}
MODULES = {
    "model.layers.0.mlp.up_proj": "W4A16 in blocks",
    "model.layers.0.mlp.down_proj": "FP8 for each output",
    "model.layers.1.mlp.up_proj": "NVFP4",
}


def described(targets: dict[str, list[str]]) -> dict[str, Any]:
    groups = {
        name: {"format": layout, "weights": weights, "targets": targets[name]}
        for name, (layout, weights) in FORMATS.items()
    }
    config = {"quant_method": "compressed-tensors", "format": "mixed-precision"}
    return {"quantization_config": config | {"config_groups": groups}}


def opened(directory: Path, config: dict[str, Any]) -> tuple[Format, Checkpoint]:
    """The modules, and a matrix of floats."""
    stored: dict[str, Tensor] = {"model.layers.0.mlp.gate.weight": random(8, INPUTS)}
    for module, case in MODULES.items():
        _, tensors, _ = CASES[case]()
        stored |= {f"{module}.{name}": tensor.contiguous() for name, tensor in tensors.items()}
    save_file(stored, directory / "model.safetensors")
    source = Checkpoint(directory)
    return format_of(config, source), source


def test_a_name_counts_before_patterns_and_patterns_before_the_class(tmp_path: Path) -> None:
    stored_as, source = opened(tmp_path, described(TARGETS))
    for module, case in MODULES.items():
        _, _, expected = CASES[case]()
        weight = stored_as.read(source, [f"{module}.weight"], (OUTPUTS, INPUTS), TARGET)
        assert torch.equal(weight.dense(expected.dtype), expected)
    gate = stored_as.read(source, ["model.layers.0.mlp.gate.weight"], (8, INPUTS), TARGET)
    assert torch.equal(gate.dense(torch.float32), random(8, INPUTS))
    assert not source.unread


def test_groups_of_one_layout_may_have_scales_for_different_numbers_of_inputs(
    tmp_path: Path,
) -> None:
    modules = {"q_proj": "W4A16", "k_proj": "W4A16 in blocks"}
    stored = {
        f"{module}.{name}": tensor.contiguous()
        for module, case in modules.items()
        for name, tensor in CASES[case]()[1].items()
    }
    save_file(stored, tmp_path / "model.safetensors")
    groups = {
        module: {"targets": [module], "weights": {"num_bits": 4, **groups_of(size)}}
        for module, size in (("q_proj", 16), ("k_proj", 32))
    }
    config = compressed("pack-quantized", 4) | {"config_groups": groups}
    source = Checkpoint(tmp_path)
    stored_as = format_of({"quantization_config": config}, source)

    for module, case in modules.items():
        _, _, expected = CASES[case]()
        weight = stored_as.read(source, [f"{module}.weight"], (OUTPUTS, INPUTS), TARGET)
        assert torch.equal(weight.dense(expected.dtype), expected)


def test_the_memory_is_that_of_all_formats(tmp_path: Path) -> None:
    stored_as, source = opened(tmp_path, described(TARGETS))
    size = OUTPUTS * INPUTS
    blocks = sum(BLOCK_SIZES[name].bytes_per_weight for name in ("q4_0", "float8"))
    assert stored_as.num_bytes(source, TARGET) == (blocks + 4) * size + 4 * 8 * INPUTS


def test_a_packed_module_that_is_no_target_is_refused_by_name(tmp_path: Path) -> None:
    stored_as, source = opened(tmp_path, described(TARGETS | {"FP8 for each output": ["lm_head"]}))
    name = "model.layers.0.mlp.down_proj.weight"
    with pytest.raises(StartupError, match=f"no format for {name}, which is packed"):
        stored_as.read(source, [name], (OUTPUTS, INPUTS), TARGET)


def test_a_pattern_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"target 're:\(' cannot be read"):
        opened(tmp_path, described(TARGETS | {"NVFP4": ["re:("]}))


def test_an_unknown_algorithm_is_refused_with_its_module(tmp_path: Path) -> None:
    layers = {"model.layers.0.mlp.up_proj": {"quant_algo": "INT3"}}
    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
    with pytest.raises(StartupError, match=r"0\.mlp\.up_proj are quantized with modelopt \(INT3\)"):
        opened(tmp_path, {"quantization_config": config | {"quantized_layers": layers}})
