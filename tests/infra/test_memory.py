"""The memory that the limits of connections and bodies add up to, beside that of the containers."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT

from gateway import connections
from shared.settings import GatewaySettings
from tests.support.network.attacks import MAX_BYTES_PER_BODY_BYTE

ROOT = Path(__file__).parents[2]
COMPOSE = (ROOT / "docker-compose.yml").read_text()
SERVICES: dict[str, Any] = yaml.safe_load(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", COMPOSE))["services"]
VALUES = yaml.safe_load((ROOT / "infra/helm/warren/values.yaml").read_text())
NGINX = (ROOT / "infra/proxy/nginx.conf").read_text()

UNITS = {
    "": 1,
    "k": 1 << 10,
    "m": 1 << 20,
    "g": 1 << 30,
    "Ki": 1 << 10,
    "Mi": 1 << 20,
    "Gi": 1 << 30,
}
TLS_BYTES = 48 << 10
"""A TLS connection in OpenSSL: its state, and a record of 16 KiB in each direction."""
NGINX_REQUEST_BYTES = 16 << 10
"""nginx's state of a request, and its buffer for the head of the response."""
NGINX_BYTES = 24 << 20
"""nginx without connections: two processes and the shared zones."""
GATEWAY_BYTES = 160 << 20
"""A gateway without connections."""


def num_bytes(size: str) -> int:
    match = re.fullmatch(r"(\d+)(\w*)", size)
    assert match is not None, size
    return int(match[1]) * UNITS[match[2]]


def directive(name: str) -> list[str]:
    (value,) = re.findall(rf"^\s*{name} ([^;]+);", NGINX, re.MULTILINE)
    return str(value).split()


def tmpfs_bytes(service: dict[str, Any]) -> int:
    """What the service's tmpfs may hold, which is memory of the container."""
    options = [mount.partition(":size=")[2] for mount in service.get("tmpfs", [])]
    return sum(num_bytes(size.partition(",")[0]) for size in options)


@pytest.mark.parametrize("service", SERVICES.values(), ids=SERVICES.keys())
def test_a_tmpfs_has_a_size_and_leaves_the_container_most_of_its_memory(
    service: dict[str, Any],
) -> None:
    assert all(":size=" in mount for mount in service.get("tmpfs", []))
    assert tmpfs_bytes(service) <= num_bytes(service["mem_limit"]) / 4


def test_the_proxys_connections_fit_its_memory() -> None:
    (worker_connections,) = map(int, directive("worker_connections"))
    num_buffers, size = directive("large_client_header_buffers")
    head_bytes = int(num_buffers) * num_bytes(size) + (1 << 10)
    (buffer_size,) = directive("client_body_buffer_size")
    idle = worker_connections * (TLS_BYTES + head_bytes)
    # A request that is passed on takes a connection to a gateway, too.
    request_bytes = TLS_BYTES + head_bytes + num_bytes(buffer_size) + NGINX_REQUEST_BYTES
    proxied = worker_connections // 2 * request_bytes
    proxy = SERVICES["proxy"]

    assert max(idle, proxied) + NGINX_BYTES + tmpfs_bytes(proxy) < num_bytes(proxy["mem_limit"])


def test_the_proxy_keeps_the_bodies_that_fit_its_buffers_alone() -> None:
    (buffer_size,) = directive("client_body_buffer_size")
    kept = re.compile("|".join(re.findall(r'"~(\S+)" 0;', NGINX)))
    locations = re.findall(r"location [^{]+{(?:[^{}]|{[^{}]*})*}", NGINX)

    assert max(length for length in range(70_000) if kept.match(str(length))) == 59_999
    assert num_bytes(buffer_size) > 59_999
    assert kept.match("600000") is None
    for location in locations:
        is_checked = "if ($is_large)" in location or "proxy_request_buffering off;" in location
        is_second_try = "@elsewhere {" in location
        assert "proxy_pass" not in location or is_checked or is_second_try, location


@pytest.mark.parametrize(
    "limit",
    [SERVICES["gateway"]["mem_limit"], VALUES["gateway"]["resources"]["limits"]["memory"]],
    ids=["compose", "helm"],
)
def test_a_gateways_connections_and_bodies_fit_its_memory(limit: str) -> None:
    settings = GatewaySettings()
    connection_bytes = (
        connections._MAX_HEAD_BYTES
        + HIGH_WATER_LIMIT  # of a body that is not read
        + connections._CHUNK_BYTES  # of a response
        + connections._PIECE_BYTES
    )
    bodies = settings.max_bytes_in_flight * MAX_BYTES_PER_BODY_BYTE
    connected = settings.max_connections * connection_bytes

    assert GATEWAY_BYTES + connected + bodies < num_bytes(limit)


def test_the_charts_volume_holds_all_that_one_tenant_may_store() -> None:
    size = str(VALUES["gateway"]["volume"]["size"])
    defaults = GatewaySettings.model_fields
    stored = 2 * defaults["max_tenant_bytes"].default  # files, and responses as well

    assert size.endswith("Gi")
    assert stored <= 0.8 * int(size.removesuffix("Gi")) * (1 << 30)
