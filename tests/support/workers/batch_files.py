"""Inputs and outputs of `warren batch`."""

import json
from pathlib import Path
from typing import Any

from tests.support.workers.batch_worker import MODEL


def chat_line(custom_id: str, content: str = "hello", **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": MODEL, "messages": messages, **body},
    }


def completion_line(custom_id: str, prompt: str | list[str], **body: Any) -> dict[str, Any]:
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/completions",
        "body": {"model": MODEL, "prompt": prompt, **body},
    }


def write_lines(path: Path, *lines: object) -> Path:
    """Write a JSON value in each line."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def chat_text(answer: dict[str, Any]) -> str:
    """The model's text in an output line."""
    text: str = answer["response"]["body"]["choices"][0]["message"]["content"]
    return text
