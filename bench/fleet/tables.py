"""The tables of the results in the terminal."""

from collections.abc import Sequence
from operator import itemgetter
from statistics import median

import msgspec
import psutil
from rich.table import Table

from bench import report
from bench.fleet.announcements import Announcements
from bench.fleet.curve import Curve
from bench.fleet.dense import DenseFleet
from bench.fleet.neighbour import Neighbour
from bench.fleet.queues import Queues
from bench.fleet.results import first_full, of_linear
from bench.fleet.slow_streams import SlowStreams
from bench.fleet.steady import Steady
from cli.size.costs import ROLES, Costs


def show_curve(curve: Curve) -> None:
    loaded = [point for point in curve.points if point.answer_tokens]
    first = loaded[0]
    table = Table("workers", "tokens of an answer", title="The curve", title_justify="left")
    headings = ("tok/s", "of linear", "req/s", "TTFT p50, ms", *ROLES, "client", "others")
    for heading in headings:
        table.add_column(heading, justify="right")
    for point in loaded:
        is_comparable = point.answer_tokens == first.answer_tokens
        table.add_row(
            str(point.num_workers),
            str(point.answer_tokens),
            f"{point.received.tokens_per_s:.0f}",
            f"{of_linear(point, first):.2f}" if is_comparable else "",
            f"{point.received.requests_per_s:.1f}",
            f"{point.received.ttft_p50_ms:.0f}",
            *(f"{point.cores[role]:.2f}" for role in (*ROLES, "client")),
            f"{point.others:.1f}",
        )
    report.console().print(table)
    if (full := first_full(curve, psutil.cpu_count() or 1)) is not None:
        used = sorted(full.cores.items(), key=itemgetter(1), reverse=True)
        parts = ", ".join(f"{role} {cores:.2f}" for role, cores in used)
        report.console().print(f"the cores are full with {full.num_workers} workers: {parts}")
    joined = ", ".join(f"{one:.2f}" for one in curve.joined_s)
    if joined:
        report.console().print(f"workers that joined ran their first job after {joined} s")
    report.console().print(f"{curve.num_left} left under load; no request failed or changed")


def show_costs(costs: Costs) -> None:
    table = Table("process", title="CPU milliseconds, fitted", title_justify="left")
    for heading in ("idle", "a worker", "a request", "an event", "a wake-up", "wake-ups/s at most"):
        table.add_column(heading, justify="right")
    for name in (*ROLES, "cluster"):
        *parts, most = msgspec.structs.astuple(getattr(costs, name))
        table.add_row(name, *(f"{1e3 * part:.3f}" for part in parts), f"{most:.0f}")
    report.console().print(table)


def show_dense(result: DenseFleet | Steady) -> None:
    numbers = ("nodes", "gateways", "workers", "tokens of an answer")
    table = Table(*numbers, title="Streams at reading speed", title_justify="left")
    headings = ("tok/s", "events/s", "req/s", "TTFT p50, ms", *ROLES, "client", "others")
    for heading in (*headings, *(f"wake-ups/s, {role}" for role in ROLES)):
        table.add_column(heading, justify="right")
    for point in result.points:
        table.add_row(
            str(point.num_nodes),
            str(point.num_gateways),
            str(point.num_workers),
            str(point.answer_tokens),
            f"{point.received.tokens_per_s:.0f}",
            f"{point.received.events_per_s:.0f}",
            f"{point.received.requests_per_s:.1f}",
            f"{point.received.ttft_p50_ms:.0f}",
            *(f"{point.cores[role]:.2f}" for role in (*ROLES, "client")),
            f"{point.others:.1f}",
            *(f"{point.wakeups_per_s[role]:.0f}" for role in ROLES),
        )
    report.console().print(table)


def show_announcements(result: Announcements) -> None:
    alone, *others = result.points
    table = Table("other workers", title="CPU of announcements", title_justify="left")
    for heading in ("gateway", "worker", "broker", "others"):
        table.add_column(heading, justify="right")
    for point in others:
        table.add_row(
            str(point.num_workers - 1),
            *(f"{point.cores[role] - alone.cores[role]:.2%}" for role in ("gateway", "worker")),
            f"{point.cores['broker'] - alone.cores['broker']:.1%}",
            f"{point.others:.1f}",
        )
    report.console().print(table)


def show_errors(errors: Sequence[float]) -> None:
    sizes = sorted(map(abs, errors))
    report.console().print(
        f"costs that are fitted without a load predict its CPU time within {sizes[-1]:.0%}, half "
        f"of the {len(sizes)} loads within {median(sizes):.0%}"
    )


def show_streams(result: SlowStreams) -> None:
    table = Table("", "", title=f"{result.num_streams} streams at once", title_justify="left")
    rows = {
        "workers, gateways": f"{result.num_workers}, {result.num_gateways}",
        "a token of each every": f"{result.token_every_s:g} s",
        "opened": f"{result.opened_per_s:.0f}/s",
        "lost tokens, ended streams": "0, 0",
        "delay of a token, p50 and p99": f"{result.delay_p50_ms:.0f}, {result.delay_p99_ms:.0f} ms",
        "processes of Erlang a stream": f"{result.stream_erlang_processes:.1f}",
        "cores of others": f"{result.others:.1f}",
    }
    for role in ROLES:
        kib = result.stream_bytes[role] / 1024
        rows[f"{role}: memory a stream, cores"] = f"{kib:.1f} KiB, {result.cores[role]:.2f}"
    for row in rows.items():
        table.add_row(*row)
    report.console().print(table)


def show_queues(result: Queues) -> None:
    table = Table(title="CPU of the broker", title_justify="left")
    for heading in ("nodes", "other queues", "ms a queue", "queues/s", "others"):
        table.add_column(heading, justify="right")
    for one in result.queues:
        table.add_row(
            str(one.num_nodes),
            str(one.num_present),
            f"{1e3 * one.cpu_s:.2f}",
            f"{one.per_s:.0f}",
            f"{one.others:.1f}",
        )
    report.console().print(table)
    for job in result.jobs:
        report.console().print(
            f"{job.num_nodes} nodes: {1e3 * job.cpu_s:.2f} ms a job, {job.per_s:.0f} jobs/s"
        )


def show_neighbour(result: Neighbour) -> None:
    title = f"{result.messages_per_s} messages per second of other traffic"
    table = Table("beside", title=title, title_justify="left")
    for heading in ("req/s", "events/s", "p50, ms", "p99, ms", "broker's cores", "others"):
        table.add_column(heading, justify="right")
    for one in result.loads:
        table.add_row(
            one.load,
            f"{one.received.requests_per_s:.1f}",
            f"{one.received.events_per_s:.0f}",
            f"{one.delay_p50_ms:.1f}",
            f"{one.delay_p99_ms:.1f}",
            f"{one.broker_cores:.2f}",
            f"{one.others:.1f}",
        )
    report.console().print(table)
