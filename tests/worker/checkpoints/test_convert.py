"""The configuration and the tokenizer of a GGUF file, and the conversion of a known model."""

import ast
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, ReaderField, RopeScalingType
from gguf.quants import dequantize
from safetensors import safe_open
from tokenizers import Tokenizer

from tests.worker.checkpoints.gguf_files import (
    CHAT_TEMPLATE,
    CONTROL,
    EOS_ID,
    HEADS,
    HIDDEN,
    NORMAL,
    NUM_PLAIN,
    USER_DEFINED,
    without_entries,
    write_tiny_gguf,
)
from worker.checkpoints import convert
from worker.text import Tokenizer as Warren


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny GGUF file and its conversion beside it."""
    directory = tmp_path_factory.mktemp("converted")
    path = write_tiny_gguf(directory / "tiny.gguf", GGMLQuantizationType.Q8_0)
    convert.convert(path, directory, has_weights=True)
    return path


def test_metadata_is_what_the_library_reads(tmp_path: Path) -> None:
    def add_arrays(writer: GGUFWriter) -> None:
        writer.add_array("test.texts", ["", "a", "Grüße", "\U0001f600" * 40])
        writer.add_array("test.numbers", [-1, 2, 2**31 - 1])
        writer.add_array("test.reals", [0.5, -1e30])
        writer.add_array("test.truths", [True, False])
        writer.add_array("test.tables", [[1, 2], [3, 4]])

    path = write_tiny_gguf(tmp_path / "tiny.gguf", add=add_arrays)
    expected = GGUFReader(path)

    with convert._read(path) as reader:
        fields, tensors = reader.fields, reader.tensors

    def described(field: ReaderField) -> tuple[object, ...]:
        parts = [(str(part.dtype), part.tolist()) for part in field.parts]
        return field.offset, field.name, parts, field.data, field.types, field.contents()

    assert [*map(described, fields.values())] == [*map(described, expected.fields.values())]
    assert [t.data_offset for t in tensors] == [t.data_offset for t in expected.tensors]


def from_pretrained(directory: Path, **options: Any) -> Any:
    auto: Any = transformers.AutoModelForCausalLM
    return auto.from_pretrained(directory, dtype=torch.float32, **options).eval()


def test_a_conversion_computes_what_transformers_computes_from_the_file(gguf: Path) -> None:
    ids = torch.arange(3, 40)[None]

    with torch.inference_mode():
        expected = from_pretrained(gguf.parent, gguf_file=gguf.name)(ids).logits
        logits = from_pretrained(gguf.parent)(ids).logits

    error = (logits - expected).abs().max() / expected.abs().max()
    assert error <= 4 * torch.finfo(torch.bfloat16).eps


def test_the_directory_looks_like_any_hugging_face_directory(gguf: Path) -> None:
    config = json.loads((gguf.parent / "config.json").read_text())
    tokenizer_config = json.loads((gguf.parent / "tokenizer_config.json").read_text())
    generation_config = json.loads((gguf.parent / "generation_config.json").read_text())

    assert config["architectures"] == ["LlamaForCausalLM"]
    assert "quantization_config" not in config
    assert config["eos_token_id"] == EOS_ID
    assert generation_config["eos_token_id"] == [0, EOS_ID]
    assert tokenizer_config["eos_token"] == "<|im_end|>"
    assert (gguf.parent / "chat_template.jinja").read_text() == CHAT_TEMPLATE


def test_a_tied_output_is_stored_once(gguf: Path) -> None:
    with safe_open(gguf.parent / "model.safetensors", framework="pt") as weights:
        names = set(weights.keys())

    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


def test_the_tokenizer_gives_every_text_back(gguf: Path) -> None:
    tokenizer = Tokenizer.from_file(str(gguf.parent / "tokenizer.json"))
    text = "hello naïve 日本語 🎉\n\t 12345 ▁<|im_end|>"

    encoding = tokenizer.encode(text)

    assert "hel" in encoding.tokens
    assert encoding.ids[-1] == EOS_ID
    assert tokenizer.decode(encoding.ids, skip_special_tokens=False) == text


def converted(directory: Path, architecture: str = "llama", **options: Any) -> dict[str, Any]:
    """The config.json of a tiny file that ``options`` add to."""
    path = write_tiny_gguf(directory / "tiny.gguf", architecture=architecture, **options)
    convert.convert(path, directory)
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return config


def add_scaling(
    writer: GGUFWriter, kind: RopeScalingType, factor: float, original: int | None = None
) -> None:
    writer.add_rope_scaling_type(kind)
    writer.add_rope_scaling_factor(factor)
    if original is not None:
        writer.add_rope_scaling_orig_ctx_len(original)


def add_two_scalings(writer: GGUFWriter) -> None:
    add_scaling(writer, RopeScalingType.LINEAR, 2)
    writer.add_tensor("rope_freqs.weight", llama3_divisors(8.0))


def add_odd_yarn(writer: GGUFWriter) -> None:
    add_scaling(writer, RopeScalingType.YARN, 2)
    writer.add_float32("llama.rope.scaling.yarn_ext_factor", 0.5)


def llama3_divisors(factor: float, high: float = 4.0) -> np.ndarray:
    """What llama.cpp stores of Llama 3.1's scaling."""
    wavelengths = 2 * math.pi * 10_000 ** (np.arange(0, 1, 2 * HEADS / HIDDEN))
    kept = ((8192 / wavelengths - 1) / (high - 1)).clip(0, 1)
    divisors: np.ndarray = 1 / ((1 - kept) / factor + kept)
    return divisors.astype(np.float32)


