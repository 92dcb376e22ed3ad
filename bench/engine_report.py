"""The tables and the picture of `bench.engine`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.table import Table

from bench import ceilings
from bench.ceilings import ModelWork, Products, Rates
from bench.dense_shape import DenseShape
from bench.plots import label_axis, new_figure, save
from bench.report import console


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The time of a step. ``parts`` are in milliseconds, like ``step_ms``."""

    weights: str
    num_seqs: int
    num_new_tokens: int
    """New tokens of each sequence."""
    context: int
    """Previous tokens of each sequence."""
    step_ms: float
    parts: dict[str, float]

    @property
    def name(self) -> str:
        return f"{self.num_seqs} x {self.num_new_tokens} after {self.context}"


@dataclass(frozen=True, kw_only=True)
class EngineTime:
    """The time of a step of the whole engine while ``num_seqs`` sequences decode."""

    weights: str
    draws: str
    """A name in `bench.engine.DRAWS`."""
    num_seqs: int
    step_ms: float
    decoder_ms: float
    """The part of ``step_ms`` that the decoder takes."""

    @property
    def host_ms(self) -> float:
        return self.step_ms - self.decoder_ms


@dataclass(frozen=True, kw_only=True)
class FormatMeasurements:
    """All measurements of a weight format."""

    weights: str
    kv_dtype: torch.dtype
    steps: list[StepTime]
    engine: list[EngineTime]


def show_steps(steps: Sequence[StepTime]) -> None:
    table = Table("weights", "step", title="Steps of the decoder, ms")
    names = list(steps[0].parts)
    for heading in ("total", "tok/s", *names):
        table.add_column(heading, justify="right")
    for step in steps:
        rate = step.num_seqs * step.num_new_tokens / step.step_ms * 1e3
        table.add_row(
            step.weights,
            step.name,
            f"{step.step_ms:.1f}",
            f"{rate:.0f}",
            *(f"{step.parts[name]:.1f}" for name in names),
        )
    console().print(table)


def rates_of(config: DenseShape, measured: FormatMeasurements, step: StepTime) -> dict[str, Rates]:
    """The rates of the parts of a step that compute or read much, and of the whole step."""
    work = ceilings.work_of(
        config,
        measured.weights,
        measured.kv_dtype,
        num_seqs=step.num_seqs,
        num_new_tokens=step.num_new_tokens,
        context=step.context,
    )
    times = {**{name: step.parts[name] for name in work}, "total": step.step_ms}
    work["total"] = ModelWork(
        flops=sum(part.flops for part in work.values()),
        num_bytes=sum(part.num_bytes for part in work.values()),
    )
    return {
        name: Rates(
            flops=part.flops / times[name] * 1e3, num_bytes=part.num_bytes / times[name] * 1e3
        )
        for name, part in work.items()
    }


def show_rates(config: DenseShape, found: Sequence[FormatMeasurements], peak: Rates) -> None:
    title = (
        f"GFLOP/s and GB/s of the steps' parts; the machine's peak is {peak.flops / 1e9:.0f} "
        f"GFLOP/s of float32 multiply-adds and {peak.num_bytes / 1e9:.1f} GB/s of reads"
    )
    names = [*ceilings.LINEARS, "attention", "logits", "total"]
    table = Table("weights", "step", *names, "of peak", title=title)
    for measured in found:
        for step in measured.steps:
            rates = rates_of(config, measured, step)
            total = rates["total"]
            of_flops, of_bytes = total.flops / peak.flops, total.num_bytes / peak.num_bytes
            table.add_row(
                step.weights,
                step.name,
                *(
                    f"{rates[name].flops / 1e9:.0f}, {rates[name].num_bytes / 1e9:.1f}"
                    for name in names
                ),
                f"{of_flops:.0%}, {of_bytes:.0%}",
            )
    console().print(table)


def show_products(found: Sequence[FormatMeasurements], products: Sequence[Products]) -> None:
    table = Table("weights", "tokens", title="Linears of a step, ms")
    for heading in ("ours", "torch float32", "torch bfloat16", "best of torch's over ours"):
        table.add_column(heading, justify="right")
    for measured in found:
        for product in products:
            ours_ms = linears_ms(measured.steps, product.num_tokens)
            table.add_row(
                measured.weights,
                str(product.num_tokens),
                f"{ours_ms:.1f}",
                f"{product.float32_ms:.1f}",
                f"{product.bfloat16_ms:.1f}",
                f"{product.best_ms / ours_ms:.2f}",
            )
    console().print(table)


def linears_ms(steps: Sequence[StepTime], num_tokens: int) -> float:
    """The time of the linears in the first step with this many tokens."""
    step = next(s for s in steps if s.num_seqs * s.num_new_tokens == num_tokens)
    return sum(step.parts[name] for name in ceilings.LINEARS)


def show_engine(rows: Sequence[EngineTime]) -> None:
    table = Table("weights", "draws", "sequences", title="Steps of the engine, ms")
    for heading in ("total", "decoder", "the rest"):
        table.add_column(heading, justify="right")
    for row in rows:
        times = (row.step_ms, row.decoder_ms, row.host_ms)
        counts = (row.weights, row.draws, str(row.num_seqs))
        table.add_row(*counts, *(f"{ms:.2f}" for ms in times))
    console().print(table)


def draw(path: Path, steps: Sequence[StepTime]) -> None:
    """Plot the time of decode steps over their size, with the context of the first step."""
    figure, (axis,) = new_figure(1)
    context = steps[0].context
    for weights in dict.fromkeys(step.weights for step in steps):
        line = [
            step
            for step in steps
            if (step.weights, step.num_new_tokens, step.context) == (weights, 1, context)
        ]
        axis.plot(
            [step.num_seqs for step in line],
            [step.step_ms for step in line],
            marker="o",
            label=weights,
        )
    axis.legend(fontsize="small")
    label_axis(axis, f"sequences, {context} tokens each", "ms a step")
    save(figure, path)
