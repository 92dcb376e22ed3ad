"""Small tokenizers of each kind, and a way to load them as a worker does."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

WORDS = ("a", "b", "▁", "▁▁", "▁a", "▁hello", "hello", "é", "▁世", "界", "\n", "🙂", "�")


def sentencepiece_tokenizer() -> Tokenizer:
    """Like Llama 2: "▁" for spaces, unknown characters as bytes, a space to strip."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    entries = ["<unk>", "<s>", "</s>", *bytes_, *WORDS]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={entry: k for k, entry in enumerate(entries)},
            merges=[("▁", "a"), ("▁", "▁")],
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def metaspace_tokenizer() -> Tokenizer:
    """Like T5: the decoder itself determines which piece is the first."""
    entries = ["<unk>", "</s>", *WORDS]
    tokenizer = Tokenizer(
        models.Unigram([(entry, -float(k)) for k, entry in enumerate(entries)], unk_id=0)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


def word_suffix_tokenizer() -> Tokenizer:
    """Like GPT-1: "</w>" ends a word, and the last word has no space after it."""
    entries = ["<unk>", "</s>", "a", "a</w>", "bc", "bc</w>", ".</w>"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={entry: k for k, entry in enumerate(entries)},
            merges=[],
            unk_token="<unk>",
            end_of_word_suffix="</w>",
        )
    )
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


def word_tokenizer() -> Tokenizer:
    """No decoder at all: words joined with spaces."""
    entries = ["<unk>", "</s>", "one", "two", "three"]
    tokenizer = Tokenizer(
        models.WordLevel({entry: k for k, entry in enumerate(entries)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


def byte_level_tokenizer() -> Tokenizer:
    """A token for each byte, and added tokens that are written as they are."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: k for k, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken("<tool call>"), AddedToken("café ☕")])
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path, **files: dict[str, Any]) -> Path:
    """Write a model directory; ``files`` are JSON files by their stem."""
    tokenizer.save(str(directory / "tokenizer.json"))
    for stem, content in files.items():
        (directory / f"{stem}.json").write_text(json.dumps(content))
    return directory
