"""Batches give way at engines with priorities."""

from collections.abc import Mapping
from typing import Any

import pytest

from shared.messages import SamplingParams
from tests.support.engines.scripted_server import engine_server
from worker.engines.adapter import Ask
from worker.engines.adapters import ADAPTERS
from worker.engines.server import EngineServer
from worker.text import Tokenizer


def priorities(protocol: str, tokenizer: Tokenizer, **traits: bool) -> list[Any]:
    """The priorities of an interactive and of a batch job at a server with these traits."""
    adapter = ADAPTERS[protocol]
    with engine_server(protocol, tokenizer) as script:
        vars(script).update(traits)
        server = EngineServer(script.url, None, silence_s=10)
        adapter.facts(server, ())
        server.close()
    asks = [Ask([1], 1, SamplingParams(), seed=0, is_batch=batch) for batch in (False, True)]
    bodies: list[Mapping[str, Any]] = [adapter.call(ask, tokenizer).body for ask in asks]
    return [body.get("priority") for body in bodies]


@pytest.mark.parametrize("protocol", ["vllm", "sglang"])
def test_a_server_without_priorities_is_sent_none(protocol: str, tokenizer: Tokenizer) -> None:
    assert priorities(protocol, tokenizer) == [None, None]


@pytest.mark.parametrize(
    ("protocol", "is_low_first", "expected"),
    [("vllm", True, [0, 1]), ("sglang", True, [0, 1]), ("sglang", False, [1, 0])],
)
def test_a_batch_has_the_lower_priority(
    protocol: str, is_low_first: bool, expected: list[int], tokenizer: Tokenizer
) -> None:
    found = priorities(protocol, tokenizer, has_priority=True, is_low_first=is_low_first)

    assert found == expected
