"""Tiny models as GGUF files, as llama.cpp's ``convert_hf_to_gguf.py`` writes them: with the names
of the gguf package, experts in one tensor, and matrices arranged as llama.cpp multiplies them."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import gguf
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file
from torch import Tensor

Named: TypeAlias = Iterator[tuple[str, Tensor]]
Change: TypeAlias = Callable[[str, Tensor, Mapping[str, Any]], Named]
"""What becomes of a tensor of a checkpoint, under names that the gguf package knows."""

_NEW = {"backbone": "model", "mixer": "mlp", "feed_forward": "mlp"}
"""What the converter writes for parts of the names of experts."""
_EXPERT = re.compile(r"(.*experts)\.(\d+)\.(\w+)(\.weight)")
_ENTRIES: Mapping[str, tuple[str, ...]] = {
    "context_length": ("max_position_embeddings", "model_max_length"),
    "embedding_length": ("hidden_size",),
    "feed_forward_length": ("intermediate_size_mlp", "intermediate_size"),
    "head_count": ("num_attention_heads",),
    "head_count_kv": ("num_key_value_heads",),
    "key_length": ("head_dim",),
    "value_length": ("head_dim",),
    "layer_norm_rms_eps": ("rms_norm_eps", "norm_eps", "layer_norm_epsilon"),
    "layer_norm_eps": ("norm_epsilon", "layer_norm_eps", "norm_eps"),
    "expert_count": ("moe_num_experts", "num_local_experts", "num_experts", "n_routed_experts"),
    "expert_used_count": (
        "moe_k",
        "num_experts_per_tok",
        "top_k_experts",
        "num_experts_per_token",
    ),
    "expert_feed_forward_length": ("moe_intermediate_size", "intermediate_size"),
    "expert_shared_feed_forward_length": (
        "shared_expert_intermediate_size",
        "shared_intermediate_size",
        "moe_shared_expert_intermediate_size",
    ),
    "expert_shared_count": ("moe_num_shared_experts", "n_shared_experts", "num_shared_experts"),
    "expert_weights_scale": ("routed_scaling_factor",),
    "expert_weights_norm": ("norm_topk_prob", "moe_renormalize"),
    "expert_group_count": ("n_group", "num_expert_group"),
    "expert_group_used_count": ("topk_group",),
    "leading_dense_block_count": (
        "moe_layer_start_index",
        "first_k_dense_replace",
        "num_dense_layers",
    ),
    "interleave_moe_layer_step": ("moe_layer_interval", "interleave_moe_layer_step"),
    "sliding_window": ("sliding_window",),
    "attention_scale": ("attention_multiplier",),
    "embedding_scale": ("embedding_multiplier",),
    "residual_scale": ("residual_multiplier",),
    "logit_scale": ("logits_scaling", "logit_scale"),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "q_lora_rank": ("q_lora_rank",),
    "kv_lora_rank": ("kv_lora_rank",),
    "value_length_mla": ("v_head_dim",),
    "ssm_conv_kernel": ("linear_conv_kernel_dim", "mamba_d_conv", "conv_kernel"),
    "ssm_state_size": ("linear_key_head_dim", "mamba_d_state", "state_size", "ssm_state_size"),
    "ssm_group_count": ("linear_num_key_heads", "mamba_n_groups", "n_groups"),
    "ssm_time_step_rank": (
        "linear_num_value_heads",
        "mamba_n_heads",
        "mamba_num_heads",
        "mamba_dt_rank",
        "num_heads",
        "time_step_rank",
    ),
    "shortconv_l_cache": ("conv_L_cache",),
    "shared_kv_layers": ("num_kv_shared_layers",),
    "embedding_length_per_layer_input": ("hidden_size_per_layer_input",),
    "key_length_swa": ("head_dim",),
    "kda_head_dim": ("linear_head_dim",),
    "moe_latent_size": ("moe_latent_size",),
}
"""The entries of the metadata, by the methods of `gguf.GGUFWriter`, and the keys of config.json
from which they are copied, if these are there."""
_SPELLINGS = {
    "d_model": "hidden_size",
    "layer_norm_epsilon": "norm_epsilon",
    "max_seq_len": "max_position_embeddings",
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_heads": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_layers": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
}
"""The keys of BLOOM, GPT-2 and MPT."""
_ADD_ONE = {"gemma", "gemma2", "gemma3", "nemotron", "qwen3next", "qwen35", "qwen35moe"}
_PAIRED = {"llama", "granite", "granitemoe", "granitehybrid", "arcee", "smollm3", "mistral3"}
"""The architectures of families that rotate the halves of heads, which llama.cpp rotates in
pairs."""
_TILED = {"qwen35", "qwen35moe"}
_FACTORS: Mapping[str, tuple[str, ...]] = {
    "k_proj": ("key_multiplier", "attention_in_multiplier"),
    "q_proj": ("attention_in_multiplier",),
    "v_proj": ("attention_in_multiplier",),
    "o_proj": ("attention_out_multiplier",),
    "out_proj": ("ssm_out_multiplier",),
    "in_proj": ("ssm_in_multiplier",),
    "lm_head": ("lm_head_multiplier",),
    "embed_tokens": ("embedding_multiplier",),
}
"""The factors of Falcon H1's configuration with which tensors of its files are multiplied."""


