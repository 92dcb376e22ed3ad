"""The stages of a reading of a log, and the transitions between them.

`docs/concepts/log.md` shows the stages. A transition that is not in `TRANSITIONS` contradicts what
a reading knows about its log, and raises.
"""

from collections.abc import Mapping
from enum import Enum


class Stage(Enum):
    """How a reading stands to its log. The values are the descriptions in the documentation."""

    CLAIMING = "Another reader may hold the log, and is asked to release it"
    ATTACHING = "The log is about to be consumed, for the first time or again"
    READING = "The log is consumed, and its events are read"
    HOLDING = "The log is kept from other readers while the client takes what was read"
    NODE_DOWN = "The broker does not answer about the log, whose node may be down"
    RECREATING = "The log is lost, and is begun again in another queue with a copy"
    RESTORING = "The recreated log has the copy, which was not read there yet"
    FAILED = "The log's node is down, and nothing is recreated: the log's `Failed` was read"
    LOST = "The log is gone, and cannot be begun again"

    @property
    def label(self) -> str:
        """The name in the documentation."""
        return self.name.lower().replace("_", " ")


class Transition(Enum):
    """What happens to a reading. The values are the descriptions in the documentation."""

    ATTACHED = "the reader consumes the log"
    DETACHED = "the reader returns the log's messages, or has lost them with the connection"
    HELD = "the buffer is full"
    SILENCED = "the broker does not answer, or answers that the node is down"
    MOVED_ON = "the log is lost, and everything that clients were sent was read"
    BEGUN = "the broker has confirmed the copy"
    RESTORED = "the copy was read"
    FAILED = "the node is down after the log's `Failed`"
    GONE = "the log is not found, and cannot be begun again"


TRANSITIONS: Mapping[Transition, Mapping[Stage, Stage]] = {
    Transition.ATTACHED: {
        Stage.CLAIMING: Stage.READING,
        Stage.ATTACHING: Stage.READING,
        Stage.NODE_DOWN: Stage.READING,
        Stage.RESTORING: Stage.RESTORING,
    },
    Transition.DETACHED: {
        Stage.READING: Stage.ATTACHING,
        Stage.HOLDING: Stage.ATTACHING,
        Stage.RESTORING: Stage.RESTORING,
    },
    Transition.HELD: {
        Stage.ATTACHING: Stage.HOLDING,
        Stage.RESTORING: Stage.RESTORING,
    },
    Transition.SILENCED: {
        Stage.CLAIMING: Stage.CLAIMING,
        Stage.ATTACHING: Stage.NODE_DOWN,
        Stage.NODE_DOWN: Stage.NODE_DOWN,
        Stage.RECREATING: Stage.RECREATING,
        Stage.RESTORING: Stage.RESTORING,
    },
    Transition.MOVED_ON: {
        Stage.ATTACHING: Stage.RECREATING,
        Stage.NODE_DOWN: Stage.RECREATING,
        Stage.RECREATING: Stage.RECREATING,
        Stage.RESTORING: Stage.RECREATING,
    },
    Transition.BEGUN: {Stage.RECREATING: Stage.RESTORING},
    Transition.RESTORED: {Stage.RESTORING: Stage.READING},
    Transition.FAILED: {Stage.ATTACHING: Stage.FAILED},
    Transition.GONE: {
        Stage.ATTACHING: Stage.LOST,
        Stage.NODE_DOWN: Stage.LOST,
        Stage.RECREATING: Stage.LOST,
        Stage.RESTORING: Stage.LOST,
    },
}
"""For each transition, the stages in which it can happen, and the stages to which it leads."""


class ImpossibleTransition(Exception):
    """A transition cannot happen in the stage of a reading."""


def after(stage: Stage, transition: Transition) -> Stage:
    """The stage to which a transition leads. Raises `ImpossibleTransition`."""
    following = TRANSITIONS[transition].get(stage)
    if following is None:
        raise ImpossibleTransition(f"{transition.name} while {stage.label}")
    return following
