"""Where the time of a decode step goes: kernels, and the gaps in which the device waits for the
host."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from bench.gpu.figures import Figure

_NUM_PARTS = 12


@dataclass(frozen=True, kw_only=True)
class Span:
    """A kernel, or on the CPU an operation, in microseconds of the profiler's clock."""

    name: str
    start: float
    end: float


def measure(
    work: Callable[[], None], num_steps: int, device: torch.device, *, name: str
) -> list[Figure]:
    """Profile ``work``, which computes ``num_steps``: its most expensive parts, and the gaps."""
    work()
    kind = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    with profile(activities=[kind]) as found:
        work()
    wanted = kind.name
    spans = [
        Span(name=event.name, start=event.time_range.start, end=event.time_range.end)
        for event in found.events() or ()
        if event.device_type.name == wanted and event.cpu_parent is None
    ]
    return [*_parts(spans, num_steps, name), _gaps(spans, num_steps, name)]


def _parts(spans: Iterable[Span], num_steps: int, step: str) -> list[Figure]:
    taken: defaultdict[str, float] = defaultdict(float)
    for span in spans:
        taken[span.name] += span.end - span.start
    total = sum(taken.values())
    largest = sorted(taken.items(), key=lambda item: item[1], reverse=True)[:_NUM_PARTS]
    return [
        Figure(
            section="where",
            name=f"{step}: {name[:48]}",
            value=us / num_steps,
            unit="us a step",
            ratio=us / total,
            note="of all",
        )
        for name, us in largest
    ]


def _gaps(spans: Iterable[Span], num_steps: int, step: str) -> Figure:
    idle_us, busy_us = idle(spans)
    return Figure(
        section="where",
        name=f"{step}: nothing, the device waits",
        value=idle_us / num_steps,
        unit="us a step",
        ratio=idle_us / max(idle_us + busy_us, 1e-9),
        note="of the time from the first kernel to the last",
    )


def idle(spans: Iterable[Span]) -> tuple[float, float]:
    """Microseconds in which the device was idle, and in which it was busy."""
    ordered = sorted(spans, key=lambda span: span.start)
    if not ordered:
        return 0.0, 0.0
    idle_us, until = 0.0, ordered[0].start
    for span in ordered:
        idle_us += max(0.0, span.start - until)
        until = max(until, span.end)
    return idle_us, until - ordered[0].start - idle_us
