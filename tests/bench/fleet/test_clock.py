"""Tokens that state when they were generated."""

import time

import pytest

from bench.echo_worker import MODEL, synthetic_tokenizer
from bench.fleet.clock import TICK_S, Clock, words
from bench.queue_client import Streams, opened
from shared.bus.memory import MemoryBroker
from tests.support import PATIENCE_S
from tests.support.gateway.http import live_gateway
from tests.support.workers.synthetic import echo_worker

TOKENIZER = synthetic_tokenizer()
BODY = {"model": MODEL, "prompt": [1000], "max_tokens": 4000, "ignore_eos": True}
"""Of a stream that outlasts its test, on a busy machine too."""


def test_each_word_is_one_token_and_the_words_last_for_half_a_minute() -> None:
    found = words(TOKENIZER)

    assert len(found) * TICK_S > 20
    assert len({*found.values()}) == len(found)
    text = next(iter(found))
    assert TOKENIZER.decode([found[text]]) == text


@pytest.mark.parametrize("age_s", [0.0, 0.5, 10.0])
def test_a_word_states_when_its_token_was_generated(age_s: float) -> None:
    generated_at = time.monotonic() - age_s
    texts = [*words(TOKENIZER)]
    text = texts[int(generated_at / TICK_S) % len(texts)]

    read_at, num_tokens = Clock(TOKENIZER).read(f"{text} again".encode())

    assert num_tokens == 2
    assert read_at == pytest.approx(generated_at, abs=2 * TICK_S)


async def test_streams_of_a_clock_lose_no_token() -> None:
    broker = MemoryBroker()
    streams = Streams(Clock(TOKENIZER).read)
    async with (
        echo_worker(broker, step_s=0.02, is_clock=True),
        live_gateway(broker) as gateway,
        opened(streams, [gateway.url], 3, BODY, timeout_s=PATIENCE_S),
    ):
        tallies = [await streams.measure(0.2) for _ in range(3)]

    num_tokens = sum(tally.num_tokens for tally in tallies)
    assert 0 < num_tokens <= sum(stream.num_tokens for stream in streams.streams)
    assert all(delay_s >= -TICK_S for tally in tallies for delay_s in tally.delays_s)


async def test_a_stream_that_ends_early_is_an_error() -> None:
    broker = MemoryBroker()
    streams = Streams(Clock(TOKENIZER).read)
    async with (
        echo_worker(broker, is_clock=True),
        live_gateway(broker) as gateway,
        opened(streams, [gateway.url], 1, {**BODY, "max_tokens": 3}, timeout_s=PATIENCE_S),
    ):
        (stream,) = streams.streams
        await stream.ended
        with pytest.raises(RuntimeError, match="ended after 3 tokens"):
            await streams.measure(0)


async def test_streams_are_opened_at_all_servers_in_turn() -> None:
    broker = MemoryBroker()
    streams = Streams(Clock(TOKENIZER).read)
    async with (
        echo_worker(broker, step_s=0.02, is_clock=True),
        live_gateway(broker) as first,
        live_gateway(broker) as second,
        opened(streams, [first.url, second.url], 4, BODY, timeout_s=PATIENCE_S),
    ):
        running = [await one.sample("warren_gateway_requests_running") for one in (first, second)]

    assert running == [2, 2]
