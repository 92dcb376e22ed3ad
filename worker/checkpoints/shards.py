"""The index of a checkpoint in several files."""

from pathlib import Path

from msgspec import Struct

from shared.errors import StartupError
from shared.model_files import check_fields, read_json_object


class _Index(Struct):
    weight_map: dict[str, str]


def shard_names(directory: Path) -> list[str]:
    """The files that ``model.safetensors.index.json`` lists; empty if there is no index.

    The names are untrusted. Raises `StartupError` if the index is corrupt.
    """
    index = directory / "model.safetensors.index.json"
    content = read_json_object(index)
    if content is None:
        return []
    files = check_fields(content, _Index, index.name).weight_map
    if not files:
        raise StartupError(f"{index.name} does not list files: download it again")
    return sorted(set(files.values()))
