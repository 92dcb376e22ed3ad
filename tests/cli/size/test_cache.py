"""The part of a worker's cache that a stream takes, in ``warren size``."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from cli.main import app
from shared.errors import StartupError
from tests.support.models.tiny import write_tiny_model

LENGTH = 128
GIB = 1 << 30


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hybrid")
    write_tiny_model(directory, "qwen3_5_text")
    (directory / "tokenizer.json").write_text("{}")
    return directory


def run(*options: object) -> Result:
    given = ["size", "--streams=1000", *map(str, options)]
    return CliRunner().invoke(app, given, catch_exceptions=True)


def computed(model: Path, *options: str) -> dict[str, Any]:
    done = run("--model", model, f"--context-tokens={LENGTH}", "--json", *options)
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_cache_limits_the_streams_of_a_worker(model: Path) -> None:
    cache = computed(model)["cache"]
    each = cache["token_bytes"] + cache["state_bytes"]

    found = computed(model, f"--cache-memory={10.5 * each / GIB}")

    assert cache["num_streams"] is None
    assert cache["state_bytes"] > 0
    assert found["cache"]["num_streams"] == 10
    assert found["num_workers"] == 1000 / 10 + 1


def test_the_table_shows_keys_values_and_states(model: Path) -> None:
    done = run("--model", model, f"--context-tokens={LENGTH}", "--cache-memory=1")

    assert done.exit_code == 0
    for text in ("Cache of a worker", "keys and values", "states", "streams fit"):
        assert text in done.stdout


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--model=no-such-model"], "no-such-model"),
        (["--cache-memory=1"], "--cache-memory needs --model"),
        (["--model={model}", "--context-tokens=100000000"], "but the model supports"),
        (["--model={model}", "--context-tokens=200", "--cache-memory=0.00001"], "takes"),
    ],
)
def test_what_cannot_be_computed_is_refused(options: list[str], reason: str, model: Path) -> None:
    done = run(*(option.format(model=model) for option in options))

    assert isinstance(done.exception, StartupError)
    assert reason in str(done.exception)
