"""Tells the accepted events of a log apart by their types, once for everything that renders, counts
or records them."""

from typing import Protocol, TypeVar

from gateway.log.cursor import LogEvent
from shared.messages import Failed, Finished, PromptScores, Started, TokenDelta

Result_co = TypeVar("Result_co", covariant=True)
Result = TypeVar("Result")


class LogVisitor(Protocol[Result_co]):
    """Makes something of each event."""

    def on_start(self, event: Started) -> Result_co: ...

    def on_scores(self, event: PromptScores) -> Result_co: ...

    def on_tokens(self, event: TokenDelta) -> Result_co: ...

    def on_finish(self, event: Finished) -> Result_co: ...

    def on_failure(self, event: Failed) -> Result_co: ...


class LogObserver:
    """A visitor that learns from some events, and ignores the others."""

    def read(self, event: LogEvent) -> None:
        """Learn from the next accepted event of a log."""
        visit(event, self)

    def on_start(self, event: Started) -> None:
        pass

    def on_scores(self, event: PromptScores) -> None:
        pass

    def on_tokens(self, event: TokenDelta) -> None:
        pass

    def on_finish(self, event: Finished) -> None:
        pass

    def on_failure(self, event: Failed) -> None:
        pass


def visit(event: LogEvent, visitor: LogVisitor[Result]) -> Result:
    """What ``visitor`` makes of an event."""
    match event:
        case TokenDelta():
            return visitor.on_tokens(event)
        case Finished():
            return visitor.on_finish(event)
        case Started():
            return visitor.on_start(event)
        case PromptScores():
            return visitor.on_scores(event)
        case Failed():
            return visitor.on_failure(event)
