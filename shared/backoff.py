"""The pauses between attempts that fail, for everything that is tried again."""

import secrets


def drawn(pause_s: float) -> float:
    """Half of a pause and a random part of the other half, so that not all come back at once."""
    return pause_s * secrets.SystemRandom().uniform(0.5, 1.0)


class Backoff:
    """Lengthens the pauses between attempts while each attempt soon fails."""

    def __init__(
        self, first_s: float, longest_s: float, *, steady_s: float = 5.0, num_failed: int = 0
    ) -> None:
        """The pauses begin with ``first_s``. An attempt that lasted ``steady_s`` makes them short
        again. ``num_failed`` attempts have failed already."""
        self._first_s = first_s
        self._longest_s = longest_s
        self._steady_s = steady_s
        self._num_brief = num_failed

    @property
    def pause_s(self) -> float:
        """Doubled for each attempt in a row that failed soon, except the first."""
        # A power of two beyond the longest pause would only become a number that no float holds.
        doublings = min(max(0, self._num_brief - 1), 64)
        return min(self._first_s * 2.0**doublings, self._longest_s)

    @property
    def drawn_pause_s(self) -> float:
        """`pause_s`, but drawn."""
        return drawn(self.pause_s)

    def lasted(self, seconds: float = 0.0) -> None:
        """Record that an attempt has failed, and how long it lasted."""
        self._num_brief = self._num_brief + 1 if seconds < self._steady_s else 0
