"""Claude Code: ``claude --print`` with its base URL in the environment, over /v1/messages.

Its instructions are replaced by short instructions, and it is offered few tools, because the
context of the served model has 8192 tokens.
"""

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.clients.checks import CAPITAL, equal, printed_lines, run, target

TARGET = target()
CLAUDE = Path("node_modules/.bin/claude").absolute()
GREEDY = '{"temperature": 0}'
"""With the temperature that it asks for, a model of this size writes nonsense for minutes."""
STREAM = ("--output-format=stream-json", "--verbose", "--include-partial-messages")


def lines(*options: str) -> list[Any]:
    """The objects that Claude Code prints in its lines."""
    command = [CLAUDE, "--bare", "--print", CAPITAL, "--system-prompt=Be brief.", *options]
    with TemporaryDirectory() as home:
        variables = {
            "PATH": os.environ["PATH"],
            "HOME": home,
            "ANTHROPIC_BASE_URL": TARGET.url,
            "ANTHROPIC_API_KEY": TARGET.api_key,
            "ANTHROPIC_MODEL": TARGET.model,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CODE_EXTRA_BODY": GREEDY,
        }
        return printed_lines(command, Path(home), variables)


def check_answer() -> None:
    (result,) = lines("--tools=", "--output-format=json")

    equal((result["is_error"], result["terminal_reason"]), (False, "completed"))
    assert result["result"]
    assert result["usage"]["output_tokens"]


def check_stream() -> None:
    *printed, result = lines("--tools=", *STREAM)

    events = [line["event"] for line in printed if line["type"] == "stream_event"]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    equal((events[0]["type"], events[-1]["type"]), ("message_start", "message_stop"))
    equal("".join(delta["text"] for delta in deltas), result["result"])


def check_tools() -> None:
    """A model of this size does not reliably call a tool and end its turn."""
    *_, result = lines("--tools=Read", "--output-format=json")

    equal(result["is_error"], False)


if __name__ == "__main__":
    run(globals())
