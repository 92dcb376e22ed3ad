"""Writes the configuration and the tokenizer of a GGUF file in a separate program, so that workers
need not load transformers.

    python convert.py MODEL.gguf DIRECTORY [--end-with-stdin] [--with-weights]

It imports nothing of Warren and prints a line for each of its `STEPS`. DIRECTORY is then a Hugging
Face model directory: config.json, generation_config.json, tokenizer.json, tokenizer_config.json
and, if the model has one, chat_template.jinja. A worker reads the weights from the GGUF file; with
the option, model.safetensors has them in bfloat16, too. A config.json that is there already is
completed: transformers then need not know the file's architecture.
"""

import math
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Reader = Any
"""`gguf.GGUFReader`, which is untyped."""

WITH_PARENT = "--end-with-stdin"
"""The option with which the program ends as soon as its standard input does."""
WITH_WEIGHTS = "--with-weights"
"""The option with which the weights are written, too."""
STEPS = ("imported", "weights read", "weights written", "tokenizer written")
VERSION = 4
"""Counts the changes after which files that were converted before have to be converted again."""

_END_ROLES = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
_ENDS = {
    *("[EOS]", "[EOT]", "<EOT>", "_<EOT>", "<eos>", "<|endoftext|>", "<|end_of_text|>"),
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|return|>", "<|call|>"),
    *("<|calls|>", "<|flush|>", "<end_of_turn>", "<turn|>", "<|tool_response>"),
    *("<end_of_utterance>", "<｜end▁of▁sentence｜>", "[e~["),
    *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    *("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>"),
}
"""Tokens at which an answer ends in llama.cpp, whatever their type: a file names only one of them,
and a chat model may end a turn with another token."""
_CONTROL = 3
_USER_DEFINED = 4
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""What a SentencePiece vocabulary writes for a space."""
_PRE_TOKENIZERS = "pre_tokenizers.json"
"""The file beside this program with llama.cpp's names of pre-tokenizers: those like GPT-2's, alone
or after each digit was split off, and those that transformers does not know, with their patterns,
or the name of a pre-tokenizer with the same patterns. Each pattern splits the pieces that the
patterns before it have left."""
_TEMPLATE = "tokenizer.chat_template."
_CONFIG = "config.json"
UNKNOWN = 3
"""The exit status after `UnknownArchitecture`."""


class Unconvertible(Exception):
    """The reason why a file cannot be converted, as the end of a sentence about it."""


class UnknownArchitecture(Exception):
    """transformers does not read files of this architecture; the text names those that it reads."""


def convert(gguf: Path, directory: Path, *, has_weights: bool = False) -> None:
    """Write ``directory``. Raises `Unconvertible`, and the errors of the libraries."""
    with _read(gguf) as reader:
        _refuse_pre_tokenizer(reader)
        # This import follows the checks, because it takes seconds.
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        _report("imported")
        source: dict[str, Any] = {
            "pretrained_model_name_or_path": str(gguf.parent),
            "gguf_file": gguf.name,
            "local_files_only": True,
        }
        is_described = (directory / _CONFIG).exists()
        if not is_described:
            _refuse_unknown(reader)
        write = _complete_config if is_described else _write_config
        (_write_model if has_weights else write)(source, reader, directory)
        _report("weights written")
        kind: Any = PreTrainedTokenizerFast if is_described else AutoTokenizer
        tokenizer = kind.from_pretrained(**source)
        _set_tokens(tokenizer, reader)
        _correct_tokenizer(tokenizer, reader)
        tokenizer.save_pretrained(directory)
        _write_templates(reader, directory)
        _report("tokenizer written")


@contextmanager
def _read(path: Path) -> Iterator[Reader]:
    """The file's metadata, read once, also for transformers, which reads it at each call.

    Vocabularies make up nearly all of it. The library's reader takes 20 microseconds for a string,
    because it slices a memory map with numpy several times for each; here a plain array is sliced.
    """
    import gguf
    import numpy as np
    from gguf import GGUFReader
    from gguf import GGUFValueType as Kind

    library: Any = gguf

    class FastReader(GGUFReader):
        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type != Kind.ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            data = self.data.view(np.ndarray)
            start = orig_offs + 12
            head = [data[orig_offs : orig_offs + 4].view(np.uint32)]
            head += [data[orig_offs + 4 : start].view(np.uint64)]
            kind, count = Kind(int(head[0][0])), int(head[1][0])
            scalar = self.gguf_scalar_to_np.get(kind)
            if not count or self.byte_order != "I" or (scalar is None and kind != Kind.STRING):
                return super()._get_field_parts(orig_offs, raw_type)
            if scalar is not None:
                end = start + count * np.dtype(scalar).itemsize
                values = data[start:end].view(scalar)
                head += [values[i : i + 1] for i in range(count)]
                return end - orig_offs, head, list(range(2, 2 + count)), [Kind.ARRAY, kind]
            end, words = start, data.data
            for _ in range(count):
                text = end + 8
                head.append(data[end:text].view(np.uint64))
                end = text + int.from_bytes(words[end:text], "little")
                head.append(data[text:end])
            return end - orig_offs, head, list(range(3, 3 + 2 * count, 2)), [Kind.ARRAY, kind]

    reader = FastReader(path)
    library.GGUFReader = lambda *_: reader
    try:
        yield reader
    finally:
        library.GGUFReader = GGUFReader


def _complete_config(source: dict[str, Any], reader: Reader, directory: Path) -> None:
    """Add the scaling of rotary positions to the configuration, and the tokens at which answers
    end."""
    import json

    import transformers

    library: Any = transformers
    path = directory / _CONFIG
    described = json.loads(path.read_text())
    _report("weights read")
    config = library.AutoConfig.for_model(**described)
    _set_rope(config, reader, is_described=True)
    described["rope_parameters"] = config.rope_parameters
    kinds = library.MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) not in kinds:  # transformers counts it among models for images
        kinds = library.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    described["architectures"] = [kinds[type(config)].__name__]
    path.write_text(json.dumps(described, indent=2))
    generation = library.GenerationConfig.from_model_config(config)
    generation.eos_token_id = _end_ids(reader)
    generation.save_pretrained(directory)


def _write_config(source: dict[str, Any], reader: Reader, directory: Path) -> None:
    """Write the configuration without reading any weights."""
    import transformers

    library: Any = transformers
    config = library.AutoConfig.from_pretrained(**source)
    _report("weights read")
    if type(config) not in library.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise Unconvertible(f"transformers has no causal language model of {config.model_type}")
    _set_sizes(config, reader)
    _set_rope(config, reader)
    kind = library.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    generation = library.GenerationConfig.from_model_config(config)
    generation.eos_token_id = _end_ids(reader)
    config.architectures = [kind.__name__]
    config.save_pretrained(directory)
    generation.save_pretrained(directory)


def _write_model(source: dict[str, Any], reader: Reader, directory: Path) -> None:
    """Write the weights and the configuration."""
    import torch
    from transformers import AutoModelForCausalLM

    models: Any = AutoModelForCausalLM
    model = models.from_pretrained(**source, dtype=torch.bfloat16)
    _report("weights read")
    _set_rope(model.config, reader)
    model.generation_config.eos_token_id = _end_ids(reader)
    _save(model, directory)


def known_to_transformers() -> set[str]:
    """The architectures whose files transformers reads, in all spellings."""
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    # gguf writes a hyphen or nothing where transformers' names have an underscore.
    known = set(GGUF_CONFIG_MAPPING) - {"general", "tokenizer"}
    return {name.replace("_", sign) for name in known for sign in ("_", "-", "")}


def _refuse_unknown(reader: Reader) -> None:
    known = known_to_transformers()
    if _text(reader, "general.architecture") not in known:
        raise UnknownArchitecture(", ".join(sorted(known)))


def _refuse_pre_tokenizer(reader: Reader) -> None:
    """Raise `Unconvertible` if a byte-level vocabulary splits its text in a way that is unknown:
    the tokens would be others than the model was trained with."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    if _text(reader, "tokenizer.ggml.model") != "gpt2":
        return
    kind = _text(reader, "tokenizer.ggml.pre")
    if kind is None:
        raise Unconvertible(
            "it does not say how its text is split (tokenizer.ggml.pre), because an old version of "
            "llama.cpp has written it: use a newer file of this model"
        )
    known = {*GGUF_PRE_TOKENIZER_SPLITS}.union(*_pre_tokenizers().values())
    if kind not in known:
        raise Unconvertible(f"its pre-tokenizer {kind!r} is not supported")