def test_yarn_is_that_of_the_file(tmp_path: Path) -> None:
    config = converted(
        tmp_path, add=lambda writer: add_scaling(writer, RopeScalingType.YARN, 4, 32)
    )

    rope = config["rope_parameters"]
    assert (rope["rope_type"], rope["factor"], rope["rope_theta"]) == ("yarn", 4, 10_000)
    assert (rope["original_max_position_embeddings"], config["max_position_embeddings"]) == (
        32,
        128,
    )
    assert (rope["beta_fast"], rope["beta_slow"]) == (32, 1)
    assert rope["attention_factor"] == pytest.approx(0.1 * math.log(4) + 1)


def test_linear_scaling_is_that_of_the_file_for_layers_without_a_window(tmp_path: Path) -> None:
    def add(writer: GGUFWriter) -> None:
        add_scaling(writer, RopeScalingType.LINEAR, 8)

    (tmp_path / "llama").mkdir()
    rope = converted(tmp_path / "llama", add=add)["rope_parameters"]
    layers = converted(tmp_path, "gemma3", add=add)["rope_parameters"]

    assert (rope["rope_type"], rope["factor"]) == ("linear", 8)
    assert (layers["full_attention"]["rope_type"], layers["full_attention"]["factor"]) == (
        "linear",
        8,
    )
    assert layers["sliding_attention"]["rope_type"] == "default"


def test_the_scaling_of_llama_3_is_recognized(tmp_path: Path) -> None:
    rope = converted(
        tmp_path,
        add=lambda writer: writer.add_tensor("rope_freqs.weight", llama3_divisors(8.0)),
    )["rope_parameters"]

    assert rope == {
        "rope_theta": 10_000,
        "rope_type": "llama3",
        "factor": 8,
        "low_freq_factor": 1,
        "high_freq_factor": 4,
        "original_max_position_embeddings": 8192,
    }


