"""Tokens that only the files beside tokenizer.json name, compared with transformers."""

import json
import os
from pathlib import Path
from random import Random
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from shared.errors import StartupError
from shared.messages import TextPrompt
from worker.text import Tokenizer

NUM_DRAWN = int(os.environ.get("WARREN_TEST_VARIATIONS", "100"))
NAMES = [
    *("<|im_start|>", "<|im_end|>", "<s>", "</s>", "<pad>", "<unk>", "<tool>", " glued", "the"),
    *("[INST]", "<｜User｜>", "ab c", "<think>"),
]
ROLES = ["bos_token", "eos_token", "pad_token", "unk_token", "image_token"]
PLENTY = 1000


@pytest.fixture(scope="module")
def plain() -> tokenizers.Tokenizer:
    """A byte-level tokenizer without any added token."""
    plain = tokenizers.Tokenizer(models.BPE())
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    plain.train_from_iterator(["the thing that the other thing is"] * 3, trainer)
    return plain


def write(directory: Path, plain: tokenizers.Tokenizer, **files: Any) -> Path:
    """Write tokenizer.json with the added tokens ``stored``, and other files by their stems."""
    directory.mkdir(exist_ok=True)
    encoder = tokenizers.Tokenizer.from_str(plain.to_str())
    encoder.add_tokens(files.pop("stored", []))
    (directory / "tokenizer.json").write_text(encoder.to_str())
    for name, content in files.items():
        if content is not None:
            (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


def drawn_token(draw: Random, content: str | None = None) -> dict[str, Any]:
    entry: dict[str, Any] = {"content": content or draw.choice(NAMES)}
    for flag in ("lstrip", "rstrip", "single_word", "normalized", "special"):
        if draw.random() < 0.5:
            entry[flag] = draw.random() < 0.3 if flag != "special" else draw.random() < 0.6
    return entry


def drawn_role(draw: Random) -> Any:
    entry = drawn_token(draw)
    entry.pop("special", None)
    return entry["content"] if draw.random() < 0.6 else {"__type": "AddedToken", **entry}


def drawn_files(draw: Random, num_plain: int) -> dict[str, Any]:
    stored = [
        tokenizers.AddedToken(name, special=draw.random() < 0.5)
        for name in draw.sample(NAMES, draw.randrange(4))
    ]
    next_id = num_plain + len([one for one in stored if one.content != "the"])
    config: dict[str, Any] = {}
    free = [name for name in NAMES if name not in [one.content for one in stored] and name != "the"]
    more = draw.sample(free, draw.randrange(4))
    files: dict[str, Any] = {"stored": stored, "tokenizer_config": config}
    if draw.random() < 0.5:
        ids = {str(num_plain + k): drawn_token(draw, one.content) for k, one in enumerate(stored)}
        shift = draw.random() < 0.1
        ids |= {str(next_id + k + shift): drawn_token(draw, n) for k, n in enumerate(more)}
        config["added_tokens_decoder"] = ids
    elif draw.random() < 0.6:
        files["added_tokens"] = {name: next_id + k for k, name in enumerate(more)}
    for role in draw.sample(ROLES, draw.randrange(len(ROLES))):
        config[role] = drawn_role(draw)
    extra: Any = draw.sample(NAMES, draw.randrange(3))
    if draw.random() < 0.3:
        extra = {f"{k}_token": name for k, name in enumerate(extra)}
        config["extra_special_tokens"] = extra
    elif draw.random() < 0.5:
        config[draw.choice(["extra_special_tokens", "additional_special_tokens"])] = extra
    if draw.random() < 0.5:
        files["special_tokens_map"] = {
            role: one["content"] if isinstance(one := drawn_role(draw), dict) else one
            for role in draw.sample(ROLES[:4], draw.randrange(4))
        }
    if draw.random() < 0.1:
        del files["tokenizer_config"]
    return files


def drawn_text(draw: Random) -> str:
    pieces = [*NAMES, " ", "  ", "\n", "the thing", "x", "is<", "é"]
    return "".join(draw.choice(pieces) for _ in range(draw.randrange(1, 12)))


@pytest.mark.parametrize("seed", range(NUM_DRAWN))
def test_tokens_are_those_of_transformers(
    seed: int, plain: tokenizers.Tokenizer, tmp_path: Path
) -> None:
    draw = Random(seed)
    directory = write(tmp_path / "model", plain, **drawn_files(draw, plain.get_vocab_size()))
    expected: Any = PreTrainedTokenizerFast.from_pretrained(directory)

    try:
        tokenizer = Tokenizer.load(directory, vocab_size=PLENTY)
    except StartupError as error:
        assert "the files belong to different versions" in error.message  # noqa: PT017
        return

    for text in [drawn_text(draw) for _ in range(8)]:
        token_ids = tokenizer.encode(TextPrompt(text=text, add_special_tokens=False))
        assert token_ids == expected(text, add_special_tokens=False).input_ids
        stream = tokenizer.text_stream()
        shown = "".join(map(stream.push, token_ids)) + stream.flush()
        assert shown == expected.decode(token_ids, skip_special_tokens=True)
    if expected.eos_token is not None:
        assert tokenizer.eos_ids == {expected.eos_token_id}


CHATML = {"270": {"content": "<|im_start|>"}, "271": {"content": "<|im_end|>", "special": True}}


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(TextPrompt(text=text, add_special_tokens=False))


def test_an_id_that_is_not_the_next_free_one_is_refused_by_name(
    plain: tokenizers.Tokenizer, tmp_path: Path
) -> None:
    files = {"tokenizer_config": {"added_tokens_decoder": {"299": {"content": "<think>"}}}}
    directory = write(tmp_path, plain, **files)
    with pytest.raises(StartupError, match=r"'<think>' has the id 299 .* next free id .* is 270"):
        Tokenizer.load(directory, vocab_size=PLENTY)


def test_a_token_without_an_embedding_remains_text(
    plain: tokenizers.Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = write(tmp_path, plain, tokenizer_config={"added_tokens_decoder": CHATML})

    tokenizer = Tokenizer.load(directory, vocab_size=271)

    assert ids_of(tokenizer, "<|im_start|>") == [270]
    assert max(ids_of(tokenizer, "<|im_end|>")) < 270
    (record,) = caplog.records
    assert record.message == "tokens without an embedding are read as text"
    assert vars(record)["tokens"] == ["<|im_end|>"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer_config", [], "no JSON object"),
        ("tokenizer_config", {"added_tokens_decoder": {"x": {"content": "a"}}}, "the id 'x'"),
        ("tokenizer_config", {"added_tokens_decoder": {"1": "a"}}, "Expected `object`, got `str`"),
        ("tokenizer_config", {"bos_token": {"text": "a"}}, "missing required field `content`"),
        ("tokenizer_config", {"extra_special_tokens": [1]}, r"at `\$\.extra_special_tokens"),
        ("added_tokens", {"<a>": "270"}, "Expected `int`, got `str`"),
        ("special_tokens_map", {"eos_token": {"text": "a"}}, "missing required field `content`"),
    ],
)
def test_a_malformed_file_is_named(
    name: str, content: Any, message: str, plain: tokenizers.Tokenizer, tmp_path: Path
) -> None:
    directory = write(tmp_path, plain, **{name: content})
    with pytest.raises(StartupError, match=rf"{name}\.json.*{message}"):
        Tokenizer.load(directory)