def _pre_tokenizers() -> Any:
    import json

    return json.loads(Path(__file__).with_name(_PRE_TOKENIZERS).read_text())


def _text(reader: Reader, name: str) -> str | None:
    field = reader.fields.get(name)
    return None if field is None else str(field.contents())


def _set_sizes(config: Any, reader: Reader) -> None:
    """Set the sizes that transformers does not read: GPT-2's context length, and how much of a head
    StableLM rotates."""
    architecture = _text(reader, "general.architecture")
    length = reader.fields.get(f"{architecture}.context_length")
    if length is not None:
        config.max_position_embeddings = length.contents()
    rope = getattr(config, "rope_parameters", {})
    rotated = reader.fields.get(f"{architecture}.rope.dimension_count")
    if rotated is not None and "partial_rotary_factor" in rope:
        head_dim = config.hidden_size // config.num_attention_heads
        rope["partial_rotary_factor"] = rotated.contents() / head_dim


def _set_rope(config: Any, reader: Reader, *, is_described: bool = False) -> None:
    """Set the scaling of rotary positions, which transformers does not read from the file, and the
    factors of LongRoPE in a configuration that is described already.

    Raises `Unconvertible` if no configuration has the file's scaling.
    """
    if not hasattr(config, "rope_parameters"):
        return  # GPT-2 has learned its positions
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    divisors = tensors.get("rope_freqs.weight")
    parameters = config.rope_parameters.get("full_attention", config.rope_parameters)
    if parameters.get("rope_type") == "proportional" and divisors is not None:
        parameters["partial_rotary_factor"] = float((divisors == 1).mean())
    if parameters.get("rope_type", "default") != "default":
        return  # it is part of the configuration that is completed
    if is_described and "rope_factors_long.weight" in tensors:
        _set_longrope(parameters, tensors, reader)
        return
    scaling = _scaling(config, reader)
    if divisors is not None and (divisors != 1).any():
        if scaling:
            raise Unconvertible("its rotary positions are scaled twice, which is not supported")
        _set_llama3(config, divisors)
    elif scaling:
        # For Gemma 3, llama.cpp scales only the positions of layers without a sliding window.
        parameters.update(scaling)


