"""Warren beside its peers over HTTP: throughput, latency, start-up and memory.

    python -m bench.serving --llama-server PATH --llama-model GGUF --vllm PATH

Each user streams one completion after another: 128 random tokens in, 128 greedy tokens out.
"""

from typing import Annotated, Literal

import typer

from bench import options, report
from bench.checks import check_output
from bench.comparison import Plan, compare, own_client
from bench.figures import rows_of
from bench.interrupt import ends_on_sigterm
from bench.machine import describe
from bench.plots import Panel, draw_rows
from bench.systems import peers
from bench.vllm_client import vllm_client

COLUMNS: list[report.Column] = [
    ("tok/s", report.rate),
    ("TTFT p50", lambda row: f"{row.figures.ttft_p50_ms:.0f}"),
    ("TTFT p99", lambda row: f"{row.figures.ttft_p99_ms:.0f}"),
    ("TPOT", lambda row: f"{row.figures.tpot_p50_ms:.1f}"),
    ("ITL p99", lambda row: f"{row.figures.itl_p99_ms:.0f}"),
    ("start s", lambda row: f"{row.start_s:.1f}"),
    ("MiB", lambda row: f"{row.memory_bytes / 2**20:.0f}"),
    ("others", lambda row: f"{row.other_cores:.1f}"),
    ("to best", lambda row: report.ratio(row.to_best_peer)),
    ("to same", lambda row: report.ratio(row.to_same_weights)),
]
PANELS: list[Panel] = [
    ("output tokens per second", lambda row: row.figures.tokens_per_s),
    ("median time to first token, ms", lambda row: row.figures.ttft_p50_ms),
]


@ends_on_sigterm
def main(
    formats: options.Formats = ["bfloat16"],  # noqa: B006 (typer copies it)
    llama_server: options.LlamaServer = None,
    llama_model: options.LlamaModels = None,
    vllm: options.Vllm = None,
    vllm_dtype: options.VllmDtypes = ["bfloat16"],  # noqa: B006
    only: options.Only = None,
    users: options.Users = [1, 8, 32],  # noqa: B006
    runs: options.Runs = 1,
    requests_per_user: Annotated[int, typer.Option(min=1, help="At least 8 a setting.")] = 4,
    client: Annotated[Literal["own", "vllm"], typer.Option(help="Who measures.")] = "own",
    broker: options.Broker = None,
    worker_option: options.WorkerOptions = None,
    out: options.Out = options.RESULTS,
) -> None:
    plan = Plan(users, requests_per_user, min_requests=8)
    ours = options.ours(formats, broker, worker_option)
    theirs = peers(llama_server, llama_model or (), vllm, vllm_dtype, needed=plan.room)
    systems = options.selected([*ours, *theirs], only)
    check_output(systems, worker_option)
    measure = own_client if client == "own" else vllm_client(vllm or "vllm")
    measurements = list(compare(systems, plan, runs, measure))
    rows = rows_of(measurements)
    title = (
        f"128 tokens in, 128 out, {runs} runs, client: {client}; times in ms; "
        "tok/s to those of the best peer, and to the best with the same weights"
    )
    report.show(title, rows, COLUMNS)
    about = {**describe(systems), "client": client}
    report.write(out / "serving.json", about, rows, measurements)
    draw_rows(out / "serving.svg", rows, PANELS)


if __name__ == "__main__":
    typer.run(main)
