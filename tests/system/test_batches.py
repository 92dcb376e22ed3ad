"""Batches over a real broker, while processes are killed."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch

from tests.support.deployment import processes
from tests.support.deployment.broker import RabbitNode
from tests.support.deployment.postgres import PostgresServer, running_postgres
from tests.support.deployment.processes import WarrenProcess

pytestmark = [pytest.mark.rabbit, pytest.mark.timeout(300)]

NUM_LINES = 30
ENDED = ("completed", "failed", "expired", "cancelled")
PATIENCE_S = 200
PASSING = (openai.APIConnectionError, openai.InternalServerError)


@pytest.fixture
def postgres() -> Iterator[PostgresServer]:
    with running_postgres() as server:
        yield server


def lines() -> bytes:
    requests = (
        {
            "custom_id": f"line {k}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {
                "model": "echo",
                "prompt": f"Question {k}",
                "max_tokens": 30 + k % 20,
                "seed": k,
                "temperature": 1.0,
                "ignore_eos": True,
            },
        }
        for k in range(NUM_LINES)
    )
    return "".join(f"{json.dumps(request)}\n" for request in requests).encode()


def client_of(gateway: WarrenProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0)


def ordered(client: openai.OpenAI) -> Batch:
    file = client.files.create(file=("in.jsonl", lines()), purpose="batch")
    # The library's types know OpenAI's only window.
    return client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
    )


def polled(client: openai.OpenAI, batch: Batch, is_true: Callable[[Batch], bool]) -> Batch:
    """Poll until the condition holds, whatever is being restarted."""
    deadline = time.monotonic() + PATIENCE_S
    while not is_true(batch):
        assert time.monotonic() < deadline, batch
        time.sleep(0.1)
        try:
            batch = client.batches.retrieve(batch.id)
        except PASSING:
            continue
    return batch


def num_completed(batch: Batch) -> int:
    return batch.request_counts.completed if batch.request_counts is not None else 0


def go_on(client: openai.OpenAI, batch: Batch) -> None:
    """Wait until some more lines are done. On a busy machine the others may be done already."""
    held = num_completed(client.batches.retrieve(batch.id))
    polled(client, batch, lambda now: num_completed(now) >= min(held + 5, NUM_LINES))


def texts(client: openai.OpenAI, batch: Batch) -> list[tuple[str, str]]:
    """The answers in the order of the output file."""
    assert (batch.status, batch.error_file_id) == ("completed", None)
    assert batch.output_file_id is not None
    content = client.files.content(batch.output_file_id).text
    found: list[dict[str, Any]] = [json.loads(line) for line in content.splitlines()]
    return [(line["custom_id"], line["response"]["body"]["choices"][0]["text"]) for line in found]


def test_no_death_of_a_process_loses_or_doubles_a_line(
    own_broker: RabbitNode, postgres: PostgresServer, tmp_path: Path
) -> None:
    options = (
        f"--database-url={postgres.url}",
        f"--data-dir={tmp_path / 'data'}",
    )

    def gateway(name: str) -> WarrenProcess:
        return processes.gateway(
            own_broker.url_of("gateway"),
            tmp_path / name,
            *options,
            tuning={"batch_lease_s": 3.0, "max_batch_window": 4},
        )

    def worker(name: str) -> WarrenProcess:
        log = tmp_path / name
        return processes.echo_worker(own_broker.url_of("worker"), log, "--step-ms=40")

    with ExitStack() as stack:
        workers = [stack.enter_context(worker(f"worker{k}")) for k in range(2)]
        first = stack.enter_context(gateway("first"))
        batch = ordered(client_of(first))
        # The other one starts later, so that the first one holds the batch.
        second = stack.enter_context(gateway("second"))
        client = client_of(second)
        polled(client, batch, lambda now: num_completed(now) >= 5)

        first.kill()
        workers[0].kill()
        workers.append(stack.enter_context(worker("worker2")))
        go_on(client, batch)
        own_broker.kill()
        own_broker.start()
        go_on(client, batch)
        postgres.restart()

        disturbed = polled(client, batch, lambda now: now.status in ENDED)
        undisturbed = polled(client, ordered(client), lambda now: now.status in ENDED)
        answers = texts(client, disturbed)

        assert [custom_id for custom_id, _ in answers] == [f"line {k}" for k in range(NUM_LINES)]
        assert answers == texts(client, undisturbed)
        assert "batch claimed" in first.log
        assert "batch claimed" in second.log
