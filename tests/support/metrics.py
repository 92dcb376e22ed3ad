"""Reads metrics in Prometheus' text format."""

import httpx

from tests.support import PATIENCE_S
from tests.support.deployment.processes import NO_TLS, WarrenProcess


def total(text: str, name: str) -> float:
    """The sum of a metric over all labels; 0 if there is none."""
    lines = (line for line in text.splitlines() if line.split("{")[0].split(" ")[0] == name)
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def sample(process: WarrenProcess, name: str) -> float:
    """`total` of what a process exports."""
    return total(httpx.get(f"{process.url}/metrics", timeout=PATIENCE_S, verify=NO_TLS).text, name)
