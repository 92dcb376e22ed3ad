"""How a long prompt affects running streams: their ITL during its prefill.

    python -m bench.interference --max-step-ms 50 --max-step-ms 200 --llama-server PATH ...

Once all streams have their first tokens, another request with a long prompt arrives. The table
covers the time from its arrival to its first token; the picture also shows a few seconds before and
after.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from bench import plots, report
from bench.checks import check_output
from bench.comparison import run_loop
from bench.figures import percentile, ttft_s
from bench.load import Stream, complete, follow, random_requests
from bench.machine import describe
from bench.options import SharedOptions, comparison
from bench.other_load import undisturbed
from bench.servers import running
from bench.systems import Room, System
from cli.terminal import notices

_STREAM_TOKENS = 4000
"""More tokens than any stream receives before all of them are stopped."""
_FIRST_CHUNKS = 16
_AROUND_S = 3.0
_MOMENT_S = 0.25


@dataclass(frozen=True)
class Interference:
    """A system with its options. Times are in seconds since the request with the long prompt."""

    system: str
    weights: str
    options: str
    """The options of our workers."""
    gaps: Sequence[tuple[float, float]]
    """For each chunk of all running streams: when it arrived, and the time since the previous
    chunk."""
    prefill_s: float
    """The long prompt's time to first token."""
    other_cores: float
    """Cores that other processes used during the measurement."""

    def during_ms(self) -> list[float]:
        """The gaps that overlap the prefill."""
        return [1e3 * gap for at, gap in self.gaps if at >= 0 and at - gap <= self.prefill_s]

    def before_ms(self) -> list[float]:
        return [1e3 * gap for at, gap in self.gaps if at < 0]

    def summary(self) -> dict[str, Any]:
        """The figures of the table and the picture, in milliseconds and seconds."""
        times, longest_ms = _longest(self)
        return {
            "system": self.system,
            "weights": self.weights,
            "options": self.options,
            "before_ms": _percentiles(self.before_ms()),
            "during_ms": _percentiles(self.during_ms()),
            "prefill_s": round(self.prefill_s, 3),
            "other_cores": round(self.other_cores, 2),
            "curve": [
                [round(at, 2), round(ms, 1)] for at, ms in zip(times, longest_ms, strict=True)
            ],
        }


async def interfere(
    url: str, num_streams: int, prompt_len: int, attempt: int
) -> tuple[list[tuple[float, float]], float]:
    """Measure the gaps and the prefill. Raises `bench.load.LoadError` in a group."""
    streams = [Stream() for _ in range(num_streams)]
    requests = random_requests(num_streams, seed=2 * attempt, max_tokens=_STREAM_TOKENS)
    [long] = random_requests(1, seed=2 * attempt + 1, prompt_len=prompt_len, max_tokens=1)
    async with asyncio.TaskGroup() as tasks:
        running_streams = [
            tasks.create_task(follow(url, request, stream))
            for request, stream in zip(requests, streams, strict=True)
        ]
        while min(len(stream.chunk_times) for stream in streams) < _FIRST_CHUNKS:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        await asyncio.sleep(_AROUND_S)
        disturbance = await complete(url, long)
        await asyncio.sleep(_AROUND_S)
        for task in running_streams:
            task.cancel()
    start = disturbance.sent_at
    gaps = [
        (after - start, after - before)
        for stream in streams
        for before, after in pairwise(stream.chunk_times)
        if after - start > -_AROUND_S
    ]
    return sorted(gaps), ttft_s(disturbance)


def measure(system: System, num_streams: int, prompt_len: int) -> Interference:
    """Start ``system`` and measure it."""
    notices.print(f"{system.name}, {system.weights} {' '.join(system.options)}")
    with running(system) as server:

        def once(attempt: int) -> tuple[list[tuple[float, float]], float]:
            return run_loop(interfere(server.url, num_streams, prompt_len, attempt))

        (gaps, prefill_s), other_cores = undisturbed(once)
    options = " ".join(system.options)
    return Interference(system.name, system.weights, options, gaps, prefill_s, other_cores)


def show(measured: Sequence[Interference], title: str) -> None:
    table = Table("system", "weights", "options", title=title)
    for heading in ("before: p50", "p99", "during: p50", "p99", "max", "prefill s", "others"):
        table.add_column(heading, justify="right")
    for one in measured:
        before, during = one.before_ms(), one.during_ms()
        table.add_row(
            one.system,
            one.weights,
            one.options,
            *(f"{percentile(before, percent):.0f}" for percent in (50, 99)),
            *(f"{percentile(during, percent):.0f}" for percent in (50, 99, 100)),
            f"{one.prefill_s:.1f}",
            f"{one.other_cores:.1f}",
        )
    report.console().print(table)


def draw(path: Path, measured: Sequence[Interference]) -> None:
    """The longest gap of any stream over time; a bar marks the end of each prefill."""
    figure, [axis] = plots.new_figure(1)
    for one in measured:
        name = " ".join(filter(None, (one.system, one.weights, one.options)))
        [line] = axis.plot(*_longest(one), linewidth=1.2, label=name)
        axis.axvline(one.prefill_s, color=line.get_color(), linewidth=0.8, linestyle=":")
    axis.set_yscale("log")
    axis.legend(fontsize="small")
    plots.label_axis(axis, "seconds since the long prompt came", "longest ITL, ms")
    plots.save(figure, path)


def _percentiles(gaps_ms: Sequence[float]) -> dict[str, float]:
    return {
        name: round(percentile(gaps_ms, percent), 1)
        for name, percent in (("p50", 50), ("p99", 99), ("max", 100))
    }


def _longest(one: Interference) -> tuple[list[float], list[float]]:
    longest: dict[float, float] = {}
    for at, gap in one.gaps:
        moment = round(at / _MOMENT_S) * _MOMENT_S
        longest[moment] = max(longest.get(moment, 0.0), 1e3 * gap)
    return list(longest), list(longest.values())


@comparison
def main(
    choice: SharedOptions,
    max_step_ms: Annotated[
        list[float] | None, typer.Option(help="Of our workers; none: their default. Repeatable.")
    ] = None,
    streams: Annotated[int, typer.Option(min=1, help="Streams that run.")] = 32,
    prompt_len: Annotated[int, typer.Option(help="Tokens of the long prompt.")] = 4000,
) -> None:
    bounds = [f"--max-step-ms={value:g}" for value in max_step_ms or ()]
    room = Room(streams + 1, max(prompt_len, 128 + _STREAM_TOKENS) + 1)
    systems = choice.systems(room, bounds)
    check_output(systems, choice.worker_options)
    measured = [measure(system, streams, prompt_len) for system in systems]
    show(measured, f"ITL in ms of {streams} streams while {prompt_len} tokens are prefilled")
    runs = [one.summary() for one in measured]
    report.write_json(choice.out / "interference.json", {**describe(systems), "runs": runs})
    draw(choice.out / "interference.svg", measured)


if __name__ == "__main__":
    typer.run(main)