def _set_longrope(parameters: Any, tensors: dict[str, Any], reader: Reader) -> None:
    architecture = reader.fields["general.architecture"].contents()
    scaling = f"{architecture}.rope.scaling"
    parameters["rope_type"] = "longrope"
    for kind in ("short", "long"):
        parameters[f"{kind}_factor"] = tensors[f"rope_factors_{kind}.weight"].tolist()
    original = reader.fields.get(f"{scaling}.original_context_length")
    if original is not None:
        parameters["original_max_position_embeddings"] = original.contents()
    amplitude = reader.fields.get(f"{scaling}.attn_factor")
    if amplitude is not None:
        parameters["attention_factor"] = amplitude.contents()


def _scaling(config: Any, reader: Reader) -> dict[str, Any]:
    """The parameters of linear scaling or YaRN; empty if positions are not scaled."""
    architecture = reader.fields["general.architecture"].contents()

    def read(name: str, default: Any) -> Any:
        field = reader.fields.get(f"{architecture}.rope.{name}")
        return default if field is None else field.contents()

    kind = read("scaling.type", "linear")
    factor = read("scaling.factor", 0.0) or read("scale_linear", 1.0)
    is_longrope = any("rope_factors_" in tensor.name for tensor in reader.tensors)
    if is_longrope or kind not in ("none", "linear", "yarn"):
        kind = "longrope" if is_longrope else kind
        raise Unconvertible(f"its rotary positions are scaled by {kind}, which is not supported")
    if kind == "none" or factor == 1:
        return {}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if read("scaling.yarn_ext_factor", 1.0) != 1 or read("scaling.yarn_log_multiplier", 0.0):
        raise Unconvertible("its variant of YaRN is not supported")
    amplitude = read("scaling.attn_factor", 1.0) * (0.1 * math.log(factor) + 1.0)
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": read(
            "scaling.original_context_length", config.max_position_embeddings
        ),
        # Written by llama.cpp if the original configuration has it.
        "attention_factor": read("scaling.yarn_attn_factor", amplitude),
        "beta_fast": read("scaling.yarn_beta_fast", 32.0),
        "beta_slow": read("scaling.yarn_beta_slow", 1.0),
    }


