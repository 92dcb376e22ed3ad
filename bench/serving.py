"""Warren beside its peers over HTTP: throughput, latency, start-up and memory.

    python -m bench.serving --llama-server PATH --llama-model GGUF --vllm PATH

Each user streams completions in sequence: 128 random tokens in, 128 greedy tokens out.
"""

from typing import Annotated, Literal

import typer

from bench import options, report
from bench.checks import check_output
from bench.comparison import Plan, compare, own_client
from bench.figures import Measurement, rows_of
from bench.machine import describe
from bench.options import Choice, comparison
from bench.plots import Panel, draw_rows
from bench.vllm_client import vllm_client

COLUMNS: list[report.Column] = [
    ("tok/s", report.rate),
    ("TTFT p50", lambda row: f"{row.figures.ttft_p50_ms:.0f}"),
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
    choice: Choice,
    users: options.Users = [1, 8, 32],  # noqa: B006 (typer copies it)
    runs: options.Runs = 1,
    requests_per_user: Annotated[int, typer.Option(min=1, help="At least 4 a setting.")] = 4,
    add: Annotated[
        bool, typer.Option("--add", help="Add the runs to those that the JSON file holds.")
    ] = False,
    client: Annotated[Literal["own", "vllm"], typer.Option(help="Who measures.")] = "own",
) -> None:
    plan = Plan(users, requests_per_user, min_requests=4)
    systems = choice.systems(plan.room, has_engines=True)
    check_output(systems, choice.worker_options)
    measure = own_client if client == "own" else vllm_client(choice.vllm or "vllm")
    about = {**describe(systems), "client": client}
    path = choice.out / "serving.json"
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
        f"128 tokens in, 128 out, client: {client}; times in ms; CPU: gateway + worker, per token; "
        "tok/s to those of the best peer, and to the best with the same weights"
    )
    report.show(title, rows, COLUMNS)
    draw_rows(choice.out / "serving.svg", rows, PANELS)


if __name__ == "__main__":
    typer.run(main)
