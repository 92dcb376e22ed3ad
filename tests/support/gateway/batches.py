"""Files and batches of a live gateway, as a client of OpenAI's API handles them."""

import asyncio
import json
from collections.abc import Callable, Iterable
from typing import Any

from openai.types import Batch

from tests.support import PATIENCE_S
from tests.support.gateway.http import LiveGateway
from tests.support.workers.scripted_worker import MODEL

CHATS = "/v1/chat/completions"
ENDED = ("completed", "failed", "expired", "cancelled")


def chat(custom_id: str, content: str = "one two three", **more: Any) -> dict[str, Any]:
    """A line that asks the scripted worker."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}], **more}
    return {"custom_id": custom_id, "method": "POST", "url": CHATS, "body": body}


def jsonl(lines: Iterable[object]) -> bytes:
    """The lines; strings are taken as they are."""
    texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    return "".join(f"{text}\n" for text in texts).encode()


async def order(
    gateway: LiveGateway,
    lines: Iterable[object],
    *,
    endpoint: Any = CHATS,
    window: Any = "24h",
    **more: Any,
) -> Batch:
    """Upload the lines, and create their batch."""
    file = await gateway.openai.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
    return await gateway.openai.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window=window, **more
    )


async def until(gateway: LiveGateway, batch: Batch, is_true: Callable[[Batch], bool]) -> Batch:
    """Poll until the condition holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not is_true(batch):
            await asyncio.sleep(0.02)
            batch = await gateway.openai.batches.retrieve(batch.id)
    return batch


async def ended(gateway: LiveGateway, batch: Batch) -> Batch:
    return await until(gateway, batch, lambda now: now.status in ENDED)


async def output(gateway: LiveGateway, file_id: str | None) -> list[Any]:
    """The lines of a file of outputs or errors."""
    assert file_id is not None
    content = await gateway.openai.files.content(file_id)
    return [json.loads(line) for line in content.text.splitlines()]


def texts(lines: Iterable[Any]) -> dict[str, str]:
    """The answers to chats, by ``custom_id``."""
    return {
        line["custom_id"]: line["response"]["body"]["choices"][0]["message"]["content"]
        for line in lines
    }
