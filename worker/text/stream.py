"""Streams the text of one choice, up to the first stop string."""

from collections.abc import Sequence

from worker.text.detokenizer import Detokenizer


class StopFinder:
    """Passes text on up to the first stop string, which is removed unless it is to be included.

    The first stop string is the one whose last character comes first; of several that end at the
    same position, the longest. Exactly the longest suffix that may still become a stop string is
    held back, so the output does not depend on how the text is divided.
    """

    def __init__(self, stop: Sequence[str], *, includes_stop: bool = False) -> None:
        self.met: str | None = None
        """The matched stop string."""
        self._matchers = [_Matcher(string) for string in stop]
        self._held = ""
        self._includes_stop = includes_stop

    def push(self, text: str) -> str:
        """The text that is certain to precede any stop string, or to belong to an included one."""
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
        """The held-back text, at the end of the text."""
        held, self._held = self._held, ""
        return "" if self.met is not None else held


class _Matcher:
    """The algorithm of Knuth, Morris and Pratt (1977), in amortized constant time per character."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        """Length of the longest proper prefix of ``stop`` that is a suffix of the text so far."""
        self._borders = [0]
        for char in stop[1:]:
            self._borders.append(self._next(self._borders[-1], char))

    def advance(self, char: str) -> bool:
        """Advance by ``char``; returns whether it completes the stop string, which ends the
        text."""
        self.num_matched = self._next(self.num_matched, char)
        return self.num_matched == len(self.stop)

    def _next(self, num_matched: int, char: str) -> int:
        while num_matched and self.stop[num_matched] != char:
            num_matched = self._borders[num_matched - 1]
        return num_matched + (self.stop[num_matched] == char)


class TextStream:
    """Converts the tokens of one choice into text that is safe to send.

    What each call returns depends only on all token ids so far. It never ends within a character,
    and never contains text that may still become part of a stop string.
    """

    def __init__(self, detokenizer: Detokenizer, stop: StopFinder) -> None:
        self._detokenizer = detokenizer
        self._stop = stop

    @property
    def stop_reason(self) -> str | None:
        """The matched stop string; the text ends before it."""
        return self._stop.met

    def push(self, token_id: int) -> str:
        """The text that the token completes; empty after a stop string."""
        return self._stop.push(self._detokenizer.push(token_id))

    def flush(self) -> str:
        """The held-back text at the natural end; incomplete bytes become U+FFFD.

        The last bytes may complete a stop string, in which case `stop_reason` is set.
        """
        return self._stop.push(self._detokenizer.flush()) + self._stop.flush()
