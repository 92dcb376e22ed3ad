"""Every native family computes what transformers computes, without transformers."""

import copy
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shared.errors import StartupError
from tests.support.models.batches import batch, share
from tests.support.models.numerics import assert_close, poisoned
from tests.support.models.tiny import (
    FAMILIES,
    LIKE,
    SIZES,
    VOCAB_SIZE,
    WITH_TOWERS,
    reference_logits,
    write_tiny_model,
)
from tests.worker.model.conftest import TinyModels
from worker.model import families
from worker.model.cache_layout import CacheLayout, one_group
from worker.model.config import alibi_slopes
from worker.model.families import FAMILIES as FAMILIES_OF_FILES
from worker.model.families import spec_of
from worker.model.forward import Decoder
from worker.model.inputs import build_inputs
from worker.model.kv_cache import KVCache
from worker.model.loading import load_decoder

MAX_RELATIVE_ERROR = 1e-5
CPU = torch.device("cpu")
BLOCK_SIZE = 8
BLOCKS = [[5, 1, 8, 3, 0, 7], [9, 4, 2, 6]]
PROMPTS = [
    [(7 * i) % VOCAB_SIZE for i in range(43)],
    [(11 * i + 5) % VOCAB_SIZE for i in range(26)],
]
STEPS = [(9, 0), (1, 26), (20, 0), (1, 0), (12, 0)]
"""The number of tokens of each prompt per step: chunks and single tokens, mixed."""


def load(directory: Path, kernels: str = "native") -> Decoder:
    return load_decoder(directory, dtype="float32", device=CPU, kernels=kernels, num_threads=2)


