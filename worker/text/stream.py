"""The text of one choice, as it may be sent."""

from worker.text.detokenizer import Detokenizer
from worker.text.stop_strings import StopFinder


class TextStream:
    """Turns one choice's tokens into text that is safe to send.

    What each call returns is a function of all token ids so far and nothing else. It never ends
    inside a character, and never holds a part of what may still become a stop string.
    """

    def __init__(self, detokenizer: Detokenizer, stop: StopFinder) -> None:
        self._detokenizer = detokenizer
        self._stop = stop

    @property
    def stop_reason(self) -> str | None:
        """The stop string that was met; the text has ended before it."""
        return self._stop.met

    def push(self, token_id: int) -> str:
        """Text that the token makes certain; empty once a stop string was met."""
        return self._stop.push(self._detokenizer.push(token_id))

    def flush(self) -> str:
        """What was held back, at the natural end; incomplete bytes become U+FFFD.

        The last bytes may complete a stop string: `stop_reason` is set then.
        """
        return self._stop.push(self._detokenizer.flush()) + self._stop.flush()
