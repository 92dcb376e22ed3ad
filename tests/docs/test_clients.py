"""The table of clients shows what was stored of their runs."""

import json

import pytest

from docs.site.clients import DEPLOYMENTS, RESULTS, client_table, row
from tests.clients import deployments, results
from tests.clients.catalog import CLIENTS

RUN = {"version": "1.2", "serve": {"chat": "ok", "tools": "failed"}, "rabbitmq": {"chat": "ok"}}


def test_every_client_has_a_row() -> None:
    stored = json.loads(RESULTS.read_text())

    assert set(stored) == set(CLIENTS)
    assert client_table().count("\n") == len(CLIENTS) + 1


@pytest.mark.parametrize("client", ["litellm", "openai", "openai-node"])
@pytest.mark.parametrize("deployment", DEPLOYMENTS)
def test_clients_with_batches_have_run_them(client: str, deployment: str) -> None:
    run = json.loads(RESULTS.read_text())[client][deployment]

    of_batches = {check: result for check, result in run.items() if "batch" in check}

    assert of_batches
    assert set(of_batches.values()) == {"ok"}


def test_the_table_has_all_deployments() -> None:
    assert results.PATH == RESULTS
    assert tuple(deployments.DEPLOYMENTS) == DEPLOYMENTS


def test_a_row_names_the_checks_that_failed() -> None:
    shown = row("one", RUN)

    assert shown == "| one | 1.2 | chat, tools | 1 of 2; failed: tools | 1 of 1 | not run |"


def test_a_client_that_ran_in_one_deployment_only_says_so() -> None:
    assert row("one", {"version": "1.2", "serve": {"chat": "ok"}}).endswith(
        "| 1 of 1 | not run | not run |"
    )


def test_a_client_that_is_missing_has_its_reason() -> None:
    assert row("one", {"missing": "there is no one in PATH"}) == (
        "| one | | not run: there is no one in PATH | | | |"
    )
