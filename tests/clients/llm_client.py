"""The command `llm`, with a model of ``extra-openai-models.yaml``."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.clients.checks import ANSWER, CAPITAL, WEATHER, equal, is_weather, run, target
from tests.clients.weather import ASKING, CALLING, is_sunny

TARGET = target()
LLM = Path(sys.executable).with_name("llm")
MODEL = {
    "model_id": "warren",
    "model_name": TARGET.model,
    "api_base": f"{TARGET.url}/v1",
    "api_key_name": "warren",
    "supports_tools": True,
    "supports_schema": True,
}
FUNCTION = """
def weather(city: str, unit: str) -> str:
    "Tell the weather."
    return "It is sunny in Rome."
"""


@contextmanager
def user() -> Iterator[Path]:
    """The directory of a user who has set the model and its key."""
    with TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "extra-openai-models.yaml").write_text(json.dumps([MODEL]))  # JSON is YAML
        (directory / "keys.json").write_text(json.dumps({"warren": TARGET.api_key}))
        yield directory


def called(directory: Path, *arguments: str) -> str:
    return subprocess.run(
        [LLM, *arguments],
        env={**os.environ, "LLM_USER_PATH": str(directory)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    ).stdout.strip()


def prompted(directory: Path, *arguments: str) -> str:
    options = ("-m", "warren", "-o", "temperature", "0", "-o", "max_tokens", "48")
    return called(directory, "prompt", *options, *arguments)


def check_prompt_streamed_and_whole() -> None:
    with user() as directory:
        equal(prompted(directory, CAPITAL), ANSWER)
        equal(prompted(directory, "--no-stream", CAPITAL), ANSWER)


def check_conversation_continued() -> None:
    with user() as directory:
        prompted(directory, CAPITAL)
        assert prompted(directory, "--continue", "And of Italy?")
        first, second = json.loads(called(directory, "logs", "--json", "-n", "2"))

    equal(first["conversation_id"], second["conversation_id"])
    assert second["input_tokens"] > first["input_tokens"] + 8


def check_tool_is_called() -> None:
    with user() as directory:
        for more in ((), ("--no-stream",)):
            is_sunny(prompted(directory, "--functions", FUNCTION, *more, CALLING))
        (*_, last) = json.loads(called(directory, "logs", "--json"))
    equal([result["name"] for result in last["tool_results"]], ["weather"])


def check_schema() -> None:
    with user() as directory:
        is_weather(json.loads(prompted(directory, "--schema", json.dumps(WEATHER), ASKING)))


if __name__ == "__main__":
    run(globals())