def stepwise_logits(decoder: Decoder, steps: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Each prompt's logits, [num_tokens, vocab_size], over a cache that initially contains NaN."""
    layout = decoder.cache_layout(BLOCK_SIZE)
    if layout.state is None:
        layout = one_group(decoder.num_layers)
    shape = (layout.num_places, 10, BLOCK_SIZE, decoder.num_kv_heads, decoder.head_dim)
    if layout.state is not None:
        shape = (shape[0], 10 + 4 * layout.state.num_blocks, *shape[2:])
    device = decoder.device
    keys, values = (poisoned(*shape, dtype=decoder.cache_dtype).to(device) for _ in range(2))
    cache = KVCache(keys, values, layout)
    computed: list[list[Tensor]] = [[] for _ in PROMPTS]
    for step in steps:
        shares = {}
        for row, count in enumerate(step):
            start = sum(len(part) for part in computed[row])
            if count:
                tokens = PROMPTS[row][start : start + count]
                blocks = BLOCKS[row] if keeps_tokens(layout) else []
                states = state_blocks(layout, row, len(computed[row]))
                shares[row] = share(tokens, blocks, start=start, states=states)
        inputs = build_inputs(batch(*shares.values()), BLOCK_SIZE, device, layout).forward
        rows = torch.arange(len(inputs.token_ids), device=device)
        every_token = replace(inputs, sampled_rows=rows)
        with torch.inference_mode():
            logits = decoder.forward(every_token, cache).cpu().clone()
        order = sorted(shares, key=lambda row: shares[row].num_tokens > 1)
        parts = torch.split(logits, [shares[row].num_tokens for row in order])
        for row, part in zip(order, parts, strict=True):
            computed[row].append(part)
    return [torch.cat(parts) for parts in computed]


def keeps_tokens(layout: CacheLayout) -> bool:
    return any(place is not None for place in layout.places)


def state_blocks(layout: CacheLayout, row: int, num_steps: int) -> list[int]:
    """The blocks of a prompt's states in its next step, which alternate between two states."""
    if layout.state is None:
        return []
    count = layout.state.num_blocks
    first = 10 + 2 * row * count
    states = [[*range(first + k * count, first + (k + 1) * count)] for k in range(2)]
    written = states[num_steps % 2]
    return [*states[1 - num_steps % 2], *written] if num_steps else written


def assert_same_logits(directory: Path, model: Any) -> None:
    exact = copy.deepcopy(model).double()
    expected = [reference_logits(exact, prompt) for prompt in PROMPTS]
    for kernels in ("native", "reference"):
        for logits, right in zip(
            stepwise_logits(load(directory, kernels), STEPS), expected, strict=True
        ):
            assert_close(logits, right, MAX_RELATIVE_ERROR)


@pytest.mark.parametrize("family", [*FAMILIES, *WITH_TOWERS])
def test_a_family_computes_the_logits_of_transformers(tiny_models: TinyModels, family: str) -> None:
    assert_same_logits(*tiny_models(family))


@pytest.mark.parametrize("family", ["deepseek_v3", "bloom"])
def test_the_bits_of_attention_do_not_depend_on_the_step(
    tiny_models: TinyModels, family: str
) -> None:
    directory, _ = tiny_models(family)
    decoder = load(directory, "native")

    mixed = stepwise_logits(decoder, STEPS)
    at_once = stepwise_logits(decoder, [(0, 26), (43, 0)])

    assert all(torch.equal(one, other) for one, other in zip(mixed, at_once, strict=True))


class Multimodal(NamedTuple):
    """A checkpoint with a language model beside other models."""

    family: str
    text_family: str
    starts: dict[str, str]
    """How the names of the language model's tensors begin alone, and how they begin here."""
    unread: list[str]
    """Tensors that are not read."""


_OLD = {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."}
_NEW = {"model.": "model.language_model."}
_OLD_TOWER, _NEW_TOWER = "vision_tower.patch.weight", "model.visual.patch.weight"
_PREDICTOR = "mtp.fc.weight"
IN_OTHER_CHECKPOINTS = [
    Multimodal("gemma3", "gemma3_text", _OLD, [_OLD_TOWER]),
    Multimodal("kimi_k25", "deepseek_v3", _OLD, [_OLD_TOWER]),
    Multimodal("llama4", "llama4_text", _OLD, ["vision_model.patch_embedding.linear.weight"]),
    Multimodal("mistral3", "ministral3", _NEW, ["model.vision_tower.patch_conv.weight"]),
    Multimodal("mistral3", "mistral", _OLD, [_OLD_TOWER]),
    Multimodal("mistral3", "mistral4", _OLD, [_OLD_TOWER]),
    Multimodal("qwen3_5", "qwen3_5_text", _NEW, [_NEW_TOWER, _PREDICTOR]),
    Multimodal("qwen3_5_moe", "qwen3_5_moe_text", _NEW, [_NEW_TOWER, _PREDICTOR]),
]
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "biases everywhere": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "a head of its own": ("llama", {"tie_word_embeddings": False}),
    "mistral without a window": ("mistral", {"sliding_window": None}),
    "latent vectors of the published length": (
        "glm4_moe_lite",
        {
            "num_attention_heads": 20,
            "num_key_value_heads": 20,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
        },
    ),
    "experts of shorter vectors": ("nemotron_h", {"moe_latent_size": 56}),
    "experts of longer vectors": ("nemotron_h", {"moe_latent_size": 104, "mlp_bias": False}),
    "gemma 4 whose layers share nothing": (
        "gemma4_text",
        {
            "enable_moe_block": False,
            "hidden_size_per_layer_input": 0,
            "num_hidden_layers": 3,
            "num_kv_shared_layers": 0,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        },
    ),
    "olmo hybrid with positions, and states of one sign": (
        "olmo_hybrid",
        {"rope_parameters": None, "linear_allow_neg_eigval": False},
    ),
    "qwen without windows": ("qwen2", {"use_sliding_window": False}),
    "windows by layer": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_computes_the_logits_of_transformers(tmp_path: Path, variant: str) -> None:
    family, overrides = VARIANTS[variant]
    assert_same_logits(tmp_path, write_tiny_model(tmp_path, family, **overrides))


def test_a_checkpoint_in_several_files_is_read_by_its_index(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path, "llama", max_shard_size="100KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    assert_same_logits(tmp_path, model)


FAULTS = {
    "a window that is one too long": ("mistral", 'window": 7', 'window": 8'),
    "another epsilon": ("mistral", "1e-06", "1e-02"),
    "another soft cap": ("gemma2", 'attn_logit_softcapping": 3.0', 'attn_logit_softcapping": 9.0'),
    "chunks that are one too long": ("llama4_text", 'chunk_size": 8', 'chunk_size": 9'),
    "experts in all groups": ("glm4_moe", 'topk_group": 2', 'topk_group": 4'),
    "another factor of residuals": ("granite", 'multiplier": 0.4', 'multiplier": 0.5'),
    "rotary keys in the other order": ("deepseek_v3", 'interleave": true', 'interleave": false'),
    "scores that grow more slowly": ("deepseek_v3", 'mscale_all_dim": 1.0', 'mscale_all_dim": 0.5'),
    "states of one sign": ("olmo_hybrid", 'neg_eigval": true', 'neg_eigval": false'),
    "heads rotated further": ("qwen3_5_text", 'rotary_factor": 0.25', 'rotary_factor": 0.5'),
    "one expert too few": ("gemma4_text", 'top_k_experts": 2', 'top_k_experts": 1'),
    "steps with another limit": ("granitemoehybrid", "    1.5", "    2.5"),
    "another epsilon of states": ("mamba2", "1e-05", "1e-02"),
    "another epsilon of steps": ("falcon_mamba", 'mixer_rms_eps": 1e-06', 'mixer_rms_eps": 1e-02'),
    "gates after the norm": ("falcon_h1", 'norm_before_gate": true', 'norm_before_gate": false'),
    "slopes that are less steep": ("mpt", 'alibi_bias_max": 8', 'alibi_bias_max": 6'),
    "experts weighed against others": ("phimoe", 'jitter_noise": 0.3', 'jitter_noise": 0.01'),
    "weights of experts that are not normalized": (
        "qwen3_moe",
        'norm_topk_prob": true',
        'norm_topk_prob": false',
    ),
    "weights of experts that are normalized": (
        "qwen2_moe",
        'norm_topk_prob": false',
        'norm_topk_prob": true',
    ),
    "weights of OLMoE's experts that are normalized": (
        "olmoe",
        'norm_topk_prob": false',
        'norm_topk_prob": true',
    ),
    "one of Mixtral's experts": ("mixtral", 'experts_per_tok": 2', 'experts_per_tok": 1'),
    "one expert beside shared experts": ("ernie4_5_moe", 'moe_k": 2', 'moe_k": 1'),
    "experts of all groups": ("deepseek_v2", '"group_limited_greedy"', '"greedy"'),
    "embeddings and norms of Llama": ("gemma", 'type": "gemma"', 'type": "llama"'),
    "elements in the order of Llama": ("helium", 'type": "helium"', 'type": "llama"'),
    "rotary keys in the order of DeepSeek": (
        "glm4_moe_lite",
        'interleave": false',
        'interleave": true',
    ),
    "other positions behind a window": ("gemma3_text", 'theta": 10000.0', 'theta": 20000.0'),
    "further angles of a whole head": (
        "gemma4_unified_text",
        'rotary_factor": 0.25',
        'rotary_factor": 0.5',
    ),
    "another factor of a frequency": ("phi3", "      1.5,", "      1.7,"),
    "another base of positions": ("ernie4_5", 'theta": 500000.0', 'theta": 10000.0'),
    "a base that is stretched less": ("hunyuan_v1_dense", 'alpha": 1000.0', 'alpha": 500.0'),
    "a context that is extended further": ("olmo3", 'factor": 4.0', 'factor": 8.0'),
    "whole heads rotated": ("glm", 'rotary_factor": 0.5', 'rotary_factor": 1.0'),
    "heads rotated less": ("minimax_m2", 'rotary_factor": 0.5', 'rotary_factor": 0.25'),
    "positions in all layers": ("smollm3", "    0,", "    1,"),
    "windows and positions in all layers": ("exaone4", '"full_att', '"sliding_att'),
    "queries that grow more slowly": ("ministral3", 'scaling_beta": 0.3', 'scaling_beta": 0.2'),
    "queries of latent vectors that grow more slowly": (
        "mistral4",
        'scaling_beta": 0.3',
        'scaling_beta": 0.2',
    ),
    "another factor of logits": ("granitemoe", 'logits_scaling": 2.0', 'logits_scaling": 2.1'),
    "another scale of logits": ("cohere2", 'logit_scale": 0.0625', 'logit_scale": 0.07'),
    "another epsilon of layer norms": ("starcoder2", 'epsilon": 1e-05', 'epsilon": 1e-02'),
    "another activation": ("arcee", '"relu2"', '"relu"'),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_constant_is_caught(tmp_path: Path, fault: str) -> None:
    family, right, planted = FAULTS[fault]
    model = write_tiny_model(tmp_path, family)
    config = tmp_path / "config.json"
    assert right in config.read_text()
    config.write_text(config.read_text().replace(right, planted))
    with pytest.raises(AssertionError, match="relative error"):
        assert_same_logits(tmp_path, model)


@pytest.mark.parametrize("num_heads", [1, 8, 12, 71, 112])
def test_slopes_are_those_of_transformers(num_heads: int) -> None:
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    biases: Callable[..., Tensor] = build_mpt_alibi_tensor

    slopes = torch.tensor(alibi_slopes(num_heads, greatest=6.0))

    torch.testing.assert_close(slopes, -biases(num_heads, 2, alibi_bias_max=6)[:, 0, 0])


def test_a_published_bloom_has_other_keys_and_names(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path, "bloom")
    rewrite_config(tmp_path, '"n_head"', '"num_attention_heads"')
    rewrite_config(tmp_path, '"hidden_size"', '"n_embed"')
    tensors = load_file(tmp_path / "model.safetensors")
    published = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    save_file(published, tmp_path / "model.safetensors")

    assert_same_logits(tmp_path, model)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("bloom", {"apply_residual_connection_post_layernorm": True}),
        ("mpt", {"no_bias": False}),
        ("mpt", {"logit_scale": "inv_sqrt_d_model"}),
        *[
            ("mpt", {"attn_config": {key: value}})
            for key, value in {
                "alibi": False,
                "attn_type": "multiquery_attention",
                "clip_qkv": 6,
                "prefix_lm": True,
                "qk_ln": True,
            }.items()
        ],
    ],
)
def test_variants_that_no_released_model_needs_are_not_native(
    family: str, changes: dict[str, Any]
) -> None:
    sizes = {"n_head": 4, "n_heads": 4, "n_layer": 2, "n_layers": 2}
    config = {"model_type": family, "vocab_size": 97, "hidden_size": 64, **sizes}

    assert spec_of(config) is not None
    assert spec_of(config | changes) is None


@pytest.mark.parametrize(
    ("family", "part"),
    [
        ("gpt_oss", "self_attn.sinks"),
        ("qwen2", "self_attn.q_proj.bias"),
        ("qwen2_moe", "mlp.shared_expert_gate.weight"),
        ("qwen3", "self_attn.q_norm.weight"),
        ("olmo2", "self_attn.k_norm.weight"),
        ("seed_oss", "self_attn.o_proj.bias"),
        ("nemotron", "input_layernorm.bias"),
        ("glm4", "post_mlp_layernorm.weight"),
        ("apertus", "mlp.act_fn.alpha_p"),
        *[
            ("qwen3_5_text", f"linear_attn.{part}")
            for part in ("A_log", "dt_bias", "conv1d.weight", "norm.weight")
        ],
        *[
            ("jamba", f"mamba.{part}")
            for part in ("A_log", "D", "dt_proj.bias", "b_layernorm.weight")
        ],
        *[
            ("kimi_linear", f"self_attn.{part}")
            for part in ("forget_gate.A_log", "forget_gate.dt_bias", "o_norm.weight")
        ],
    ],
)
def test_no_part_of_a_layer_is_forgotten(tmp_path: Path, family: str, part: str) -> None:
    model = write_tiny_model(tmp_path, family)
    with torch.no_grad():
        model.model.layers[2].get_parameter(part).add_(0.5)
    with pytest.raises(AssertionError, match="relative error"):
        assert_same_logits(tmp_path, model)


@pytest.mark.parametrize(
    "checkpoint", IN_OTHER_CHECKPOINTS, ids=lambda one: f"{one.text_family} in {one.family}"
)
def test_a_language_model_is_served_from_a_checkpoint_with_images(
    tmp_path: Path, checkpoint: Multimodal
) -> None:
    text = write_tiny_model(tmp_path / "text", checkpoint.text_family)
    config = json.loads((tmp_path / "text" / "config.json").read_text())
    outer = {"model_type": checkpoint.family, "text_config": config}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    tensors = load_file(tmp_path / "text" / "model.safetensors")
    renamed = {_renamed(name, checkpoint.starts): tensor for name, tensor in tensors.items()}
    unread = {name: torch.ones(2, 2) for name in checkpoint.unread}
    save_file({**renamed, **unread}, tmp_path / "model.safetensors")

    assert_same_logits(tmp_path, text)


def _renamed(name: str, starts: dict[str, str]) -> str:
    for old, new in starts.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def test_experts_are_read_as_published_and_as_transformers_saves_them(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path, "qwen3_vl_moe")
    tensors = load_file(tmp_path / "model.safetensors")
    published = {
        name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor
        for name, tensor in tensors.items()
    }
    save_file(published, tmp_path / "model.safetensors")

    assert_same_logits(tmp_path, model)


def test_experts_of_gemma_4_are_read_one_by_one(tmp_path: Path) -> None:
    """So they are published with quantized weights."""
    model = write_tiny_model(tmp_path, "gemma4_text")
    apart: dict[str, Tensor] = {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        before, is_expert, matrix = name.partition(".experts.")
        if not is_expert:
            apart[name] = tensor
            continue
        for index, expert in enumerate(tensor):
            parts = {"down_proj": expert} if matrix == "down_proj" else _halves(expert)
            apart |= {
                f"{before}.experts.{index}.{part}.weight": half.clone()
                for part, half in parts.items()
            }
    save_file(apart, tmp_path / "model.safetensors")

    assert_same_logits(tmp_path, model)


def _halves(gate_up: Tensor) -> dict[str, Tensor]:
    return dict(zip(("gate_proj", "up_proj"), gate_up.chunk(2), strict=True))


@pytest.mark.parametrize("family", LIKE)
def test_a_family_has_the_layers_of_another_family(tmp_path: Path, family: str) -> None:
    model = write_tiny_model(tmp_path, family)

    assert_same_logits(tmp_path, model)


def test_olmo_hybrid_is_read_as_published_and_as_transformers_saves_it(tmp_path: Path) -> None:
    """transformers divides the taps of the convolution into equal parts."""
    model = write_tiny_model(tmp_path, "olmo_hybrid")
    tensors = load_file(tmp_path / "model.safetensors")
    norm = "model.layers.1.{}.weight"
    tensors[norm.format("post_attention_layernorm")] = tensors.pop(
        norm.format("feedforward_layer_norm")
    )
    for layer in (0, 2):
        names = [f"model.layers.{layer}.linear_attn.{part}_conv1d.weight" for part in "qkv"]
        taps = torch.cat([tensors[name] for name in names])
        parts = [part.clone() for part in torch.split(taps, [32, 32, 128])]
        assert [len(part) for part in parts] != [len(tensors[name]) for name in names]
        tensors |= dict(zip(names, parts, strict=True))
    save_file(tensors, tmp_path / "model.safetensors")

    assert_same_logits(tmp_path, model)


def test_kimi_linear_is_read_as_published_and_as_transformers_saves_it(tmp_path: Path) -> None:
    """transformers saves layers without experts under another name, and names the kinds of
    layers."""
    model = write_tiny_model(tmp_path, "kimi_linear")
    config = json.loads((tmp_path / "config.json").read_text())
    linear = {
        "full_attn_layers": [2],
        "kda_layers": [1, 3],
        "num_heads": config.pop("linear_num_heads"),
        "head_dim": config.pop("linear_head_dim"),
        "short_conv_kernel_size": config.pop("linear_conv_kernel_dim"),
    }
    del config["layer_types"], config["mlp_layer_types"]
    config |= {"linear_attn_config": linear, "first_k_dense_replace": 1, "mla_use_nope": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(tmp_path / "model.safetensors")
    dense = "model.layers.0.{}.{}_proj.weight"
    for part in ("gate", "up", "down"):
        saved = tensors.pop(dense.format("block_sparse_moe", part))
        tensors[dense.format("mlp", part)] = saved
    save_file(tensors, tmp_path / "model.safetensors")

    assert_same_logits(tmp_path, model)


@pytest.mark.parametrize(
    "positions",
    [
        {"rope_parameters": None, "rope_theta": None},
        {"rope_parameters": {"rope_type": None}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": None}},
    ],
)
def test_a_released_olmo_hybrid_has_no_positions(positions: dict[str, Any]) -> None:
    sizes = {"hidden_size": 3840, "num_attention_heads": 30, "max_position_embeddings": 65_536}
    spec = spec_of({"model_type": "olmo_hybrid", **sizes, **positions})
    assert spec is not None
    assert [one.attention is None for one in spec.layers[:4]] == [True, True, True, False]
    assert {one.rope for one in spec.attentions} == {None}
    states = {one.recurrence.state_size for one in spec.layers if one.recurrence}
    assert states == {3 * 30 * (96 + 96 + 192) + 30 * 96 * 192}


def test_parts_that_predict_several_tokens_at_once_are_not_read(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path, "ernie4_5_moe")
    tensors = load_file(tmp_path / "model.safetensors")
    further = {"model.mtp_block.0.input_layernorm.weight": torch.ones(96)}
    save_file({**tensors, **further}, tmp_path / "model.safetensors")

    assert_same_logits(tmp_path, model)


@pytest.mark.parametrize("family", FAMILIES_OF_FILES)
def test_every_family_has_a_test(family: str) -> None:
    multimodal = {checkpoint.family for checkpoint in IN_OTHER_CHECKPOINTS}
    assert family in {*FAMILIES, *WITH_TOWERS, *LIKE} | multimodal
    lines = (Path(families.__file__).parent / f"{family}.py").read_text().splitlines()
    assert len(lines) <= 120


def test_a_model_whose_tokens_do_not_depend_on_one_another_is_not_native() -> None:
    config = {"model_type": "nemotron_h", **SIZES}
    assert spec_of(config | {"layers_block_type": ["mlp", "mamba"]}) is not None
    assert spec_of(config | {"layers_block_type": ["mlp", "mlp"]}) is None


def test_the_stated_size_of_falcon_mamba_counts() -> None:
    """The published model has an ``expand`` that does not fit its size."""
    sizes = {"hidden_size": 4096, "expand": 16, "intermediate_size": 8192, "time_step_rank": 256}
    spec = spec_of({"model_type": "falcon_mamba", "state_size": 16, "conv_kernel": 4, **sizes})
    assert spec is not None
    assert {one.recurrence.state_size for one in spec.layers if one.recurrence} == {19 * 8192}


def test_only_rows_to_be_sampled_have_logits(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "llama")
    decoder = load(tmp_path)
    shares = batch(
        share(PROMPTS[0][:12], BLOCKS[0], is_sampled=False), share(PROMPTS[1], BLOCKS[1])
    )
    shape = (decoder.num_layers, 10, BLOCK_SIZE, decoder.num_kv_heads, decoder.head_dim)
    inputs = build_inputs(shares, BLOCK_SIZE, CPU).forward
    with torch.inference_mode():
        cache = KVCache(poisoned(*shape), poisoned(*shape), one_group(decoder.num_layers))
        logits = decoder.forward(inputs, cache)
    assert_close(logits, stepwise_logits(decoder, [(12, 26)])[1][-1:], MAX_RELATIVE_ERROR)


def test_native_families_load_and_run_without_transformers(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "llama")
    program = f"""
import sys
from pathlib import Path
from tests.support.models.batches import batch, share
from worker.model.loading import load_runner
from worker.model.start import RunnerLimits
runner = load_runner(Path({str(tmp_path)!r}), RunnerLimits(kv_cache_bytes=1 << 20), device="cpu")
assert len(runner.launch(batch(share([1, 2, 3], [0]))).result()) == 1
runner.close()
assert "transformers" not in sys.modules
"""
    root = Path(__file__).parents[4]
    subprocess.run([sys.executable, "-c", program], check=True, timeout=240, cwd=root)


def rewrite_config(directory: Path, old: str, new: str) -> None:
    path = directory / "config.json"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def test_a_tensor_without_a_place_in_the_model_refuses_it(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "qwen3")
    rewrite_config(tmp_path, '"num_hidden_layers": 3', '"num_hidden_layers": 2')
    with pytest.raises(
        StartupError, match=r"11 tensors are not part of .* model\.layers\.2\.input"
    ):
        load(tmp_path)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "llama")
    rewrite_config(tmp_path, '"num_hidden_layers": 3', '"num_hidden_layers": 4')
    with pytest.raises(StartupError, match=r"no tensor model\.layers\.3\.input_layernorm\.weight"):
        load(tmp_path)


def test_a_tensor_of_another_shape_is_refused_with_both(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "llama")
    rewrite_config(tmp_path, '"intermediate_size": 72', '"intermediate_size": 70')
    with pytest.raises(
        StartupError, match=r"gate_proj.* \(144, 96\), config.json says \(140, 96\)"
    ):
        load(tmp_path)
