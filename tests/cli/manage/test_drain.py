"""``warren drain`` against a real gateway."""

import json
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner, Result

from cli.main import app
from cli.manage.drain import found
from shared.errors import InvalidRequest
from tests.support.gateway.serving import served

ONE, OTHER = "3f9c2a71d0b84e55a8f6e1c2b3d4f5a6", "3f9cffffd0b84e55a8f6e1c2b3d4f5a6"
WORKERS = [{"id": ONE, "model": "smollm2"}, {"id": OTHER, "model": "qwen3"}]


@pytest.fixture
def url() -> Iterator[str]:
    with served() as url:
        yield url


def drain(url: str, worker: str, *options: str) -> Result:
    command = ["drain", worker, "--url", url, *options]
    return CliRunner().invoke(app, command, catch_exceptions=True)


def worker_of(url: str) -> str:
    status = CliRunner().invoke(app, ["status", "--url", url, "--json"], catch_exceptions=False)
    (worker,) = json.loads(status.stdout)["workers"]
    return str(worker["id"])


@pytest.mark.parametrize("options", [[], ["--immediate"]])
def test_a_worker_is_drained_by_the_beginning_of_its_id(url: str, options: list[str]) -> None:
    worker = worker_of(url)

    done = drain(url, worker[:8], *options)

    assert done.exit_code == 0, done.output
    assert done.stdout == f"{worker} is draining\n"


def test_an_unknown_worker_is_answered_with_the_known_ones(url: str) -> None:
    worker = worker_of(url)

    done = drain(url, "nobody")

    assert done.exit_code == 1
    assert "there is no worker nobody" in str(done.exception)
    assert worker in str(done.exception)


@pytest.mark.parametrize("name", [ONE, f"worker.{ONE}", ONE[:8], f"worker.{ONE[:5]}"])
def test_a_worker_has_several_names(name: str) -> None:
    assert found(name, WORKERS) == ONE


@pytest.mark.parametrize("name", ["3f9c", "3f9"])
def test_what_two_workers_share_names_neither(name: str) -> None:
    with pytest.raises(InvalidRequest, match="too short to name one worker") as refused:
        found(name, WORKERS)

    assert f"{ONE}  smollm2" in refused.value.message
    assert f"{OTHER}  qwen3" in refused.value.message


def test_one_character_names_no_worker() -> None:
    with pytest.raises(InvalidRequest, match="3 is too short"):
        found("3", WORKERS[:1])


@pytest.mark.parametrize("name", ["", "worker."])
def test_an_empty_id_is_answered_with_the_known_ones(name: str) -> None:
    with pytest.raises(InvalidRequest, match="the id of the worker is empty") as refused:
        found(name, WORKERS)

    assert f"{ONE}  smollm2" in refused.value.message


def test_a_slip_is_answered_with_what_was_meant() -> None:
    with pytest.raises(InvalidRequest, match=r"no worker 3f9c2a72: did you mean 3f9c2a71\?"):
        found("3f9c2a72", WORKERS)


def test_without_workers_nothing_is_suggested() -> None:
    with pytest.raises(InvalidRequest, match="has heard of none"):
        found("3f9c2a71", [])
