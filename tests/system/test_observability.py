"""Dashboards, alerts and metrics, with a real Prometheus that scrapes a real deployment in which a
worker is killed."""

import asyncio
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from infra.dashboards import expressions
from shared import topology
from shared.bus.base import Message
from shared.bus.rabbit import RabbitBus
from tests.support.deployment import processes
from tests.support.deployment.broker import Broker
from tests.support.deployment.processes import NO_TLS, ROOT, WarrenProcess, free_port

pytestmark = [
    pytest.mark.rabbit,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="Prometheus is not installed"),
]

RULES = ROOT / "infra" / "prometheus"
SETTLES_S = 200
"""How long an expression may take until it has data on a busy machine: two scrapes, evaluated
rules, and the watch of the queues."""


@dataclass
class Deployment:
    gateway: WarrenProcess
    workers: list[WarrenProcess]
    prometheus: str
    """The URL."""

    def wait_ready(self) -> None:
        """Wait until Prometheus answers queries; it says 503 until it has read its storage."""
        deadline = time.monotonic() + SETTLES_S
        while time.monotonic() < deadline:
            with suppress(httpx.TransportError):
                ready = httpx.get(f"{self.prometheus}/-/ready", timeout=60, verify=NO_TLS)
                if ready.status_code == 200:
                    return
            time.sleep(0.2)
        raise AssertionError("Prometheus does not become ready")

    def query(self, expression: str) -> list[Any]:
        response = httpx.get(
            f"{self.prometheus}/api/v1/query",
            params={"query": expression},
            timeout=60,
            verify=NO_TLS,
        )
        assert response.status_code == 200, (expression, response.text)
        result: list[Any] = response.json()["data"]["result"]
        return result

    def without_data(self, wanted: list[str]) -> list[str]:
        """The expressions that have no data, after a while."""
        return self._settled(wanted, lambda expression: not self.query(expression))

    def with_data(self, unwanted: list[str]) -> list[str]:
        """The expressions that still have data after a while. A scrape that a busy machine delays
        for more than a second counts as failed."""
        return self._settled(unwanted, lambda expression: bool(self.query(expression)))

    def _settled(self, expressions: list[str], is_bad: Callable[[str], bool]) -> list[str]:
        deadline = time.monotonic() + SETTLES_S
        bad = expressions
        while bad and time.monotonic() < deadline:
            bad = [expression for expression in bad if is_bad(expression)]
            time.sleep(0.5 if bad else 0)
        return bad


def config(targets: dict[str, list[str]]) -> str:
    """infra's configuration with other targets and intervals."""
    shipped = yaml.safe_load((RULES / "prometheus.yml").read_text())
    jobs = [
        {"job_name": job, "static_configs": [{"targets": urls}]} for job, urls in targets.items()
    ]
    rules = [str(RULES / Path(name).name) for name in shipped["rule_files"]]
    intervals = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    return json.dumps({"global": intervals, "rule_files": rules, "scrape_configs": jobs})


def complete(url: str, **more: Any) -> httpx.Response:
    body = {"model": "echo", "prompt": "Hello", "max_tokens": 20, "ignore_eos": True, **more}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60, verify=NO_TLS)


def survive_a_kill(gateway: WarrenProcess, workers: list[WarrenProcess]) -> None:
    """Kill the worker that answers a stream, and read the stream to its end."""
    body = {"model": "echo", "prompt": "Hello", "max_tokens": 300, "ignore_eos": True}
    url = f"{gateway.url}/v1/completions"
    with httpx.stream(
        "POST", url, json={**body, "stream": True}, timeout=60, verify=NO_TLS
    ) as stream:
        lines = stream.iter_lines()
        while not next(lines).startswith("data: "):
            pass
        request_id, victims = stream.headers["x-request-id"], list[WarrenProcess]()
        while not victims:
            victims = [worker for worker in workers if request_id in worker.log]
        victims[0].kill()
        assert list(lines)[-2:][0] == "data: [DONE]"


async def publish_garbage(url: str) -> None:
    async with RabbitBus(url) as bus:
        await bus.publish(topology.jobs_binding("echo", "interactive"), Message(b"no job"))


