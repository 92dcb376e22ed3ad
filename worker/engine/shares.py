"""Fair shares of tenants, measured in tokens, by virtual token counters.

See "Fairness in Serving Large Language Models", Sheng et al., OSDI 2024.
"""

from collections import Counter
from collections.abc import Mapping

PROMPT_TOKEN_COST = 1.0
OUTPUT_TOKEN_COST = 2.0
"""An output token occupies a sequence for a whole step; prompt tokens share a step."""


class Shares:
    """The virtual token counters of the active tenants.

    A tenant is active while it has sequences, waiting or running. Its counter is the cost of the
    tokens that it was served, divided by its weight; the tenant with the lowest counter is served
    next. A tenant that becomes active is lifted to the lowest counter of the active tenants, so
    that it earns no credit while it is idle. When no tenant is active, no tenant is owed anything,
    and all counters are forgotten.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        """``weights`` are positive; other tenants have weight 1."""
        self._weights = weights
        self._counters: dict[str, float] = {}
        self._num_sequences: Counter[str] = Counter()

    @property
    def num_active(self) -> int:
        return len(self._num_sequences)

    def weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def counter(self, tenant: str) -> float:
        """The virtual token counter of an active tenant."""
        return self._counters[tenant]

    def enter(self, tenant: str) -> None:
        """Add a sequence of ``tenant``."""
        if tenant not in self._num_sequences:
            lowest = min((self._counters[active] for active in self._num_sequences), default=0.0)
            self._counters[tenant] = max(self._counters.get(tenant, 0.0), lowest)
        self._num_sequences[tenant] += 1

    def leave(self, tenant: str) -> None:
        """Remove a sequence of ``tenant``."""
        self._num_sequences[tenant] -= 1
        if not self._num_sequences[tenant]:
            del self._num_sequences[tenant]
            if not self._num_sequences:
                self._counters.clear()

    def charge(self, tenant: str, cost: float) -> None:
        """Record that an active tenant was served tokens of this cost."""
        self._counters[tenant] += cost / self.weight(tenant)

    def check_invariants(self, tenants: Counter[str]) -> None:
        """Assert that the active tenants are these, with their numbers of sequences."""
        assert self._num_sequences == tenants, (self._num_sequences, tenants)
        assert self._counters.keys() >= tenants.keys()
