"""Reads metrics in Prometheus' text format."""

import httpx

from tests.support import PATIENCE_S
from tests.support.deployment.processes import NO_TLS, WarrenProcess


def total(text: str, name: str, **labels: str) -> float:
    """The sum of a metric over all series with these labels; 0 if there is none."""
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    lines = (line for line in text.splitlines() if line.split("{")[0].split(" ")[0] == name)
    series = (line for line in lines if all(one in line for one in wanted))
    return sum(float(line.rpartition(" ")[2]) for line in series)


def sample(process: WarrenProcess, name: str, **labels: str) -> float:
    """`total` of what a process exports."""
    text = httpx.get(f"{process.url}/metrics", timeout=PATIENCE_S, verify=NO_TLS).text
    return total(text, name, **labels)
