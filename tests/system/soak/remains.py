"""Checks that nothing is left soon after the traffic."""

import time
from collections import Counter

import httpx

from shared.bus.rabbit import RabbitBus
from shared.dead_letters import opened
from tests.support.deployment.broker import RabbitNode
from tests.support.deployment.processes import NO_TLS
from tests.system.chaos import ground
from tests.system.chaos.deployment import Deployment

_MAX_DEAD_LETTERS = 10_000
_PATIENCE_S = 60.0
_LOOK_INTERVAL_S = 2.0
_REFILL_S = 1.0
"""Time in which gateways replace their spare logs."""


class Remains:
    """Compares a deployment at rest with its state before the traffic."""

    def __init__(self, node: RabbitNode, deployment: Deployment) -> None:
        """Waits until the deployment is at rest."""
        self._node = node
        self._deployment = deployment
        ground.wait_clean(node, deployment, {})
        time.sleep(_REFILL_S)
        self._num_logs = len(self._logs())
        self._descriptors = self._num_descriptors()

    def find(self) -> list[str]:
        """Wait for some minutes at most until nothing is left; returns what is left."""
        deadline = time.monotonic() + _PATIENCE_S
        try:
            ground.wait_clean(self._node, self._deployment, {})
        except AssertionError as error:
            return [str(error)]
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(_LOOK_INTERVAL_S)
        return left

    def _left(self) -> list[str]:
        left = []
        # Gateways keep spare logs. A leak shows as more logs than these.
        if (num_logs := len(self._logs())) > self._num_logs:
            left.append(f"{num_logs} reply queues instead of {self._num_logs}")
        for gateway in self._deployment.gateways:
            num_requests = httpx.get(f"{gateway.url}/health", timeout=60, verify=NO_TLS).json()[
                "requests"
            ]
            if num_requests:
                left.append(f"{gateway.url}: {num_requests} requests in flight")
        for pid, num in self._num_descriptors().items():
            more = num - self._descriptors[pid]
            if more > ground.MORE_DESCRIPTORS:
                left.append(f"process {pid}: {more} more open files")
        return left

    def _logs(self) -> list[str]:
        logs = [name for (name,) in self._node.list_queues("name") if name.startswith("reply.")]
        return [name for name in logs if not name.startswith(ground.PROBES)]

    def _num_descriptors(self) -> dict[int, int]:
        usages = ground.usages(self._deployment.processes)
        return {pid: usage.num_descriptors for pid, usage in usages.items()}


async def dead_letters(broker_url: str) -> Counter[str]:
    """The number of dead letters, by reason."""
    async with RabbitBus(broker_url) as bus, opened(bus, _MAX_DEAD_LETTERS) as letters:
        return Counter(letter.reason for letter in letters)
