"""What operators read of dead letters, and how they drop all of them."""

import base64
import json
from typing import Any

import pytest

from shared import topology
from shared.bus.base import Message
from shared.bus.memory import MemoryBus
from tests.support.gateway.http import LiveGateway
from tests.support.workers.jobs import dead_letter

LETTERS = "/admin/v1/dead-letters"
BINARY = b"\xc1\xff\x00"


async def test_the_body_of_a_job_is_shown_as_json(gateway: LiveGateway, bus: MemoryBus) -> None:
    await dead_letter(bus, "chatcmpl-one")

    response = await gateway.http.get(f"{LETTERS}/chatcmpl-one")

    shown = response.json()
    assert (shown["id"], shown["format"], shown["is_truncated"]) == ("chatcmpl-one", "json", False)
    assert "Once upon a time" in shown["body"]
    assert json.loads(shown["body"])


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        (b'{"a":1}', ("json", '{\n  "a": 1\n}')),
        ("no job, señor".encode(), ("text", "no job, señor")),
        (BINARY, ("base64", base64.b64encode(BINARY).decode())),
        (b"x" * 300_000, ("text", "x" * 262_144)),
    ],
)
async def test_any_body_is_shown(
    gateway: LiveGateway, bus: MemoryBus, body: bytes, shown: tuple[str, str]
) -> None:
    await bus.declare(topology.DEAD_LETTERS)
    message = Message(body, content_type="x/y", correlation_id="letter")
    await bus.publish(topology.DEAD_LETTERS.bindings[0], message)
    (letter,) = (await gateway.http.get(LETTERS)).json()["data"]

    read: Any = (await gateway.http.get(f"{LETTERS}/{letter['id']}")).json()

    assert (read["format"], read["body"]) == shown
    assert read["content_type"] == "x/y"
    assert read["is_truncated"] == (len(body) == 300_000)


async def test_reading_a_letter_leaves_it_there(gateway: LiveGateway, bus: MemoryBus) -> None:
    await dead_letter(bus, "chatcmpl-one")
    await gateway.http.get(f"{LETTERS}/chatcmpl-one")

    letters = (await gateway.http.get(LETTERS)).json()["data"]

    assert [letter["id"] for letter in letters] == ["chatcmpl-one"]


async def test_a_letter_that_is_not_there_is_not_found(gateway: LiveGateway) -> None:
    response = await gateway.http.get(f"{LETTERS}/chatcmpl-one")

    assert response.status_code == 404


async def test_all_letters_are_dropped(gateway: LiveGateway, bus: MemoryBus) -> None:
    for number in range(3):
        await dead_letter(bus, f"chatcmpl-{number}")

    dropped = await gateway.http.delete(LETTERS)

    assert dropped.json() == {"status": "dropped", "num_letters": 3}
    assert (await gateway.http.get(LETTERS)).json()["data"] == []


async def test_the_history_begins_empty(gateway: LiveGateway) -> None:
    history = (await gateway.http.get("/admin/v1/history")).json()

    assert (history["interval_s"], history["data"]) == (15.0, [])