@pytest.fixture(scope="module")
def deployment(broker: Broker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A gateway and two workers after a kill, some requests, a refused request and a dead
    letter."""
    logs = tmp_path_factory.mktemp("observability")
    port = free_port()
    with ExitStack() as stack:
        workers = [
            processes.echo_worker(broker.url_of("worker"), logs / f"worker{k}", "--step-ms=20")
            for k in range(2)
        ]
        for worker in workers:
            worker.start()
            stack.callback(worker.terminate)
        gateway = stack.enter_context(
            processes.gateway(
                broker.url_of("gateway"),
                logs / "gateway",
                "--audit-share=1",
                # A hedge could win on a busy machine, before the broker notices the lost worker.
                tuning={"has_hedging": False},
            )
        )
        for worker in workers:
            worker.wait_healthy()
        targets = {
            "gateway": [gateway.url.removeprefix("http://")],
            "worker": [worker.url.removeprefix("http://") for worker in workers],
        }
        (logs / "prometheus.json").write_text(config(targets))
        prometheus = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={logs / 'prometheus.json'}",
                f"--storage.tsdb.path={logs / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
                "--log.level=error",
            ]
        )
        stack.callback(prometheus.wait)
        stack.callback(prometheus.terminate)
        running = Deployment(gateway, workers, f"http://127.0.0.1:{port}")
        while complete(gateway.url).status_code != 200:
            time.sleep(0.2)
        running.wait_ready()
        # Prometheus sees no increase of a counter that it has not read before the kill.
        scraped = f'count(up{{job="worker"}} == 1) >= {len(workers)}'
        assert running.without_data(["warren_worker_jobs_total", scraped]) == []
        assert complete(gateway.url, temperature=9).status_code == 400
        survive_a_kill(gateway, workers)
        asyncio.run(publish_garbage(broker.url_of("operator")))
        for _ in range(5):
            assert complete(gateway.url).status_code == 200
        yield running


def test_every_expression_of_a_dashboard_has_data(deployment: Deployment) -> None:
    assert deployment.without_data(expressions()) == []


def alerts() -> dict[str, str]:
    rules = yaml.safe_load((RULES / "alerts.rules.yml").read_text())
    return {
        rule["alert"]: rule["expr"]
        for group in rules["groups"]
        for rule in group["rules"]
        if "alert" in rule
    }


def test_every_signal_of_an_alert_has_data(deployment: Deployment) -> None:
    """An alert compares a signal with a number, and fires by having data itself."""
    parts = [expression.rpartition(" ") for expression in alerts().values()]
    signals = [left.rpartition(" ")[0] for left, _, _ in parts]

    assert all(left.rpartition(" ")[2] in "<>" for left, _, _ in parts)
    assert deployment.without_data(signals) == []


def test_alerts_about_the_kill_and_the_dead_letter_have_data(deployment: Deployment) -> None:
    wanted = [alerts()[name] for name in ("WarrenWorkerDown", "WarrenDeadLetters")]

    assert deployment.without_data([*wanted, "warren:workers_lost:increase10m > 0"]) == []


def test_no_alert_has_an_expression_for_which_a_working_gateway_counts(
    deployment: Deployment,
) -> None:
    quiet = ("WarrenGatewayDown", "WarrenBrokerUnreachable", "WarrenNoWorkers")

    assert deployment.with_data([alerts()[name] for name in quiet]) == []


def test_vllms_names_have_data(deployment: Deployment) -> None:
    names = [
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:time_to_first_token_seconds_bucket",
        "vllm:inter_token_latency_seconds_bucket",
        "vllm:e2e_request_latency_seconds_bucket",
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:request_success_total",
        "vllm:num_preemptions_total",
    ]

    wanted = [f'{name}{{model_name="echo"}}' for name in names]
    assert deployment.without_data(wanted) == []


def test_promtool_finds_no_fault_in_what_processes_export(deployment: Deployment) -> None:
    living = [worker for worker in deployment.workers if worker.is_alive]

    for process in (deployment.gateway, *living):
        exported = httpx.get(f"{process.url}/metrics", timeout=60, verify=NO_TLS).text
        checked = subprocess.run(
            ["promtool", "check", "metrics"], input=exported, text=True, capture_output=True
        )

        assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")
