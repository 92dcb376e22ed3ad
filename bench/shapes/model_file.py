"""GGUF files of published shapes with random weights, which Warren and its peers can serve alike.

How long a step takes does not depend on the values of weights, so a file needs no checkpoint. Its
tokenizer is that of SmolLM2, with more tokens up to the vocabulary of the shape.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf import LlamaFileType, TokenType
from numpy.typing import NDArray

from bench.shapes.tensors import ARCHITECTURES, Matrix, MatrixRole, Vector, tensors_of
from worker.checkpoints.cache import build_once, cache_directory

_VERSION = 1
"""Changes whenever other files are written for the same shape."""
_STD = 0.02
_RMS_EPS = 1e-5


@dataclass(frozen=True, kw_only=True)
class Mix:
    """The formats that llama-quantize chooses for the matrices of a file
    (``llama_tensor_get_type_impl`` in llama.cpp's ``llama-quant.cpp``)."""

    file_type: LlamaFileType
    most: Kind
    head: Kind
    """The head's format, and that of an embedding that is also the head."""
    improved: Kind
    """The format of the values' projection and of ``ffn_down`` in about half of the layers."""

    def of(self, role: MatrixRole) -> Kind:
        kinds: Mapping[MatrixRole, Kind] = {
            "most": self.most,
            "head": self.head,
            "improved": self.improved,
            "router": Kind.F32,
        }
        return kinds[role]


MIXES: Mapping[str, Mix] = {
    "Q4_K_M": Mix(
        file_type=LlamaFileType.MOSTLY_Q4_K_M, most=Kind.Q4_K, head=Kind.Q6_K, improved=Kind.Q6_K
    ),
    "Q4_1": Mix(
        file_type=LlamaFileType.MOSTLY_Q4_1, most=Kind.Q4_1, head=Kind.Q6_K, improved=Kind.Q4_1
    ),
    "Q8_0": Mix(
        file_type=LlamaFileType.MOSTLY_Q8_0, most=Kind.Q8_0, head=Kind.Q8_0, improved=Kind.Q8_0
    ),
    "BF16": Mix(
        file_type=LlamaFileType.MOSTLY_BF16, most=Kind.BF16, head=Kind.BF16, improved=Kind.BF16
    ),
}

_SCALES: Mapping[Kind, Mapping[int, float]] = {
    Kind.Q4_K: {0: _STD / 258, 2: 7.5 * _STD / 258},
    Kind.Q6_K: {208: _STD / 1366},
    Kind.Q8_0: {0: _STD / 74},
    Kind.Q4_1: {0: _STD / 4.61, 2: -7.5 * _STD / 4.61},
}
"""The float16 numbers of a block, by their positions in it. All other bytes of a block are random.
The divisors are the standard deviations of weights with a scale of 1; the second number of a block
moves the mean of its weights to 0."""

_ROPE_SECTIONS = (11, 11, 10, 0)
"""How Qwen 3.5 divides the rotated pairs of a head among the axes of an image. A token of a text
has the same position on all axes."""


def model_file(name: str, config: Mapping[str, Any], weights: str, tokenizer: Path) -> Path:
    """The GGUF file of a configuration with ``weights`` of `MIXES`, in the user's cache. It is
    written if it is not there.

    ``tokenizer`` is the directory of SmolLM2. Raises `ValueError` for a configuration that cannot
    be written.
    """
    _check(config, weights)
    described = json.dumps([_VERSION, config, weights], sort_keys=True)
    digest = hashlib.sha256(described.encode()).hexdigest()[:12]
    file = f"{name}-{weights}".lower() + ".gguf"
    directory = build_once(
        cache_directory() / "shapes" / digest,
        lambda partial: write_model(partial / file, config, weights, tokenizer),
    )
    return directory / file


def write_model(path: Path, config: Mapping[str, Any], weights: str, tokenizer: Path) -> None:
    """Write the file to ``path``; equal arguments give equal files. Raises `ValueError` for a
    configuration that cannot be written."""
    _check(config, weights)
    mix = MIXES[weights]
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, architecture.name)
    _add_sizes(writer, config)
    if architecture.has_recurrence:
        _add_recurrence(writer, config)
    tensors = list(tensors_of(config))
    vectors = [tensor for tensor in tensors if isinstance(tensor, Vector)]
    matrices = [tensor for tensor in tensors if isinstance(tensor, Matrix)]
    if experts := [one for one in matrices if one.count is not None]:
        _add_experts(writer, config, experts[0])
    writer.add_file_type(mix.file_type)
    _add_tokenizer(writer, tokenizer, config["vocab_size"])
    for vector in vectors:
        num_bytes = 4 * math.prod(vector.shape)
        writer.add_tensor_info(vector.name, vector.shape, np.dtype(np.float32), num_bytes)
    for one in matrices:
        kind = mix.of(one.role)
        shape = gguf.quant_shape_to_byte_shape(one.shape, kind)
        num_bytes = math.prod(shape)
        writer.add_tensor_info(one.name, shape, np.dtype(np.uint8), num_bytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for vector in vectors:
        writer.write_tensor_data(np.full(vector.shape, vector.value, np.float32))
    random = np.random.default_rng(0)
    for one in matrices:
        rows = math.prod(one.shape[:-1])
        writer.write_tensor_data(random_matrix(random, rows, one.columns, mix.of(one.role)))
    writer.close()


def random_matrix(
    random: np.random.Generator, rows: int, columns: int, kind: Kind
) -> NDArray[np.uint8]:
    """Random weights with a mean of 0 and a standard deviation of 0.02 as they stand in a file,
    [rows, bytes of a row]."""
    if kind in (Kind.F32, Kind.BF16):
        drawn = random.standard_normal((rows, columns), dtype=np.float32) * np.float32(_STD)
        if kind is Kind.F32:
            return drawn.view(np.uint8)
        return (drawn.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    num_weights, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    shape = (rows, columns // num_weights, num_bytes)
    blocks = np.frombuffer(bytearray(random.bytes(math.prod(shape))), np.uint8).reshape(shape)
    for position, scale in _SCALES[kind].items():
        blocks[..., position : position + 2] = np.array([scale], np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


def _check(config: Mapping[str, Any], weights: str) -> None:
    if weights not in MIXES:
        raise ValueError(f"{weights} is none of the weights {', '.join(MIXES)}")
    family, mix = config["model_type"], MIXES[weights]
    if family not in ARCHITECTURES:
        raise ValueError(
            f"no file can be written for the family {family}, only for {', '.join(ARCHITECTURES)}"
        )
    if ARCHITECTURES[family].has_recurrence and mix.improved is not mix.most:
        raise ValueError(
            f"no file of {weights} can be written for the family {family}, whose mix of formats is "
            "not known"
        )
    for one in tensors_of(config):
        if isinstance(one, Vector):
            continue
        kind = mix.of(one.role)
        num_weights = gguf.GGML_QUANT_SIZES[kind][0]
        if one.columns % num_weights:
            raise ValueError(
                f"{one.name}, {one.rows} x {one.columns}, has no whole blocks of {num_weights} "
                f"{kind.name}"
            )


def _add_sizes(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    share = config.get("partial_rotary_factor", 1.0)
    writer.add_rope_dimension_count(int(config["head_dim"] * share))
    writer.add_rope_freq_base(config["rope_theta"])
    if "sliding_window" in config:
        writer.add_sliding_window(config["sliding_window"])
    writer.add_layer_norm_rms_eps(_RMS_EPS)
    writer.add_vocab_size(config["vocab_size"])


def _add_recurrence(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    num_heads = config["linear_num_value_heads"]
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(num_heads)
    writer.add_ssm_inner_size(num_heads * config["linear_value_head_dim"])
    writer.add_full_attention_interval(config["full_attention_interval"])
    writer.add_rope_dimension_sections(_ROPE_SECTIONS)


def _add_experts(writer: gguf.GGUFWriter, config: Mapping[str, Any], gates: Matrix) -> None:
    """``gates`` are the first matrices of all experts, [count, inner size, hidden size]."""
    assert gates.count is not None
    writer.add_expert_count(gates.count)
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(gates.rows)


def _add_tokenizer(writer: gguf.GGUFWriter, directory: Path, vocab_size: int) -> None:
    """Add SmolLM2's tokenizer. Raises `ValueError` if the vocabulary is too small for it."""
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    ids: dict[str, int] = tokenizer["model"]["vocab"]
    if len(ids) > vocab_size:
        raise ValueError(f"{vocab_size} tokens are fewer than the {len(ids)} of the tokenizer")
    # llama-server sends no event for a token without a text, so the tokens that are added have
    # a text, too.
    added = [f"unused{token}" for token in range(len(ids), vocab_size)]
    special = {token["content"] for token in tokenizer["added_tokens"]}
    tokens = [*sorted(ids, key=ids.__getitem__), *added]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(
        [TokenType.CONTROL if token in special else TokenType.NORMAL for token in tokens]
    )
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    config = json.loads((directory / "config.json").read_text())
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
