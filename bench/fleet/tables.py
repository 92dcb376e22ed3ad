"""The tables of the results in the terminal."""

from collections.abc import Sequence
from operator import itemgetter

import msgspec
import psutil
from rich.table import Table

from bench import report
from bench.fleet.curve import Curve, Point
from bench.fleet.fit import error, fit
from bench.fleet.neighbour import Neighbour
from bench.fleet.queues import Queues
from bench.fleet.results import first_full, of_linear
from bench.fleet.slow_streams import SlowStreams
from cli.size.costs import ROLES, Costs


def show_curve(title: str, curve: Curve) -> None:
    loaded = [point for point in curve.points if point.answer_tokens]
    first = loaded[0]
    table = Table("workers", "tokens of an answer", title=title, title_justify="left")
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
    _show_costs(curve)


def _show_costs(curve: Curve) -> None:
    table = Table("process", title="CPU seconds, fitted", title_justify="left")
    for heading in ("1,000 s idle", "1,000 s a worker", "1,000 requests", "1,000 events"):
        table.add_column(heading, justify="right")
    is_one = len({point.num_workers for point in curve.points}) == 1
    for role in ROLES:
        cost = msgspec.structs.astuple(fit(curve.points, role, per_pair=0.0 if is_one else None))
        table.add_row(role, *(f"{1e3 * part:.2f}" for part in cost))
    report.console().print(table)


def show_errors(costs: Costs, points: Sequence[Point]) -> None:
    errors = [error(costs, point) for point in points if point.answer_tokens]
    report.console().print(
        f"the fitted costs predict all loads within {max(map(abs, errors)):.0%} of their CPU time"
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
