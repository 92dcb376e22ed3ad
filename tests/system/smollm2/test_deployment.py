"""A gateway and two workers over RabbitMQ: what a cluster does that a single process cannot."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pika
import pytest

from shared import topology
from tests.support import PATIENCE_S
from tests.support.deployment import processes
from tests.support.deployment.broker import Broker
from tests.support.deployment.processes import NO_TLS, ROOT, WarrenProcess
from tests.support.metrics import sample

pytestmark = pytest.mark.rabbit

MODEL = "smollm2"
QUESTION = "What is the capital of France?"
GENERATED = "warren_worker_generation_tokens_total"
RUNNING = "warren_worker_sequences_running"


@pytest.fixture
def openai_client(gateway: WarrenProcess) -> Iterator[openai.OpenAI]:
    url = f"{gateway.url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def answer(client: openai.OpenAI, prompt: str, *, max_tokens: int = 24, model: str = MODEL) -> str:
    chunks = client.completions.create(
        model=model, prompt=prompt, max_tokens=max_tokens, temperature=0, seed=1, stream=True
    )
    return "".join(chunk.choices[0].text for chunk in chunks)


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_true():
        assert time.monotonic() < deadline, "it never became true"
        time.sleep(0.01)


def test_two_workers_share_the_work(
    openai_client: openai.OpenAI, workers: list[WarrenProcess]
) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda k: answer(openai_client, f"Number {k} is"), range(16)))

    assert min(sample(worker, GENERATED) for worker in workers) > 0


def test_health_lists_the_live_workers(gateway: WarrenProcess) -> None:
    wait_until(lambda: MODEL in httpx.get(f"{gateway.url}/health", timeout=60, verify=NO_TLS).text)


def test_a_worker_that_is_stopped_hands_its_streams_over(
    broker: Broker, gateway: WarrenProcess, openai_client: openai.OpenAI, logs: Path
) -> None:
    def echo(name: str, step_ms: int) -> WarrenProcess:
        options = (f"--step-ms={step_ms}", "--drain-grace-s=0.2")
        return processes.echo_worker(broker.url_of("worker"), logs / name, *options)

    # The first one is so slow that its answer has not ended when the other one has started.
    with echo("drained", 1000) as drained, ThreadPoolExecutor(1) as pool:
        stream = pool.submit(answer, openai_client, "Long ago", max_tokens=100, model="echo")
        wait_until(lambda: sample(drained, RUNNING) == 1)
        with echo("successor", 20):
            assert drained.terminate() == 0
            continued = stream.result()
            undisturbed = answer(openai_client, "Long ago", max_tokens=100, model="echo")

    assert "job handed over" in drained.log
    assert continued == undisturbed


def test_a_client_that_leaves_frees_its_worker(
    broker: Broker, gateway: WarrenProcess, openai_client: openai.OpenAI, logs: Path
) -> None:
    with processes.echo_worker(broker.url_of("worker"), logs / "left", "--step-ms=200") as worker:
        stream = openai_client.completions.create(
            model="echo", prompt="Long ago", max_tokens=2000, stream=True
        )
        next(iter(stream))
        stream.close()

        # It may return within the gateway's grace period of 5 s. The answer alone takes 400.
        wait_until(lambda: sample(worker, RUNNING) == 0)


def test_malformed_messages_are_dead_lettered_and_take_nobody_down(
    broker: Broker, openai_client: openai.OpenAI, workers: list[WarrenProcess]
) -> None:
    bodies = [b"", b"{}", b"\xc1" * 100, b"[" * 10_000]
    with pika.BlockingConnection(pika.URLParameters(broker.url)) as connection:
        channel = connection.channel()

        def num_dead() -> int:
            declared = channel.queue_declare(topology.DEAD_LETTERS.name, passive=True)
            return int(declared.method.message_count)

        before = num_dead()
        for body in bodies:
            channel.basic_publish(topology.JOBS.name, f"{MODEL}.interactive", body)

        assert "Paris" in answer(openai_client, "The capital of France is")
        wait_until(lambda: num_dead() >= before + len(bodies))
        assert num_dead() == before + len(bodies)


def test_the_pika_example_gets_an_answer(
    broker: Broker, gateway: WarrenProcess, workers: list[WarrenProcess]
) -> None:
    run = subprocess.run(
        [sys.executable, "examples/publish_with_pika.py", broker.url_of("publisher"), QUESTION],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )

    assert "Paris" in run.stdout


def test_a_batch_survives_the_kill_of_a_worker_and_of_itself(
    broker: Broker, tmp_path: Path, logs: Path
) -> None:
    questions, output = tmp_path / "questions.jsonl", tmp_path / "answers.jsonl"
    journal = tmp_path / "answers.jsonl.part"
    # All run at once. Each answer is longer than the answer before, so that no two end together.
    lines = [
        {
            "custom_id": f"q{k}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "echo", "prompt": f"Question {k}", "max_tokens": 10 + 5 * k},
        }
        for k in range(60)
    ]
    questions.write_text("".join(json.dumps(line) + "\n" for line in lines))
    url = broker.url_of("publisher")
    command = ["warren.py", "batch", str(questions), str(output), f"--broker={url}"]

    def echo(name: str, step_ms: int) -> WarrenProcess:
        return processes.echo_worker(broker.url_of("worker"), logs / name, f"--step-ms={step_ms}")

    def num_answered() -> int:
        """Lines of the journal without its header."""
        return journal.read_bytes().count(b"\n") - 1 if journal.exists() else 0

    with echo("batch-survivor", 10):
        with echo("batch-victim", 100) as victim:  # it has not ended its jobs when it is killed
            first = subprocess.Popen([sys.executable, *command], cwd=ROOT)
            wait_until(lambda: num_answered() >= 1)
            num_held = sample(victim, RUNNING)
            victim.kill()
            first.kill()
            first.wait()
        num_done = num_answered()
        subprocess.run([sys.executable, *command], cwd=ROOT, check=True)

    assert num_held > 0
    assert 1 <= num_done < len(lines)
    answers = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line["custom_id"] for line in answers] == [line["custom_id"] for line in lines]
    assert all(line["response"]["status_code"] == 200 for line in answers)
