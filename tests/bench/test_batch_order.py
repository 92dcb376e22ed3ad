from bench.batch_order import measure


def test_the_best_order_shares_prompts_and_starts_no_long_answer_last() -> None:
    shared, shared_best, *_, different, different_best = measure(
        num_lines=80, num_prefixes=10, prefix_tokens=300
    )

    assert shared_best.tokens_per_s > 1.2 * shared.tokens_per_s
    assert shared_best.cached_share > shared.cached_share
    assert different_best.tail_s < 0.2 * different.tail_s
