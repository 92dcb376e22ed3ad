"""A server that does not fit its worker stops the start, and the error names both."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shared.errors import StartupError
from tests.support.engines.scripted_server import ScriptedEngine, engine_server
from worker.engines.start_up import EngineOptions, OpenedEngine, open_engine
from worker.text import Tokenizer


@pytest.fixture
def server(tokenizer: Tokenizer) -> Iterator[ScriptedEngine]:
    with engine_server("llama-server", tokenizer) as server:
        yield server


@pytest.fixture
def text_server(tokenizer: Tokenizer) -> Iterator[ScriptedEngine]:
    with engine_server("openai", tokenizer) as server:
        yield server


def opened(server: ScriptedEngine, directory: Path, **options: Any) -> OpenedEngine:
    """Open the engine and end it."""
    at = EngineOptions(engine=server.protocol, url=server.url, max_seq_len=512, **options)
    engine = open_engine(at, directory)
    engine.engine.stop()
    return engine


def renamed(smollm2: Path, directory: Path, old: str, new: str) -> Path:
    """The tokenizer with another name of an added token."""
    content = (smollm2 / "tokenizer.json").read_text()
    (directory / "tokenizer.json").write_text(content.replace(json.dumps(old), json.dumps(new)))
    (directory / "config.json").write_text((smollm2 / "config.json").read_text())
    return directory


def test_another_special_token_stops_the_start(
    server: ScriptedEngine, smollm2: Path, tmp_path: Path
) -> None:
    directory = renamed(smollm2, tmp_path, "<reponame>", "<tool>")

    with pytest.raises(StartupError, match=r"<tool>.* is \[.* there and \[.* here"):
        opened(server, directory)


def test_a_vocabulary_of_another_size_stops_the_start(
    server: ScriptedEngine, smollm2: Path
) -> None:
    server.vocab_size += 64

    with pytest.raises(StartupError, match=r"49216 tokens, and that of .* has 49152"):
        opened(server, smollm2)


@pytest.mark.parametrize(("version", "num_warnings"), [("b11434", 0), ("b114345", 1), ("b9000", 1)])
def test_a_version_that_was_not_tried_is_warned_of(
    server: ScriptedEngine,
    smollm2: Path,
    caplog: pytest.LogCaptureFixture,
    version: str,
    num_warnings: int,
) -> None:
    server.version = version
    opened(server, smollm2)

    warning = "the worker was not tried with this version of the engine"
    assert caplog.messages.count(warning) == num_warnings


@pytest.mark.parametrize("names", [("model",), ("alias", "model")])
def test_the_model_of_that_name_is_used(
    text_server: ScriptedEngine, smollm2: Path, names: tuple[str, ...]
) -> None:
    text_server.other_models = ("first", "second")

    engine = opened(text_server, smollm2, names=names)
    text_server.other_models = ()
    alone = opened(text_server, smollm2, names=("another name",))

    assert engine.fingerprint == alone.fingerprint


def test_several_models_of_other_names_stop_the_start(
    text_server: ScriptedEngine, smollm2: Path
) -> None:
    text_server.other_models = ("first", "second")

    with pytest.raises(StartupError, match=r"3 models is mine: .* first, second, model"):
        opened(text_server, smollm2, names=("mine",))


@pytest.mark.parametrize("key", [None, "secret"])
def test_each_question_has_the_key(server: ScriptedEngine, smollm2: Path, key: str | None) -> None:
    opened(server, smollm2, api_key=key)

    assert set(server.keys) == {None if key is None else f"Bearer {key}"}
