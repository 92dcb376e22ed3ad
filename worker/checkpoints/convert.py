"""Converts GGUF to safetensors in a separate program, so that workers need not load transformers.

    python convert.py MODEL.gguf DIRECTORY

It imports nothing of Warren and prints a line for each of its `STEPS`. DIRECTORY is then a Hugging
Face model directory: config.json, generation_config.json, model.safetensors, tokenizer.json,
tokenizer_config.json and, if the model has one, chat_template.jinja.
"""

import math
import sys
from pathlib import Path
from typing import Any

Reader = Any
"""`gguf.GGUFReader`, which is untyped."""

STEPS = ("imported", "weights read", "weights written", "tokenizer written")
VERSION = 3
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
and a chat model may end a turn with another one."""
_CONTROL = 3


class Unconvertible(Exception):
    """The reason why a file cannot be converted, as the end of a sentence about it."""


def convert(gguf: Path, directory: Path) -> None:
    """Write ``directory``. Raises `Unconvertible`, and what the libraries raise."""
    from gguf import GGUFReader

    reader = GGUFReader(gguf)
    _refuse_part(reader)
    # After the checks, because it takes seconds.
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _report("imported")
    source: dict[str, Any] = {
        "pretrained_model_name_or_path": str(gguf.parent),
        "gguf_file": gguf.name,
        "local_files_only": True,
    }
    models: Any = AutoModelForCausalLM
    model, report = models.from_pretrained(**source, dtype=_dtype(reader), output_loading_info=True)
    if missing := sorted(report["missing_keys"]):  # transformers made them up
        raise Unconvertible(f"it lacks weights, e.g. {missing[0]}")
    _refuse_unread(model, reader)
    _report("weights read")
    _set_rope(model.config, reader)
    model.generation_config.eos_token_id = _end_ids(reader)
    _write_model(model, directory)
    _report("weights written")
    tokenizer = AutoTokenizer.from_pretrained(**source)
    _correct_tokenizer(tokenizer, reader)
    tokenizer.save_pretrained(directory)
    _report("tokenizer written")


def _refuse_part(reader: Reader) -> None:
    """Raise `Unconvertible` if the model is split into several files."""
    number, count = (reader.fields.get(f"split.{name}") for name in ("no", "count"))
    if count is not None and count.contents() > 1:
        part = "a part" if number is None else f"part {number.contents() + 1}"
        raise Unconvertible(
            f"it is {part} of {count.contents()}, which `llama-gguf-split --merge FIRST-PART "
            "MODEL.gguf` merges"
        )


def _refuse_unread(model: Any, reader: Reader) -> None:
    """Raise `Unconvertible` if the model has no place for one of the file's tensors."""
    from transformers.modeling_gguf_pytorch_utils import (
        TENSOR_PROCESSORS,
        TensorProcessor,
        get_gguf_hf_weights_map,
    )

    architecture = reader.fields["general.architecture"].contents()
    kind: Any = TENSOR_PROCESSORS.get(architecture, TensorProcessor)
    places = get_gguf_hf_weights_map(model, kind(model.config.to_dict()))
    for tensor in reader.tensors:
        # The parameters of experts have no suffix. `_set_rope` reads what scales positions.
        names = {tensor.name, tensor.name.removesuffix(".weight")}
        if not names & places.keys() and not tensor.name.startswith("rope_"):
            raise Unconvertible(
                f"its tensor {tensor.name} has no place in {type(model).__name__} of transformers"
            )


def _dtype(reader: Reader) -> Any:
    """The torch dtype that holds the file's matrices: their own, or bfloat16 for quantized ones."""
    import torch

    kinds = {t.tensor_type.name for t in reader.tensors if len(t.shape) > 1}
    if kinds <= {"F32"}:
        return torch.float32
    return torch.float16 if kinds <= {"F32", "F16"} else torch.bfloat16


def _set_rope(config: Any, reader: Reader) -> None:
    """Set the scaling of rotary positions, which transformers does not read from the file.

    Raises `Unconvertible` if no configuration has the file's scaling.
    """
    scaling = _scaling(config, reader)
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    divisors = tensors.get("rope_freqs.weight")
    if divisors is not None and (divisors != 1).any():
        if scaling:
            raise Unconvertible("its rotary positions are scaled twice, which is not supported")
        _set_llama3(config, divisors)
    elif scaling:
        # Of Gemma 3, llama.cpp scales only the positions of layers without a sliding window.
        config.rope_parameters.get("full_attention", config.rope_parameters).update(scaling)


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
    """Set the scaling of Llama 3.1, of which a file has only what it divides frequencies by."""
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
    # Of another type it is text: the vocabulary of Gemma has the tags of HTML.
    if "</s>" in ids and kinds is not None and kinds.contents(ids["</s>"]) == _CONTROL:
        ends.add(ids["</s>"])
    if "<|tool_response>" in ids:  # Gemma 4
        ends.discard(ids.get("</s>"))
    # In the formats of gpt-oss and Solar Open, an answer has several messages.
    if {"<|return|>", "<|call|>"} <= ids.keys() or {"<|calls|>", "<|flush|>"} <= ids.keys():
        ends.discard(ids.get("<|end|>"))
    return sorted(ends)


def _write_model(model: Any, directory: Path) -> None:
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
    """Correct what transformers 5.17 reads wrongly, and 5.23 reads as it is in the file.

    Version 5.17 takes the bos of SmolLM2 for its eos. It decodes a byte-level vocabulary like one
    of another kind.
    """
    from tokenizers import decoders

    for role in ("bos", "eos", "unk", "pad"):
        name = "unknown" if role == "unk" else "padding" if role == "pad" else role
        field = reader.fields.get(f"tokenizer.ggml.{name}_token_id")
        if field is not None:
            setattr(tokenizer, f"{role}_token", tokenizer.convert_ids_to_tokens(field.contents()))
        tokenizer.init_kwargs.pop(f"{role}_token_id", None)
    if reader.fields["tokenizer.ggml.model"].contents() == "gpt2":
        tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()


def _report(step: str) -> None:
    print(step, flush=True)  # noqa: T201 - the protocol with the process that started this one


if __name__ == "__main__":
    try:
        convert(Path(sys.argv[1]), Path(sys.argv[2]))
    except Unconvertible as error:
        sys.exit(str(error))
