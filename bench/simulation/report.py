"""The figures of simulated fleets, as tables in the terminal and as a JSON file."""

import math
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from bench import report
from bench.simulation.books import Books

_PERCENTILES = (50, 95, 99)


def row_of(name: str, books: Books, cpu_s: float | None = None) -> dict[str, Any]:
    """The figures of one fleet. Without ``cpu_s``, the CPU time of the simulation, they depend on
    nothing but its parameters and the seed."""
    num_requests = int(books.arrived.sum())
    return {
        "fleet": name,
        "requests": num_requests,
        "refused": int(books.refused.sum()),
        "late": int(books.late.sum()),
        "handed_over": int(books.handed_over.sum()),
        **_first_token_times(books),
        "utilisation": books.utilisation,
        "sequences_per_worker": books.num_sequences,
        "worker_hours": books.worker_s / 3600,
        "most_workers": max(books.sizes.workers, default=0),
        "turns": books.sizes.num_turns,
        "fairness": books.fairness,
        "tenants": [_tenant_row(books, index) for index in range(len(books.tenants))],
        "cpu_s": cpu_s,
    }


def _tenant_row(books: Books, index: int) -> dict[str, Any]:
    tenant = books.tenants[index]
    return {
        "tenant": tenant.name,
        "weight": tenant.weight,
        "requests": int(books.arrived[index]),
        "refused": int(books.refused[index]),
        "late": int(books.late[index]),
        **_first_token_times(books, index),
        "contended_cost": float(books.contended_cost[index]),
    }


def _first_token_times(books: Books, tenant: int | None = None) -> dict[str, float | None]:
    times = {percent: books.ttft_s(percent, tenant) for percent in _PERCENTILES}
    return {f"ttft_p{p}_s": None if math.isnan(s) else s for p, s in times.items()}


def samples(books: Books, every_s: float) -> list[dict[str, Any]]:
    """The size of a fleet at regular times."""
    sizes = books.sizes
    columns = zip(sizes.at, sizes.workers, sizes.ready, sizes.demand, strict=True)
    return [
        {"hour": at / 3600, "workers": workers, "ready": ready, "demand": demand}
        for at, workers, ready, demand in columns
        if at % every_s == 0
    ]


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print a table of the fleets and one of their tenants."""
    fleets = Table("fleet", title="Fleets on virtual time")
    for heading in (
        "requests", "failed", "TTFT s: p50", "p95", "p99", "utilisation", "sequences",
        "worker-hours", "at most", "turns", "fairness", "CPU s",
    ):  # fmt: skip
        fleets.add_column(heading, justify="right")
    tenants = Table("fleet", "tenant", title="Tenants")
    for heading in ("weight", "requests", "refused", "late", "TTFT s: p50", "p95", "p99"):
        tenants.add_column(heading, justify="right")
    for row in rows:
        fleets.add_row(
            row["fleet"],
            f"{row['requests']:,}",
            f"{row['refused'] + row['late']:,}",
            *_times(row),
            f"{row['utilisation']:.0%}",
            f"{row['sequences_per_worker']:.1f}",
            f"{row['worker_hours']:,.0f}",
            str(row["most_workers"]),
            str(row["turns"]),
            f"{row['fairness']:.3f}",
            "" if row["cpu_s"] is None else f"{row['cpu_s']:.0f}",
        )
        for tenant in row["tenants"]:
            tenants.add_row(
                row["fleet"],
                tenant["tenant"],
                f"{tenant['weight']:g}",
                f"{tenant['requests']:,}",
                f"{tenant['refused']:,}",
                f"{tenant['late']:,}",
                *_times(tenant),
                end_section=tenant is row["tenants"][-1],
            )
    console = report.console()
    console.print(fleets)
    console.print(tenants)


def _times(row: dict[str, Any]) -> list[str]:
    times = (row[f"ttft_p{percent}_s"] for percent in _PERCENTILES)
    return ["" if time_s is None else f"{time_s:.2f}" for time_s in times]
