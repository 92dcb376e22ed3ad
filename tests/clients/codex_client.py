"""Codex CLI: ``codex exec`` with a provider of its configuration, over /v1/responses.

Its instructions are replaced by short instructions, and the tools that can be switched off are,
because the context of the served model has 8192 tokens. No command is asked for: after so long a
prompt, a model of this size does not reliably write a command and end its turn.
"""

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.clients.checks import CAPITAL, equal, printed_lines, run, target

TARGET = target()
CODEX = Path("node_modules/.bin/codex").absolute()
CONFIG = f"""
model = "{TARGET.model}"
model_provider = "warren"
model_context_window = 8192
model_instructions_file = "instructions.md"
approval_policy = "never"
sandbox_mode = "danger-full-access"

[features]
goals = false
multi_agent = false
view_image = false

[model_providers.warren]
name = "Warren"
base_url = "{TARGET.url}/v1"
env_key = "WARREN_KEY"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
"""


def events(home: Path, prompt: str) -> list[Any]:
    """The events that Codex prints in its lines."""
    (home / "config.toml").write_text(CONFIG)
    (home / "instructions.md").write_text("Be brief.")
    (home / "work").mkdir()
    command = [CODEX, "exec", "--json", "--skip-git-repo-check", prompt]
    variables = {**os.environ, "CODEX_HOME": str(home), "WARREN_KEY": TARGET.api_key}
    return printed_lines(command, home / "work", variables)


def ended(found: list[Any]) -> list[Any]:
    """Raise unless the turn is completed; returns its items."""
    equal((found[0]["type"], found[-1]["type"]), ("thread.started", "turn.completed"))
    return [event["item"] for event in found if event["type"] == "item.completed"]


def check_answer() -> None:
    with TemporaryDirectory() as home:
        *_, last = ended(events(Path(home), CAPITAL))

    equal(last["type"], "agent_message")
    assert last["text"]


if __name__ == "__main__":
    run(globals())
