"""docs/tasks.md: its commands run against a real deployment, and print what the page shows."""

import asyncio
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.async_api import Page, expect

from gateway.intake.keys.key_file import KeyFile
from shared import topology
from shared.bus.base import Message
from shared.bus.rabbit import RabbitBus
from tests.support import otlp
from tests.support.browser import browser, page
from tests.support.console import ask, begun
from tests.support.deployment import processes
from tests.support.deployment.broker import RabbitNode, running_node
from tests.support.deployment.processes import NO_TLS, WarrenProcess, free_port
from tests.support.gateway.http import text_of
from tests.support.pages import ROOT, Block, blocks_of
from tests.system.tasks.compose import BROKER, DIRECTORY, KEYS, Deployment
from tests.system.tasks.terminal import Terminal

__all__ = ["browser", "page"]

PAGE = ROOT / "docs" / "tasks.md"
MODEL = "smollm2"
"""The model of the page; the deployment has the synthetic model."""
NUM_TOKENS = 1500
WAITS_S = 300

pytestmark = [
    pytest.mark.rabbit,
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="Prometheus is not installed"),
    pytest.mark.skipif(shutil.which("jq") is None, reason="jq is not installed"),
]


def sections() -> dict[str, list[Block]]:
    """The blocks of each section by its title. The blocks before the first title have an empty
    title."""
    parts = re.split(r"^## (.+)\n", "\n" + PAGE.read_text(), flags=re.MULTILINE)
    return {
        title: blocks_of(text) for title, text in zip(["", *parts[1::2]], parts[::2], strict=True)
    }


PREPARATION, WITHOUT_COMPOSE, *_ = sections().values()
TASKS = {title: task for title, task in sections().items() if title[:1].isdigit()}
IN_TERMINAL = [title for title, task in TASKS.items() if task[0].mark.startswith("run")]
(IN_CONSOLE,) = [task for title, task in TASKS.items() if title not in IN_TERMINAL]
(RESUMED,) = [title for title in IN_TERMINAL if "stream" in title]


@dataclass
class Played:
    """A deployment in which a request waited long, a worker was killed and a job is dead."""

    gateway: WarrenProcess
    workers: Deployment
    key: str
    """An operator's."""
    addresses: dict[str, str]
    """What the deployment has in the place of the page's addresses."""
    variables: dict[str, str]

    def in_place(self, commands: str) -> str:
        for shown, actual in self.addresses.items():
            commands = commands.replace(shown, actual)
        return commands.replace(MODEL, "echo")

    def request(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return httpx.post(
            self.gateway.url + path,
            json={"model": "echo", "prompt": "Hello", "ignore_eos": True, **body},
            headers={"Authorization": f"Bearer {self.key}"},
            timeout=WAITS_S,
            verify=NO_TLS,
        )

    def get(self, path: str) -> Any:
        headers = {"Authorization": f"Bearer {self.key}"}
        return httpx.get(self.gateway.url + path, headers=headers, timeout=60, verify=NO_TLS).json()

    def scale(self, num_workers: int) -> None:
        command = ["docker", "compose", "up", "--detach", "--no-recreate"]
        scale = f"--scale=worker={num_workers}"
        subprocess.run([*command, scale], env=self.variables, check=True)

    def wait_for_workers(self, number: int) -> None:
        def are_heard() -> bool:
            return len(self.get("/admin/v1/status")["workers"]) == number

        wait_until(are_heard)


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAITS_S
    while not is_true():
        assert time.monotonic() < deadline, "it never became true"
        time.sleep(0.2)


@pytest.fixture(scope="module")
def broker() -> Iterator[RabbitNode]:
    """A broker without the workers of other tests, which the page does not show."""
    with running_node() as node:
        yield node


@pytest.fixture(scope="module")
def played(broker: RabbitNode, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    directory = tmp_path_factory.mktemp("tasks")
    (directory / BROKER).write_text(broker.url_of("worker"))
    (directory / "gateway.url").write_text(broker.url_of("gateway"))
    key = KeyFile(directory / KEYS).add("first", scopes=("generate", "cancel", "operator"))
    with ExitStack() as stack:
        traces = stack.enter_context(otlp.serving())
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("WARREN_OTLP_ENDPOINT", traces.url)
            patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "500")
            gateway = stack.enter_context(
                processes.gateway(
                    broker.url_of("gateway"),
                    directory / "gateway.log",
                    f"--keys-file={directory / KEYS}",
                )
            )
            workers = Deployment(directory)
            stack.callback(workers.scale, 0)
            prometheus = stack.enter_context(prometheus_of(gateway, directory))
            addresses = {
                "http://127.0.0.1:8000": gateway.url,
                "http://127.0.0.1:9090": prometheus,
                "http://127.0.0.1:3200": traces.url,
            }
            played = Played(gateway, workers, key, addresses, variables_of(directory))
            let_a_request_wait(played)
            kill_a_worker(played)
            asyncio.run(publish_garbage(broker.url_of("operator")))
            yield played


def variables_of(directory: Path) -> dict[str, str]:
    """The environment of a terminal, whose commands ``docker`` and ``warren`` are the test's."""
    programs = directory / "bin"
    programs.mkdir()
    for name, program in {
        "docker": f"{shlex.quote(sys.executable)} -m tests.system.tasks.compose",
        "warren": f"{shlex.quote(sys.executable)} {ROOT / 'warren.py'}",
    }.items():
        (programs / name).write_text(f'#!/bin/sh\nexec {program} "$@"\n')
        (programs / name).chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "200",
        DIRECTORY: str(directory),
    }


