"""The jobs that a worker holds."""

import asyncio

from shared import incidents
from shared.messages import Cancel, Continue, GenerationJob
from worker.jobs.delivery import JobDelivery
from worker.jobs.execution import JobExecution
from worker.jobs.run import Signal


class HeldJob:
    """A job that this worker runs, and the delivery to settle at its end.

    A delivery is lost with its channel, but the run continues. If the broker redelivers the job
    here and no other worker has had it in between, the run adopts the new delivery.
    """

    def __init__(self, job: GenerationJob, execution: JobExecution, delivery: JobDelivery) -> None:
        self.job = job
        self.execution = execution
        self._delivery: JobDelivery | None = delivery
        self._num_returns = delivery.num_returns
        self._decided = asyncio.Event()
        """Set while it is known which delivery, if any, is to be settled."""
        self._decided.set()

    def lose(self) -> None:
        """Record that the delivery was lost with its channel."""
        self._delivery = None
        self._decided.clear()

    def adopt(self, job: GenerationJob, delivery: JobDelivery) -> bool:
        """Adopt this delivery of ``job`` for the current run.

        Returns False if another worker may have had the job, or if the delivery does not match.
        """
        is_ours = (
            self._delivery is None
            and not self._decided.is_set()
            and job.publication == self.job.publication
            and delivery.num_returns <= self._num_returns + 1
        )
        if is_ours:
            self._delivery = delivery
            self._num_returns = delivery.num_returns
            self._decided.set()
        return is_ours

    def give_up(self) -> None:
        """Hand the job over: the delivery did not come back, so another worker has it."""
        if self._delivery is None:
            self._decided.set()
            self.execution.tell(Signal.HAND_OVER)

    @property
    def in_hand(self) -> JobDelivery | None:
        """The delivery, or None if it was lost."""
        return self._delivery

    async def delivery(self) -> JobDelivery | None:
        """The delivery to settle; waits while a lost one may still come back."""
        await self._decided.wait()
        return self._delivery


class HeldJobs(dict[str, HeldJob]):
    """The held jobs, by request id."""

    def __init__(self) -> None:
        super().__init__()
        self.num_answered = 0

    def obey(self, command: Cancel | Continue) -> None:
        """Apply a command to one of the jobs. No error of that job propagates."""
        held = self.get(command.request_id)
        if held is not None:
            request_id = command.request_id
            with incidents.survived("job", "command not obeyed", request_id=request_id):
                held.execution.tell(command)
