"""Warren beside its peers over HTTP: throughput, latency, start-up and memory.

    python -m bench.serving --llama-server PATH --llama-model GGUF --vllm PATH
    python -m bench.serving --model-shape llama-3.2-1b --weights Q4_K_M --llama-server PATH

Each user streams completions in sequence: 128 random tokens in, 128 greedy tokens out. With
``--model-shape``, all systems serve a file of random weights in place of SmolLM2.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from bench import options, report
from bench.checks import check_finite, check_output
from bench.comparison import ComparisonPlan, compare, own_client
from bench.figures import Measurement, rows_of
from bench.load import MODEL
from bench.machine import describe
from bench.options import SharedOptions, comparison
from bench.plots import Panel, draw_rows
from bench.shapes.catalogue import SHAPES
from bench.shapes.model_file import MIXES, model_file
from bench.shapes.tensors import ARCHITECTURES
from bench.vllm_client import vllm_client
from worker.checkpoints import store

_WRITABLE = {
    name.lower(): shape
    for name, shape in SHAPES.items()
    if shape.config["model_type"] in ARCHITECTURES
}

COLUMNS: list[report.Column] = [
    ("tok/s", report.rate),
    ("TTFT p50", lambda row: f"{row.figures.ttft_p50_ms:.0f}"),
    ("prompt tok/s", lambda row: report.number(row.prompt_tokens_per_s)),
    ("TTFT p99", lambda row: f"{row.figures.ttft_p99_ms:.0f}"),
    ("TPOT", lambda row: f"{row.figures.tpot_p50_ms:.1f}"),
    ("ITL p99", lambda row: f"{row.figures.itl_p99_ms:.0f}"),
    ("start s", lambda row: f"{row.start_s:.1f}"),
    ("CPU ms", lambda row: " + ".join(f"{ms:.2f}" for ms in row.cpu_ms_per_token.values())),
    ("MiB", lambda row: f"{row.memory_bytes / 2**20:.0f}"),
    ("others", lambda row: f"{row.other_cores:.1f}"),
    ("to best", lambda row: report.ratio(row.to_best_peer)),
    ("to same", lambda row: report.ratio(row.to_same_weights)),
]
PANELS: list[Panel] = [
    ("output tokens per second", lambda row: row.figures.tokens_per_s),
    ("median time to first token, ms", lambda row: row.figures.ttft_p50_ms),
]


@comparison
def main(
    choice: SharedOptions,
    users: options.Users = [1, 8, 32],  # noqa: B006 (typer copies it)
    runs: options.Runs = 1,
    requests_per_user: Annotated[int, typer.Option(min=1, help="At least 4 a setting.")] = 4,
    prompt_lens: Annotated[
        list[int], typer.Option("--prompt-tokens", min=1, help="Of each request. Repeatable.")
    ] = [128],  # noqa: B006
    model_shape: Annotated[
        str | None,
        typer.Option(help=f"Random weights in place of SmolLM2: {', '.join(_WRITABLE)}."),
    ] = None,
    weights: Annotated[
        list[str],
        typer.Option(help=f"Of --model-shape: {', '.join(MIXES)}. Repeatable."),
    ] = ["Q4_K_M"],  # noqa: B006
    layers: Annotated[
        int | None, typer.Option(min=1, help="Of --model-shape; default: all of them.")
    ] = None,
    add: Annotated[
        bool, typer.Option("--add", help="Add the runs to those that the JSON file holds.")
    ] = False,
    client: Annotated[Literal["own", "vllm"], typer.Option(help="Who measures.")] = "own",
) -> None:
    plan = ComparisonPlan(users, requests_per_user, min_requests=4, prompt_lens=prompt_lens)
    if model_shape is None:
        name, served = "serving", MODEL
        systems = choice.systems(plan.room, has_engines=True)
        check_output(systems, choice.worker_options)
    else:
        served = _served_name(model_shape, layers)
        name = f"serving-{served}"
        files = files_of(model_shape, weights, layers)
        systems = choice.systems_of_files(plan.room, files)
        for file in files:
            check_finite(file)
    measure = own_client if client == "own" else vllm_client(choice.vllm or "vllm")
    about = {**describe(systems), "client": client, "model": served}
    path = choice.out / f"{name}.json"
    measurements: list[Measurement] = []
    if add:
        about, measurements = report.continued(path, about)
    first = 1 + max((one.run for one in measurements), default=0)
    for measurement in compare(systems, plan, range(first, first + runs), measure):
        measurements.append(measurement)
        # What was measured is kept, even if a later measurement fails.
        report.write(path, about, rows_of(measurements), measurements)
    rows = rows_of(measurements)
    title = (
        f"{served}, {plan.max_tokens} tokens out, client: {client}; times in ms; CPU: gateway + "
        "worker, per token; tok/s to those of the best peer, and to the best with the same weights"
    )
    report.show(title, rows, COLUMNS)
    pictured = [row for row in rows if row.prompt_len == rows[0].prompt_len]
    draw_rows(path.with_suffix(".svg"), pictured, PANELS)


def _served_name(shape: str, layers: int | None) -> str:
    return shape.lower() if layers is None else f"{shape.lower()}-{layers}-layers"


def files_of(shape: str, weights: Sequence[str], layers: int | None) -> list[Path]:
    """A file for each of ``weights``. Raises `typer.BadParameter`."""
    if (known := _WRITABLE.get(shape.lower())) is None:
        raise typer.BadParameter(f"{shape}: there are {', '.join(_WRITABLE)}")
    config = known.config if layers is None else {**known.config, "num_hidden_layers": layers}
    tokenizer = store.resolve(MODEL)
    name = _served_name(shape, layers)
    try:
        return [model_file(name, config, mix, tokenizer) for mix in weights]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


if __name__ == "__main__":
    typer.run(main)
