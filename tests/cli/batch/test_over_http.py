"""``warren batch --url`` and ``warren batches``, with a gateway in a thread."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from cli.batch import over_http
from cli.batch.input_file import RemoteFile
from cli.batch.journal import Journal, Remote, noted
from cli.batch.over_http import run_over_http
from cli.batch.progress import BatchProgress
from cli.gateway_client import connect, request
from cli.main import app
from shared.errors import InvalidRequest, RequestError, Unavailable
from tests.support.deployment.processes import free_port
from tests.support.gateway.serving import served
from tests.support.workers.batch_files import chat_line, chat_text, read_lines, write_lines
from tests.support.workers.scripted_worker import (
    MODEL,
    ScriptedJob,
    repeat_the_prompt,
    start_only,
)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served() as url:
        yield url


def batch_ids(client: httpx.Client) -> set[str]:
    listed = client.get("/v1/batches", params={"limit": 100}).json()["data"]
    return {batch["id"] for batch in listed}


def file_ids(client: httpx.Client) -> set[str]:
    """The input files."""
    listed = client.get("/v1/files", params={"purpose": "batch"}).json()["data"]
    return {file["id"] for file in listed}


def test_answers_are_in_the_order_of_the_input(url: str, tmp_path: Path) -> None:
    lines = [chat_line(str(k), content=f"number {k}", model=MODEL) for k in range(30)]
    source, results = write_lines(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl"
    progress: list[BatchProgress] = []

    with connect(url) as client:
        summary = run_over_http(source, results, client, on_progress=progress.append)

    assert (summary.num_lines, summary.num_failed) == (30, 0)
    assert [chat_text(line) for line in read_lines(results)] == [f"number {k}" for k in range(30)]
    assert progress[-1].num_done == 30
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_bad_lines_are_named_before_anything_is_uploaded(tmp_path: Path) -> None:
    lines = [
        chat_line("a", model=MODEL),
        chat_line("a", model=MODEL),
        {**chat_line("b", model=MODEL), "url": "/v1/completions"},
        chat_line("c", model=MODEL, temperature=9),
        {"custom_id": "d", "method": "POST", "url": "/v1/chat/completions"},
        chat_line("e", model=MODEL, stream=True),
    ]
    source = write_lines(tmp_path / "in.jsonl", *lines)
    nowhere = f"http://127.0.0.1:{free_port()}"

    with connect(nowhere) as client, pytest.raises(InvalidRequest) as refused:
        run_over_http(source, tmp_path / "out.jsonl", client)

    assert refused.value.message.splitlines() == [
        "in.jsonl: 5 bad lines",
        "line 2: The custom_id 'a' is not unique.",
        "line 3: The URL is not /v1/chat/completions, which is the batch's endpoint.",
        "line 4: temperature: expected `float` <= 2.0",
        "line 5: Object missing required field `body`",
        "line 6: stream: not supported in a batch.",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_a_line_has_the_same_problem_here_and_at_the_gateway(url: str, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", chat_line("a", model=MODEL, temperature=9, n=0))
    with connect(url) as client, pytest.raises(InvalidRequest) as here:
        run_over_http(source, tmp_path / "out.jsonl", client)

    with connect(url) as client, source.open("rb") as content:
        form = {"data": {"purpose": "batch"}, "files": {"file": content}}
        order = {
            "input_file_id": request(client, "POST", "/v1/files", **form).json()["id"],
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
        }
        batch = request(client, "POST", "/v1/batches", json=order).json()
        while batch["errors"] is None:
            batch = request(client, "GET", f"/v1/batches/{batch['id']}").json()

    (error,) = batch["errors"]["data"]
    assert here.value.message.splitlines()[1] == f"line 1: {error['message']}"


def test_what_only_the_gateway_can_check_is_named_in_the_same_form(
    url: str, tmp_path: Path
) -> None:
    lines = [chat_line("a", model=MODEL), chat_line("b", model="unknown")]
    source = write_lines(tmp_path / "in.jsonl", *lines)

    with connect(url) as client, pytest.raises(InvalidRequest) as refused:
        run_over_http(source, tmp_path / "out.jsonl", client)

    head, problem = refused.value.message.splitlines()
    assert head == "in.jsonl: 1 bad line"
    assert problem.startswith("line 2: ")
    assert "model" in problem
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


class Killed(BaseException):
    """The command was killed."""


class KilledAt(httpx.HTTPTransport):
    """Ends the command at the first request to a path, before or after the gateway has it; if the
    file has several parts, at the second request."""

    def __init__(self, step: str, moment: str) -> None:
        super().__init__()
        self._step, self._moment = re.compile(step), moment
        self._num_left = 2 if "parts" in step else 1

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self._num_left -= self._step.fullmatch(f"{request.method} {request.url.path}") is not None
        if self._num_left == 0 and self._moment == "before":
            raise Killed
        response = super().handle_request(request)
        if self._num_left == 0:
            response.read()
            raise Killed
        return response


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize(
    "step",
    [
        "POST /v1/uploads",
        "POST /v1/uploads/.*/parts",
        "POST /v1/uploads/.*/complete",
        "POST /v1/batches",
        "GET /v1/batches/.*",
        "GET /v1/files/.*/content",
    ],
)
def test_wherever_the_command_is_killed_it_goes_on_with_the_same_batch(
    url: str, step: str, moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(over_http, "_PART_BYTES", 1000)
    lines = [chat_line(str(k), content=f"number {k}", model=MODEL) for k in range(12)]
    source, results = write_lines(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl"
    with connect(url) as client:
        before = batch_ids(client), file_ids(client)
        with connect(url, transport=KilledAt(step, moment)) as mortal, pytest.raises(Killed):
            run_over_http(source, results, mortal)

        run_over_http(source, results, client)
        made = batch_ids(client) - before[0], file_ids(client) - before[1]

    assert [len(ids) for ids in made] == [1, 1]
    assert [chat_text(line) for line in read_lines(results)] == [f"number {k}" for k in range(12)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_an_upload_that_has_expired_meanwhile_is_begun_again(url: str, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", chat_line("a", model=MODEL))
    results = tmp_path / "out.jsonl"
    with Journal.open(results, RemoteFile.check(source).digest, is_remote=True) as journal:
        journal.note(Remote(upload_id="upload_of_yesterday", part_ids=("part_of_yesterday",)))

    with connect(url) as client:
        run_over_http(source, results, client)

    assert len(read_lines(results)) == 1


def test_a_command_that_has_all_answers_needs_no_gateway(url: str, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", chat_line("a", model=MODEL))
    results = tmp_path / "out.jsonl"
    with connect(url) as client:
        run_over_http(source, results, client)
    (answer,) = results.read_bytes().splitlines()
    results.unlink()
    with Journal.open(results, RemoteFile.check(source).digest, is_remote=True) as journal:
        journal.append(answer)
    results.write_text("of the run that was killed between its last steps")

    with connect(f"http://127.0.0.1:{free_port()}") as client:
        run_over_http(source, results, client)

    assert [path.name for path in sorted(tmp_path.iterdir())] == ["in.jsonl", "out.jsonl"]
    assert results.read_bytes() == answer + b"\n"


class Flaky(httpx.HTTPTransport):
    """Loses the connection at every second request, and in the middle of every first answer."""

    def __init__(self) -> None:
        super().__init__()
        self._num_asked = 0

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self._num_asked += 1
        if self._num_asked % 2 == 0:
            raise httpx.ReadError("Connection reset by peer")
        response = super().handle_request(request)
        is_whole = "range" in request.headers or not request.url.path.endswith("/content")
        if is_whole:
            return response
        half = response.read()[:3000]
        return httpx.Response(response.status_code, stream=Cut(half), request=request)


class Cut(httpx.SyncByteStream):
    """A body whose connection is lost after some bytes."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def __iter__(self) -> Iterator[bytes]:
        yield self._content
        raise httpx.ReadError("Connection reset by peer")


