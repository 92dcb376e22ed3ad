"""Figures of hand-made streams."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.figures import Figures, Measurement, figures_of, percentile, rows_of
from bench.load import MeasuredLoad, Stream

STEADY = Stream(sent_at=10.0, chunk_times=[10.5, 10.6, 10.7, 10.8], num_tokens=4)
"""0.5 s to its first token, 0.1 s to each of three more."""
COALESCED = Stream(sent_at=20.0, chunk_times=[21.0, 21.4], num_tokens=5)
"""Four tokens arrived in a single chunk."""


def test_a_stream_gives_the_times_that_were_put_in() -> None:
    figures = figures_of(MeasuredLoad([STEADY], duration_s=2.0))

    assert figures.tokens_per_s == pytest.approx(2.0)
    assert figures.ttft_p50_ms == figures.ttft_p99_ms == pytest.approx(500)
    assert figures.tpot_p50_ms == pytest.approx(100)
    assert figures.itl_p99_ms == pytest.approx(100)
    assert figures.response_mean_ms == figures.response_p90_ms == pytest.approx(800)


def test_tokens_of_one_chunk_make_one_itl_and_share_the_tpot() -> None:
    figures = figures_of(MeasuredLoad([COALESCED], duration_s=1.0))

    assert figures.itl_p99_ms == pytest.approx(400)
    assert figures.tpot_p50_ms == pytest.approx(100)
    assert figures.tokens_per_s == pytest.approx(5)


def test_ttft_and_response_are_taken_over_requests_and_itl_over_chunks() -> None:
    figures = figures_of(MeasuredLoad([STEADY, COALESCED], duration_s=3.0))

    assert figures.tokens_per_s == pytest.approx(3.0)
    assert figures.ttft_p50_ms == pytest.approx(750)
    assert figures.response_mean_ms == pytest.approx((800 + 1400) / 2)
    assert figures.itl_p99_ms == pytest.approx(percentile([100, 100, 100, 400], 99))


def test_percentiles_lie_between_their_neighbours() -> None:
    assert percentile([30.0, 10.0, 20.0], 50) == 20
    assert percentile([10.0, 20.0], 75) == pytest.approx(17.5)
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 100))
def test_a_percentile_has_its_share_of_the_values_below(
    values: list[float], percent: float
) -> None:
    at = percentile(values, percent)

    assert min(values) <= at <= max(values)
    assert sum(value <= np.nextafter(at, np.inf) for value in values) >= (
        (len(values) - 1) * percent / 100
    )


def _measurement(
    system: str, weights: str, rate: float, run: int = 1, users: int = 8, prompt_len: int = 128
) -> Measurement:
    times = {entry.name: 1.0 for entry in dataclasses.fields(Figures)}
    return Measurement(
        system=system,
        weights=weights,
        is_peer=system.startswith("peer"),
        num_users=users,
        run=run,
        start_s=float(run),
        memory_bytes=100 * run,
        other_cores=run / 10,
        figures=Figures(**{**times, "tokens_per_s": rate}),
        prompt_len=prompt_len,
    )


def test_a_row_holds_the_medians_and_the_range_of_its_runs() -> None:
    [row] = rows_of(
        [_measurement("ours", "q8_0", rate, run) for run, rate in enumerate([9, 3, 5], 1)]
    )

    assert (row.num_runs, row.start_s, row.memory_bytes, row.other_cores) == (3, 2, 200, 0.3)
    assert row.figures.tokens_per_s == 5
    assert (row.slowest_tokens_per_s, row.fastest_tokens_per_s) == (3, 9)


def test_ratios_are_to_the_fastest_peer_with_as_many_users() -> None:
    rows = rows_of(
        [
            _measurement("ours", "bfloat16", 60),
            _measurement("peer A", "bfloat16", 20),
            _measurement("peer B", "bfloat16", 30),
            _measurement("peer A", "q4_1", 40),
            _measurement("peer A", "q4_1", 1000, users=1),
            _measurement("peer A", "q4_1", 1000, prompt_len=16),
            _measurement("ours", "q8_0", 80),
        ]
    )

    in_bfloat16, *_, in_q8_0 = rows
    assert in_bfloat16.to_best_peer == pytest.approx(1.5)
    assert in_bfloat16.to_same_weights == pytest.approx(2.0)
    assert in_q8_0.to_best_peer == pytest.approx(2.0)
    assert in_q8_0.to_same_weights is None


def test_only_a_prompt_that_is_computed_alone_has_a_rate() -> None:
    alone, beside = rows_of(
        [
            _measurement("ours", "q8_0", 1, users=1, prompt_len=2048),
            _measurement("ours", "q8_0", 1, users=8, prompt_len=2048),
        ]
    )

    assert alone.prompt_tokens_per_s == pytest.approx(2048 / 1e-3)
    assert beside.prompt_tokens_per_s is None
