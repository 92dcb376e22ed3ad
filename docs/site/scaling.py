"""The tables of the page on scaling: the measured curve, the costs of ``warren size``, and what it
predicts."""

from collections.abc import Iterable, Iterator, Sequence

from bench.fleet.results import Results, of_curve, of_linear
from bench.options import RESULTS
from cli.size.costs import ROLES, load
from cli.size.model import Load, Machines, paced_tokens_per_event, size

_MIB = 1 << 20
_SIZES = (1000, 3000, 10_000)
_TOKENS_PER_S = 20
_TOKENS_PER_REQUEST = 300


def curve_table() -> str:
    """The throughput by the number of workers, and the cores that each kind of process uses."""
    first, *_ = line = of_curve(Results.read(RESULTS / "fleet.json").part("curve"))
    rows = (
        (
            str(point.num_workers),
            f"{point.received.tokens_per_s:.0f}",
            f"{of_linear(point, first):.2f}",
            f"{point.received.requests_per_s:.1f}",
            *(f"{point.cores[role]:.2f}" for role in (*ROLES, "client")),
        )
        for point in line
    )
    headings = ("Workers", "Tokens/s", "Of linear", "Requests/s", "Workers' cores", "Broker's")
    return _table((*headings, "Gateways'", "Client's"), rows)


def cost_table() -> str:
    """CPU seconds by process."""
    costs = load()
    kinds = {
        "Worker": costs.worker,
        "Gateway": costs.gateway,
        "Broker, one node": costs.broker,
        "Broker, all of three nodes": costs.cluster,
    }
    rows = (
        (
            name,
            f"{1000 * cost.per_request:.2f} s",
            f"{1000 * cost.per_event:.2f} s",
            f"{1000 * cost.per_process:.1f} s",
        )
        for name, cost in kinds.items()
    )
    return _table(("Process", "1,000 requests", "1,000 events", "1,000 s without load"), rows)


def size_table() -> str:
    """The deployments for more and more streams."""
    headings = ("Streams", "Deployments", "Broker nodes", "Gateways", "Workers", "Broker cores")
    return _table((*headings, "Gateway cores", "Next limit"), _sizes())


def _sizes() -> Iterator[Sequence[str]]:
    machines = Machines(
        worker_tokens_per_s=3000,
        worker_streams=256,
        node_cores=16,
        node_bytes=64 * 1024 * _MIB,
        gateway_streams=1024,
    )
    costs = load()
    for num_streams in _SIZES:
        tokens_per_s = float(num_streams * _TOKENS_PER_S)
        users = Load(
            num_streams=num_streams,
            requests_per_s=tokens_per_s / _TOKENS_PER_REQUEST,
            tokens_per_s=tokens_per_s,
            tokens_per_event=paced_tokens_per_event(_TOKENS_PER_REQUEST, _TOKENS_PER_S),
        )
        found = size(users, machines, costs)
        numbers = (found.num_deployments, found.num_nodes, found.num_gateways, found.num_workers)
        first = found.limits[0]
        yield (
            f"{num_streams:,}",
            *(f"{number:,}" for number in numbers),
            f"{found.broker_cores:,.0f}",
            f"{found.gateway_cores:,.0f}",
            f"{first.name} ({first.used:.0%})",
        )


def _table(headings: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    lines = [list(headings), *map(list, rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
