"""A GGUF file of every architecture computes what the checkpoint computes that it is made of."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from shared.errors import StartupError
from tests.kernels.blocks import random_blocks
from tests.support.models.numerics import assert_close
from tests.support.models.predictors import write_predicting_model
from tests.support.models.tiny import FAMILIES, write_tiny_model
from tests.worker.checkpoints.gguf_files import write_tiny_gguf
from tests.worker.checkpoints.gguf_models import write_gguf
from tests.worker.model.decoders.test_native_families import load, stepwise_logits
from tests.worker.model.decoders.test_predictors import predictions
from worker.checkpoints import convert
from worker.checkpoints.architectures import architectures, config_of
from worker.checkpoints.gguf_file import GgufHeader, read_header, write_file_list
from worker.model.config import read_json_config
from worker.model.families import spec_of
from worker.model.loading import rehearse
from worker.model.weights.formats.blocks import Gguf
from worker.model.weights.formats.interface import Target
from worker.model.weights.gguf_names import as_stored
from worker.model.weights.layers import ExpertWeights, LayerWeights, WeightReader
from worker.model.weights.sources import open_source

CPU = torch.device("cpu")
STEPS = [(9, 0), (1, 26), (12, 0)]
_YARN: dict[str, Any] = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0} | {
    "original_max_position_embeddings": 64
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("llama", {}),
    "qwen2_moe": ("qwen2moe", {}),
    "qwen3_moe": ("qwen3moe", {"mlp_only_layers": []}),
    "gpt_oss": ("gpt-oss", {}),
    "deepseek_v2": ("deepseek2", {}),
    "deepseek_v3": (
        "deepseek2",
        {"rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "glm4_moe_lite": (
        "deepseek2",
        {"mlp_layer_types": ["dense", "sparse", "sparse"], "rope_interleave": True}
        | {"first_k_dense_replace": 1},
    ),
    "llama4_text": (
        "llama4",
        {"attention_chunk_size": 8192, "no_rope_layer_interval": 4, "num_hidden_layers": 5}
        | {"floor_scale": 8192},
    ),
    "olmoe": ("olmoe", {}),
    "granitemoe": ("granitemoe", {}),
    "granitemoehybrid": ("granitehybrid", {"time_step_limit": [0.0, float("inf")]}),
    "ernie4_5_moe": ("ernie4_5-moe", {}),
    "glm4_moe": ("glm4moe", {}),
    "minimax_m2": ("minimax-m2", {}),
    "qwen3_next": ("qwen3next", {"mlp_only_layers": []}),
    "qwen3_5_text": ("qwen35", {}),
    "qwen3_5_moe_text": ("qwen35moe", {}),
    "lfm2": ("lfm2", {"block_auto_adjust_ff_dim": False}),
    "lfm2_moe": ("lfm2moe", {"conv_bias": False}),
    "mamba": ("mamba", {}),
    "falcon_mamba": ("mamba", {}),
    "mamba2": ("mamba2", {}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 16}),
    "gemma3_text": ("gemma3", {"query_pre_attn_scalar": 16}),
    "gemma4_text": ("gemma4", {}),
    "ministral3": (
        "mistral3",
        {
            "rope_parameters": _YARN
            | {"mscale_all_dim": 1.0, "mscale": 1.0}
            | {"llama_4_scaling_beta": 0.3}
        },
    ),
    "phi3": ("phi3", {}),
    "granite": ("granite", {}),
    "ernie4_5": ("ernie4_5", {}),
    "arcee": ("arcee", {}),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 4, "num_hidden_layers": 5}),
    "glm4": ("glm4", {}),
    "glm": ("chatglm", {}),
    "exaone4": ("exaone4", {}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo2", {}),
    "starcoder2": ("starcoder2", {"sliding_window": None}),
    "seed_oss": ("seed_oss", {}),
    "nemotron": ("nemotron", {}),
    "cohere2": ("cohere2", {"layer_types": None, "num_hidden_layers": 5}),
    "hunyuan_v1_dense": ("hunyuan-dense", {}),
    "apertus": ("apertus", {}),
    "phimoe": (
        "phimoe",
        {
            "router_jitter_noise": 0.01,
            "rope_parameters": FAMILIES["phimoe"]["rope_parameters"]
            | dict.fromkeys(("short_mscale", "long_mscale"), 1.243163121016122),
        },
    ),
    "bloom": ("bloom", {"layer_norm_epsilon": 1e-2}),
    "mpt": ("mpt", {"layer_norm_epsilon": 1e-2, "attn_config": {"alibi_bias_max": 4}}),
    "mistral4": ("mistral4", {}),
    "jamba": ("jamba", {}),
    "falcon_h1": ("falcon-h1", {"mamba_norm_before_gate": False}),
    "nemotron_h": ("nemotron_h", {"layers_block_type": ["mamba", "attention", "mlp"]}),
    "nemotron_h with experts": (
        "nemotron_h_moe",
        {"layers_block_type": ["moe", "attention", "mamba"], "moe_latent_size": 24},
    ),
    "kimi_linear": ("kimi-linear", {"linear_num_heads": 6, "first_k_dense_replace": 1}),
}
"""The architecture of each family, and what a file cannot say otherwise."""


def served_from(path: Path) -> Path:
    """The directory of a file's configuration, from which a worker loads it."""
    directory = path.with_suffix("")
    directory.mkdir()
    config = config_of([read_header(path)])
    assert config is not None
    (directory / "config.json").write_text(json.dumps(config))
    with convert._read(path) as reader:
        convert._complete_config({}, reader, directory)
    write_file_list(directory, [path])
    return directory


