"""The server of any kind fails in the middle of a stream: the job continues where it was."""

import pytest

from shared.bus.memory import MemoryBus
from shared.messages import SamplingParams, Started
from tests.support.engines.scripted_server import Fault, engine_server
from tests.support.workers.jobs import Log, ask, new_job
from tests.support.workers.synthetic import remote_worker
from worker.engines.adapters import ADAPTERS
from worker.text import Tokenizer

FAULTS: list[Fault] = ["break", "cut", "nonsense", "error", "unknown token", "500"]
WITH_POSITIONS = ("llama-server", "sglang")
"""The servers whose events say how many tokens there are."""


def faults_of(protocol: str) -> list[Fault]:
    return [*FAULTS, "out of order"] if protocol in WITH_POSITIONS else FAULTS


def num_runs(log: Log) -> int:
    return sum(isinstance(event, Started) for event in log.raw)


@pytest.mark.parametrize("protocol", ADAPTERS)
async def test_nothing_is_lost_or_repeated(
    protocol: str, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    traits = ADAPTERS[protocol].traits
    sampling = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=traits.can("ignore_eos"))
    logs: dict[Fault, Log] = {}
    with engine_server(protocol, tokenizer) as server:
        async with MemoryBus() as bus, remote_worker(bus, server):
            whole = await ask(bus, new_job("smollm2", sampling=sampling))
            for fault in faults_of(protocol):
                server.faults = [fault]
                logs[fault] = await ask(bus, new_job("smollm2", sampling=sampling))

    assert {fault: num_runs(log) for fault, log in logs.items()} == dict.fromkeys(logs, 2)
    assert caplog.messages.count("engine failed a sequence") == len(logs)
    if traits.has_token_ids:
        assert {fault: log.token_ids for fault, log in logs.items()} == dict.fromkeys(
            logs, whole.token_ids
        )
    else:  # the server may divide the text of the continued answer into other tokens
        begin = tokenizer.decode(whole.token_ids[:3])
        assert all(log.text.startswith(begin) for fault, log in logs.items() if fault != "500")
