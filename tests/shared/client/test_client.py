"""A program that submits jobs and reads their answers, whatever happens to workers."""

import asyncio
from contextlib import aclosing

import pytest

from bench.echo_worker import MODEL
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.bus.rabbit import RabbitBus
from shared.client.client import AnswerEvent, AsyncClient, AsyncGenerator
from shared.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    ModelNotFound,
    StreamExpired,
    Unavailable,
)
from shared.messages import Completed, Failed
from tests.support.deployment.broker import Broker
from tests.support.workers.synthetic import doomed_worker, echo_worker
from warren import Client, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, seed=1)
LONG = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, seed=1)
PROMPT = "Once upon a time"
STEP_S = 0.1
"""4,000 steps of this duration take longer than a test may."""
CONVERSATION = [{"role": "user", "content": "Who are you?"}]


@pytest.fixture
def place() -> MemoryBroker:
    return MemoryBroker()


def client_of(place: MemoryBroker) -> AsyncClient:
    return AsyncClient("", MODEL, bus=MemoryBus(place))


async def text_of(events: AsyncGenerator[AnswerEvent]) -> str:
    return "".join([event.text async for event in events])


async def test_answers_come_in_the_order_of_the_prompts_and_as_streams(place: MemoryBroker) -> None:
    prompts = [f"{PROMPT} {number}" for number in range(20)]
    async with echo_worker(place), client_of(place) as client:
        answers = await client.generate(prompts, GREEDY)
        (chat,) = await client.chat(CONVERSATION, GREEDY, num_choices=2)
        streamed = [await text_of(client.stream(prompt, GREEDY)) for prompt in prompts[:3]]
        conversed = await text_of(client.stream_chat(CONVERSATION, GREEDY))

    assert len({answer.text for answer in answers}) == 20
    assert streamed == [answer.text for answer in answers[:3]]
    assert (len(chat.choices), conversed) == (2, chat.text)


async def test_a_stream_continues_when_its_worker_dies(place: MemoryBroker) -> None:
    async with client_of(place) as client:
        async with echo_worker(place):
            expected = await text_of(client.stream(PROMPT, LONG))
        async with doomed_worker(place, step_s=0.01):
            events = client.stream(PROMPT, LONG)
            said = (await anext(events)).text
        async with echo_worker(place):
            said += await text_of(events)

    assert said == expected


async def test_a_closed_stream_is_cancelled_and_leaves_nothing(place: MemoryBroker) -> None:
    endless = SamplingParams(max_tokens=4000, ignore_eos=True, seed=1)
    async with echo_worker(place, step_s=STEP_S, max_num_seqs=1), client_of(place) as client:
        async with aclosing(client.stream(PROMPT, endless)) as events:
            await anext(events)
        await client.generate(PROMPT, GREEDY)

        assert [name for *_, name in place.bindings if name.startswith("reply.")] == []


async def test_a_request_goes_on_without_a_reader_and_is_resumed(place: MemoryBroker) -> None:
    async with echo_worker(place), client_of(place) as client:
        whole = await text_of(client.stream(PROMPT, LONG))
        request_id = await client.submit(PROMPT, LONG)
        events = client.resume(request_id)
        first = (await anext(events)).text
        with pytest.raises(Unavailable):
            await client.cancel(request_id)
        await events.aclose()
        rest = await text_of(client.resume(request_id, num_seen=1))
        again = await text_of(client.resume(request_id))

    assert (first + rest, again) == (whole, whole)


async def test_a_request_that_is_cancelled_has_no_answer(place: MemoryBroker) -> None:
    endless = SamplingParams(max_tokens=4000, ignore_eos=True, seed=1)
    async with echo_worker(place, step_s=STEP_S, max_num_seqs=1), client_of(place) as client:
        request_id = await client.submit(PROMPT, endless)
        async with aclosing(client.resume(request_id)) as events:
            await anext(events)
        await client.cancel(request_id)

        with pytest.raises(StreamExpired):
            await text_of(client.resume(request_id))
        await client.generate(PROMPT, GREEDY)


async def test_a_batch_yields_every_answer_and_error_with_its_number(place: MemoryBroker) -> None:
    prompts = [f"{PROMPT} {number}" for number in range(40)]
    prompts[7] = "word " * 20_000
    found: dict[int, Completed | Failed] = {}
    async with echo_worker(place), client_of(place) as client:
        async for number, answer in client.batch(prompts, GREEDY):
            assert number not in found
            found[number] = answer
        with pytest.raises(ContextLengthExceeded):
            await client.generate(prompts, GREEDY)

    failed = found.pop(7)
    assert isinstance(failed, Failed)
    assert sorted(found) == [number for number in range(40) if number != 7]
    assert all(isinstance(answer, Completed) for answer in found.values())


async def test_what_cannot_be_answered_is_an_error(place: MemoryBroker) -> None:
    async with client_of(place) as client:
        with pytest.raises(ModelNotFound):
            await client.generate(PROMPT)
        with pytest.raises(ModelNotFound):
            await text_of(client.stream(PROMPT))
        with pytest.raises(ModelNotFound):
            await client.submit(PROMPT, model="other")
        with pytest.raises(InvalidRequest, match="temperature"):
            client.stream(PROMPT, SamplingParams(temperature=-1.0))
        with pytest.raises(InvalidRequest, match="one prompt"):
            client.stream_chat([CONVERSATION, CONVERSATION])
        with pytest.raises(StreamExpired):
            await client.cancel("operator.unknown")


@pytest.mark.rabbit
async def test_programs_without_an_event_loop_use_rabbitmq(broker: Broker) -> None:
    def use() -> tuple[str, str, str, list[int]]:
        with Client(broker.url_of("publisher"), MODEL) as client:
            (answer,) = client.generate(PROMPT, GREEDY)
            (chat,) = client.chat(CONVERSATION, GREEDY)
            abandoned = client.stream(PROMPT, LONG)
            next(abandoned)
            abandoned.close()  # type: ignore[attr-defined] # it is a generator
            request_id = client.submit(PROMPT, GREEDY)
            resumed = "".join(event.text for event in client.resume(request_id))
            client.cancel(request_id)
            streamed = "".join(event.text for event in client.stream_chat(CONVERSATION, GREEDY))
            numbers = sorted(number for number, _ in client.batch([PROMPT] * 300, GREEDY))
            assert streamed == chat.text
            return answer.text, resumed, streamed, numbers

    async with RabbitBus(broker.url_of("worker")) as bus, echo_worker(bus):
        answer, resumed, _, numbers = await asyncio.to_thread(use)

    assert answer == resumed
    assert numbers == list(range(300))
