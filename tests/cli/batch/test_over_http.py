"""``warren batch --url`` and ``warren batches``, with a gateway in a thread."""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from cli.batch.over_http import run_over_http
from cli.batch.progress import BatchProgress
from cli.gateway_client import connect
from cli.main import app
from shared.errors import InvalidRequest, Unavailable
from tests.support.deployment.processes import free_port
from tests.support.gateway.serving import served
from tests.support.workers.batch_files import chat_line, chat_text, read_lines, write_lines
from tests.support.workers.scripted_worker import MODEL


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served() as url:
        yield url


def batch_ids(client: httpx.Client) -> set[str]:
    listed = client.get("/v1/batches", params={"limit": 100}).json()["data"]
    return {batch["id"] for batch in listed}


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


def test_bad_lines_are_named(url: str, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", chat_line("a", model=MODEL, temperature=9))

    with connect(url) as client, pytest.raises(InvalidRequest, match="line 1: temperature"):
        run_over_http(source, tmp_path / "out.jsonl", client)


def test_an_interrupted_command_waits_for_the_same_batch(url: str, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", chat_line("a", model=MODEL))
    results = tmp_path / "out.jsonl"

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    with connect(url) as client:
        before = batch_ids(client)
        with pytest.raises(KeyboardInterrupt):
            run_over_http(source, results, client, on_progress=interrupt)
        batch_id = (tmp_path / "out.jsonl.batch").read_text().split()[0]
        run_over_http(source, results, client)
        created = batch_ids(client) - before

    assert created == {batch_id}
    assert len(read_lines(results)) == 1


@pytest.fixture
def note(url: str, tmp_path: Path) -> Path:
    """What an interrupted command leaves beside out.jsonl."""
    source = write_lines(tmp_path / "in.jsonl", chat_line("a", content="old", model=MODEL))

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    with connect(url) as client, pytest.raises(KeyboardInterrupt):
        run_over_http(source, tmp_path / "out.jsonl", client, on_progress=interrupt)
    return tmp_path / "out.jsonl.batch"


def test_the_answers_to_another_input_are_not_taken(url: str, tmp_path: Path, note: Path) -> None:
    changed = write_lines(tmp_path / "in.jsonl", chat_line("a", content="new", model=MODEL))
    results = tmp_path / "out.jsonl"

    with connect(url) as client:
        with pytest.raises(InvalidRequest, match=f"{note.name} names the batch of another input"):
            run_over_http(changed, results, client)
        assert not results.exists()
        note.unlink()
        run_over_http(changed, results, client)

    assert [chat_text(line) for line in read_lines(results)] == ["new"]


def test_a_batch_that_is_no_longer_kept_is_named_with_its_file(tmp_path: Path, note: Path) -> None:
    source, results = tmp_path / "in.jsonl", tmp_path / "out.jsonl"

    with (
        served() as another,
        connect(another) as client,
        pytest.raises(InvalidRequest, match=f"no longer keeps .*delete {note.name}"),
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
    assert "completed" in listed.stdout
    assert json.loads(shown.stdout)["id"] == batch_id
    assert isinstance(cancelled.exception, InvalidRequest)
