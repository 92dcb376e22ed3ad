"""How the processes of a run reach their broker: directly, or through provoked faults."""

from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from tests.support.deployment.broker import RabbitNode
from tests.support.network.amqp.provocations import GATEWAYS_RATE, WORKERS_RATE, Provocations
from tests.support.network.amqp.proxy import AmqpProxy

_RATES = {"worker": WORKERS_RATE, "gateway": GATEWAYS_RATE}


@dataclass(frozen=True)
class Network:
    """Where workers and gateways find the broker, and what is done to them there."""

    worker_url: str
    gateway_url: str
    _policies: Mapping[str, Provocations] = field(default_factory=dict)

    @property
    def provoked(self) -> dict[str, Counter[str]]:
        """How often each fault has struck workers and gateways."""
        return {name: policy.num_of for name, policy in self._policies.items()}

    def begin(self) -> None:
        """Provoke faults until `end`."""
        for name, policy in self._policies.items():
            policy.rate = _RATES[name]

    def end(self) -> None:
        for policy in self._policies.values():
            policy.rate = 0


@asynccontextmanager
async def network(node: RabbitNode, seed: int, *, is_provoked: bool) -> AsyncIterator[Network]:
    worker_url, gateway_url = node.url_of("worker"), node.url_of("gateway")
    if not is_provoked:
        yield Network(worker_url, gateway_url)
        return
    policies = {name: Provocations(seed + k, rate=0) for k, name in enumerate(_RATES)}
    async with (
        AmqpProxy(worker_url, policies["worker"]) as workers,
        AmqpProxy(gateway_url, policies["gateway"]) as gateways,
    ):
        yield Network(workers.url, gateways.url, policies)
