"""How more users affect response times, of Warren and its peers.

    python -m bench.users --llama-server PATH --llama-model GGUF --vllm PATH

Each user sends one request after another: 128 random tokens in, 64 greedy tokens out.
"""

from typing import Annotated

import typer

from bench import options, report
from bench.checks import check_output
from bench.comparison import Plan, compare, own_client
from bench.figures import Row, rows_of
from bench.machine import describe
from bench.options import Choice, comparison
from bench.plots import Panel, draw_rows

PANELS: list[Panel] = [
    ("mean response time, ms", lambda row: row.figures.response_mean_ms),
    ("90th percentile, ms", lambda row: row.figures.response_p90_ms),
]


def to_fewest_users(row: Row, rows: list[Row]) -> float:
    """The mean response time, relative to that of the same system with the fewest users."""
    own = [other for other in rows if (other.system, other.weights) == (row.system, row.weights)]
    fewest = min(own, key=lambda other: other.num_users)
    return row.figures.response_mean_ms / fewest.figures.response_mean_ms


@comparison
def main(
    choice: Choice,
    users: options.Users = [1, 3, 9],  # noqa: B006 (typer copies it)
    runs: options.Runs = 1,
    requests_per_user: Annotated[int, typer.Option(min=1, help="At least 4 a setting.")] = 5,
) -> None:
    plan = Plan(users, requests_per_user, min_requests=4, max_tokens=64)
    systems = choice.systems(plan.room)
    check_output(systems, choice.worker_options)
    measurements = list(compare(systems, plan, range(1, runs + 1), own_client))
    rows = rows_of(measurements)
    columns: list[report.Column] = [
        ("mean ms", lambda row: f"{row.figures.response_mean_ms:.0f}"),
        ("p90 ms", lambda row: f"{row.figures.response_p90_ms:.0f}"),
        ("to fewest users", lambda row: f"{to_fewest_users(row, rows):.2f}x"),
        ("tok/s", report.rate),
        ("others", lambda row: f"{row.other_cores:.1f}"),
    ]
    report.show(f"Response time, 128 tokens in, 64 out, {runs} runs", rows, columns)
    report.write(choice.out / "users.json", describe(systems), rows, measurements)
    draw_rows(choice.out / "users.svg", rows, PANELS)


if __name__ == "__main__":
    typer.run(main)
