"""The ledger of a whole deployment whose workers are killed."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types import CompletionUsage

from tests.support.deployment import processes
from tests.support.deployment.broker import RabbitNode
from tests.support.deployment.processes import WarrenProcess

pytestmark = [pytest.mark.rabbit, pytest.mark.timeout(300)]

NUM_REQUESTS = 60
NUM_AT_ONCE = 24
NUM_KILLS = 2
PATIENCE_S = 200


@pytest.fixture
def gateway(own_broker: RabbitNode, tmp_path: Path) -> Iterator[WarrenProcess]:
    data_dir = tmp_path / "data"
    url = own_broker.url_of("gateway")
    with processes.gateway(url, tmp_path / "gateway", f"--data-dir={data_dir}") as process:
        yield process


def asked(client: openai.OpenAI, number: int) -> CompletionUsage:
    answer = client.completions.create(
        model="echo",
        prompt=f"Question {number} " * (1 + number % 5),
        n=1 + number % 2,
        max_tokens=40 + number % 160,
        seed=number,
        temperature=1.0,
        extra_body={"ignore_eos": True},
    )
    assert answer.usage is not None
    return answer.usage


def reported(gateway: WarrenProcess) -> dict[str, Any]:
    """The only row of the report, once all requests are in it."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        answer = httpx.get(
            f"{gateway.url}/v1/usage", params={"group_by": "model"}, timeout=PATIENCE_S
        )
        rows: list[dict[str, Any]] = answer.json()["data"]
        if rows and rows[0]["requests"] >= NUM_REQUESTS:
            return rows[0]
        assert time.monotonic() < deadline, rows
        time.sleep(0.2)


def test_the_sums_are_those_of_the_answers_whichever_worker_dies(
    own_broker: RabbitNode, gateway: WarrenProcess, tmp_path: Path
) -> None:
    def worker(number: int) -> WarrenProcess:
        log = tmp_path / f"worker{number}"
        return processes.echo_worker(own_broker.url_of("worker"), log, "--step-ms=10")

    client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0)
    with ExitStack() as stack, ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        workers = [stack.enter_context(worker(k)) for k in range(2)]
        answers = [pool.submit(asked, client, number) for number in range(NUM_REQUESTS)]
        for killed in range(NUM_KILLS):
            while sum(answer.done() for answer in answers) < (1 + killed) * NUM_REQUESTS // 4:
                time.sleep(0.005)
            workers[killed].kill()
            workers.append(stack.enter_context(worker(2 + killed)))
        used = [answer.result() for answer in answers]
        row = reported(gateway)

    details = [one.prompt_tokens_details for one in used]
    assert (row["requests"], row["completed"]) == (NUM_REQUESTS, NUM_REQUESTS)
    assert row["takeovers"] > 0
    assert row["input_tokens"] == sum(one.prompt_tokens for one in used)
    assert row["output_tokens"] == sum(one.completion_tokens for one in used)
    assert row["cached_tokens"] == sum(
        (one.cached_tokens or 0) for one in details if one is not None
    )
