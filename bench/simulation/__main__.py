"""A day of a whole fleet on virtual time, with a fixed number of workers and with the autoscaler.

    python -m bench.simulation [--workers N] [--hours H] [--seed S] [--load L] [--fidelity exact]

The traffic is that of `traffic.TENANTS`. Its mean without floods is ``--load`` times what all
workers can answer. Steps take as long as `bench.engine` has measured on two cores. The autoscaler
is KEDA with the ScaledObject that the Helm chart renders, so the result changes with the chart.
"""

import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from bench import report as files
from bench.interrupt import ends_on_sigterm
from bench.machine import describe
from bench.options import Out
from bench.simulation import report
from bench.simulation.autoscaler import Autoscaler, ScaledObject
from bench.simulation.books import Books
from bench.simulation.coarse import CoarseFleet
from bench.simulation.exact import ExactFleet
from bench.simulation.play import play
from bench.simulation.spec import Prices, Spec
from bench.simulation.traffic import TENANTS, Traffic, capacity_per_s
from tests.support.deployment.helm import CHART, find, render

RESULTS = Path(__file__).parents[1] / "results"
_SAMPLES_S = 900.0


class Fidelity(StrEnum):
    """How workers are simulated."""

    COARSE = "coarse"
    EXACT = "exact"


def scaled_object(min_workers: int, max_workers: int, values: dict[str, Any]) -> ScaledObject:
    """What the Helm chart says, with these limits, and these values of its ``autoscaling``."""
    limits = {"enabled": True, "minReplicas": min_workers, "maxReplicas": max_workers}
    pool = {"model": "smollm2", "autoscaling": {**values, **limits}}
    return ScaledObject.of(
        find(render({"workers": {"pool": pool}}), "ScaledObject", "warren-worker-pool")
    )


def scrape_interval_s() -> float:
    """The interval of the chart's monitors."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    return float(values["monitoring"]["interval"].removesuffix("s"))


@ends_on_sigterm
def main(
    workers: Annotated[
        int, typer.Option(min=1, help="Workers; for the autoscaler, at most.")
    ] = 1000,
    hours: Annotated[float, typer.Option(help="Of virtual time.")] = 24.0,
    seed: Annotated[int, typer.Option(help="Of all draws.")] = 1,
    load: Annotated[
        float, typer.Option(help="Mean traffic over the capacity of all workers.")
    ] = 0.45,
    weights: Annotated[
        str, typer.Option(help="A format that bench.engine has measured.")
    ] = "bfloat16",
    min_workers: Annotated[int, typer.Option(min=0, help="At least, for the autoscaler.")] = 1,
    start_s: Annotated[float, typer.Option(help="Seconds that a worker takes to start.")] = 60.0,
    jobs_per_replica: Annotated[
        int | None, typer.Option(help="The chart's jobsPerReplica; none: its default.")
    ] = None,
    stabilization_s: Annotated[
        int | None,
        typer.Option(help="Its scaleDownStabilizationSeconds; none: the default."),
    ] = None,
    fidelity: Annotated[
        Fidelity, typer.Option(help="exact: real schedulers and windows, for a few workers.")
    ] = Fidelity.COARSE,
    out: Out = RESULTS,
) -> None:
    spec = Spec(prices=Prices.measured(weights), start_s=start_s)
    capacity = workers * capacity_per_s(spec, TENANTS)
    chosen = {
        "jobsPerReplica": jobs_per_replica,
        "scaleDownStabilizationSeconds": stabilization_s,
    }
    values = {name: value for name, value in chosen.items() if value is not None}
    scaled = scaled_object(min_workers, workers, values)
    rows, sizes = [], {}
    for name, size in ((f"{workers} workers", workers), ("autoscaled", min_workers)):
        autoscaler = None if name != "autoscaled" else Autoscaler(scaled, scrape_interval_s())
        traffic = Traffic(TENANTS, load * capacity, seed, capacity_per_s=capacity)
        began = time.process_time()
        books = simulate(fidelity, spec, size, workers, traffic, hours, autoscaler)
        rows.append(report.row_of(name, books, time.process_time() - began))
        sizes[name] = report.samples(books, _SAMPLES_S)
    report.show(rows)
    parameters = {
        "workers": workers,
        "hours": hours,
        "seed": seed,
        "load": load,
        "weights": weights,
    }
    content = {
        **describe([]),
        "parameters": {**parameters, "requests_per_s_at_full_load": capacity, "start_s": start_s},
        "autoscaler": repr(scaled),
        "rows": rows,
        "sizes": sizes["autoscaled"],
    }
    files.write_json(out / "simulation.json", content)


def simulate(
    fidelity: Fidelity,
    spec: Spec,
    num_workers: int,
    max_workers: int,
    traffic: Traffic,
    hours: float,
    autoscaler: Autoscaler | None,
) -> Books:
    if fidelity is Fidelity.COARSE:
        fleet = CoarseFleet(spec, traffic.tenants, num_workers, max_workers)
        return play(fleet, traffic, 3600 * hours, autoscaler)
    with ExactFleet(spec, traffic.tenants, num_workers) as exact:
        return play(exact, traffic, 3600 * hours, autoscaler)


if __name__ == "__main__":
    typer.run(main)
