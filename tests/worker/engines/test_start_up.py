"""The start of a worker with another engine: what is an error, and what the worker announces."""

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from shared.errors import StartupError
from tests.support.engines.scripted_server import ScriptedEngine, engine_server
from worker.engines.start_up import EngineOptions, OpenedEngine, open_engine
from worker.text import Tokenizer

SLEEPER = shlex.join([sys.executable, "-c", "import time; time.sleep(600)"])


@pytest.fixture
def server(tokenizer: Tokenizer) -> Iterator[ScriptedEngine]:
    with engine_server("llama-server", tokenizer) as server:
        yield server


@contextmanager
def opened(server: ScriptedEngine, directory: Path, **options: Any) -> Iterator[OpenedEngine]:
    known = {"url": server.url, **options}
    engine = open_engine(EngineOptions(engine=server.protocol, **known), directory)
    try:
        yield engine
    finally:
        engine.engine.stop()


def numerics(server: ScriptedEngine, directory: Path, options: str) -> str:
    with opened(server, directory, command=f"{SLEEPER} {options}") as engine:
        return engine.numerics


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"url": "localhost:8000"}, "does not begin with http"),
        ({"url": "http://"}, "does not begin with http"),
        ({"url": "http://[::1"}, "is no URL"),
        ({"command": "vllm serve 'model"}, "--engine-command cannot be read: No closing quotation"),
        ({"command": ""}, "--engine-command cannot be read: it is empty"),
    ],
)
def test_a_url_or_command_that_is_none_stops_the_start(
    server: ScriptedEngine, smollm2: Path, options: dict[str, str], reason: str
) -> None:
    with pytest.raises(StartupError, match=reason), opened(server, smollm2, **options):
        pass


def test_a_server_that_lacks_the_health_path_stops_the_start(
    server: ScriptedEngine, smollm2: Path
) -> None:
    url = f"{server.url}/elsewhere"

    with pytest.raises(StartupError, match="/elsewhere: /health answers 404"):
        open_engine(EngineOptions(engine="llama-server", url=url), smollm2)


def test_no_message_has_the_password_of_the_url(server: ScriptedEngine, smollm2: Path) -> None:
    url = server.url.replace("http://", "http://user:secret@")
    server.can_tokenize = False

    with pytest.raises(StartupError, match="does not tokenize") as raised:
        open_engine(EngineOptions(engine="llama-server", url=url), smollm2)

    assert "secret" not in str(raised.value)


def test_a_model_may_be_in_another_directory(server: ScriptedEngine, smollm2: Path) -> None:
    fingerprints = set()
    for directory in ("/models", "/srv/other models"):
        server.model = f"{directory}/model.gguf"
        with opened(server, smollm2) as engine:
            fingerprints.add(engine.fingerprint)

    assert len(fingerprints) == 1


def test_numerics_have_the_options_of_the_command(server: ScriptedEngine, smollm2: Path) -> None:
    known = numerics(server, smollm2, "--port 1 --model /a/m.gguf --dtype float32")
    same = numerics(server, smollm2, "--host=b --port=2 --model /b/m.gguf --dtype float32")
    other = numerics(server, smollm2, "--port 1 --model /a/m.gguf --dtype float16")

    assert known == same
    assert known != other
