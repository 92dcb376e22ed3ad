"""The prices of models, from a file that the operator writes::

    {"currency": "USD", "models": {"smollm2": {"input": 0.1, "cached_input": 0.05, "output": 0.4}}}

A price is for one million tokens. The name ``*`` is for all models that are not named.
"""

from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Annotated, NamedTuple, Self

import msgspec
from msgspec import Meta, Struct

from gateway.store.usage import Group, TotalUsage, UsageSum
from shared.errors import StartupError

_TOKENS_OF_A_PRICE = 1_000_000
_ANY_MODEL = "*"


class Price(Struct, frozen=True, forbid_unknown_fields=True):
    """In the table's currency, for one million tokens."""

    input: Decimal
    output: Decimal
    cached_input: Decimal | None = None
    """The price of prompt tokens that were found in the prefix cache; None: the same as
    ``input``."""
    cached_answer: Decimal | None = None
    """The price of all tokens of a request whose answer was computed for another request; None:
    the same as if it had been computed for this request."""

    def __post_init__(self) -> None:
        """Raises ValueError."""
        prices = (self.input, self.output, self.cached_input or 0, self.cached_answer or 0)
        if min(prices) < 0:
            raise ValueError("a price is negative")


class PricedSum(NamedTuple):
    of: Mapping[Group, str]
    used: TotalUsage
    cost: Decimal | None
    """None if any model has no price."""

    def plus(self, other: "PricedSum") -> "PricedSum":
        is_known = self.cost is not None and other.cost is not None
        cost = (self.cost or 0) + (other.cost or Decimal()) if is_known else None
        return PricedSum(self.of, self.used.plus(other.used), cost)


class PriceTable(Struct, frozen=True, forbid_unknown_fields=True):
    models: Mapping[str, Price] = {}
    currency: Annotated[str, Meta(pattern=r"^[A-Z]{3}\Z")] = "USD"

    @classmethod
    def of(cls, path: Path | None) -> Self:
        """Read the table; without a path no model has a price. Raises `StartupError`."""
        if path is None:
            return cls()
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except OSError as error:
            raise StartupError(f"{path} cannot be read: {error.strerror}") from None
        except msgspec.MsgspecError as error:
            raise StartupError(f"{path} is not a table of prices: {error}") from None

    def priced(self, sums: Iterable[UsageSum], groups: Sequence[Group]) -> list[PricedSum]:
        """Add up sums by ``groups``, with their cost, in the order of the groups. The models of
        ``sums`` must be given, if any model has a price."""
        priced: dict[tuple[str, ...], PricedSum] = {}
        for of, used in sums:
            key = tuple(of[group] for group in groups)
            one = PricedSum(
                dict(zip(groups, key, strict=True)), used, self._cost(of.get("model", ""), used)
            )
            priced[key] = priced[key].plus(one) if key in priced else one
        return [priced[key] for key in sorted(priced)]

    def _cost(self, model: str, used: TotalUsage) -> Decimal | None:
        price = self.models.get(model, self.models.get(_ANY_MODEL))
        if price is None:
            return None
        cached = price.input if price.cached_input is None else price.cached_input
        num_prompt = used.num_cached_answer_prompt_tokens
        num_output = used.num_cached_answer_output_tokens
        num_computed = used.num_prompt_tokens - used.num_cached_tokens - num_prompt
        costs = (
            num_computed * price.input,
            used.num_cached_tokens * cached,
            (used.num_output_tokens - num_output) * price.output,
            num_prompt * (price.input if price.cached_answer is None else price.cached_answer),
            num_output * (price.output if price.cached_answer is None else price.cached_answer),
        )
        return sum(costs, Decimal()) / _TOKENS_OF_A_PRICE
