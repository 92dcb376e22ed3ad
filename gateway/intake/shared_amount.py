"""An amount of slots or bytes that tenants or addresses share."""

from collections import Counter

_RESERVED_SHARE = 8
"""The divisor of what is reserved: an eighth is kept for owners that hold less than their share."""


class SharedAmount:
    """An amount of which every owner takes parts.

    Its last eighth is kept for owners that hold less than an equal share among the active owners
    and an owner that is still to come, so that a busy owner does not keep the others out.
    """

    def __init__(self, amount: int, *, has_owners: bool = True) -> None:
        """Without owners nothing is kept for others."""
        self._amount = self._free = amount
        self._num_reserved = amount // _RESERVED_SHARE if has_owners else 0
        self._held: Counter[str] = Counter()

    def has(self, amount: int) -> bool:
        """Whether so much is free, for whichever owner."""
        return amount <= self._free

    def take(self, owner: str, amount: int) -> bool:
        """Take a part until `give_back`; False if too little is left for this owner."""
        left = self._free - amount
        if left < 0 or (left < self._num_reserved and not self._is_below_share(owner)):
            return False
        self._free = left
        self._held[owner] += amount
        return True

    def give_back(self, owner: str, amount: int) -> None:
        self._free += amount
        self._held[owner] -= amount
        if not self._held[owner]:
            del self._held[owner]

    def _is_below_share(self, owner: str) -> bool:
        num_active = len(self._held) + (owner not in self._held)
        return self._held[owner] * (num_active + 1) < self._amount
