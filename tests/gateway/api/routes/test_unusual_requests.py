"""Requests that are unusual and yet mean something, and answers that unusual clients can read."""

import json
from codecs import BOM_UTF8

import pytest

from tests.support.gateway.http import LiveGateway, chat_body, text_of
from tests.support.workers.scripted_worker import ScriptedJob, ScriptedWorker

JSON = {"Content-Type": "application/json"}
SEPARATORS = "a\u2028b\u2029c\x85d"


async def test_a_body_may_begin_with_a_byte_order_mark(gateway: LiveGateway) -> None:
    body = BOM_UTF8 + json.dumps(chat_body()).encode()

    answer = await gateway.http.post("/v1/chat/completions", content=body, headers=JSON)

    assert answer.status_code == 200


@pytest.mark.parametrize("encoding", ["", "identity", "Identity"])
async def test_a_body_that_is_not_compressed_is_read(gateway: LiveGateway, encoding: str) -> None:
    headers = {"Content-Encoding": encoding}

    answer = await gateway.http.post("/v1/chat/completions", json=chat_body(), headers=headers)

    assert answer.status_code == 200


async def test_a_compressed_body_is_refused(gateway: LiveGateway) -> None:
    headers = {"Content-Encoding": "gzip"}

    answer = await gateway.http.post("/v1/chat/completions", json=chat_body(), headers=headers)

    assert answer.status_code == 415


async def test_line_separators_of_unicode_are_escaped_in_streams(
    gateway: LiveGateway, worker: ScriptedWorker
) -> None:
    async def say_separators(job: ScriptedJob) -> None:
        await job.start()
        await job.say(SEPARATORS)
        await job.finish(SEPARATORS)

    worker.script = say_separators

    chat = (await gateway.chat(stream=True)).text
    message = await gateway.post("/v1/messages", **chat_body(stream=True, max_tokens=9))

    assert text_of(chat) == 2 * SEPARATORS
    assert chat.count(r"a\u2028b\u2029c\u0085d") == message.text.count(r"\u2028b") == 2
    assert not {"\u2028", "\u2029", "\x85"} & set(chat + message.text)
