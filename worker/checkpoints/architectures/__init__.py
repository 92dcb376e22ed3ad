"""The architectures of GGUF files that are read as they are: a module for each.

A module has an `interface.Architecture` with the name ``ARCHITECTURE``. It is called like the
architecture, with ``_`` for every other sign. `architecture_of` finds it, and `config_of` makes a
config.json of a file's metadata.
"""

import importlib
import pkgutil
import re
from collections.abc import Mapping, Sequence
from typing import Any

from shared.errors import StartupError
from worker.checkpoints.architectures.interface import Architecture, GgufModel
from worker.checkpoints.gguf_file import GgufHeader

_MODULES = tuple(
    sorted(one.name for one in pkgutil.iter_modules(__path__) if one.name != "interface")
)


def architectures() -> list[Architecture]:
    """All architectures."""
    return [_of_module(module) for module in _MODULES]


def architecture_of(name: str) -> Architecture | None:
    """The architecture that llama.cpp calls like this; None if files of it are not read."""
    module = re.sub(r"\W", "_", name)
    return _of_module(module) if module in _MODULES else None


def _of_module(name: str) -> Architecture:
    found: Architecture = importlib.import_module(f"{__name__}.{name}").ARCHITECTURE
    return found


def config_of(headers: Sequence[GgufHeader]) -> Mapping[str, Any] | None:
    """The config.json of a model in files with these headers; None: transformers makes it. Raises
    `StartupError`."""
    model = GgufModel(headers)
    architecture = architecture_of(model.architecture)
    if architecture is None:
        raise StartupError(
            f"GGUF files of {model.architecture} are not read, only those of "
            f"{', '.join(one.name for one in architectures())}"
        )
    return architecture.read(model)
