"""A job that came back too often only because connections were lost, with the shipped users."""

import msgspec
import pytest

from shared import topology
from shared.bus.rabbit import RabbitBus, link
from shared.errors import BusUnavailable
from shared.messages import Finished, GenerationJob, SamplingParams, Started
from tests.support.deployment.broker import Broker
from tests.support.engines.brake import Brake
from tests.support.network.tcp_proxy import TcpProxy
from tests.support.workers.jobs import Log, ask, new_job, publish, read, reading
from tests.support.workers.synthetic import doomed_worker, echo_worker
from worker.jobs.run import MAX_RETURNS

pytestmark = pytest.mark.rabbit

LONG = SamplingParams(max_tokens=300, ignore_eos=True)
NUM_BEGUN = 5
"""The tokens that are read of the first worker."""


async def lose_connections(bus: RabbitBus, proxy: TcpProxy, queue: str, num_times: int) -> None:
    """Take the job of ``queue`` and lose the connection, again and again."""
    for _ in range(num_times):
        async with bus.consume(queue) as consumer:
            await anext(consumer)
            proxy.sever()
            with pytest.raises(BusUnavailable):
                await anext(consumer)
        await bus.wait_connected()


async def run_to_the_end(broker: Broker, job: GenerationJob) -> Log:
    """Publish ``job``, end its first worker, lose connections, and leave the rest to another
    worker."""
    queue = topology.jobs_queue(job.model, "interactive").name
    async with (
        RabbitBus(broker.url_of("gateway")) as bus,
        TcpProxy(broker.url_of("worker")) as proxy,
        RabbitBus(proxy.url) as theirs,
        reading(bus, job) as consumer,
    ):
        brake = Brake(4 * NUM_BEGUN)  # a token may wait for the rest of its character
        async with doomed_worker(theirs, brake=brake):
            await publish(bus, job)
            log = await read(bus, job, consumer, num_tokens=NUM_BEGUN)
        await lose_connections(theirs, proxy, queue, MAX_RETURNS - 1)
        async with echo_worker(theirs):
            return await read(bus, job, consumer, log)


async def test_an_excused_stream_is_answered_as_if_nothing_had_happened(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    # However late the last worker takes the job, its connection was lost just before.
    monkeypatch.setattr(link, "_SETTLES_S", 600.0)
    job = new_job("echo", sampling=LONG)
    async with (
        RabbitBus(broker.url_of("worker")) as theirs,
        RabbitBus(broker.url_of("gateway")) as bus,
        echo_worker(theirs),
    ):
        undisturbed = await ask(bus, msgspec.structs.replace(job, request_id="undisturbed"))

    log = await run_to_the_end(broker, job)

    assert isinstance(log.last, Finished)
    assert log.token_ids == undisturbed.token_ids
    assert log.text == undisturbed.text
    started = [event for event in log.raw if isinstance(event, Started)]
    assert [event.publication for event in started] == [0, 1]
