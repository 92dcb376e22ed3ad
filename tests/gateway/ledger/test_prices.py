"""What requests cost."""

from decimal import Decimal
from pathlib import Path

import pytest

from gateway.ledger.prices import PriceTable
from gateway.store.usage import TotalUsage, UsageSum
from shared.errors import StartupError

USED = TotalUsage(
    num_requests=1,
    num_completed=1,
    num_prompt_tokens=1_000_000,
    num_cached_tokens=400_000,
    num_output_tokens=2_000_000,
    num_takeovers=0,
    queue_s=0.0,
    compute_s=1.0,
)


def table(tmp_path: Path, text: str) -> PriceTable:
    path = tmp_path / "prices.json"
    path.write_text(text)
    return PriceTable.of(path)


def costs(prices: PriceTable, *models: str) -> list[Decimal | None]:
    sums = [UsageSum({"day": "d", "model": model}, USED) for model in models]
    return [priced.cost for priced in prices.priced(sums, ["day"])]


@pytest.mark.parametrize(
    ("price", "cost"),
    [
        ('{"input": 0.1, "output": 0.3}', "0.70"),
        ('{"input": 0.1, "output": 0.3, "cached_input": 0.05}', "0.68"),
        ('{"input": 0, "output": 0}', "0"),
    ],
)
def test_a_cost_is_exact(tmp_path: Path, price: str, cost: str) -> None:
    prices = table(tmp_path, f'{{"models": {{"m": {price}}}}}')

    assert costs(prices, "m") == [Decimal(cost)]


@pytest.mark.parametrize(
    ("price", "cost"),
    [
        ('{"input": 1, "output": 3, "cached_input": 0.5}', "6.8"),
        ('{"input": 1, "output": 3, "cached_input": 0.5, "cached_answer": 0.1}', "5.08"),
        ('{"input": 1, "output": 3, "cached_input": 0.5, "cached_answer": 0}', "5.0"),
    ],
    ids=["no price of their own", "a price of their own", "free"],
)
def test_cached_answers_have_a_price_of_their_own(tmp_path: Path, price: str, cost: str) -> None:
    prices = table(tmp_path, f'{{"models": {{"m": {price}}}}}')
    cached = {
        "num_cached_answer_prompt_tokens": 300_000,
        "num_cached_answer_output_tokens": 500_000,
    }

    (priced,) = prices.priced([UsageSum({"model": "m"}, USED._replace(**cached))], ["model"])

    assert priced.cost == Decimal(cost)


def test_models_are_added_up_each_at_its_price(tmp_path: Path) -> None:
    cheap, dear = '{"input": 0, "output": 1}', '{"input": 0, "output": 5}'
    prices = table(tmp_path, f'{{"models": {{"m": {cheap}, "*": {dear}}}}}')

    assert costs(prices, "m", "other") == [Decimal(12)]


def test_rows_of_several_models_stay_in_the_order_of_their_groups(tmp_path: Path) -> None:
    prices = table(tmp_path, '{"models": {"*": {"input": 1, "output": 1}}}')
    days = [("m", "1"), ("m", "3"), ("n", "2"), ("n", "3")]
    sums = [UsageSum({"day": day, "model": model}, USED) for model, day in days]

    priced = prices.priced(sums, ["day"])

    assert [one.of["day"] for one in priced] == ["1", "2", "3"]


def test_a_model_without_a_price_makes_the_cost_unknown(tmp_path: Path) -> None:
    prices = table(tmp_path, '{"models": {"m": {"input": 0, "output": 1}}}')

    assert costs(prices, "m", "other") == [None]


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"models": {"m": {"input": 1}}}',
        '{"models": {"m": {"input": -1, "output": 1}}}',
        '{"models": {"m": {"input": 1, "output": 1, "otput": 1}}}',
        '{"models": {}, "currency": "dollars"}',
    ],
)
def test_a_table_with_a_fault_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(StartupError, match=r"prices\.json is not a table of prices"):
        table(tmp_path, text)


def test_a_missing_table_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"gone\.json cannot be read"):
        PriceTable.of(tmp_path / "gone.json")
