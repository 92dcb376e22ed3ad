"""What a user of the broker may name in the messages that it publishes.

Gateways serve many tenants, so their users are trusted: their messages name any tenant and any
request. Every other user publishes under its own name. The ids of its requests begin with that name
and a dot, and so do the names of its reply queues, after ``reply.``. Its jobs run for the tenant of
that name, and its commands reach no other requests.

The broker refuses a message that names another user than that of its connection. A message that
names none could come from anyone.
"""

from collections.abc import Iterable
from typing import TypeVar

import msgspec

from shared import topology
from shared.bus.base import Message
from shared.errors import UndecodableMessage
from shared.messages import Command, Drain, GenerationJob, QuickJob, is_reply_key

_Job = TypeVar("_Job", bound=GenerationJob | QuickJob)


class Publishers:
    """The users of a broker, some of whom are trusted."""

    def __init__(self, trusted: Iterable[str]) -> None:
        self._trusted = frozenset(trusted)

    def admitted(self, job: _Job, message: Message) -> _Job:
        """The job of a message, with the tenant that it runs for.

        Raises `UndecodableMessage` if the publisher may not name its request or its reply queue.
        """
        if not is_reply_key(message.reply_to):
            raise UndecodableMessage("reply_to is not the key of a reply queue")
        user = message.user_id
        if self.is_trusted(user):
            return job
        if not user:
            raise UndecodableMessage("the message has no user_id")
        if not self.may_name(user, job.request_id):
            raise UndecodableMessage(f"request_id does not begin with {own_name(user)}")
        if not self.may_be_answered(message):
            raise UndecodableMessage(f"reply_to does not begin with {_own_key(user)}")
        return msgspec.structs.replace(job, tenant=user, key_id="")

    def is_trusted(self, user: str) -> bool:
        """Whether ``user`` may name any tenant and any request."""
        return user in self._trusted

    def may_name(self, user: str, request_id: str) -> bool:
        """Whether ``user`` may publish and command this request."""
        return user in self._trusted or (bool(user) and request_id.startswith(own_name(user)))

    def may_command(self, user: str, command: Command) -> bool:
        """Whether ``user`` may give this command. Only trusted users command workers as a whole."""
        if isinstance(command, Drain):
            return user in self._trusted
        return self.may_name(user, command.request_id)

    def may_be_answered(self, message: Message) -> bool:
        """Whether ``reply_to`` is the key of a reply queue that its publisher may name."""
        user, key = message.user_id, message.reply_to
        is_own = user in self._trusted or (bool(user) and key.startswith(_own_key(user)))
        return is_own and is_reply_key(key)


def own_name(user: str, name: str = "") -> str:
    """``name`` in the name space of a user of the broker."""
    return f"{user}.{name}"


def _own_key(user: str) -> str:
    return topology.reply_key(own_name(user))