def test_lost_connections_are_waited_out(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(over_http, "_POLL_S", 0.01)
    lines = [chat_line(str(k), content=f"number {k}", model=MODEL) for k in range(30)]
    source, results = write_lines(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl"
    stages: list[str] = []

    with connect(url, transport=Flaky()) as client:
        run_over_http(source, results, client, on_progress=lambda now: stages.append(now.stage))

    assert [chat_text(line) for line in read_lines(results)] == [f"number {k}" for k in range(30)]
    assert any(stage.startswith("waiting: ") for stage in stages)


class Proxied(httpx.HTTPTransport):
    """Answers every second request of a kind with the page of a proxy."""

    def __init__(self, kind: str, status: int) -> None:
        super().__init__()
        self._kind, self._status = re.compile(kind), status
        self._num_asked = 0

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if self._kind.fullmatch(f"{request.method} {request.url.path}"):
            self._num_asked += 1
            if self._num_asked % 2:
                return httpx.Response(self._status, html="<h1>proxy</h1>", request=request)
        return super().handle_request(request)


def test_what_a_proxy_refuses_for_good_is_not_waited_for(url: str, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", chat_line("a", model=MODEL))
    transport = Proxied("POST /v1/uploads/.*/parts", 413)

    def show(progress: BatchProgress) -> None:
        assert not progress.stage.startswith("waiting")

    with (
        connect(url, transport=transport) as client,
        pytest.raises(RequestError, match=f"HTTP 413 from {url}"),
    ):
        run_over_http(source, tmp_path / "out.jsonl", client, on_progress=show)


@pytest.mark.parametrize("status", [408, 425, 429, 502])
def test_what_a_proxy_may_answer_later_is_waited_for(
    url: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(over_http, "_POLL_S", 0.01)
    source = write_lines(tmp_path / "in.jsonl", chat_line("a", model=MODEL))
    transport = Proxied("POST /v1/uploads/.*/parts|GET /v1/files/.*/content", status)

    with connect(url, transport=transport) as client:
        summary = run_over_http(source, tmp_path / "out.jsonl", client)

    assert (summary.num_lines, summary.num_failed) == (1, 0)


@pytest.fixture
def part(url: str, tmp_path: Path) -> Path:
    """What an interrupted command leaves beside out.jsonl."""
    source = write_lines(tmp_path / "in.jsonl", chat_line("a", content="old", model=MODEL))

    def interrupt(progress: BatchProgress) -> None:
        if progress.stage != "uploading":
            raise KeyboardInterrupt

    with connect(url) as client, pytest.raises(KeyboardInterrupt):
        run_over_http(source, tmp_path / "out.jsonl", client, on_progress=interrupt)
    return tmp_path / "out.jsonl.part"


def test_the_answers_to_another_input_are_not_taken(url: str, tmp_path: Path, part: Path) -> None:
    changed = write_lines(tmp_path / "in.jsonl", chat_line("a", content="new", model=MODEL))
    results = tmp_path / "out.jsonl"

    with connect(url) as client:
        with pytest.raises(InvalidRequest, match=f"{part.name} is of a run with another input"):
            run_over_http(changed, results, client)
        assert not results.exists()
        part.unlink()
        run_over_http(changed, results, client)

    assert [chat_text(line) for line in read_lines(results)] == ["new"]


def test_a_batch_that_is_no_longer_kept_is_named_with_its_file(tmp_path: Path, part: Path) -> None:
    source, results = tmp_path / "in.jsonl", tmp_path / "out.jsonl"

    with (
        served() as another,
        connect(another) as client,
        pytest.raises(InvalidRequest, match=f"no longer keeps batch_.*delete {part.name}"),
    ):
        run_over_http(source, results, client)


def test_two_commands_do_not_share_a_batch(url: str, tmp_path: Path, part: Path) -> None:
    source, results = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    digest = RemoteFile.check(source).digest

    with (
        Journal.open(results, digest, is_remote=True),
        connect(url) as client,
        pytest.raises(InvalidRequest, match="another run is writing"),
    ):
        run_over_http(source, results, client)


def test_existing_results_are_kept(url: str, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", chat_line("a", model=MODEL))
    (tmp_path / "out.jsonl").write_text("kept")

    with connect(url) as client, pytest.raises(InvalidRequest, match="exists"):
        run_over_http(source, tmp_path / "out.jsonl", client)


def test_a_gateway_that_does_not_answer_is_named(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", chat_line("a", model=MODEL))
    url = f"http://127.0.0.1:{free_port()}"

    with connect(url) as client, pytest.raises(Unavailable, match=url):
        run_over_http(source, tmp_path / "out.jsonl", client)


def test_a_cancelled_batch_leaves_its_answers_and_an_exit_code(tmp_path: Path) -> None:
    """The worker answers only requests for one token."""

    async def finish_one(job: ScriptedJob) -> None:
        await (repeat_the_prompt if job.job.sampling.max_tokens == 1 else start_only)(job)

    lines = [chat_line("late", model=MODEL), chat_line("done", model=MODEL, max_tokens=1)]
    source, results = write_lines(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl"

    def interrupt(progress: BatchProgress) -> None:
        if progress.num_done == 1:
            raise KeyboardInterrupt

    with served(script=finish_one) as url:
        with connect(url) as client, pytest.raises(KeyboardInterrupt):
            run_over_http(source, results, client, on_progress=interrupt)
        batch_id = noted(results).batch_id
        CliRunner().invoke(app, ["batches", "cancel", batch_id, "--url", url])
        ended = CliRunner().invoke(app, ["batch", str(source), str(results), "--url", url])
        listed = CliRunner().invoke(app, ["batches", "list", "--url", url])

    assert ended.exit_code == 1
    assert "0 failed, 1 cancelled, " in ended.stderr
    assert listed.stdout.endswith("1/2, 0 failed, 1 cancelled\n")
    late, done = read_lines(results)
    assert late["error"]["code"] == "batch_cancelled"
    assert chat_text(done) == "hello"


def test_batches_are_listed_shown_and_cancelled(url: str, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", chat_line("a", model=MODEL))
    run = CliRunner().invoke
    arguments = ["batch", str(source), str(tmp_path / "out.jsonl"), "--url", url]

    answered = run(app, arguments, catch_exceptions=False)
    listed = run(app, ["batches", "list", "--url", url, "--limit", "1"], catch_exceptions=False)
    batch_id = listed.stdout.split()[0]
    shown = run(app, ["batches", "show", batch_id, "--url", url], catch_exceptions=False)
    cancelled = run(app, ["batches", "cancel", batch_id, "--url", url])

    assert answered.exit_code == 0
    assert "1/1" in answered.stderr
    assert "completed" in listed.stdout
    assert json.loads(shown.stdout)["id"] == batch_id
    assert isinstance(cancelled.exception, InvalidRequest)
