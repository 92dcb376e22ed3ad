"""The Helm chart's deployment, played with processes: order of the start, probes, upgrade and end.

Containers, network and volumes are not played. Manifests, the broker's users, variables, probes and
grace periods come from the rendered chart.
"""

import base64
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from yarl import URL

from gateway.intake.keys.key_file import KeyFile
from tests.support.deployment.broker import RabbitNode, new_node
from tests.support.deployment.helm import Manifest, find, render
from tests.support.deployment.processes import NO_TLS
from tests.system.pods import Pod

pytestmark = [pytest.mark.rabbit, pytest.mark.timeout(600)]

VALUES: dict[str, Any] = {
    "settings": {"log_format": "json"},
    "gateway": {"drainSeconds": 20},
    "workers": {
        "smollm2": {
            "model": "smollm2",
            "drainSeconds": 1,
            "settings": {"compute_threads": 1, "max_num_seqs": 4, "kv_cache_bytes": 64 << 20},
        }
    },
}
LINKS = {
    "WARREN_SERVICE_HOST": "10.0.0.1",
    "WARREN_SERVICE_PORT": "80",
    "WARREN_GATEWAY_PORT": "tcp://10.0.0.1:80",
    "WARREN_GATEWAY_PORT_80_TCP_ADDR": "10.0.0.1",
}
"""What Kubernetes injects for a Service if it is not told otherwise."""
BODY = {
    "model": "smollm2",
    "prompt": "The capital of France is",
    "max_tokens": 48,
    "temperature": 0,
    "ignore_eos": True,
}


@dataclass
class Cluster:
    """A broker that is not started, and pods that are."""

    node: RabbitNode
    manifests: list[Manifest]
    key: str
    stack: ExitStack
    directory: Path

    def start(self, kind: str) -> Pod:
        """Start a pod of the gateways, or of the workers."""
        name = {"gateway": "warren-gateway", "worker": "warren-worker-smollm2"}[kind]
        deployment = find(self.manifests, "Deployment", name)
        secrets = {
            "/etc/warren/keys/keys": (self.directory / "keys").read_text(),
            "/etc/warren/secret/secret": self._secret("warren-gateway", "secret"),
            f"/etc/warren/broker/{kind}-url": self._url(f"{kind}-url"),
        }
        return self.stack.enter_context(Pod(deployment, self.directory, secrets, LINKS))

    def _secret(self, name: str, key: str) -> str:
        return base64.b64decode(find(self.manifests, "Secret", name)["data"][key]).decode()

    def _url(self, key: str) -> str:
        port = URL(self.node.url).port
        return str(URL(self._secret("warren-broker", key)).with_host("127.0.0.1").with_port(port))


@pytest.fixture
def cluster(tmp_path: Path, smollm2: Path) -> Iterator[Cluster]:
    manifests = render(VALUES)
    secret = find(manifests, "Secret", "warren-broker")["data"]["definitions.json"]
    key = KeyFile(tmp_path / "keys").add("alice")
    with ExitStack() as stack:
        node = stack.enter_context(new_node(base64.b64decode(secret).decode()))
        yield Cluster(node, manifests, key, stack, tmp_path)


def text_of(stream: str) -> str:
    data = [line.removeprefix("data: ") for line in stream.splitlines() if line[:6] == "data: "]
    assert data[-1] == "[DONE]", data[-1]
    return "".join(json.loads(one)["choices"][0]["text"] for one in data[:-1])


def test_it_starts_in_any_order_and_is_upgraded_without_the_loss_of_a_stream(
    cluster: Cluster,
) -> None:
    gateway, worker = cluster.start("gateway"), cluster.start("worker")
    for pod in (gateway, worker):  # before the broker is there
        pod.wait("livenessProbe")
        assert not pod.passes("readinessProbe")
    cluster.node.start()
    for pod in (gateway, worker):
        pod.wait("startupProbe")
        pod.wait("readinessProbe")

    headers = {"authorization": f"Bearer {cluster.key}"}
    with (
        httpx.Client(base_url=gateway.url, timeout=300, verify=NO_TLS) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        assert client.post("/v1/completions", json=BODY).status_code == 401
        client.headers.update(headers)
        undisturbed = client.post("/v1/completions", json=BODY).json()["choices"][0]["text"]

        # A rolling update: each new pod is ready before its predecessor ends.
        new_worker, new_gateway = cluster.start("worker"), cluster.start("gateway")
        new_worker.wait("readinessProbe")
        new_gateway.wait("readinessProbe")
        with client.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as answer:
            pieces = answer.iter_text()
            stream = next(pieces)
            worker.terminate()
            gateway.terminate()
            rest = pool.submit(lambda: "".join(pieces))
            assert worker.wait_ended() == 0
            stream += rest.result()
        assert gateway.wait_ended() == 0
        assert text_of(stream) == undisturbed
        assert not gateway.passes("livenessProbe")

        url = f"{new_gateway.url}/v1/completions"
        after = client.post(url, json=BODY).json()["choices"][0]["text"]
        assert after == undisturbed