@contextmanager
def prometheus_of(gateway: WarrenProcess, directory: Path) -> Iterator[str]:
    """The URL of a Prometheus that scrapes the gateway."""
    url = f"127.0.0.1:{free_port()}"
    targets = [{"targets": [gateway.url.removeprefix("http://")]}]
    config = {
        "global": {"scrape_interval": "1s"},
        "scrape_configs": [{"job_name": "gateway", "static_configs": targets}],
    }
    (directory / "prometheus.json").write_text(json.dumps(config))
    process = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={directory / 'prometheus.json'}",
            f"--storage.tsdb.path={directory / 'data'}",
            f"--web.listen-address={url}",
            "--log.level=error",
        ]
    )
    try:
        yield f"http://{url}"
    finally:
        process.terminate()
        process.wait()


def let_a_request_wait(played: Played) -> None:
    """Send a request while the model's only worker is away."""
    played.scale(1)
    played.wait_for_workers(1)
    played.scale(0)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(played.request, "/v1/completions", {"max_tokens": 5})
        wait_until(lambda: "request accepted" in played.workers.log())
        played.scale(2)
        assert waiting.result().status_code == 200


def kill_a_worker(played: Played) -> None:
    """Kill the worker that answers a request, which another worker continues."""
    played.wait_for_workers(2)
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(played.request, "/v1/completions", {"max_tokens": NUM_TOKENS})
        wait_until(lambda: bool(busy(played.workers)))
        os.kill(busy(played.workers)[0], signal.SIGKILL)
        assert answer.result().json()["usage"]["completion_tokens"] == NUM_TOKENS
    played.wait_for_workers(1)


def busy(workers: Deployment) -> list[int]:
    """The processes of the workers that run a request."""
    return [pid for url, pid in workers.workers().items() if is_busy(url)]


def is_busy(url: str) -> bool:
    try:
        lines = httpx.get(f"{url}/metrics", timeout=60, verify=NO_TLS).text.splitlines()
    except httpx.TransportError:
        return False
    running = [line for line in lines if line.startswith("warren_worker_sequences_running{")]
    return any(float(line.split()[-1]) > 0 for line in running)


async def publish_garbage(url: str) -> None:
    async with RabbitBus(url) as bus:
        await bus.publish(topology.jobs_binding("echo", "interactive"), Message(b"no job"))


