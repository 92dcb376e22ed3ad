"""Converts GGUF to safetensors in a separate program, so that workers need not load transformers.

    python convert.py MODEL.gguf DIRECTORY

It imports nothing of Warren and prints a line for each of its `STEPS`. DIRECTORY is then a Hugging
Face model directory: config.json, generation_config.json, model.safetensors, tokenizer.json,
tokenizer_config.json and, if the model has one, chat_template.jinja.
"""

import sys
from pathlib import Path
from typing import Any

Reader = Any
"""`gguf.GGUFReader`, which is untyped."""

STEPS = ("imported", "weights read", "weights written", "tokenizer written")


def convert(gguf: Path, directory: Path) -> None:
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, AutoTokenizer

    reader = GGUFReader(gguf)
    _report("imported")
    source: dict[str, Any] = {
        "pretrained_model_name_or_path": str(gguf.parent),
        "gguf_file": gguf.name,
        "local_files_only": True,
    }
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=_dtype(reader))
    _report("weights read")
    _write_model(model, directory)
    _report("weights written")
    tokenizer = AutoTokenizer.from_pretrained(**source)
    _correct_tokenizer(tokenizer, reader)
    tokenizer.save_pretrained(directory)
    _report("tokenizer written")


def _dtype(reader: Reader) -> Any:
    """The torch dtype that holds the file's matrices: their own, or bfloat16 for quantized ones."""
    import torch

    kinds = {t.tensor_type.name for t in reader.tensors if len(t.shape) > 1}
    if kinds <= {"F32"}:
        return torch.float32
    return torch.float16 if kinds <= {"F32", "F16"} else torch.bfloat16


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
    """Correct the tokenizer from the file: transformers 5.17 uses SmolLM2's bos as its eos, and
    gives a byte-level vocabulary another kind's decoder."""
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
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
