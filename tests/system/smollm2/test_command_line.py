"""The commands that users type, with the real model."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.support.deployment import processes
from tests.support.deployment.broker import Broker
from tests.support.deployment.processes import NO_TLS, ROOT, WarrenProcess

QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
FP32 = ("--dtype=float32", "--compute-threads=1")


def warren(*args: str, typed: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "warren.py", *args],
        cwd=ROOT,
        text=True,
        capture_output=True,
        input=typed,
        timeout=250,
    )


def test_serve_answers_a_question_and_ends(smollm2: Path) -> None:
    asked = warren("serve", f"--ask={QUESTION}", "--once", "--port=0", "--dtype=float32")

    assert asked.returncode == 0, asked.stderr
    assert QUESTION in asked.stdout
    assert ANSWER in asked.stdout


def test_pull_says_where_the_model_is(smollm2: Path) -> None:
    pulled = warren("pull", "smollm2")

    assert pulled.returncode == 0, pulled.stderr
    assert (Path(pulled.stdout.split()[-1]) / "config.json").is_file()


def test_chat_remembers_the_conversation(embedded: WarrenProcess) -> None:
    typed = f"{QUESTION}\nAnd what is the capital of Italy?\n/exit\n"

    talked = warren("chat", f"--url={embedded.url}", "--temperature=0", typed=typed)

    assert talked.returncode == 0, talked.stderr
    assert ANSWER in talked.stdout
    assert "Rome" in talked.stdout


def test_serve_ends_at_once_when_it_is_asked_twice(smollm2: Path, logs: Path) -> None:
    endless = {"model": "smollm2", "prompt": "1 2 3", "stream": True, "ignore_eos": True}
    body = {**endless, "max_tokens": 4000}
    with (
        processes.serve(logs / "twice", *FP32) as process,
        httpx.stream("POST", f"{process.url}/v1/completions", json=body, timeout=60) as response,
    ):
        lines = response.iter_lines()  # closes the response when it is garbage-collected
        next(lines)
        os.kill(process.pid, signal.SIGINT)
        while httpx.get(f"{process.url}/health", timeout=60, verify=NO_TLS).status_code == 200:
            time.sleep(0.05)

        assert process.terminate() == -signal.SIGTERM


def test_a_worker_without_its_broker_ends_when_it_is_asked_to(smollm2: Path) -> None:
    nowhere = f"--broker=amqp://nobody:secret@127.0.0.1:{processes.free_port()}/warren"
    with subprocess.Popen(
        [sys.executable, "warren.py", "worker", nowhere], cwd=ROOT, stderr=subprocess.PIPE
    ) as process:
        assert process.stderr is not None
        assert b"broker unreachable" in process.stderr.readline()

        process.terminate()

        assert process.wait() == 130


@pytest.mark.rabbit
def test_batch_answers_a_file(broker: Broker, workers: list[WarrenProcess], tmp_path: Path) -> None:
    requests, results = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = f'{{"model": "smollm2", "messages": [{{"role": "user", "content": "{QUESTION}"}}]'
    line = f'"method": "POST", "url": "/v1/chat/completions", "body": {body}, "temperature": 0}}}}'
    requests.write_text("".join(f'{{"custom_id": "{k}", {line}\n' for k in range(4)))

    run = warren("batch", str(requests), str(results), f"--broker={broker.url_of('publisher')}")

    assert run.returncode == 0, run.stderr
    assert re.findall(r'"custom_id": ?"(\d)"', results.read_text()) == ["0", "1", "2", "3"]
    assert results.read_text().count(ANSWER) == 4
    assert "4/4" in run.stderr
    assert "0 failed" in run.stderr


@pytest.mark.rabbit
def test_batch_goes_on_after_ctrl_c(
    broker: Broker, smollm2: Path, logs: Path, tmp_path: Path
) -> None:
    questions, answers = tmp_path / "questions.jsonl", tmp_path / "answers.jsonl"
    body = {"model": "echo", "prompt": "Long ago", "max_tokens": 50, "ignore_eos": True}
    lines = [
        {"custom_id": f"q{k}", "method": "POST", "url": "/v1/completions", "body": body}
        for k in range(100)
    ]
    questions.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    command = ["batch", str(questions), str(answers), f"--broker={broker.url_of('publisher')}"]
    journal = answers.with_name("answers.jsonl.part")

    # So slow that the first command has not ended when it is interrupted.
    with processes.echo_worker(broker.url_of("worker"), logs / "ctrl-c", "--step-ms=20"):
        first = subprocess.Popen(
            [sys.executable, "warren.py", *command, "--window=4"],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        while first.poll() is None and not (journal.exists() and "q0" in journal.read_text()):
            time.sleep(0.01)
        first.send_signal(signal.SIGINT)
        _, notice = first.communicate()
        was_complete = answers.exists()
        second = warren(*command)

    assert (first.returncode, was_complete) == (130, False)
    assert "run the same command" in notice
    assert second.returncode == 0, second.stderr
    ids = [json.loads(line)["custom_id"] for line in answers.read_text().splitlines()]
    assert ids == [line["custom_id"] for line in lines]
