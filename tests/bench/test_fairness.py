"""The figures of the benchmark of shares, and what its published results have to reach."""

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from bench.fairness import ALONE, FLOODED, ONE_TENANT, EngineRun, StreamTimes, summary
from bench.options import IMAGES, RESULTS

WEIGHTED = "two tenants"
MAX_P95_RATIO = 1.3
MIN_THROUGHPUT_RATIO = 0.97
WEIGHTS = (3 * 0.95, 3 * 1.05)
"""The bounds of the ratio of tokens between tenants with the weights three and one."""
MAX_ADDED_GAP_MS = 500.0
PUBLISHED: list[dict[str, Any]] = json.loads((RESULTS / "fairness.json").read_text())["rows"]


def run(
    load: str,
    *ttfts_s: float,
    engine: str = "e",
    gap_s: float = 0.0,
    received: dict[str, int] | None = None,
    tokens_with_prompts_per_s: float = 0.0,
) -> EngineRun:
    singles = [StreamTimes("single", ttft_s, gap_s) for ttft_s in ttfts_s]
    counted = Counter(received or {})
    return EngineRun(engine, load, singles, counted, 0.0, tokens_with_prompts_per_s, 0.0)


def row_of(load: str, runs: Sequence[EngineRun]) -> dict[str, Any]:
    (row,) = [row for row in summary(runs) if (row["engine"], row["load"]) == ("e", load)]
    return row


def test_waiting_is_compared_with_that_of_the_tenants_alone() -> None:
    runs = [
        run(ALONE, 0.1),
        run(FLOODED, 0.2, gap_s=0.4),
        run(ONE_TENANT, 9.0, tokens_with_prompts_per_s=1.0),
    ]

    row = row_of(FLOODED, runs)

    assert row["p95_ratio_to_alone"] == pytest.approx(2.0)
    assert (row["num_jobs"], row["gap_max_ms"]) == (1, pytest.approx(400))


def test_times_to_first_token_are_percentiles_in_milliseconds() -> None:
    times_s = [number / 1000 for number in range(101)]

    row = row_of(ALONE, [run(ALONE, *times_s)])

    figures = [row[f"ttft_{name}_ms"] for name in ("p50", "p95", "max")]
    assert figures == pytest.approx([50, 95, 100])


def test_throughput_is_compared_with_the_same_load_as_one_tenant() -> None:
    runs = [
        run(ALONE, 0.1, tokens_with_prompts_per_s=500),
        run(FLOODED, 0.1, tokens_with_prompts_per_s=90),
        run(ONE_TENANT, 0.1, tokens_with_prompts_per_s=100),
    ]

    assert row_of(FLOODED, runs)["throughput_ratio_to_one_tenant"] == pytest.approx(0.9)
    assert row_of(ALONE, runs)["throughput_ratio_to_one_tenant"] is None


def test_the_tokens_of_weights_are_compared_as_they_are_received() -> None:
    received = {"light": 200, "heavy": 590}
    runs = [run(ALONE, 0.1), run(WEIGHTED, received=received)]

    row = row_of(WEIGHTED, runs)

    assert row["heavy_to_light_tokens"] == pytest.approx(2.95)
    assert (row["num_jobs"], row["ttft_p95_ms"], row["p95_ratio_to_alone"]) == (0, None, None)


def test_engines_are_compared_with_themselves() -> None:
    runs = [
        run(ALONE, 0.1),
        run(ALONE, 10.0, engine="slow"),
        run(WEIGHTED, 0.2),
        run(WEIGHTED, 10.0, engine="slow"),
    ]

    assert row_of(WEIGHTED, runs)["p95_ratio_to_alone"] == pytest.approx(2.0)


@pytest.mark.parametrize("engine", ["synthetic", "smollm2"])
def test_the_published_shares_are_fair(engine: str) -> None:
    rows = {row["load"]: row for row in PUBLISHED if row["engine"] == engine}
    (weighted,) = [row for row in rows.values() if row["heavy_to_light_tokens"]]
    others = [row for load, row in rows.items() if load not in (ALONE, ONE_TENANT)]

    assert rows[FLOODED]["p95_ratio_to_alone"] <= MAX_P95_RATIO
    assert rows[FLOODED]["throughput_ratio_to_one_tenant"] >= MIN_THROUGHPUT_RATIO
    assert WEIGHTS[0] <= weighted["heavy_to_light_tokens"] <= WEIGHTS[1]
    longest_ms = max(row["gap_max_ms"] for row in others)
    assert longest_ms - rows[ALONE]["gap_max_ms"] <= MAX_ADDED_GAP_MS


def test_the_page_has_the_published_picture() -> None:
    picture = IMAGES / "fairness.svg"

    assert picture.exists()
    assert f"](images/{picture.name})" in (IMAGES.parent / "benchmarks.md").read_text()
