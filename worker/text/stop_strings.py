"""Stop strings in a text that arrives piece by piece."""

from collections.abc import Sequence


class StopFinder:
    """Passes text on up to the first stop string, which it swallows unless told to include it.

    The first stop string is the one whose last character comes first; of several that end there,
    the longest. Held back is exactly the longest end of the text that may still become a stop
    string, so what is passed on does not depend on how the text is cut.
    """

    def __init__(self, stop: Sequence[str], *, includes_stop: bool = False) -> None:
        self.met: str | None = None
        """The stop string that ended the text."""
        self._matchers = [_Matcher(string) for string in stop]
        self._held = ""
        self._includes_stop = includes_stop

    def push(self, text: str) -> str:
        """The text that is now known to lie before any stop string, or within one to include."""
        if self.met is not None:
            return ""
        if not self._matchers:
            return text
        pending = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            ended = [matcher.stop for matcher in self._matchers if matcher.advance(char)]
            if ended:
                self.met = max(ended, key=len)
                return pending[: end if self._includes_stop else end - len(self.met)]
        num_safe = len(pending) - max(matcher.num_matched for matcher in self._matchers)
        self._held = pending[num_safe:]
        return pending[:num_safe]

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        return "" if self.met is not None else held


class _Matcher:
    """Knuth, Morris and Pratt (1977): amortised constant time a character."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        """Length of the longest proper prefix of ``stop`` that the text so far ends with."""
        self._borders = [0]
        for char in stop[1:]:
            self._borders.append(self._next(self._borders[-1], char))

    def advance(self, char: str) -> bool:
        """Whether ``char`` completes the stop string; the text ends then."""
        self.num_matched = self._next(self.num_matched, char)
        return self.num_matched == len(self.stop)

    def _next(self, num_matched: int, char: str) -> int:
        while num_matched and self.stop[num_matched] != char:
            num_matched = self._borders[num_matched - 1]
        return num_matched + (self.stop[num_matched] == char)
