"""A batch through the files and batches of a gateway, instead of the broker.

Each step is noted in the journal once the gateway has confirmed it, and can be repeated: parts that
were not noted are left out of the file, completing an upload again returns the same file, and a
second order of a file returns the same batch. A command that was killed therefore goes on where it
was, and neither uploads its file nor creates its batch twice.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from msgspec.structs import replace

from cli.batch.input_file import RemoteFile, report, worded
from cli.batch.journal import Journal, Remote
from cli.batch.progress import BatchProgress, BatchSummary, OnProgress
from cli.gateway_client import is_passing, lines_of, request_json
from gateway.intake.signer import KEY_HEADER
from shared.errors import InvalidRequest, NotFound, Overloaded, RequestError, Unavailable

_PART_BYTES = 8 << 20
_POLL_S = 0.5
_COMPLETION_TIMEOUT_S = 600.0
"""A gateway copies the parts of a file within its storage."""
_ENDED = ("completed", "failed", "expired", "cancelled")


def run_over_http(
    requests: Path,
    results: Path,
    client: httpx.Client,
    *,
    window: str = "24h",
    on_progress: OnProgress = lambda _: None,
) -> BatchSummary:
    """Answer every line of ``requests`` in ``results``, in the order of the input.

    The batch continues without this process. After an interruption or a crash, another call goes
    on with the same batch: the journal is in ``results`` + ".part". Raises `InvalidRequest` naming
    each bad line, if ``results`` exists, or if the batch has another input or is no longer kept;
    `Unavailable` if no gateway answers at the start; the errors of the gateway, and of a proxy
    before it; `OSError`.
    """
    began_at = time.monotonic()
    file = RemoteFile.check(requests)
    with Journal.open(results, file.digest, is_remote=True) as journal:
        run = RemoteRun(file, journal, client, on_progress)
        ending = journal.ending  # if an earlier run was killed after its last answer
        if len(journal) < len(file.custom_ids):
            ending = run.collect(window)
        journal.finish(name for name in file.custom_ids if name in journal)
        return BatchSummary(
            num_lines=len(journal),
            num_failed=journal.num_failed,
            num_tokens=0,
            elapsed_s=time.monotonic() - began_at,
            ending=ending,
            num_unexecuted=journal.num_unexecuted,
        )


class RemoteRun:
    """A run of a checked file, whose batch a gateway runs."""

    def __init__(
        self, file: RemoteFile, journal: Journal, client: httpx.Client, on_progress: OnProgress
    ) -> None:
        self._file = file
        self._journal = journal
        self._client = client
        self._on_progress = on_progress
        self._is_answered = False
        """Whether a gateway has answered this run. Later answers are waited for."""

    def collect(self, window: str) -> str:
        """Return once the answers to all lines are in the journal; returns how the batch ended."""
        try:
            batch = self._wait_ended(self._create_batch(window))
            ending: str = batch["status"]
            file_ids = [batch["output_file_id"], batch["error_file_id"]]
            if ending == "failed":
                self._journal.discard()
                raise InvalidRequest(_report(self._file.path, batch["errors"]["data"]))
            if file_ids == [None, None]:
                self._journal.discard()
                message = f"{batch['id']} was {ending} before it ran; run the command again"
                raise InvalidRequest(message)
            for file_id in file_ids:
                if file_id is not None:
                    self._download(file_id)
        except NotFound:
            remote = self._journal.remote
            raise InvalidRequest(
                f"the gateway no longer keeps {remote.batch_id or remote.file_id}; delete "
                f"{self._journal.name} to run the batch again"
            ) from None
        return ending

    def _create_batch(self, window: str) -> str:
        """Upload the file and create its batch, unless an earlier run has; returns its id."""
        journal = self._journal
        if not journal.remote.file_id:
            journal.note(Remote(file_id=self._upload(), window=window))
        if not journal.remote.batch_id:
            remote = journal.remote
            order = {
                "input_file_id": remote.file_id,
                "endpoint": self._file.endpoint,
                "completion_window": remote.window,
            }
            headers = {KEY_HEADER: f"warren-batch-{remote.file_id}"}
            batch = self._request("POST", "/v1/batches", json=order, headers=headers)
            journal.note(replace(remote, batch_id=batch["id"]))
        return journal.remote.batch_id

    def _upload(self) -> str:
        """Upload the file, or the rest of it; returns its id."""
        if self._journal.remote.upload_id:
            try:
                return self._complete_upload()
            except RequestError as error:
                if error.param != "upload_id":
                    raise
        # The first upload, or one that has expired since an earlier run.
        order = {
            "filename": self._file.path.name,
            "bytes": self._file.num_bytes,
            "mime_type": "application/jsonl",
            "purpose": "batch",
        }
        upload = self._request("POST", "/v1/uploads", json=order)
        self._journal.note(Remote(upload_id=upload["id"]))
        return self._complete_upload()

    def _complete_upload(self) -> str:
        """Upload the parts that are missing, and make a file of all; returns its id."""
        journal = self._journal
        path = f"/v1/uploads/{journal.remote.upload_id}"
        for part in self._parts(len(journal.remote.part_ids) * _PART_BYTES):
            answer = self._request("POST", f"{path}/parts", files={"data": ("part", part)})
            part_ids = (*journal.remote.part_ids, answer["id"])
            journal.note(replace(journal.remote, part_ids=part_ids))
        answer = self._request(
            "POST",
            f"{path}/complete",
            json={"part_ids": journal.remote.part_ids},
            timeout=_COMPLETION_TIMEOUT_S,
        )
        return str(answer["file"]["id"])

    def _parts(self, start: int) -> Iterator[bytes]:
        with self._file.path.open("rb") as file:
            file.seek(start)
            while part := file.read(_PART_BYTES):
                yield part

    def _wait_ended(self, batch_id: str) -> dict[str, Any]:
        """Wait until the batch has ended, also while no gateway answers."""
        while True:
            batch = self._request("GET", f"/v1/batches/{batch_id}")
            counts, status = batch["request_counts"], batch["status"]
            self._show(
                counts["completed"] + counts["failed"],
                counts["failed"],
                "" if status == "in_progress" else status,
            )
            if status in _ENDED:
                return batch
            time.sleep(_POLL_S)

    def _download(self, file_id: str) -> None:
        """Add the lines of a file to the journal, across interruptions."""
        start = 0
        while True:
            headers = {"range": f"bytes={start}-"} if start else {}
            url = f"/v1/files/{file_id}/content"
            try:
                with self._client.stream("GET", url, headers=headers) as response:
                    response.raise_for_status()
                    for line in lines_of(response):
                        self._journal.append(line)
                        start += len(line) + 1
                return self._journal.sync()
            except httpx.TransportError as error:
                self._wait(str(error))
            except httpx.HTTPStatusError as error:
                status = error.response.status_code
                if status == httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE:
                    return self._journal.sync()  # only its end was lost
                if status == httpx.codes.NOT_FOUND:
                    raise NotFound(f"{file_id} is no longer kept") from None
                if not is_passing(status):
                    raise InvalidRequest(f"{file_id} cannot be read: HTTP {status}") from None
                self._wait(f"HTTP {status}")

    def _request(self, method: str, path: str, **more: Any) -> dict[str, Any]:
        """Send a request until a gateway answers, or once if none has answered so far; returns the
        answer."""
        if self._is_answered and not self._journal.remote.batch_id:
            self._show(0, 0, "uploading")
        while True:
            try:
                answer: dict[str, Any] = request_json(self._client, method, path, **more)
            except (Unavailable, Overloaded) as error:
                if not self._is_answered:
                    raise
                self._wait(error.message)
            else:
                self._is_answered = True
                return answer

    def _wait(self, reason: str) -> None:
        self._show(len(self._journal), self._journal.num_failed, f"waiting: {reason}")
        time.sleep(_POLL_S)

    def _show(self, num_done: int, num_failed: int, stage: str) -> None:
        num_lines = len(self._file.custom_ids)
        self._on_progress(BatchProgress(num_lines, num_done, num_failed, 0, 0.0, stage))


def _report(path: Path, errors: list[dict[str, Any]]) -> str:
    """What the gateway says about a file that it refuses."""
    lines = [error for error in errors if error["line"] is not None]
    if not lines:
        return f"{path.name}: {errors[0]['message']}"
    problems = [worded(error["message"], error["line"], error["param"]) for error in lines]
    return report(path, problems, are_all=len(lines) == len(errors))
