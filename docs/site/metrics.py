"""The tables of metrics."""

from collections.abc import Iterable

from gateway.app import create_app
from infra.vllm_names import worker_descriptions
from shared.bus.memory import MemoryBus
from shared.settings import GatewaySettings
from shared.telemetry import metrics
from shared.telemetry.metrics import Description

_HEAD = ["| Metric | Type | Labels | Meaning |", "|---|---|---|---|"]


def metric_tables() -> str:
    """All metrics of gateways, of workers, and of both, as Markdown tables."""
    app = create_app(GatewaySettings(), MemoryBus())
    parts = {
        "Gateway": app.state.metrics.catalog.descriptions,
        "Worker": worker_descriptions(),
        "Both": metrics.PROCESS.descriptions,
    }
    return "\n\n".join(f"## {title}\n\n{_table(rows)}" for title, rows in parts.items())


def _table(descriptions: Iterable[Description]) -> str:
    rows = [_row(described) for described in sorted(descriptions, key=lambda d: d.name)]
    return "\n".join([*_HEAD, *rows])


def _row(described: Description) -> str:
    labels = ", ".join(f"`{label}`" for label in described.labels)
    alias = f" vLLM: `vllm:{described.vllm}`." if described.vllm else ""
    return f"| `{described.name}` | {described.kind} | {labels} | {described.meaning}{alias} |"
