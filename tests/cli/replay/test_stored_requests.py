"""The draw of stored requests."""

from cli.replay.stored_requests import Draw

IDS = [f"batch_1/{k}" for k in range(10_000)]


def drawn(share: float, seed: int = 0) -> set[str]:
    draw = Draw(share, seed)
    return {name for name in IDS if draw.takes(name)}


def test_the_draw_takes_about_its_share() -> None:
    assert 900 < len(drawn(0.1)) < 1100


def test_the_draw_takes_all_of_the_whole() -> None:
    assert drawn(1.0) == {*IDS}


def test_a_larger_share_contains_the_smaller_share() -> None:
    assert drawn(0.1) < drawn(0.2)


def test_another_seed_draws_other_requests() -> None:
    assert len(drawn(0.1, seed=1) & drawn(0.1, seed=2)) < 200