@pytest.fixture
def terminal(played: Played, tmp_path: Path) -> Iterator[Terminal]:
    shutil.copy(played.workers.directory / "gateway.url", tmp_path)
    with Terminal(tmp_path, played.variables) as terminal:
        play(played, terminal, PREPARATION)
        yield terminal


def play(played: Played, terminal: Terminal, task: list[Block]) -> None:
    """Run the blocks of a task, and check that each prints what the page shows after it."""
    for block, following in zip(task, [*task[1:], Block("", "", "")], strict=True):
        commands = played.in_place(block.text)
        wanted = played.in_place(following.text) if following.mark == "shows" else ""
        if block.mark == "run task":
            output = terminal.run(commands)
            assert missing(wanted, output) == [], output
        elif block.mark == "run task until":
            wait_until_shown(terminal, commands, wanted)


def wait_until_shown(terminal: Terminal, commands: str, wanted: str) -> None:
    deadline = time.monotonic() + WAITS_S
    while True:
        output, status = terminal.outcome(commands)
        if status == 0 and not missing(wanted, output):
            return
        assert time.monotonic() < deadline, (missing(wanted, output), output)
        time.sleep(0.5)


def missing(wanted: str, output: str) -> list[str]:
    """The lines that the output lacks; a line that is shown twice must be there twice."""
    lines = output.splitlines()
    absent = []
    for pattern in wanted.splitlines():
        found = next((line for line in lines if matches(pattern, line)), None)
        if found is None:
            absent.append(pattern)
        else:
            lines.remove(found)
    return absent


def matches(pattern: str, line: str) -> bool:
    """Whether a line of the page, in which ``…`` stands for anything, describes a printed line."""
    expression = ".*".join(re.escape(" ".join(part.split())) for part in pattern.split("…"))
    return re.fullmatch(rf"\s*{expression}\s*", " ".join(line.split())) is not None


def test_there_are_ten_tasks() -> None:
    assert len(TASKS) == 10


@pytest.mark.parametrize("title", [title for title in IN_TERMINAL if title != RESUMED])
def test_commands_print_what_the_page_shows(title: str, played: Played, terminal: Terminal) -> None:
    play(played, terminal, TASKS[title])


def test_a_resumed_stream_lacks_nothing(played: Played, terminal: Terminal, tmp_path: Path) -> None:
    play(played, terminal, TASKS[RESUMED])

    first, rest = ((tmp_path / name).read_text() for name in ("answer.txt", "rest.txt"))
    message = {"role": "user", "content": "Tell me a long story."}
    body = {"prompt": None, "messages": [message], "max_tokens": 100, "seed": 7}
    undisturbed = played.request("/v1/chat/completions", body).json()
    text = undisturbed["choices"][0]["message"]["content"]
    assert text_of(f"{first}\n{rest}") == text


def test_files_take_the_place_of_compose(played: Played) -> None:
    variables = {name: value for name, value in played.variables.items() if name != DIRECTORY}
    with Terminal(played.workers.directory, variables) as terminal:
        play(played, terminal, WITHOUT_COMPOSE)


async def test_the_console_shows_what_the_page_shows(page: Page, played: Played) -> None:
    shown = {block.mark: block.text.strip() for block in IN_CONSOLE}
    await asyncio.to_thread(played.scale, 2)
    await asyncio.to_thread(played.wait_for_workers, 2)
    await page.goto(played.gateway.url)
    await page.get_by_label("Key", exact=True).fill(played.key)
    await page.get_by_role("button", name="Use the key").click()
    await page.locator("#model option[value=echo]").wait_for(state="attached")
    await page.get_by_label("Maximum tokens").fill("4000")
    await ask(page, "Tell me something long.")
    await begun(page)

    os.kill(busy(played.workers)[0], signal.SIGKILL)

    await expect(page.locator(".notes")).to_have_text(shown["shows in the chat"])
    await page.get_by_role("link", name="Fleet").click()
    await expect(page.locator("#streams")).to_contain_text(shown["shows in the fleet"])
    await page.get_by_role("link", name="Chat").click()
    await page.get_by_role("button", name="Stop").click()
