"""A batch through the files and batches of a gateway, instead of the broker."""

import hashlib
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import msgspec

from cli.batch.progress import BatchProgress, BatchSummary
from cli.gateway_client import asked
from shared.errors import InvalidRequest, NotFound, Unavailable

_POLL_S = 0.5
_ENDED = ("completed", "failed", "expired", "cancelled")
_MAX_SHOWN = 20


class _Url(msgspec.Struct):
    url: str


class _CustomId(msgspec.Struct):
    custom_id: str


def run_over_http(
    requests: Path,
    results: Path,
    client: httpx.Client,
    *,
    window: str = "24h",
    on_progress: Callable[[BatchProgress], None] = lambda _: None,
) -> BatchSummary:
    """Answer every line of ``requests`` in ``results``, in the order of the input.

    The batch continues without this process; another call waits for the same batch, whose id is in
    ``results`` + ".batch" with the digest of its input. Raises `InvalidRequest` naming each bad
    line, if ``results`` exists, or if the batch has another input or is no longer kept;
    `Unavailable` if no gateway answers at the start; the gateway's errors; `OSError`.
    """
    began_at = time.monotonic()
    note = results.with_name(f"{results.name}.batch")
    if results.exists():
        raise InvalidRequest(f"{results.name} exists already")
    with requests.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if not note.exists():
        batch_id = _order(requests, client, window)
        draft = note.with_name(f"{note.name}.draft")
        draft.write_text(f"{batch_id} {digest}")
        draft.replace(note)
    batch_id, _, digest_then = note.read_text().partition(" ")
    if digest_then != digest:
        raise InvalidRequest(f"{note.name} names the batch of another input; move it elsewhere")
    try:
        batch = _ended(client, batch_id, began_at, on_progress)
        if batch["status"] == "failed":
            note.unlink()
            raise InvalidRequest(_report(requests, batch["errors"]["data"]))
        num_lines = _merge(client, batch, requests, results)
    except NotFound:
        raise InvalidRequest(
            f"the gateway no longer keeps {batch_id}; delete {note.name} to run the batch again"
        ) from None
    note.unlink()
    return BatchSummary(
        num_lines=num_lines,
        num_failed=num_lines - batch["request_counts"]["completed"],
        num_tokens=0,
        elapsed_s=time.monotonic() - began_at,
    )


def _order(requests: Path, client: httpx.Client, window: str) -> str:
    with requests.open("rb") as file:
        text = next((line for line in file if line.strip()), b"")
        try:
            endpoint = msgspec.json.decode(text, type=_Url).url
        except msgspec.MsgspecError as error:
            raise InvalidRequest(f"{requests.name}: line 1: {error}") from None
        file.seek(0)
        form = {"data": {"purpose": "batch"}, "files": {"file": (requests.name, file)}}
        uploaded = asked(client, "POST", "/v1/files", **form).json()
    order = {
        "input_file_id": uploaded["id"],
        "endpoint": endpoint,
        "completion_window": window,
    }
    return str(asked(client, "POST", "/v1/batches", json=order).json()["id"])


def _ended(
    client: httpx.Client,
    batch_id: str,
    began_at: float,
    on_progress: Callable[[BatchProgress], None],
) -> dict[str, Any]:
    """Wait until the batch has ended, also while no gateway answers."""
    while True:
        with suppress(Unavailable):
            batch: dict[str, Any] = asked(client, "GET", f"/v1/batches/{batch_id}").json()
            counts = batch["request_counts"]
            num_done = counts["completed"] + counts["failed"]
            on_progress(BatchProgress(counts["total"], num_done, counts["failed"], 0, 0.0))
            if batch["status"] in _ENDED:
                return batch
        time.sleep(_POLL_S)


def _merge(client: httpx.Client, batch: dict[str, Any], requests: Path, results: Path) -> int:
    """Write the answers and the errors in the order of the input; returns how many there are."""
    draft = results.with_name(f"{results.name}.draft")
    answers = results.with_name(f"{results.name}.answers")
    spans: dict[str, tuple[int, int]] = {}
    try:
        with answers.open("w+b") as unordered, draft.open("wb") as ordered:
            for file_id in (batch["output_file_id"], batch["error_file_id"]):
                if file_id is not None:
                    _download(client, file_id, unordered)
            unordered.seek(0)
            start = 0
            for line in unordered:
                spans[msgspec.json.decode(line, type=_CustomId).custom_id] = start, len(line)
                start += len(line)
            num_lines = 0
            with requests.open("rb") as lines:
                for line in lines:
                    if not line.strip():
                        continue
                    span = spans.get(msgspec.json.decode(line, type=_CustomId).custom_id)
                    if span is not None:  # a batch cancelled before its check has no answers
                        unordered.seek(span[0])
                        ordered.write(unordered.read(span[1]))
                        num_lines += 1
            ordered.flush()
            os.fsync(ordered.fileno())
        draft.replace(results)
    finally:
        answers.unlink(missing_ok=True)
    return num_lines


def _download(client: httpx.Client, file_id: str, file: Any) -> None:
    """Append a file, across interruptions."""
    start = file.tell()
    while True:
        file.seek(start)
        file.truncate()
        try:
            with client.stream("GET", f"/v1/files/{file_id}/content") as response:
                response.raise_for_status()
                for part in response.iter_bytes():
                    file.write(part)
        except httpx.TransportError:
            time.sleep(_POLL_S)
        except httpx.HTTPStatusError as error:
            status = error.response.status_code
            if status == httpx.codes.NOT_FOUND:
                raise NotFound(f"{file_id} is no longer kept") from None
            if status < 500:
                raise InvalidRequest(f"{file_id} cannot be read: HTTP {status}") from None
            time.sleep(_POLL_S)
        else:
            return


def _report(path: Path, errors: list[dict[str, Any]]) -> str:
    shown = [_problem(error) for error in errors[:_MAX_SHOWN]]
    more = [f"and {len(errors) - len(shown)} more"] if len(errors) > len(shown) else []
    return "\n".join([f"{path.name}: the batch failed", *shown, *more])


def _problem(error: dict[str, Any]) -> str:
    place = f"line {error['line']}: " if error["line"] is not None else ""
    return f"{place}{error['message']}"
