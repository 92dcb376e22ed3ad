"""The broker: what it keeps, and whom it tells."""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from shared.log import Send
from shared.messages import Command, ReplyEvent


@dataclass(eq=False)
class Job:
    """One copy of the request in a queue of jobs."""

    publication: int = 0
    num_returns: int = 0
    is_suspect: bool = False
    num_lost_alone: int = 0
    """Runs of it in quarantine that began, and whose worker died or was taken for dead."""


@dataclass
class Broker:
    """Keeps jobs and the log through its own restart; commands and consumers it forgets.

    It may also forget the end of the log, as far as that was not confirmed.
    """

    jobs: list[Job] = field(default_factory=lambda: [Job()])
    log: list[ReplyEvent] | None = field(default_factory=list)
    """None: the reply queue was deleted."""
    reader: object = None
    """Who consumes the log."""
    commands: dict[str, deque[Command]] = field(default_factory=dict)
    """Those on their way, by the address of a worker that is connected."""

    def append(self, event: ReplyEvent) -> bool:
        """Whether there is a queue to take it."""
        if self.log is None:
            return False
        self.log.append(event)
        return True

    def send(self, send: Send) -> None:
        if send.address in self.commands:
            self.commands[send.address].append(send.command)

    def give_back(self, job: Job, *, is_counted: bool = True) -> None:
        """Some ways to come back are not counted by some versions of RabbitMQ, but it always says
        that the message was delivered before."""
        job.num_returns = max(job.num_returns + is_counted, 1)
        self.jobs.insert(0, job)

    def forget(self, unconfirmed: Collection[ReplyEvent]) -> None:
        while self.log and any(self.log[-1] is event for event in unconfirmed):
            self.log.pop()

    def restart(self) -> None:
        self.reader = None
        for commands in self.commands.values():
            commands.clear()
