"""How much of a prompt was in the prefix cache, as a whole worker tells it."""

import msgspec

from shared.bus.memory import MemoryBus
from shared.messages import Completed, Finished, SamplingParams, TextPrompt, TokenPrompt
from tests.support.engines.brake import Brake
from tests.support.workers.jobs import Log, ask, new_job, publish, read, reading
from tests.support.workers.synthetic import echo_worker

PROMPT = TokenPrompt(token_ids=tuple(range(100, 140)))
NUM_IN_FULL_BLOCKS = 32


def num_cached_tokens(log: Log) -> int:
    assert isinstance(log.last, Finished)
    return log.last.num_cached_tokens


async def test_the_end_of_a_choice_has_what_its_prompt_found() -> None:
    async with MemoryBus() as bus, echo_worker(bus):
        logs = [await ask(bus, new_job("echo", PROMPT)) for _ in range(2)]

    assert [num_cached_tokens(log) for log in logs] == [0, NUM_IN_FULL_BLOCKS]
    assert logs[0].token_ids == logs[1].token_ids


async def test_each_choice_of_a_whole_answer_has_its_own() -> None:
    async with MemoryBus() as bus, echo_worker(bus):
        await ask(bus, new_job("echo", PROMPT))
        log = await ask(bus, new_job("echo", TextPrompt(text="other"), PROMPT, mode="final"))

    assert isinstance(log.completed, Completed)
    counts = [choice.num_cached_tokens for choice in log.completed.choices]
    assert counts == [0, NUM_IN_FULL_BLOCKS]


async def test_nothing_is_found_of_another_tenants() -> None:
    jobs = [
        msgspec.structs.replace(new_job("echo", PROMPT), tenant=tenant)
        for tenant in ("a", "b", "a")
    ]
    async with MemoryBus() as bus, echo_worker(bus):
        logs = [await ask(bus, job) for job in jobs]

    assert [num_cached_tokens(log) for log in logs] == [0, 0, NUM_IN_FULL_BLOCKS]


async def test_after_a_take_over_it_is_never_more_than_the_prompt() -> None:
    """The second worker has computed the same answer before, and finds more than the prompt."""
    job = new_job("echo", PROMPT, sampling=SamplingParams(max_tokens=300, ignore_eos=True))
    async with MemoryBus() as bus, reading(bus, job) as consumer:
        async with echo_worker(bus, brake=Brake(41), drain_grace_s=0.01) as stop:
            await publish(bus, job)
            log = await read(bus, job, consumer, num_tokens=40)
            stop.set()
        async with echo_worker(bus):
            await ask(bus, msgspec.structs.replace(job, request_id="before"))
            log = await read(bus, job, consumer, log)

    assert log.reader.attempt == 2
    assert num_cached_tokens(log) == len(PROMPT.token_ids)
