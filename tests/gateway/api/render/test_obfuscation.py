"""Chunks that are padded do not reveal the lengths of their texts."""

import json
from typing import Any

import pytest

from tests.support.gateway.rendering import Log, context_of

WORDS = ["a", " upon", " \u00e9t\u00e9", "\n\t", " twenty-eight bytes of text"]
ENDPOINTS = ["chat", "completions", "responses"]


def payloads(endpoint: str, **fields: Any) -> list[bytes]:
    """Payloads, each with a single word."""
    log = Log(context_of(endpoint=endpoint, **fields))
    for word in WORDS:
        log.say(word)
    return [data for _, data in log.finish("").frames() if text_of(data)]


def text_of(data: bytes) -> str:
    chunk = json.loads(data)
    if "choices" not in chunk:
        return str(chunk.get("delta", ""))
    [choice] = chunk["choices"]
    return str(choice["text"] if "text" in choice else choice["delta"].get("content", ""))


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_short_texts_cannot_be_guessed_from_the_sizes_of_their_chunks(endpoint: str) -> None:
    padded = payloads(endpoint, is_obfuscated=True)

    assert [text_of(data) for data in padded] == WORDS
    assert len({len(data) for data in padded}) == 1
    assert len({json.loads(data)["obfuscation"] for data in padded}) == len(WORDS)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_nothing_is_padded_unasked(endpoint: str) -> None:
    plain = payloads(endpoint)

    assert [text_of(data) for data in plain] == WORDS
    assert not any("obfuscation" in json.loads(data) for data in plain)
