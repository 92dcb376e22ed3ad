"""The tables of the page on scaling: the measured curve, the costs of ``warren size``, and what it
predicts."""

from collections.abc import Iterable, Iterator, Sequence
from statistics import median

from bench.fleet.results import Results, of_curve, of_linear
from bench.options import RESULTS
from cli.size.costs import ROLES, load
from cli.size.model import Load, Machines, paced_tokens_per_event, size

_MIB = 1 << 20
_SIZES = (1000, 3000, 10_000)
_TOKENS_PER_S = 20
_TOKENS_PER_REQUEST = 300
_MACHINES = Machines(
    worker_tokens_per_s=3000,
    worker_streams=256,
    node_cores=16,
    node_bytes=64 * 1024 * _MIB,
    gateway_streams=1024,
)


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
    return markdown_table((*headings, "Gateways'", "Client's"), rows)


def announcement_table() -> str:
    """What the announcements of other workers cost."""
    alone, *others = Results.read(RESULTS / "fleet.json").part("announcements").points
    rows = (
        (
            f"{point.num_workers - 1:,}",
            *(
                f"{max(0.0, point.cores[role] - alone.cores[role]):.1%}"
                for role in ("gateway", "worker", "broker")
            ),
        )
        for point in others
    )
    return markdown_table(("Other workers", "Of a core, gateway", "Worker", "Broker"), rows)


def wakeup_table() -> str:
    """The wake-ups of processes at rising rates of events, with a process of each kind."""
    steady = Results.read(RESULTS / "fleet.json").part("steady").points
    rows = (
        (
            f"{point.received.events_per_s:,.0f}",
            *(f"{point.wakeups_per_s[role]:,.0f}" for role in ROLES),
            *(f"{1e3 * point.cores[role] / point.received.events_per_s:.2f} ms" for role in ROLES),
        )
        for point in steady
        if point.num_workers == 1
    )
    headings = ("Worker's wake-ups/s", "Broker's", "Gateway's", "Worker, an event", "Broker")
    return markdown_table(("Events/s", *headings, "Gateway"), rows)


def error_sentence() -> str:
    """How well the costs predict loads to which they were not fitted."""
    sizes = sorted(map(abs, Results.read(RESULTS / "fleet.json").errors()))
    return (
        f"Costs that are fitted to all other loads predict each of the {len(sizes)} loads within "
        f"{100 * sizes[-1]:.0f} %, and half of the loads within {100 * median(sizes):.0f} %."
    )


def price() -> str:
    """What a stream costs among a thousand."""
    num = _SIZES[0]
    found = size(_users(num), _MACHINES, load())
    cores = {
        "in its worker": found.worker_cores,
        "in the broker": found.broker_cores,
        "in its gateway": found.gateway_cores,
    }
    worker, broker, gateway = (f"{100 * one / num:.2f} {where}" for where, one in cores.items())
    many = size(_users(_SIZES[-1]), _MACHINES, load())
    return (
        f"Beside its model, each of {num:,} streams of {_TOKENS_PER_S} tokens per second costs "
        f"{100 * sum(cores.values()) / num:.1f} % of a core: {worker}, {broker} and {gateway}. "
        f"A gateway takes about {round(_SIZES[-1] / many.num_gateways, -1):.0f} such streams."
    )


def cost_table() -> str:
    """CPU milliseconds by process."""
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
            f"{1e3 * cost.per_request:.1f} ms",
            f"{1e3 * cost.per_event:.2f} ms",
            f"{1e3 * cost.per_wakeup:.2f} ms",
            f"{cost.most_wakeups_per_s:.0f}",
            f"{1e3 * cost.per_process:.0f} ms",
        )
        for name, cost in kinds.items()
    )
    headings = ("A request", "An event", "A wake-up", "Wake-ups/s at most", "A second without load")
    return markdown_table(("Process", *headings), rows)


def size_table() -> str:
    """The deployments for more and more streams."""
    headings = ("Streams", "Deployments", "Broker nodes", "Gateways", "Workers", "Broker cores")
    return markdown_table((*headings, "Gateway cores", "Next limit"), _sizes())


def _users(num_streams: int) -> Load:
    tokens_per_s = float(num_streams * _TOKENS_PER_S)
    return Load(
        num_streams=num_streams,
        requests_per_s=tokens_per_s / _TOKENS_PER_REQUEST,
        tokens_per_s=tokens_per_s,
        tokens_per_event=paced_tokens_per_event(_TOKENS_PER_REQUEST, _TOKENS_PER_S),
    )


def _sizes() -> Iterator[Sequence[str]]:
    costs = load()
    for num_streams in _SIZES:
        found = size(_users(num_streams), _MACHINES, costs)
        numbers = (found.num_deployments, found.num_nodes, found.num_gateways, found.num_workers)
        first = found.limits[0]
        yield (
            f"{num_streams:,}",
            *(f"{number:,}" for number in numbers),
            f"{found.broker_cores:,.1f}",
            f"{found.gateway_cores:,.1f}",
            f"{first.name} ({first.used:.0%})",
        )


def markdown_table(headings: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    lines = [list(headings), *map(list, rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