@pytest.mark.parametrize("family", MODELS)
def test_a_file_computes_what_its_checkpoint_computes(tmp_path: Path, family: str) -> None:
    architecture, overrides = MODELS[family]
    write_tiny_model(tmp_path, family.partition(" ")[0], **overrides)

    directory = served_from(write_gguf(tmp_path, tmp_path / "tiny.gguf", architecture))

    right = stepwise_logits(load(tmp_path), STEPS)
    for logits, expected in zip(stepwise_logits(load(directory), STEPS), right, strict=True):
        assert_close(logits, expected, 1e-5)
    assert rehearse(directory) == "natively"


@pytest.mark.parametrize("family", ["glm4_moe", "glm4_moe_lite", "deepseek_v3"])
def test_a_file_predicts_what_its_checkpoint_predicts(tmp_path: Path, family: str) -> None:
    architecture, overrides = MODELS[family]
    write_predicting_model(tmp_path, family, **overrides)

    directory = served_from(write_gguf(tmp_path, tmp_path / "tiny.gguf", architecture))

    right = predictions(load(tmp_path), STEPS)
    for logits, expected in zip(predictions(load(directory), STEPS), right, strict=True):
        assert_close(logits, expected, 1e-5)


def test_every_architecture_has_a_model_here() -> None:
    as_other = {"qwen2", "qwen3", "qwen3vl", "qwen3vlmoe"}  # Qwen's, in the tests of dense files
    tested = {architecture for architecture, _ in MODELS.values()} | as_other
    assert tested == {one.name for one in architectures()}


def random_experts(name: str, tensor: Tensor, kind: Kind) -> Any:
    """Random blocks for the matrices of all experts, [experts, outputs, bytes of a row]."""
    *outputs, inputs = tensor.shape
    blocks = random_blocks(kind.name.lower(), math.prod(outputs), inputs, len(name)).blocks
    return blocks.numpy().reshape(*outputs, -1)


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q8_0", "MXFP4"])
def test_experts_are_multiplied_as_they_are_in_the_file(tmp_path: Path, kind: str) -> None:
    sizes: dict[str, Any] = {
        "hidden_size": 256,
        "moe_intermediate_size": 256,
        "mlp_only_layers": [],
    }
    write_tiny_model(tmp_path, "qwen3_moe", **sizes)
    path = write_gguf(
        tmp_path,
        tmp_path / "tiny.gguf",
        "qwen3moe",
        kind_of=lambda name: Kind[kind] if "_exps" in name else Kind.F32,
        stored=random_experts,
    )

    directory = served_from(path)

    assert {format_of_experts(layer) for layer in layers_of(directory)} == {kind.lower()}
    packed = stepwise_logits(load(directory, "native-int16"), STEPS)
    expanded = stepwise_logits(load(directory, "reference"), STEPS)
    for logits, expected in zip(packed, expanded, strict=True):
        assert_close(logits, expected, 1e-3)  # products round their inputs
        assert torch.equal(logits.argmax(1), expected.argmax(1))


def layers_of(directory: Path) -> Iterator[LayerWeights]:
    source, spec = open_source(directory), spec_of(read_json_config(directory))
    assert spec is not None
    target = Target(torch.bfloat16, CPU, "native")
    return WeightReader(source, as_stored(spec, source), Gguf(), target).layers()


def format_of_experts(layer: LayerWeights) -> str:
    """The format of all matrices of a layer's experts."""
    assert isinstance(layer.feed_forward, ExpertWeights)
    both = [one for expert in layer.feed_forward.experts for one in (expert.gate_up, expert.down)]
    (found,) = {rows.format for one in both for rows in one.weight.native_rows()}
    return found


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"expert_used_count": None}, r"has no qwen3moe\.expert_used_count"),
        ({"expert_count": 9}, r"blk\.0\.ffn_gate_inp\.weight has shape \(5, 96\)"),
        ({"block_count": 4}, r"no tensor blk\.3\."),
    ],
)
def test_metadata_that_does_not_describe_the_tensors_is_refused(
    tmp_path: Path, damage: dict[str, int | None], message: str
) -> None:
    write_tiny_model(tmp_path, "qwen3_moe", mlp_only_layers=[])
    path = write_gguf(tmp_path, tmp_path / "tiny.gguf", "qwen3moe")
    header = read_header(path)
    for key, value in damage.items():
        header.entries.pop(f"qwen3moe.{key}")
        if value is not None:
            header.entries[f"qwen3moe.{key}"] = value

    with pytest.raises(StartupError, match=message):
        described_by(header, path)


def test_a_deepseek_whose_queries_grow_with_their_positions_is_refused(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "deepseek_v3")
    path = write_gguf(tmp_path, tmp_path / "tiny.gguf", "deepseek2")
    header = read_header(path)
    described_by(header, path)

    header.entries["deepseek2.attention.temperature_scale"] = 0.1

    with pytest.raises(StartupError, match=r"deepseek2\.attention\.temperature_scale"):
        config_of([header])


def described_by(header: GgufHeader, path: Path) -> None:
    directory = path.with_suffix("")
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config_of([header])))
    write_file_list(directory, [path])
    rehearse(directory)


def test_an_unknown_architecture_is_named_with_those_that_are_read(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", architecture="grok")
    with pytest.raises(StartupError, match=r"of grok are not read, only .*gpt-oss.*qwen3moe"):
        config_of([read_header(path)])
