"""The time of the steps of published shapes with random weights, beside what limits them.

    python -m bench.shapes [--shape NAME]... [--format FORMAT]... [--turns N] [--threads N]
    python -m bench.shapes --memory

Rows of the same shape and format replace the earlier rows in ``shapes.json``.

A decode step cannot take less time than reading what it needs once. The rate at which the machine
reads is measured before and after the steps of each turn, because that of a virtual machine
changes. The fastest step and the fastest rate count: others were disturbed. A shape is cut to a few
layers: see `catalogue.py`. Models are in memory one after another.
"""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from bench.ceilings import measured_peak
from bench.machine import describe
from bench.options import RESULTS, Out
from bench.report import console, write_json
from bench.shapes.catalogue import SHAPES, with_attention_alone
from bench.shapes.random_model import RandomReader
from bench.shapes.steps import DecoderTimes, TimedDecoder
from bench.shapes.work import decode_bytes, prompt_multiplications
from worker.model.start import sequence_memory

FORMATS = ("bfloat16", "q8_0")
_CONTEXT = 128
_USERS = (1, 8)
_PROMPT = 512
_PEAK_S = 0.2
_MEMORY_SHAPE, _MEMORY_SEQUENCES, _MEMORY_TOKENS = "Qwen3.5-0.8B", 32, 8000


@dataclass(frozen=True, kw_only=True)
class ShapeRow:
    """A decode step of ``num_seqs`` sequences, or a prompt."""

    shape: str
    weights: str
    num_seqs: int
    num_new_tokens: int
    """1 for a decode step."""
    step_ms: float
    """The fastest of all turns."""
    num_bytes: float
    """What a decode step has to read, and to write of states; 0 for a prompt."""
    of_limit: float
    """The time of reading that once, divided by the time of the step; 0 for a prompt."""
    gflops: float
    """The multiplications and additions of a prompt per second, in billions; 0 for a step."""
    parts: dict[str, float]
    """The milliseconds of the step's parts."""


def measure(
    name: str, weights: str, num_threads: int, num_turns: int, num_steps: int
) -> list[ShapeRow]:
    """Measure a shape with weights of a format."""
    spec = SHAPES[name].spec()
    reader = RandomReader(spec, weights)
    decoder = TimedDecoder(spec, reader, num_threads)
    rows = []
    with measured_peak(num_threads, _PEAK_S) as peak:
        for num_seqs in _USERS:
            num_bytes = decode_bytes(spec, reader, num_seqs, _CONTEXT)
            turns: list[DecoderTimes] = []
            rates = [peak().num_bytes]
            for _ in range(num_turns):
                turns.append(decoder.decodes(num_seqs, _CONTEXT, num_steps))
                rates.append(peak().num_bytes)
            step = _fastest(turns)
            rows.append(
                ShapeRow(
                    shape=name,
                    weights=weights,
                    num_seqs=num_seqs,
                    num_new_tokens=1,
                    step_ms=step.total_ms,
                    num_bytes=num_bytes,
                    of_limit=num_bytes / max(rates) * 1e3 / step.total_ms,
                    gflops=0.0,
                    parts=step.parts,
                )
            )
    prompt = _fastest([decoder.prompts(_PROMPT, 1) for _ in range(num_turns)])
    flops = 2 * prompt_multiplications(spec, reader, _PROMPT)
    rows.append(
        ShapeRow(
            shape=name,
            weights=weights,
            num_seqs=1,
            num_new_tokens=_PROMPT,
            step_ms=prompt.total_ms,
            num_bytes=0.0,
            of_limit=0.0,
            gflops=flops / prompt.total_ms / 1e6,
            parts=prompt.parts,
        )
    )
    return rows


def _fastest(times: list[DecoderTimes]) -> DecoderTimes:
    return min(times, key=lambda one: one.total_ms)


def _show(rows: list[ShapeRow]) -> None:
    table = Table("shape", "weights", "step", title="Steps of the decoder")
    for heading in ("ms", "GB to read", "of the limit", "GFLOP/s"):
        table.add_column(heading, justify="right")
    for row in rows:
        is_decode = row.num_new_tokens == 1
        table.add_row(
            f"{row.shape}, {SHAPES[row.shape].num_layers} layers",
            row.weights,
            f"{row.num_seqs} x {row.num_new_tokens}",
            f"{row.step_ms:.1f}",
            f"{row.num_bytes / 1e9:.2f}" if is_decode else "",
            f"{row.of_limit:.2f}" if is_decode else "",
            "" if is_decode else f"{row.gflops:.0f}",
        )
    console().print(table)


def _show_memory() -> None:
    spec = SHAPES[_MEMORY_SHAPE].spec()
    models = {
        _MEMORY_SHAPE: spec,
        f"{_MEMORY_SHAPE} with attention in all layers": with_attention_alone(spec),
        "Llama-3.2-1B": SHAPES["Llama-3.2-1B"].spec(),
    }
    title = f"The cache of {_MEMORY_SEQUENCES} sequences of {_MEMORY_TOKENS:,} tokens, MB"
    table = Table("model", title=title)
    for heading in ("keys and values", "states", "total"):
        table.add_column(heading, justify="right")
    for name, model in models.items():
        each = sequence_memory(model, _MEMORY_TOKENS, torch.bfloat16)
        sizes = (each.tokens, each.states, each.total)
        table.add_row(name, *(f"{_MEMORY_SEQUENCES * size / 1e6:,.0f}" for size in sizes))
    console().print(table)


def main(
    shapes: Annotated[
        list[str], typer.Option("--shape", help=f"Of {', '.join(SHAPES)}. Repeatable.")
    ] = list(SHAPES),  # noqa: B006 (typer copies it)
    formats: Annotated[
        list[str],
        typer.Option("--format", help="bfloat16, q8_0, or mxfp4 for experts. Repeatable."),
    ] = list(FORMATS),  # noqa: B006
    threads: Annotated[int, typer.Option(help="That compute.")] = torch.get_num_threads(),
    turns: Annotated[int, typer.Option(min=1)] = 5,
    steps: Annotated[int, typer.Option(min=2, help="Of a turn.")] = 16,
    memory: Annotated[
        bool, typer.Option("--memory", help="Show only the memory of sequences.")
    ] = False,
    out: Out = RESULTS,
) -> None:
    if unknown := set(shapes) - SHAPES.keys():
        raise typer.BadParameter(f"{', '.join(unknown)}: there are {', '.join(SHAPES)}")
    if memory:
        _show_memory()
        return
    rows = [
        row
        for shape in shapes
        for weights in formats
        for row in measure(shape, weights, threads, turns, steps)
    ]
    _show(rows)
    content = {
        **describe([]),
        "threads": threads,
        "layers": {name: shape.num_layers for name, shape in SHAPES.items()},
        "context": _CONTEXT,
    }
    path = out / "shapes.json"
    write_json(path, {**content, "rows": [*_others(path, content, rows), *_as_json(rows)]})


def _others(path: Path, content: dict[str, Any], rows: list[ShapeRow]) -> list[dict[str, Any]]:
    """The rows of other shapes and formats in a file of the same machine."""
    if not path.exists():
        return []
    earlier = json.loads(path.read_text())
    if earlier["machine"] != content["machine"]:
        raise typer.BadParameter(f"{path.name} is of another machine: use another --out")
    replaced = {(row.shape, row.weights) for row in rows}
    return [row for row in earlier["rows"] if (row["shape"], row["weights"]) not in replaced]


def _as_json(rows: list[ShapeRow]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(row) for row in rows]


if __name__ == "__main__":
    typer.run(main)