@pytest.mark.parametrize("kind", [None, RopeScalingType.NONE])
def test_positions_that_the_file_does_not_scale_stay_as_they_are(
    tmp_path: Path, kind: RopeScalingType | None
) -> None:
    def add(writer: GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", np.ones(HIDDEN // HEADS // 2, np.float32))
        if kind is not None:
            add_scaling(writer, kind, 8)

    assert converted(tmp_path, add=add)["rope_parameters"]["rope_type"] == "default"


@pytest.mark.parametrize(
    ("add", "message"),
    [
        (
            lambda writer: writer.add_tensor("rope_freqs.weight", llama3_divisors(8.0, 5.0)),
            "is not the scaling of Llama 3.1",
        ),
        (
            lambda writer: writer.add_tensor("rope_factors_long.weight", llama3_divisors(8.0)),
            "scaled by longrope, which is not supported",
        ),
        (add_two_scalings, "scaled twice"),
        (add_odd_yarn, "variant of YaRN"),
        (
            lambda writer: add_scaling(writer, RopeScalingType.LONGROPE, 1),
            "scaled by longrope, which is not supported",
        ),
    ],
)
def test_a_scaling_that_no_configuration_reproduces_is_refused(
    tmp_path: Path, add: Callable[[GGUFWriter], None], message: str
) -> None:
    with pytest.raises(convert.Unconvertible, match=message):
        converted(tmp_path, add=add)


@pytest.mark.parametrize("kind", [NORMAL, CONTROL, USER_DEFINED, None])
@pytest.mark.parametrize(
    ("further", "ends"),
    [
        (("<bos>", "<eos>", "<end_of_turn>"), {"<eos>", "<end_of_turn>"}),
        (("<|end|>", "<|user|>"), {"<|end|>"}),
        (("<|end|>", "<|return|>", "<|call|>"), {"<|return|>", "<|call|>"}),
        (("<|end|>", "<|return|>"), {"<|end|>", "<|return|>"}),
        (("<|end|>", "<|flush|>", "<|calls|>"), {"<|flush|>", "<|calls|>"}),
        (("<fim_prefix>", "<fim_pad>", "<reponame>"), {"<fim_pad>", "<reponame>"}),
        (("<|repo_name|>", "<|file_sep|>"), {"<|repo_name|>", "<|file_sep|>"}),
    ],
)
def test_an_answer_ends_at_the_tokens_that_end_a_turn(
    tmp_path: Path, kind: int | None, further: tuple[str, ...], ends: set[str]
) -> None:
    assert end_tokens(tmp_path, further, kind) == ends


@pytest.mark.parametrize(
    ("further", "kind", "ends"),
    [
        (("</s>",), CONTROL, {"</s>"}),
        (("</s>",), USER_DEFINED, set()),
        (("</s>",), NORMAL, set()),
        (("</s>",), None, set()),
        (("</s>", "<|tool_response>"), CONTROL, {"<|tool_response>"}),
    ],
)
def test_an_answer_does_not_end_at_a_tag_of_html(
    tmp_path: Path, further: tuple[str, ...], kind: int | None, ends: set[str]
) -> None:
    assert end_tokens(tmp_path, further, kind) == ends


def end_tokens(directory: Path, further: tuple[str, ...], kind: int | None) -> set[str]:
    """The tokens at which answers end, among ``further`` tokens that all have the type ``kind``."""
    path = write_tiny_gguf(
        directory / "tiny.gguf",
        further=further,
        kind_of_further=kind,
        add=lambda writer: writer.add_eot_token_id(7),
    )
    reader = GGUFReader(path)
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    usual, ends = {0, EOS_ID, 7}, set(convert._end_ids(reader))
    assert usual <= ends
    return {tokens[token_id] for token_id in ends - usual}


DEEPSEEK = ("<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜end▁of▁sentence｜>", "<|im start|>")


@pytest.mark.parametrize("kind", [CONTROL, USER_DEFINED])
def test_tokens_outside_of_the_byte_alphabet_stay_whole(tmp_path: Path, kind: int) -> None:
    def add(writer: GGUFWriter) -> None:
        writer.add_uint32("tokenizer.ggml.bos_token_id", NUM_PLAIN)

    write = without_entries("tokenizer.ggml.bos_token_id")
    path = write(tmp_path / "model.gguf", further=DEEPSEEK, kind_of_further=kind, add=add)
    convert.convert(path, tmp_path)
    tokens = GGUFReader(path).fields["tokenizer.ggml.tokens"].contents()

    tokenizer = Warren.load(tmp_path)

    assert tokenizer.num_entries == len(tokens)
    for k, token in enumerate(DEEPSEEK):
        assert tokenizer.encode_text(f"he{token}l") == [
            *tokenizer.encode_text("he"),
            NUM_PLAIN + k,
            *tokenizer.encode_text("l"),
        ]
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["bos_token"] == DEEPSEEK[0]
    shown = tokenizer.text_stream()
    assert shown.push(NUM_PLAIN + 1) == ("" if kind == CONTROL else DEEPSEEK[1])


@pytest.mark.parametrize("pre", ["superbpe", None])
def test_an_unknown_pre_tokenizer_is_refused_by_name(tmp_path: Path, pre: str | None) -> None:
    path = without_entries("tokenizer.ggml.pre")(
        tmp_path / "model.gguf",
        add=lambda writer: None if pre is None else writer.add_tokenizer_pre(pre),
    )
    named = "tokenizer.ggml.pre" if pre is None else f"'{pre}' is not supported"
    with pytest.raises(convert.Unconvertible, match=named):
        convert.convert(path, tmp_path)


def test_kimi_splits_chinese_from_other_letters(tmp_path: Path) -> None:
    path = without_entries("tokenizer.ggml.pre")(
        tmp_path / "model.gguf", add=lambda writer: writer.add_tokenizer_pre("kimi-k2")
    )
    convert.convert(path, tmp_path)
    splits = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).pre_tokenizer
    text = "ask 月之暗面Kimi's 한국어 2025"
    places = [place for _, place in splits.pre_tokenize_str(text)]
    assert [text[start:end] for start, end in places] == [
        *("ask", " ", "月之暗面", "Kimi's", " 한국어", " ", "202", "5"),
    ]


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", "a | b 's Ġ 1 2 3 4 Ġx _ y"),
        ("deepseek-llm", "a | b ' s Ġ 1234 Ġx _ y"),
        ("deepseek-v3", "a |b 's Ġ 123 4 Ġx _y"),
        ("glm4", "a |b 's Ġ 123 4 Ġx _y"),
        ("seed-coder", "a |b 's Ġ 1 2 3 4 Ġx _y"),
        ("hunyuan", "a |b 's Ġ 1 2 3 4 Ġx _y"),
        ("hunyuan-dense", "a |b 's Ġ 123 4 Ġx _y"),
        ("kimi-k2", "a |b's Ġ 123 4 Ġx _y"),
        ("exaone4", "a | b 's Ġ1234 Ġx _ y"),
    ],
)
def test_text_is_split_as_the_file_says(tmp_path: Path, pre: str, pieces: str) -> None:
    path = without_entries("tokenizer.ggml.pre")(
        tmp_path / "model.gguf", add=lambda writer: writer.add_tokenizer_pre(pre)
    )
    convert.convert(path, tmp_path)
    splits = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).pre_tokenizer
    found = [text for text, _ in splits.pre_tokenize_str("a|b's 1234 x_y")]
    assert found == pieces.split()


