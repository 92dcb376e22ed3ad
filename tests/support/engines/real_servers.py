"""The real servers of other engines, where the environment names them."""

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

NUM_SLOTS = 4


class RealEngine(NamedTuple):
    """The program of a server, which `command` starts."""

    name: str
    """The value of ``--engine``."""
    program: str
    server: str
    """The kind of the server, which another adapter may use."""

    @property
    def label(self) -> str:
        return self.name if self.name == self.server else f"{self.name}-of-{self.server}"

    def command(self, model: Path, port: int, *, max_seq_len: int, num_slots: int) -> str:
        """The command line that serves a model directory with a GGUF file."""
        words = _WORDS[self.server](model, max_seq_len, num_slots)
        return shlex.join([self.program, *words, "--port", str(port)])

    def options(
        self, model: Path, port: int, *, max_seq_len: int, num_slots: int = NUM_SLOTS
    ) -> Mapping[str, str]:
        """The settings of a worker that starts the server."""
        command = self.command(model, port, max_seq_len=max_seq_len, num_slots=num_slots)
        return {
            "engine": self.name,
            "engine_url": f"http://127.0.0.1:{port}",
            "engine_command": command,
        }


def real_engines() -> list[RealEngine]:
    """The servers whose programs ``WARREN_TEST_LLAMA_SERVER`` and ``WARREN_TEST_VLLM`` name, as
    ``make engines`` does."""
    programs = {name: os.environ.get(variable) for name, variable in _VARIABLES.items()}
    return [RealEngine(name, program, name) for name, program in programs.items() if program]


def real_text_engines() -> list[RealEngine]:
    """The same servers, used as servers that return text alone."""
    return [engine._replace(name="openai") for engine in real_engines()]


def write_unpacked(packed: Path, unpacked: Path) -> None:
    """Write a GGUF file with the weights of another file as float16: llama.cpp also rounds the
    inputs of packed weights, and a small model then answers less well."""
    from gguf import GGUFReader, GGUFValueType, GGUFWriter
    from gguf.quants import dequantize

    reader = GGUFReader(packed)
    architecture = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(unpacked, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        kind, *_ = field.types
        inner = field.types[-1] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, inner)
    for tensor in reader.tensors:
        weights = dequantize(tensor.data, tensor.tensor_type)
        kept = np.float16 if len(tensor.shape) > 1 else np.float32
        writer.add_tensor(tensor.name, weights.astype(kept))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _llama_server(model: Path, max_seq_len: int, num_slots: int) -> Sequence[str]:
    (gguf,) = model.glob("*.gguf")
    room = ("--parallel", str(num_slots), "--ctx-size", str(num_slots * max_seq_len))
    return ["--model", str(gguf), *room, "--threads", "1", "--no-webui", "--log-verbosity", "1"]


def _vllm(model: Path, max_seq_len: int, num_slots: int) -> Sequence[str]:
    room = ("--max-model-len", str(max_seq_len), "--max-num-seqs", str(num_slots))
    return ["serve", str(model), "--dtype", "float32", *room, "--enforce-eager"]


_WORDS: Mapping[str, Callable[[Path, int, int], Sequence[str]]] = {
    "llama-server": _llama_server,
    "vllm": _vllm,
}
_VARIABLES = {"llama-server": "WARREN_TEST_LLAMA_SERVER", "vllm": "WARREN_TEST_VLLM"}
