"""The index of a checkpoint in several files."""

import json
from pathlib import Path

from shared.errors import StartupError


def shard_names(directory: Path) -> list[str]:
    """The files that ``model.safetensors.index.json`` lists; empty if there is no index.

    The names are untrusted. Raises `StartupError` if the index is corrupt.
    """
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        return []
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise StartupError(f"{index.name} is corrupt: {error}") from error
    if not names or not all(isinstance(name, str) for name in names):
        raise StartupError(f"{index.name} is corrupt: it does not list files")
    return names
