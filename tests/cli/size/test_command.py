"""``warren size`` in the terminal and as JSON."""

import json
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from cli.main import app
from cli.size.costs import PATH, load
from shared.errors import StartupError


def run(*options: str) -> Result:
    return CliRunner().invoke(app, ["size", *options], catch_exceptions=True)


def computed(*options: str) -> dict[str, Any]:
    done = run(*options, "--json")
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    "option", ["--streams=3000", "--requests-per-s=200", "--tokens-per-s=60000"]
)
def test_each_of_the_numbers_determines_the_load(option: str) -> None:
    found = computed(option, "--tokens-per-request=300", "--stream-tokens-per-s=20")

    load = {"num_streams": 3000, "requests_per_s": 200, "tokens_per_s": 60_000}
    assert found["load"] == {**load, "tokens_per_event": pytest.approx(300 / 155)}


def test_a_number_that_is_given_is_not_derived() -> None:
    found = computed("--streams=3000", "--requests-per-s=1", "--tokens-per-s=50")

    assert found["load"]["num_streams"] == 3000
    assert found["load"]["requests_per_s"] == 1
    assert found["load"]["tokens_per_s"] == 50


def test_the_table_names_the_processes_the_limits_and_the_machine() -> None:
    done = run("--streams=100")

    machine = load().about["machine"]
    assert done.exit_code == 0
    for text in ("gateway", "broker node", "worker", "Raft commits", machine["cpu"]):
        assert text in done.stdout
    assert load().estimated in done.stdout


def test_what_is_extrapolated_is_marked() -> None:
    done = run("--streams=1000000")

    measured = load().measured
    assert f"streams beyond {measured.num_streams:,}" in done.stdout
    assert computed("--streams=1000000")["extrapolated"]


def test_a_load_without_a_number_is_an_error() -> None:
    done = run()

    assert isinstance(done.exception, StartupError)
    assert "--streams, --requests-per-s or --tokens-per-s" in str(done.exception)


def test_the_costs_are_complete_and_positive() -> None:
    costs = load(PATH)

    for cost in (costs.worker, costs.gateway, costs.broker, costs.cluster):
        assert cost.per_request > 0
        assert cost.per_event > 0
    assert costs.about["machine"]["cores"] > 0
