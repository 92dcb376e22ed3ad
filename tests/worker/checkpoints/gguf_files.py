"""A GGUF file of a tiny Llama with a byte-level tokenizer, complete enough to be converted."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

HIDDEN, INTERMEDIATE, HEADS, LAYERS = 64, 96, 2, 2
CHAT_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
FOREIGN = "stablelm"
"""An architecture that transformers reads, and our own decoders do not."""
EOS_ID = 2
NUM_PLAIN = len(_SPECIAL) + 256 + 2
"""The id of the first of the further tokens of a vocabulary of bytes."""


def write_tiny_gguf(
    path: Path,
    matrices: GGMLQuantizationType = GGMLQuantizationType.F32,
    seed: int = 0,
    *,
    architecture: str = "llama",
    add: Callable[[GGUFWriter], object] = lambda writer: None,
    without: str | None = None,
    further: Sequence[str] = (),
    kind_of_further: int | None = CONTROL,
    vocabulary: str = "gpt2",
    without_keys: Sequence[str] = (),
) -> Path:
    """Random weights, the matrices of the given type; the output is tied to the embedding. ``add``
    adds more entries or tensors, the tensor ``without`` is left out, and ``further`` tokens of the
    type ``kind_of_further`` come last; the file has no types of tokens if that is None.
    ``vocabulary`` is gpt2 (bytes) or llama (SentencePiece)."""
    writer = GGUFWriter(path, architecture)
    plain = _byte_alphabet() if vocabulary == "gpt2" else [*"▁abcdefghijklm"]
    tokens = [*_SPECIAL, *plain, "he", "hel", *further]
    _add_config(writer, len(tokens))
    _add_tokenizer(writer, tokens, vocabulary)
    for key in without_keys:
        for entries in writer.kv_data:
            entries.pop(key, None)
    if kind_of_further is not None:
        kinds = dict.fromkeys(_SPECIAL, CONTROL) | dict.fromkeys(further, kind_of_further)
        writer.add_token_types([kinds.get(token, NORMAL) for token in tokens])
    add(writer)
    random = np.random.default_rng(seed)
    shapes = _shapes(len(tokens), architecture)
    for name, shape in shapes.items():
        if name == without:
            continue
        weight = random.normal(0, 0.2, shape).astype(np.float32)
        kind = matrices if len(shape) > 1 else GGMLQuantizationType.F32
        writer.add_tensor(name, quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_config(writer: GGUFWriter, vocab_size: int) -> None:
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_key_length(HIDDEN // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocab_size)


def without_entries(*keys: str) -> Callable[..., Path]:
    """`write_tiny_gguf` without these entries, which ``add`` may then write."""
    return partial(write_tiny_gguf, without_keys=keys)


def _add_tokenizer(writer: GGUFWriter, tokens: list[str], vocabulary: str) -> None:
    writer.add_tokenizer_model(vocabulary)
    if vocabulary == "gpt2":
        writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_merges(["h e", "he l"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(EOS_ID)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(EOS_ID)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _shapes(vocab_size: int, architecture: str) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (vocab_size, HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        shapes |= {f"{block}.attn_{x}.weight": (HIDDEN, HIDDEN) for x in ("q", "k", "v", "output")}
        shapes |= {f"{block}.ffn_{x}.weight": (INTERMEDIATE, HIDDEN) for x in ("gate", "up")}
        shapes[f"{block}.ffn_down.weight"] = (HIDDEN, INTERMEDIATE)
        shapes |= {f"{block}.{x}_norm.weight": (HIDDEN,) for x in ("attn", "ffn")}
        if architecture == FOREIGN:
            shapes |= {f"{block}.{x}_norm.bias": (HIDDEN,) for x in ("attn", "ffn")}
        if architecture == "gemma3":
            heads, outputs = ("attn_q", "attn_k"), ("post_attention", "post_ffw")
            shapes |= {f"{block}.{x}_norm.weight": (HIDDEN // HEADS,) for x in heads}
            shapes |= {f"{block}.{x}_norm.weight": (HIDDEN,) for x in outputs}
    if architecture == FOREIGN:
        shapes |= {"output_norm.bias": (HIDDEN,), "output.weight": (vocab_size, HIDDEN)}
    return shapes


def _byte_alphabet() -> list[str]:
    """GPT-2's 256 printable stand-ins for bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) for byte in printable] + [chr(256 + k) for k in range(len(others))]