def write_gguf(
    directory: Path,
    path: Path,
    architecture: str,
    *,
    kind_of: Callable[[str], Kind] = lambda name: Kind.F32,
    stored: Callable[[str, Tensor, Kind], Any] = lambda name, tensor, kind: gguf.quantize(
        tensor.numpy(), kind
    ),
) -> Path:
    """Write the model of a directory. ``kind_of`` says how matrices of a name are stored, and
    ``stored`` makes their bytes."""
    config = json.loads((directory / "config.json").read_text())
    if architecture in ("bloom", "gpt2", "mpt"):
        config = {_SPELLINGS.get(key, key): value for key, value in config.items()}
    if "layer_types" in config and architecture == "granitehybrid":
        spellings = {"linear_attention": "mamba", "full_attention": "attention"}
        config["layer_types"] = [spellings.get(kind, kind) for kind in config["layer_types"]]
    if architecture == "jamba":
        config["layer_types"] = [
            "attention"
            if index % config["attn_layer_period"] == config["attn_layer_offset"]
            else "mamba"
            for index in range(config["num_hidden_layers"])
        ]
    elif "layers_block_type" in config:
        config["layer_types"] = config["layers_block_type"]
        config["num_hidden_layers"] = len(config["layer_types"])
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"t{index}" for index in range(config["vocab_size"])])
    writer.add_token_merges(["t 0"])
    writer.add_eos_token_id(2)
    _add_metadata(writer, config, architecture)
    if architecture == "apertus":
        _add_activations(writer, directory, config["num_hidden_layers"])
    if num_predicting := _num_predicting(directory):
        _replace(writer, "block_count", config["num_hidden_layers"] + num_predicting)
        writer.add_nextn_predict_layers(num_predicting)
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    num_layers = config["num_hidden_layers"] + num_predicting
    # The package has the names of layers that predict for some architectures only.
    maps = [gguf.get_tensor_name_map(one, num_layers) for one in (arch, gguf.MODEL_ARCH.GLM4_MOE)]
    for name, tensor in _converted(directory, config, architecture):
        is_named = name.startswith("rope_") or name.endswith(".scale")
        known = (names.get_name(name, try_suffixes=(".weight", ".bias")) for names in maps)
        found = name if is_named else next(filter(None, known), None)
        assert found is not None, f"the gguf package does not know {name}"
        kind = kind_of(found) if tensor.ndim > 1 else Kind.F32
        tensor = tensor.float().contiguous()
        data = tensor.numpy() if kind is Kind.F32 else stored(found, tensor, kind)
        writer.add_tensor(found, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _num_predicting(directory: Path) -> int:
    """The number of layers behind the decoder's that predict tokens."""
    names = load_file(directory / "model.safetensors")
    return sum(name.endswith(".eh_proj.weight") for name in names)


def _add_metadata(writer: gguf.GGUFWriter, config: Mapping[str, Any], architecture: str) -> None:
    for entry, keys in _ENTRIES.items():
        values = (config[key] for key in keys if config.get(key) is not None)
        if (value := next(values, None)) is not None:
            getattr(writer, f"add_{entry}")(value)
    writer.add_block_count(config["num_hidden_layers"])
    if architecture in ("mamba", "mamba2"):
        _add_state_spaces(writer, config)
    else:
        _add_rope(writer, config)
        _add_kinds_of_layers(writer, config, architecture)
    if "moe_num_shared_experts" in config:
        size = config["moe_num_shared_experts"] * config["moe_intermediate_size"]
        writer.add_expert_shared_feed_forward_length(size)
    if architecture == "mpt":
        writer.add_max_alibi_bias(config["attn_config"]["alibi_bias_max"])
    if architecture in _TILED:
        writer.add_rope_dimension_sections([11, 11, 10, 0])
    is_sigmoid = config["model_type"] in ("deepseek_v3", "glm4_moe_lite")
    if is_sigmoid or architecture in ("glm4moe", "lfm2moe", "minimax-m2"):
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _add_activations(writer: gguf.GGUFWriter, directory: Path, num_layers: int) -> None:
    """The constants of xIELU."""
    tensors = load_file(directory / "model.safetensors")
    for name in ("alpha_n", "alpha_p", "beta", "eps"):
        values = [
            tensors[f"model.layers.{index}.mlp.act_fn.{name}"].item() for index in range(num_layers)
        ]
        getattr(writer, f"add_xielu_{name}")(values)


def _add_state_spaces(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    heads = config.get("num_heads")
    size = heads * config["head_dim"] if heads else config["intermediate_size"]
    writer.add_ssm_inner_size(size)
    writer.add_ssm_dt_b_c_rms(config["model_type"] == "falcon_mamba")
    writer.add_head_count(0)


def _add_rope(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    rope = config.get("rope_parameters") or {}
    local, rope = rope.get("sliding_attention", {}), rope.get("full_attention", rope)
    theta = rope.get("rope_theta", 1e4)
    if "alpha" in rope:
        theta *= rope["alpha"] ** (config["head_dim"] / (config["head_dim"] - 2))
    writer.add_rope_freq_base(theta)
    if "rope_theta" in local:
        writer.add_rope_freq_base_swa(local["rope_theta"])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "mscale_all_dim" in rope:
            factor = 0.1 if "kv_lora_rank" in config else 1.0
            writer.add_rope_scaling_yarn_log_mul(factor * rope["mscale_all_dim"])
        if "llama_4_scaling_beta" in rope:
            writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if rope.get("rope_type") == "longrope":
        writer.add_rope_scaling_attn_factors(1.0)
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if "kv_lora_rank" in config:
        head_dim, rank = config["qk_rope_head_dim"], config["kv_lora_rank"]
        writer.add_key_length_mla(config["qk_nope_head_dim"] + head_dim)
        lengths = {"head_count_kv": 1, "key_length": rank + head_dim, "value_length": rank}
        for entry, value in lengths.items():
            _replace(writer, f"attention.{entry}", value)
    is_partial = "kv_lora_rank" not in config
    share = (is_partial and rope.get("partial_rotary_factor")) or 1.0
    writer.add_rope_dimension_count(config.get("rotary_dim") or int(head_dim * share))


def _add_kinds_of_layers(
    writer: gguf.GGUFWriter, config: Mapping[str, Any], architecture: str
) -> None:
    kinds = config.get("layer_types") or []
    if "sliding_attention" in kinds and architecture not in ("gpt-oss", "gemma2", "cohere2"):
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in kinds])
    if "linear_key_head_dim" in config:
        is_linear = [kind == "linear_attention" for kind in kinds]
        writer.add_array(f"{architecture}.attention.recurrent_layers", is_linear)
        num_values = config["linear_num_value_heads"]
        writer.add_ssm_inner_size(config["linear_value_head_dim"] * num_values)
    elif architecture == "gemma4":
        local = config["num_key_value_heads"]
        full = _of_full_layers(config)["num_key_value_heads"]
        _replace(writer, "attention.key_length", _of_full_layers(config)["head_dim"])
        _replace(writer, "attention.value_length", _of_full_layers(config)["head_dim"])
        _replace(
            writer,
            "attention.head_count_kv",
            [full if kind == "full_attention" else local for kind in kinds],
        )
        first = config["num_hidden_layers"] - config["num_kv_shared_layers"]
        size = config["intermediate_size"]
        sizes = [size * (1 + (k >= first)) for k in range(config["num_hidden_layers"])]
        _replace(writer, "feed_forward_length", sizes)
    elif {"mamba", "conv", "linear_attention"} & {*kinds}:
        is_whole = [kind in ("attention", "full_attention") for kind in kinds]
        count = config["num_key_value_heads"]
        counts = [count if one else 0 for one in is_whole]
        _replace(writer, "attention.head_count_kv", counts)
    if architecture == "granitehybrid":
        writer.add_rope_scaling_finetuned(False)
    if "mamba_n_heads" in config:
        writer.add_ssm_inner_size(config["mamba_n_heads"] * config["mamba_d_head"])
    elif "mamba_num_heads" in config:
        writer.add_ssm_inner_size(config["mamba_num_heads"] * config["mamba_head_dim"])
    elif "mamba_expand" in config:
        writer.add_ssm_inner_size(config["mamba_expand"] * config["hidden_size"])


def _of_full_layers(config: Mapping[str, Any]) -> Mapping[str, int]:
    """The heads of Gemma 4's layers without a window."""
    found: Mapping[str, int] = next(iter(config["per_layer_config"].values()))
    return found


def _replace(writer: gguf.GGUFWriter, entry: str, value: int | list[int]) -> None:
    key = f"{writer.arch}.{entry}"
    writer.kv_data[0].pop(key, None)
    if isinstance(value, int):
        writer.add_uint32(key, value)
    else:
        writer.add_array(key, value)


def _converted(directory: Path, config: dict[str, Any], architecture: str) -> Named:
    rope = config.get("rope_parameters") or {}
    for kind in ("short", "long") if rope.get("rope_type") == "longrope" else ():
        yield f"rope_factors_{kind}.weight", torch.tensor(rope[f"{kind}_factor"])
    if architecture == "gemma4":  # a quarter of a head's pairs is rotated
        num_pairs = _of_full_layers(config)["head_dim"] // 2
        is_rotated = torch.arange(num_pairs) < num_pairs // 4
        yield "rope_freqs.weight", torch.where(is_rotated, 1.0, 1e30)
    tensors = load_file(directory / "model.safetensors").items()
    for name, tensor in _with_experts_together(tensors):
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        if ".act_fn." in name:
            continue
        name = _published(name, architecture)
        if architecture == "falcon-h1":
            tensor = _multiplied(name, tensor, config)
        change = next((one for part, one in _CHANGES.items() if part in name), _unchanged)
        for new_name, changed in change(name, tensor, config | {"architecture": architecture}):
            has_one_more = new_name.endswith("norm.weight") and "linear_attn" not in new_name
            if has_one_more and architecture in _ADD_ONE:
                changed = changed.float() + 1
            yield new_name, changed


def _published(name: str, architecture: str) -> str:
    """The name of a tensor in published checkpoints."""
    if architecture == "kimi-linear":
        return re.sub(r"block_sparse_moe(?=\.\w+_proj)", "mlp", name)
    return name.removeprefix("transformer.") if architecture == "bloom" else name


def _with_experts_together(tensors: Iterable[tuple[str, Tensor]]) -> Named:
    found: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors:
        if (match := _EXPERT.fullmatch(name)) is None:
            yield name, tensor
            continue
        stem = match[1].replace("model.", "").replace("block_sparse_moe", "feed_forward")
        whole = ".".join(_NEW.get(part, part) for part in match[1].split("."))
        module = f"{stem if match[3].startswith('w') else whole}.{match[3]}.weight"
        found.setdefault(module, {})[int(match[2])] = tensor
    for name, matrices in found.items():
        yield name, torch.stack([matrices[index] for index in range(len(matrices))])


def _multiplied(name: str, tensor: Tensor, config: Mapping[str, Any]) -> Tensor:
    """A tensor with the factors of Falcon H1."""
    of_gates, of_outputs = config["mlp_multipliers"]
    factor = of_gates if "gate_proj" in name else of_outputs if "down_proj" in name else 1.0
    for key in next((keys for part, keys in _FACTORS.items() if part in name), ()):
        factor *= config[key]
    if "in_proj" not in name:
        return tensor * factor
    size, states = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
    parts = torch.split(tensor * factor, [size, size, states, states, config["mamba_n_heads"]])
    scaled = (one * part for one, part in zip(config["ssm_multipliers"], parts, strict=True))
    return torch.cat(list(scaled))


def _unchanged(name: str, tensor: Tensor, config: Mapping[str, Any]) -> Named:
    yield name, tensor


def _in_pairs(name: str, tensor: Tensor, config: Mapping[str, Any]) -> Named:
    if config["architecture"] in _PAIRED:
        key = "num_attention_heads" if ".q_proj" in name else "num_key_value_heads"
        heads = tensor.view(config[key], 2, -1, *tensor.shape[1:])
        tensor = heads.transpose(1, 2).reshape(tensor.shape)
    yield name, tensor


def _heads_apart(name: str, tensor: Tensor, config: Mapping[str, Any]) -> Named:
    """All queries, all keys and all values, which BLOOM has together for each head."""
    heads = tensor.view(config["num_attention_heads"], 3, -1, *tensor.shape[1:])
    yield name, heads.transpose(0, 1).reshape(tensor.shape)


def _up_of_latents(name: str, tensor: Tensor, config: Mapping[str, Any]) -> Named:
    sizes = [config["qk_nope_head_dim"], config["v_head_dim"]]
    heads = tensor.view(config["num_attention_heads"], sum(sizes), -1)
    keys, values = torch.split(heads, sizes, dim=1)
    yield name.replace("kv_b_proj", "k_b_proj"), keys.transpose(1, 2)
    yield name.replace("kv_b_proj", "v_b_proj"), values


def _gate_up(name: str, tensor: Tensor, config: Mapping[str, Any]) -> Named:
    """Both halves, which alternate in gpt-oss; matrices are transposed there and in Llama 4."""
    stem, _, kind = name.rpartition("gate_up_proj")
    architecture = config["architecture"]
    if architecture in ("gemma4", "mistral4"):  # they stay together
        yield f"{name}.weight", tensor
        return
    if kind != "_bias" and architecture in ("gpt-oss", "llama4"):
        tensor = tensor.transpose(1, 2)
    halves = tensor.chunk(2, dim=1)
    if architecture == "gpt-oss":
        halves = tensor[:, ::2], tensor[:, 1::2]
    ending = ".bias" if kind == "_bias" else ".weight"
    for part, half in zip(("gate", "up"), halves, strict=True):
        yield f"{stem}{part}_proj{ending}", half


def _down_of_experts(name: str, tensor: Tensor, config: Mapping[str, Any]) -> Named:
    if name.endswith(".bias"):  # of a shared expert
        yield name, tensor
    elif name.endswith("_bias"):
        yield name.replace("_bias", ".bias"), tensor
    elif config["architecture"] in ("gpt-oss", "llama4"):
        yield f"{name}.weight", tensor.transpose(1, 2)
    else:
        yield f"{name.removesuffix('.weight')}.weight", tensor


def _fused_granite(name: str, tensor: Tensor, config: Mapping[str, Any]) -> Named:
    """Both halves of the matrices of experts, or of the shared expert."""
    stem, _, module = name.removesuffix(".input_linear.weight").rpartition(".")
    place = "experts" if module == "block_sparse_moe" else "shared_expert"
    for part, half in zip(("gate", "up"), tensor.chunk(2, dim=-2), strict=True):
        yield f"{stem}.mlp.{place}.{part}_proj.weight", half


def _transposed(name: str, tensor: Tensor, config: Mapping[str, Any]) -> Named:
    """Only GPT-2 stores its matrices as [inputs, outputs]."""
    yield name, tensor.t() if config["architecture"] == "gpt2" else tensor


def _convolution(name: str, tensor: Tensor, config: Mapping[str, Any]) -> Named:
    if config["architecture"] == "kimi-linear":
        yield name, tensor.reshape(1, len(tensor), 1, -1)
        return
    tensor = tensor.squeeze(1)
    is_tiled = config["architecture"] in _TILED
    yield name, _tiled_values(tensor, config) if is_tiled and tensor.ndim == 2 else tensor


def _decay(name: str, tensor: Tensor, config: Mapping[str, Any]) -> Named:
    rates = -torch.exp(tensor.float())
    if config["architecture"] in _TILED:
        yield name, _tiled(rates, config, 1)
    elif "linear_attn" in name or rates.ndim > 1:
        yield name, rates
    else:
        yield name, rates.reshape(-1, 1)


def _steps(name: str, tensor: Tensor, config: Mapping[str, Any]) -> Named:
    if config["architecture"] in _TILED:
        tensor = _tiled(tensor, config, 1)
    yield name.replace("dt_bias", "dt_proj.bias"), tensor


def _linear_input(name: str, tensor: Tensor, config: Mapping[str, Any]) -> Named:
    """The parts of each key head apart (Qwen3-Next), or the heads of values in another order."""
    if "qkvz" in name:
        num_keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
        size = values // num_keys * config["linear_value_head_dim"]
        sizes = [*[config["linear_key_head_dim"]] * 2, size, size]
        heads = tensor.view(num_keys, sum(sizes), -1)
        *mixed, gates = (part.flatten(0, 1) for part in torch.split(heads, sizes, dim=1))
        yield name.replace("in_proj_qkvz", "in_proj_qkv"), torch.cat(mixed)
        yield name.replace("in_proj_qkvz", "in_proj_z"), gates
    elif "in_proj_ba" in name:
        yield name, tensor
    elif "in_proj_qkv" in name:
        yield name, _tiled_values(tensor, config)
    else:
        size = config["linear_value_head_dim"] if "in_proj_z" in name else 1
        yield name, _tiled(tensor, config, size)


def _linear_output(name: str, tensor: Tensor, config: Mapping[str, Any]) -> Named:
    if config["architecture"] in _TILED:
        tensor = _tiled(tensor.t(), config, config["linear_value_head_dim"]).t()
    yield name, tensor


def _tiled_values(rows: Tensor, config: Mapping[str, Any]) -> Tensor:
    """The last rows, which belong to values, in the order of `_tiled`."""
    size = config["linear_value_head_dim"]
    num_values = size * config["linear_num_value_heads"]
    return torch.cat((rows[:-num_values], _tiled(rows[-num_values:], config, size)))


def _tiled(rows: Tensor, config: Mapping[str, Any], size: int) -> Tensor:
    """The first head of values of each key head, then the second of each, and so on."""
    heads = rows.reshape(config["linear_num_key_heads"], -1, size, *rows.shape[1:])
    return heads.transpose(0, 1).reshape(rows.shape)


def _column(name: str, tensor: Tensor, config: Mapping[str, Any]) -> Named:
    yield name, tensor if config["architecture"] in ("mamba", "jamba") else tensor.reshape(-1, 1)


def _norm_of_groups(name: str, tensor: Tensor, config: Mapping[str, Any]) -> Named:
    yield name, tensor.reshape(config.get("mamba_n_groups") or config["n_groups"], -1)


def _correction(name: str, tensor: Tensor, config: Mapping[str, Any]) -> Named:
    yield (
        name.replace("correction_bias", "correction.bias").replace(
            "expert_bias", "expert_bias.bias"
        ),
        tensor,
    )


def _scale_of_router(name: str, tensor: Tensor, config: Mapping[str, Any]) -> Named:
    module = "ffn_down_exps" if "per_expert" in name else "ffn_gate_inp"
    yield f"blk.{name.split('.')[2]}.{module}.scale", tensor


def _sinks(name: str, tensor: Tensor, config: Mapping[str, Any]) -> Named:
    yield f"{name}.weight", tensor


_CHANGES: Mapping[str, Change] = {
    "router.scale": _scale_of_router,
    "router.per_expert_scale": _scale_of_router,
    "layer_scalar": _sinks,
    "c_attn.weight": _transposed,
    "c_fc.weight": _transposed,
    "c_proj.weight": _transposed,
    "self_attn.q_proj": _in_pairs,
    "self_attn.k_proj": _in_pairs,
    "query_key_value": _heads_apart,
    "kv_b_proj": _up_of_latents,
    "experts.gate_up_proj": _gate_up,
    "experts.down_proj": _down_of_experts,
    "input_linear": _fused_granite,
    "conv1d.weight": _convolution,
    "conv.conv.weight": _convolution,
    "A_log": _decay,
    "dt_bias": _steps,
    "linear_attn.in_proj": _linear_input,
    "linear_attn.out_proj": _linear_output,
    "mamba.D": _column,
    "mixer.D": _column,
    "mamba.norm": _norm_of_groups,
    "mixer.norm": _norm_of_groups,
    "e_score_correction_bias": _correction,
    "expert_bias": _correction,
    "sinks": _sinks,
}
"""By a part of the name in the checkpoint."""
