"""The broker of a system that is measured."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import psutil

from tests.support.deployment.broker import running_node


@dataclass(frozen=True)
class BrokerNode:
    url: str
    processes: Sequence[psutil.Process]
    """The broker's processes, if it was started here. A broker elsewhere cannot be measured."""


NO_BROKER = BrokerNode("", ())


@contextmanager
def broker_node(url: str | None) -> Iterator[BrokerNode]:
    """Use the broker at ``url``, or start a node that ends with the ``with``."""
    if url is not None:
        yield BrokerNode(url, ())
        return
    before = set(psutil.Process().children())
    with running_node() as node:
        yield BrokerNode(node.url, list(set(psutil.Process().children()) - before))
