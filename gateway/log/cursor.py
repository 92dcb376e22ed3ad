"""Reads a request's log event by event: what a reader passes on, sends to workers, and has learned.

There is no clock and no I/O. A reading starts at the beginning of the log, and again after each
lost connection, because the broker may have lost the log's end and a worker written it again,
possibly divided into other events. What follows `Restarted` is the whole log; whoever renders it
starts again too, and skips what its client has been sent.
"""

from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from gateway.log.facts import LogFacts, decode_facts
from gateway.log.fate import LogEnd
from shared.errors import StreamNotFound
from shared.log import Action, LogReader, Relay, Send
from shared.messages import (
    Accepted,
    Failed,
    Finished,
    PromptScores,
    Release,
    ReplyEvent,
    Started,
    TokenDelta,
)

NOT_FOUND = "There is no such stream."
_TELLING = (Accepted, Started)
"""The events that describe the request."""

LogEvent: TypeAlias = Started | PromptScores | TokenDelta | Finished | Failed
"""An accepted event."""


class Restarted(msgspec.Struct, frozen=True):
    """The log is read from its start again."""


Item: TypeAlias = LogEvent | Restarted


class LogCursor:
    """Reads one log, any number of times."""

    def __init__(self, claim: Release, facts: LogFacts | None) -> None:
        """``claim`` identifies the reader and its right to the log. Without ``facts`` the log
        provides them."""
        self.claim = claim
        self.facts = facts
        self.end = LogEnd.OPEN
        """How the log ended, in this reading or an earlier one."""
        self.num_accepted = 0
        """The number of `Accepted` events in the log."""
        self.publication = 0
        """The newest publication that has started."""
        self.has_started = False
        self._cut_off: set[str] = set()
        """Tickets of runs that were current when the connection to the broker was lost."""
        self._farthest = 0
        self._is_restarting = False
        self.reader = self._new_reader()

    @property
    def num_events(self) -> int:
        """The number of accepted events in the longest reading."""
        return max(self._farthest, self.reader.ordinal)

    def begin(self) -> None:
        """Start at the beginning of the log."""
        self._farthest = self.num_events
        self._is_restarting = self.num_events > 0 or self.has_started
        self.reader, self.num_accepted = self._new_reader(), 0

    def cut_off(self) -> None:
        """Record that the connection to the broker was lost."""
        if self.reader.ticket is not None:
            self._cut_off.add(self.reader.ticket)

    def read(self, event: ReplyEvent) -> Sequence[Action | Restarted]:
        """Process the next event of the log; returns the resulting actions in order.

        `Restarted` comes with the first event that a further reading passes on. Raises
        `StreamNotFound` if this reader has no right to the log.
        """
        if isinstance(event, _TELLING):
            self._learn(event)
        actions = self.reader.read(event)
        if self.reader.is_ended and actions:
            self.end = LogEnd.FAILED if isinstance(event, Failed) else LogEnd.FINISHED
        if self._is_restarting and any(isinstance(action, Relay) for action in actions):
            self._is_restarting = False
            return [Restarted(), *actions]
        return actions

    def cancel(self) -> list[Send]:
        """The commands that stop the job.

        There are none if no worker has started the job: the worker that takes it finds that its
        first event is `Unroutable`, once the log is deleted, and drops the job.
        """
        return self.reader.cancel()

    def _learn(self, event: Accepted | Started) -> None:
        if isinstance(event, Accepted):
            self.num_accepted += 1
        else:
            self.has_started = True
            self.publication = max(self.publication, event.publication)
        if self.facts is None and (event.context or isinstance(event, Started)):
            self.facts = self._checked(event.context)
            self.reader = self._new_reader()

    def _checked(self, encoded: bytes) -> LogFacts:
        try:
            facts = decode_facts(encoded)
        except msgspec.MsgspecError:  # another program's job
            raise StreamNotFound(NOT_FOUND) from None
        if self.claim.tenant not in (None, facts.tenant):
            raise StreamNotFound(NOT_FOUND)
        return facts

    def _new_reader(self) -> LogReader:
        num_choices = self.facts.num_choices if self.facts is not None else 1
        return LogReader(self.claim.request_id, num_choices, self._cut_off)
