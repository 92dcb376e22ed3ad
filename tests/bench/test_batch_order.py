from bench.batch_order import measure


def test_a_file_that_shares_prompts_runs_faster_in_the_best_order() -> None:
    small, best, *_ = measure(num_lines=150, num_prefixes=10, prefix_tokens=1000)

    assert best.tokens_per_s > 1.5 * small.tokens_per_s
    assert best.cached_share > small.cached_share


def test_no_long_answer_starts_last() -> None:
    *_, of_file, best = measure(num_lines=150, num_prefixes=10, prefix_tokens=200)

    assert best.tail_s < 0.2 * of_file.tail_s
    assert best.seconds < of_file.seconds