@pytest.mark.parametrize("has_prefix", [True, False, None])
def test_a_text_begins_with_a_space_if_the_file_says_so(
    tmp_path: Path, has_prefix: bool | None
) -> None:
    def add(writer: GGUFWriter) -> None:
        if has_prefix is not None:
            writer.add_add_space_prefix(has_prefix)

    convert.convert(write_tiny_gguf(tmp_path / "model.gguf", vocabulary="llama", add=add), tmp_path)

    tokenizer = Warren.load(tmp_path)

    has_space = has_prefix is not False
    assert tokenizer.entries(tokenizer.encode_text("he")) == (("▁", "he") if has_space else ("he",))
    shown = tokenizer.text_stream()
    piece = tokenizer.token_id("▁")
    assert piece is not None
    text = "".join(map(shown.push, [piece, *tokenizer.encode_text("he")])) + shown.flush()
    assert text == " he"


def test_the_template_for_tools_is_kept(tmp_path: Path) -> None:
    tool_use = "{{ tools[0].function.name }}"
    path = write_tiny_gguf(
        tmp_path / "model.gguf",
        add=lambda writer: writer.add_string("tokenizer.chat_template.tool_use", tool_use),
    )
    convert.convert(path, tmp_path)
    template = Warren.load(tmp_path).template
    assert template is not None
    assert (template.source, template.for_tools.source) == (CHAT_TEMPLATE, tool_use)


def test_smollm2_weights_are_those_of_the_gguf_file(smollm2: Path) -> None:
    (gguf,) = smollm2.glob("*.gguf")
    names = {
        "token_embd.weight": "model.embed_tokens.weight",
        "blk.0.attn_v.weight": "model.layers.0.self_attn.v_proj.weight",
        "blk.14.ffn_down.weight": "model.layers.14.mlp.down_proj.weight",
        "blk.29.attn_norm.weight": "model.layers.29.input_layernorm.weight",
    }
    packed = {tensor.name: tensor for tensor in GGUFReader(gguf).tensors}

    with safe_open(smollm2 / "model.safetensors", framework="pt") as weights:
        for gguf_name, name in names.items():
            source = packed[gguf_name]
            expected = torch.tensor(dequantize(source.data, source.tensor_type))
            assert torch.equal(weights.get_tensor(name), expected.bfloat16())


def test_smollm2_ends_with_its_turn_token(smollm2: Path) -> None:
    generation_config = json.loads((smollm2 / "generation_config.json").read_text())
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))

    assert tokenizer.token_to_id("<|im_end|>") in generation_config["eos_token_id"]
    assert tokenizer.encode("Paris 2024").tokens == ["Paris", "Ġ", "2", "0", "2", "4"]


def test_the_program_needs_nothing_of_warrens() -> None:
    tree = ast.parse(Path(convert.__file__).read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    imported = {ast.unparse(node).split()[1].partition(".")[0] for node in imports}

    assert "gguf" in imported
    assert not imported & {"", "kernels", "shared", "worker"}


def test_the_program_ends_with_the_process_that_has_started_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.gguf")  # whoever reads it waits
    paths = [str(tmp_path / "model.gguf"), str(tmp_path / "out")]
    command = [sys.executable, "-P", convert.__file__, *paths, convert.WITH_PARENT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as program:
        assert program.stdin is not None
        try:
            program.stdin.close()  # as the system does when the other process is killed

            assert program.wait(240) == 1
        finally:
            program.kill()
        assert program.stderr is not None
        assert program.stderr.read() == b""
