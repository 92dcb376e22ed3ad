"""The broker: its queues, and the delivery of commands."""

import random
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from shared.log import Send
from shared.messages import Command, Hedge, ReplyEvent
from worker.jobs.run import Record

_EXPIRED_SHARE = 0.8


@dataclass(eq=False)
class Job:
    """A copy of the request in a job queue."""

    publication: int = 0
    num_returns: int = 0
    is_suspect: bool = False
    is_left: bool = False
    """Whether it is of an earlier execution of the request."""
    num_renewals: int = 0
    """Into which queue of the log it is answered."""
    hedge: Hedge | None = None
    """Why it was published beside another run."""
    numerics: str = ""
    """Of the workers for which it waits; empty if any may take it."""
    affinity_target: str = ""
    """The only worker that may take it; empty once it is in the queue of all workers."""


@dataclass
class Broker:
    """Keeps jobs and the log through its restart, but not commands and consumers. It may also lose
    the unconfirmed end of the log."""

    side_dice: random.Random
    """Its own, so that schedules are the same without records and copies."""

    jobs: list[Job] = field(default_factory=lambda: [Job()])
    log: list[ReplyEvent] | None = field(default_factory=list)
    """The newest queue of the log, None if it was deleted."""
    num_renewals: int = 0
    """How often the log was recreated in another queue."""
    is_down: bool = False
    """Whether the node of that queue is down."""
    is_back: bool = False
    """Whether the nodes of the queues before it live again, whatever is written there."""
    reader: object = None
    """The consumer of the log."""
    commands: dict[str, deque[Command]] = field(default_factory=dict)
    """Commands on their way, by the address of a connected worker."""
    numerics: list[str] = field(default_factory=list)
    """Of the workers that consume jobs."""
    lost_alone: set[int] = field(default_factory=set)
    """The publications with a run in quarantine whose worker died or was considered dead."""
    copied: set[int] = field(default_factory=set)
    """The publications that may have two messages. A run of either message may replace the run of
    the other, and count it as crashed if its worker stalls."""
    records: list[Record] = field(default_factory=list)
    """What runs have recorded, in order."""

    def append(self, event: ReplyEvent) -> bool:
        """Append an event; returns whether there is a queue that receives it."""
        if self.log is None:
            return False
        self.log.append(event)
        return True

    @property
    def record(self) -> Record | None:
        """The record that counts, by the rule of `shared.messages.UsageRecord`."""
        best: Record | None = None
        for record in self.records:
            is_later = best is not None and record.attempt == best.attempt > 0
            if best is None or is_later or record.attempt > best.attempt:
                best = record
        return best

    def begin_log_again(self) -> None:
        self.log = []
        self.num_renewals += 1
        self.is_down = self.is_back = False

    def send(self, send: Send) -> None:
        if send.address in self.commands:
            self.commands[send.address].append(send.command)

    def may_take(self, name: str, numerics: str) -> Job | None:
        """The next job for a worker with this name and these numerics."""
        jobs = (job for job in self.jobs if job.affinity_target in ("", name))
        return next((job for job in jobs if job.numerics in ("", numerics)), None)

    def expire(self) -> bool:
        """Return the jobs to all workers that have waited for some; returns whether any have."""
        waiting = [job for job in self.jobs if job.numerics or job.affinity_target]
        for job in waiting:
            job.numerics, job.affinity_target, job.num_returns = "", "", 0
            job.publication += 1  # as the worker that takes it counts
        return bool(waiting)

    def give_back(self, job: Job, *, is_counted: bool = True) -> None:
        """Return a job to its queue. Some versions of RabbitMQ do not count every kind of return,
        but the redelivered flag is always set. A job that returns to the queue of a single worker
        may have expired by then."""
        job.num_returns = max(job.num_returns + is_counted, 1)
        self.jobs.insert(0, job)
        if job.affinity_target and self.side_dice.random() < _EXPIRED_SHARE:
            self.expire()

    def forget(self, unconfirmed: Collection[ReplyEvent]) -> None:
        while self.log and any(self.log[-1] is event for event in unconfirmed):
            self.log.pop()

    def restart(self) -> None:
        self.reader = None
        for commands in self.commands.values():
            commands.clear()
