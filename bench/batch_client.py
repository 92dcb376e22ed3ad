"""A client of files and batches, which streams its files from disk."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import httpx

URL = "/v1/chat/completions"
ENDED = ("completed", "failed", "expired", "cancelled")
_TIMEOUT_S = 600
_POLL_S = 0.1


class BatchClient:
    """A client of a gateway's batches. Every method raises `httpx.HTTPError`."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def upload(self, path: Path) -> str:
        """Returns the id of the file."""
        with path.open("rb") as content:
            form = {"data": {"purpose": "batch"}, "files": {"file": (path.name, content)}}
            return str(self._posted("/v1/files", **form)["id"])

    def run(self, file_id: str) -> Mapping[str, Any]:
        """Create the batch of a file, and return it once it has ended."""
        order = {"input_file_id": file_id, "endpoint": URL, "completion_window": "24h"}
        batch = self._posted("/v1/batches", json=order)
        while batch["status"] not in ENDED:
            time.sleep(_POLL_S)
            batch = self._http.get(f"/v1/batches/{batch['id']}").raise_for_status().json()
        return batch

    def _posted(self, path: str, **body: Any) -> dict[str, Any]:
        answer: dict[str, Any] = self._http.post(path, **body).raise_for_status().json()
        return answer
