"""A fleet of workers: its throughput, its open streams, and what each process costs.

    python -m bench.fleet [--only curve|cluster|streams|queues|neighbour]...

Workers, gateways and the broker are real; the engine is synthetic and sleeps in each step, so that
a machine can run more workers than it could with a model. All processes and the client share the
machine.

- ``curve``: throughput with 1 to 32 workers; workers that join and leave under load
- ``dense``: few to many streams of 20 tokens per second, with a broker of one node and of three
- ``steady``: the same without ends, so that they have no requests
- ``announcements``: the share of a core that the announcements of many workers take
- ``streams``: many slow streams at once: memory, and the delay of their tokens
- ``queues``: the broker's CPU for a request's queue, with many other queues, and for a job
- ``neighbour``: the delay of other traffic at the broker, with and without a fleet

Each part takes at most nine minutes and replaces that of an earlier run in ``fleet.json``. From
the first six follow the costs with which ``warren size`` computes.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
import uvloop

from bench.fleet import tables
from bench.fleet.announcements import measure_announcements
from bench.fleet.curve import CurvePlan, measure_curve
from bench.fleet.dense import LAYOUTS, DensePlan, alone, measure_dense
from bench.fleet.neighbour import measure_neighbour
from bench.fleet.picture import draw
from bench.fleet.queues import measure_queues
from bench.fleet.results import Results, write_costs
from bench.fleet.slow_streams import measure_streams
from bench.fleet.steady import LAYOUTS as STEADY_LAYOUTS
from bench.fleet.steady import measure_steady
from bench.interrupt import ends_on_sigterm
from bench.machine import describe
from bench.options import IMAGES, RESULTS, Out
from cli.size.costs import PATH as COSTS
from cli.terminal import notices


class FleetPart(StrEnum):
    CURVE = "curve"
    DENSE = "dense"
    STEADY = "steady"
    ANNOUNCEMENTS = "announcements"
    STREAMS = "streams"
    QUEUES = "queues"
    NEIGHBOUR = "neighbour"


def _positive(help_text: str, minimum: float = 1) -> Any:
    return typer.Option(min=minimum, help=help_text)


@ends_on_sigterm
def main(
    only: Annotated[
        list[FleetPart] | None, typer.Option(help="Measure this part. Repeatable.")
    ] = None,
    workers: Annotated[
        list[int], typer.Option(min=1, help="Workers of the curve, rising. Repeatable.")
    ] = [1, 2, 4, 8, 16, 32],  # noqa: B006 (typer copies it)
    other_tokens: Annotated[
        list[int], typer.Option(min=1, help="Other lengths of answers. Repeatable.")
    ] = [12],  # noqa: B006
    gateways: Annotated[int, _positive("Gateways of the curve.")] = 2,
    seconds: Annotated[float, _positive("Seconds to measure each load.")] = 8.0,
    step_ms: Annotated[float, _positive("Of a worker in the curve.")] = 300.0,
    dense_streams: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Streams of `dense`, rising, at a gateway and a worker alone."),
    ] = None,
    announcing: Annotated[
        list[int], typer.Option(min=1, help="Other workers of `announcements`. Repeatable.")
    ] = [1000],  # noqa: B006
    streams: Annotated[int, _positive("Slow streams at once.")] = 10_000,
    stream_gateways: Annotated[int, _positive("Gateways of these streams.")] = 4,
    stream_workers: Annotated[int, _positive("Workers of these streams.")] = 16,
    token_every_s: Annotated[float, _positive("Seconds between the tokens of each.", 0.01)] = 10.0,
    each_token: Annotated[
        bool, typer.Option("--each-token", help="Each token of these streams has an event.")
    ] = False,
    hold_s: Annotated[float, _positive("Seconds for which all of them are measured.")] = 40.0,
    queues: Annotated[
        list[int], typer.Option(min=0, help="Other queues that are present, rising. Repeatable.")
    ] = [10, 1000, 10_000],  # noqa: B006
    nodes: Annotated[
        list[int], typer.Option(min=1, help="Nodes of the broker for `queues`. Repeatable.")
    ] = [1, 3],  # noqa: B006
    repeats: Annotated[int, _positive("Queues, and jobs, of one measurement.")] = 500,
    other_messages: Annotated[int, _positive("Messages per second of other traffic.")] = 100,
    beside_users: Annotated[
        list[int], typer.Option(min=1, help="Users beside other traffic. Repeatable.")
    ] = [8, 32],  # noqa: B006
    beside_s: Annotated[float, _positive("Seconds to measure other traffic.")] = 20.0,
    out: Out = RESULTS,
    costs: Annotated[Path, typer.Option(help="Where the costs go.")] = COSTS,
    picture: Annotated[Path, typer.Option(help="Where the picture goes.")] = (
        IMAGES / "scaling.svg"
    ),
) -> None:
    curve = CurvePlan(
        num_workers=sorted(workers),
        other_tokens=other_tokens,
        num_gateways=gateways,
        step_s=step_ms / 1e3,
        seconds=seconds,
    )
    dense = DensePlan(layouts=alone(sorted(dense_streams)) if dense_streams else LAYOUTS)
    measures: Mapping[FleetPart, Callable[[], Coroutine[Any, Any, Any]]] = {
        FleetPart.CURVE: lambda: measure_curve(curve),
        FleetPart.DENSE: lambda: measure_dense(dense),
        FleetPart.STEADY: lambda: measure_steady(STEADY_LAYOUTS, seconds),
        FleetPart.ANNOUNCEMENTS: lambda: measure_announcements(sorted(announcing), seconds),
        FleetPart.STREAMS: lambda: measure_streams(
            streams,
            num_gateways=stream_gateways,
            num_workers=stream_workers,
            token_every_s=token_every_s,
            seconds=hold_s,
            each_token=each_token,
        ),
        FleetPart.QUEUES: lambda: measure_queues(sorted(nodes), sorted(queues), repeats),
        FleetPart.NEIGHBOUR: lambda: measure_neighbour(other_messages, beside_users, beside_s),
    }
    path = out / "fleet.json"
    for part in only or FleetPart:
        notices.print(part)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            result = runner.run(measures[part]())
        _SHOW[part](result)
        found = Results.read(path)
        found.add(part, describe([]), result)
        found.write(path)
        if part is FleetPart.CURVE:
            draw(picture, result)
    _fit(path, costs)


def _fit(path: Path, costs: Path) -> None:
    """Write the costs that follow from the parts in a file, if all that they need are there."""
    found = Results.read(path)
    if (fitted := found.costs()) is not None:
        tables.show_costs(fitted)
        tables.show_errors(found.errors())
        write_costs(costs, fitted)


_SHOW: Mapping[FleetPart, Callable[[Any], None]] = {
    FleetPart.CURVE: tables.show_curve,
    FleetPart.DENSE: tables.show_dense,
    FleetPart.STEADY: tables.show_dense,
    FleetPart.ANNOUNCEMENTS: tables.show_announcements,
    FleetPart.STREAMS: tables.show_streams,
    FleetPart.QUEUES: tables.show_queues,
    FleetPart.NEIGHBOUR: tables.show_neighbour,
}

if __name__ == "__main__":
    typer.run(main)
