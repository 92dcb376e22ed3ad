"""The real servers of other engines, where the environment names them."""

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

NUM_SLOTS = 4


class RealEngine(NamedTuple):
    """The program of a server, which `command` starts."""

    name: str
    """The value of ``--engine``."""
    program: str

    def command(self, model: Path, port: int, *, max_seq_len: int, num_slots: int) -> str:
        """The command line that serves a model directory with a GGUF file."""
        words = _WORDS[self.name](model, max_seq_len, num_slots)
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
    return [RealEngine(name, program) for name, program in programs.items() if program]


def _llama_server(model: Path, max_seq_len: int, num_slots: int) -> Sequence[str]:
    (gguf,) = model.glob("*.gguf")
    room = ("--parallel", str(num_slots), "--ctx-size", str(num_slots * max_seq_len))
    return ["--model", str(gguf), *room, "--threads", "1", "--no-webui", "--log-verbosity", "1"]


def _vllm(model: Path, max_seq_len: int, num_slots: int) -> Sequence[str]:
    room = ("--max-model-len", str(max_seq_len), "--max-num-seqs", str(num_slots))
    return ["serve", str(model), "--dtype", "float32", *room, "--enable-prefix-caching"]


_WORDS: Mapping[str, Callable[[Path, int, int], Sequence[str]]] = {
    "llama-server": _llama_server,
    "vllm": _vllm,
}
_VARIABLES = {"llama-server": "WARREN_TEST_LLAMA_SERVER", "vllm": "WARREN_TEST_VLLM"}
