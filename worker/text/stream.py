"""Streams the text of one choice."""

from worker.text.detokenizer import Detokenizer
from worker.text.stop_strings import StopFinder


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