def _set_llama3(config: Any, divisors: Any) -> None:
    """Set the scaling of Llama 3.1, of which a file has only the divisors of the frequencies."""
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    base = config.rope_parameters.get("rope_theta", math.nan)  # none if layers differ
    frequencies = base ** -(torch.arange(len(divisors)) / len(divisors))
    config.rope_parameters |= {
        "rope_type": "llama3",
        "rope_theta": base,
        "factor": float(divisors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    expected = frequencies / torch.tensor(divisors)
    if scaled.shape != expected.shape or not torch.allclose(scaled, expected, rtol=1e-4, atol=0):
        raise Unconvertible("its rope_freqs.weight is not the scaling of Llama 3.1")


def _end_ids(reader: Reader) -> list[int]:
    """The tokens at which an answer ends."""
    named = (reader.fields.get(f"tokenizer.ggml.{role}_token_id") for role in _END_ROLES)
    ends = {field.contents() for field in named if field is not None}
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    ends |= {ids[token] for token in _ENDS & ids.keys()}
    kinds = reader.fields.get("tokenizer.ggml.token_type")
    # A token of another type is text: the vocabulary of Gemma has the tags of HTML.
    if "</s>" in ids and kinds is not None and kinds.contents(ids["</s>"]) == _CONTROL:
        ends.add(ids["</s>"])
    if "<|tool_response>" in ids:  # Gemma 4
        ends.discard(ids.get("</s>"))
    # In the formats of gpt-oss and Solar Open, an answer has several messages.
    if {"<|return|>", "<|call|>"} <= ids.keys() or {"<|calls|>", "<|flush|>"} <= ids.keys():
        ends.discard(ids.get("<|end|>"))
    return sorted(ends)


def _save(model: Any, directory: Path) -> None:
    # `save_pretrained` rejects models that were loaded from a GGUF file.
    from safetensors.torch import save_file

    weights = directory / "model.safetensors"
    save_file(_untied(model), weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # safetensors says 600; the user who serves may be another one
    config = model.config
    del config.quantization_config
    config.architectures = [type(model).__name__]
    config.dtype = model.dtype
    config.save_pretrained(directory)
    model.generation_config.save_pretrained(directory)


def _untied(model: Any) -> dict[str, Any]:
    """The weights without duplicate names of tensors that two modules share."""
    first_names: dict[int, str] = {}
    state = model.state_dict()
    for name, tensor in state.items():
        if not tensor.is_floating_point():
            raise TypeError(f"transformers left {name} quantized")
        first_names.setdefault(tensor.data_ptr(), name)
    return {name: state[name].contiguous() for name in first_names.values()}


def _correct_tokenizer(tokenizer: Any, reader: Reader) -> None:
    """Correct fields that transformers 5.17 reads wrongly, and 5.23 reads as they are in the file.

    Version 5.17 takes the bos of SmolLM2 for its eos. It decodes a byte-level vocabulary like a
    vocabulary of another kind.
    """
    from tokenizers import decoders

    for role in ("bos", "eos", "unk", "pad"):
        name = "unknown" if role == "unk" else "padding" if role == "pad" else role
        field = reader.fields.get(f"tokenizer.ggml.{name}_token_id")
        # The library's default may be a token that the file does not have.
        token = getattr(tokenizer, f"{role}_token") or ""
        if field is not None:
            setattr(tokenizer, f"{role}_token", tokenizer.convert_ids_to_tokens(field.contents()))
        elif tokenizer.backend_tokenizer.token_to_id(token) is None:
            setattr(tokenizer, f"{role}_token", None)
        tokenizer.init_kwargs.pop(f"{role}_token_id", None)
    if reader.fields["tokenizer.ggml.model"].contents() == "gpt2":
        tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()


def _set_tokens(tokenizer: Any, reader: Reader) -> None:
    """Make the tokenizer's vocabulary the file's, and split text as the file says.

    transformers leaves out control tokens with characters outside of the byte alphabet, such as
    DeepSeek's, and does not read whether a text begins with a space. Raises `Unconvertible` for a
    token that is neither the file's nor a known spelling of it.
    """
    import json

    import tokenizers

    backend = tokenizer.backend_tokenizer
    kinds = reader.fields.get("tokenizer.ggml.token_type")
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    kind_of = [_USER_DEFINED + 1] * len(tokens) if kinds is None else kinds.contents()
    described = json.loads(backend.to_str())
    # A role of a token that was left out has got it an id beyond the file's.
    added = {e["id"]: e for e in described["added_tokens"] if e["id"] < len(tokens)}
    wrong: dict[int, str] = {}
    for token_id, (token, kind) in enumerate(zip(tokens, kind_of, strict=True)):
        found = backend.id_to_token(token_id)
        if kind in (_CONTROL, _USER_DEFINED):
            if token and (found != token or token_id not in added):
                wrong[token_id] = token
                added[token_id] = _added_entry(token_id, token, is_special=kind == _CONTROL)
        elif found != token and not _is_spelling(found, token, reader):
            raise Unconvertible(f"its token {token_id} is {token!r}, but would become {found!r}")
    if wrong or len(added) < len(described["added_tokens"]):
        vocab = described["model"]["vocab"]
        kept = {token: token_id for token, token_id in vocab.items() if token_id not in wrong}
        described["model"]["vocab"] = kept | {token: token_id for token_id, token in wrong.items()}
        described["added_tokens"] = [added[token_id] for token_id in sorted(added)]
        backend = tokenizers.Tokenizer.from_str(json.dumps(described))
    _set_splitting(backend, reader)
    tokenizer._tokenizer = backend


def _added_entry(token_id: int, token: str, *, is_special: bool) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": token, **flags, "special": is_special}


def _is_spelling(found: str, token: str, reader: Reader) -> bool:
    """Whether a token of the file is written like this in a tokenizer of transformers."""
    from transformers import convert_slow_tokenizer

    library: Any = convert_slow_tokenizer
    if _text(reader, "tokenizer.ggml.model") == "t5":  # the blanks of a prompt have other names
        return True
    spelling = library.bytes_to_unicode()
    as_bytes = "".join(spelling[byte] for byte in token.encode())
    return found in (as_bytes, token.replace(" ", _SPACE))


def _set_splitting(backend: Any, reader: Reader) -> None:
    from tokenizers import Regex, decoders, normalizers, pre_tokenizers

    kind, name = _text(reader, "tokenizer.ggml.model"), _text(reader, "tokenizer.ggml.pre")
    table = _pre_tokenizers()
    splits = table["patterns"].get(name)
    if isinstance(splits, str):
        splits = table["patterns"][splits]
    if kind == "gpt2" and splits is not None:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                *(pre_tokenizers.Split(Regex(one), behavior="isolated") for one in splits),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    if kind == "gpt2" and name in table["digits_first"]:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    prefix = reader.fields.get("tokenizer.ggml.add_space_prefix")
    if kind == "llama" and prefix is not None and not prefix.contents():
        if backend.normalizer is not None:
            backend.normalizer = normalizers.Replace(" ", _SPACE)
        if backend.pre_tokenizer is not None:
            backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
        backend.decoder = decoders.Sequence(
            [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        )


def _write_templates(reader: Reader, directory: Path) -> None:
    """Write the chat templates for certain purposes, such as ``tool_use``."""
    folder = directory / "additional_chat_templates"
    for name, field in reader.fields.items():
        purpose = name.removeprefix(_TEMPLATE)
        if name.startswith(_TEMPLATE) and purpose.replace("_", "").isalnum():
            folder.mkdir(exist_ok=True)
            (folder / f"{purpose}.jinja").write_text(field.contents(), encoding="utf-8")


def _report(step: str) -> None:
    print(step, flush=True)  # noqa: T201 - the protocol with the process that started this one


def _end_with_stdin() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    if WITH_PARENT in sys.argv[3:]:
        threading.Thread(target=_end_with_stdin, daemon=True).start()
    try:
        convert(Path(sys.argv[1]), Path(sys.argv[2]), has_weights=WITH_WEIGHTS in sys.argv[3:])
    except UnknownArchitecture as error:
        print(error, file=sys.stderr)  # noqa: T201 - as the next error
        sys.exit(UNKNOWN)
    except Unconvertible as error:
        sys.exit(str(error))
