"""The order in which the waiting jobs of a tenant begin: by their deadlines."""

from collections.abc import Iterator
from typing import Generic, TypeVar

JobT = TypeVar("JobT")


class WaitingLine(Generic[JobT]):
    """The waiting jobs of a tenant, in the order of their arrival.

    A job with a deadline must begin by a certain time to end before the deadline. The job for which
    this time comes first has the least slack, and is the next. A job that has missed its time is
    probably late: it is the next only if no other job waits, so that it makes no further job late.

    A job without a deadline keeps its place: it is the next when as many jobs have left the line as
    were before it.
    """

    def __init__(self) -> None:
        self._urgent: dict[JobT, float] = {}
        """The jobs with a deadline, and the time by which each must begin."""
        self._patient: dict[JobT, int] = {}
        """The others, and the number of jobs that leave the line before them."""
        self._num_left = 0
        self._arrivals: dict[JobT, None] = {}

    def __len__(self) -> int:
        return len(self._arrivals)

    def __iter__(self) -> Iterator[JobT]:
        return iter(self._arrivals)

    def add(self, job: JobT, begin_by: float | None) -> None:
        """Add a job, which must begin by this time to be in time; None: it has no deadline."""
        if begin_by is None:
            self._patient[job] = self._num_left + len(self)
        else:
            self._urgent[job] = begin_by
        self._arrivals[job] = None

    def remove(self, job: JobT) -> None:
        """Remove a job, if it is in the line."""
        if job in self._arrivals:
            del self._arrivals[job]
            self._urgent.pop(job, None)
            self._patient.pop(job, None)
            self._num_left += 1

    def first(self, now: float) -> JobT:
        """The job that begins next. The line must not be empty."""
        patient = next(iter(self._patient), None)
        if patient is not None and self._patient[patient] <= self._num_left:
            return patient
        in_time = [job for job, begin_by in self._urgent.items() if begin_by >= now]
        if in_time:
            return min(in_time, key=self._urgent.__getitem__)
        return min(self._urgent, key=self._urgent.__getitem__) if patient is None else patient
