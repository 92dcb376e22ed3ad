"""Snapshots of models on the Hugging Face Hub."""

from pathlib import Path
from typing import Any

from shared.errors import StartupError
from shared.proxies import proxy_of
from worker.checkpoints.cache import OnStageProgress

_HUB = "https://huggingface.co"
_ALLOWED = ["*.safetensors", "*.json", "*.jinja"]
# Consolidated files and files in subfolders are the same model in other formats, except for
# 1_Pooling/config.json and additional_chat_templates/*.jinja. Patterns have no exceptions, so all
# folders whose names end in g or s are kept, and in them all JSON files whose names end in g.
_IGNORED = ["*[!gs]/*", "*/*[!g].json", "*/*.safetensors", "consolidated*"]


def snapshot(model: str, progress: OnStageProgress) -> Path:
    """The local copy of ``org/name``, downloaded or updated if the hub can be reached.

    ``org/name@revision`` names a commit, a tag or a branch instead of ``main``. Without a
    connection, or with HF_HUB_OFFLINE set, the hub's local cache is used. Raises `StartupError`.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    proxy_of(_HUB)  # a proxy that cannot be used is an error of the environment, not of the hub
    repository, _, revision = model.partition("@")
    try:
        return Path(
            snapshot_download(
                repository,
                revision=revision or None,
                allow_patterns=_ALLOWED,
                ignore_patterns=_IGNORED,
                tqdm_class=_reporting(progress),
            )
        )
    except GatedRepoError as error:
        raise StartupError(
            f"{repository} requires you to accept its license: do so on the hub, then set HF_TOKEN"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise StartupError(
            f"there is no model {repository} on the hub, or it needs HF_TOKEN, and no such folder"
        ) from error
    except RevisionNotFoundError as error:
        raise StartupError(f"{repository} has no revision {revision} on the hub") from error
    except LocalEntryNotFoundError as error:
        raise StartupError(
            f"{model} is not in the hub's cache, and the hub cannot be reached: {_cause(error)}"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise StartupError(f"{model} could not be downloaded: {error}") from error


def _cause(error: BaseException) -> str:
    """Why a request failed: the message of the first error, which the others only passed on."""
    while (earlier := error.__cause__ or error.__context__) is not None:
        error = earlier
    return str(error) or type(error).__name__


def _reporting(progress: OnStageProgress) -> Any:
    """A progress bar class that draws nothing and reports the downloaded bytes."""
    from huggingface_hub.utils.tqdm import tqdm

    class Report(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            self._counts_bytes = options.get("unit") == "B"
            super().__init__(*args, **options | {"disable": True})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            if self._counts_bytes and self.total:
                progress("download", int(self.n), int(self.total))

    return Report
