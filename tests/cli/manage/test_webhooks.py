"""``warren webhooks``, with a gateway in a thread."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from cli.main import app
from shared.errors import NotFound
from tests.support.gateway.serving import served


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served(webhook_networks="127.0.0.0/8") as url:
        yield url


def run(url: str, *arguments: str) -> str:
    command = ["webhooks", *arguments, "--url", url]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def shown(url: str, *arguments: str) -> Any:
    return json.loads(run(url, *arguments))


def test_a_webhook_is_added_tested_rotated_and_removed(url: str) -> None:
    endpoint = f"{url}/live"  # which takes no POST

    made = shown(url, "add", endpoint, "--tenant", "acme", "--event", "batch.failed")
    listed = run(url, "list", "--tenant", "acme")
    tested = shown(url, "test", made["id"])
    rotated = shown(url, "rotate", made["id"], "--keep")
    removed = shown(url, "remove", made["id"])

    assert listed.split() == [made["id"], "acme", endpoint, "batch.failed"]
    assert (tested["status_code"], removed["deleted"]) == (405, True)
    assert rotated["signing_secret"] != made["signing_secret"]
    result = CliRunner().invoke(app, ["webhooks", "list", "--tenant", "acme", "--url", url])
    assert (result.stdout, result.stderr) == ("", "No webhooks.\n")


def test_dead_deliveries_are_listed_and_a_retry_names_one(url: str) -> None:
    assert run(url, "dead") == ""

    with pytest.raises(NotFound, match="delivery_none"):
        run(url, "retry", "delivery_none")
