"""A process that connects to the broker with an account of another role."""

from pathlib import Path

import pytest

from tests.support.deployment import processes
from tests.support.deployment.broker import Broker
from tests.support.deployment.processes import WarrenProcess

pytestmark = pytest.mark.rabbit


def code_and_last_line(process: WarrenProcess) -> tuple[int, str]:
    """What the process says at its end, which it reaches by itself."""
    process.start()
    code = process.wait()
    return code, process.log.splitlines()[-1]


@pytest.mark.parametrize("user", ["worker", "publisher"])
def test_a_gateway_does_not_start_without_its_permissions(
    user: str, broker: Broker, tmp_path: Path
) -> None:
    gateway = processes.gateway(broker.url_of(user), tmp_path / "gateway")

    code, line = code_and_last_line(gateway)

    assert code == 2
    assert "connect with the gateway's account" in line
