"""The supervision of jobs that nobody reads."""

from msgspec.structs import replace

from shared.bus.memory import MemoryBroker, MemoryBus
from shared.messages import Finished, SamplingParams
from tests.support.engines.brake import Brake
from tests.support.workers.jobs import LateBus, new_job, publish, read, reading, wait_running
from tests.support.workers.synthetic import echo_worker

SAMPLING = SamplingParams(max_tokens=1000, ignore_eos=True)


async def test_a_job_that_was_begun_again_is_not_cancelled_for_the_log_of_its_last_run() -> None:
    broker, brake = MemoryBroker(), Brake(2)
    job = new_job("echo", sampling=SAMPLING)
    async with (
        MemoryBus(broker) as bus,
        LateBus(broker) as late,
        echo_worker(late, brake=brake),
    ):
        async with reading(bus, job) as consumer:
            await publish(bus, job)
            await read(bus, job, consumer, num_tokens=1)
        await bus.delete_queue(f"reply.{job.request_id}")
        await late.is_missed.wait()  # by the supervisor: the worker has nothing to write
        async with reading(bus, job) as consumer:
            await publish(bus, replace(job, publication=1))
            log = await brake.allow_until(read(bus, job, consumer, num_tokens=1))
            late.may_answer.set()
            await wait_running(bus)  # it is still there when the supervisor has its answer
            brake.release()
            log = await read(bus, job, consumer, log)

    assert isinstance(log.last, Finished)
