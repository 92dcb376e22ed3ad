"""The jobs in a worker's hands."""

import asyncio

from shared import incidents
from shared.messages import Cancel, Continue, GenerationJob
from worker.jobs.delivery import JobDelivery
from worker.jobs.run import Answer


class HeldJob:
    """A job that this worker answers, and the delivery to settle in the end.

    A delivery is lost with its channel. The answer goes on: when the broker delivers the job again
    and nobody else has had it in between, it comes back here and is adopted.
    """

    def __init__(self, job: GenerationJob, answer: Answer, delivery: JobDelivery) -> None:
        self.job = job
        self.answer = answer
        self._delivery: JobDelivery | None = delivery
        self._num_returns = delivery.num_returns
        self._decided = asyncio.Event()
        """Whether it is known which delivery there is to settle, if any."""
        self._decided.set()

    def lose(self) -> None:
        """The delivery is gone with its channel."""
        self._delivery = None
        self._decided.clear()

    def adopt(self, job: GenerationJob, delivery: JobDelivery) -> bool:
        """Answer this delivery of ``job`` with what runs already; False if others may have had it,
        or if it is another one than the one that is held."""
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
        """The delivery did not come back: another worker has the job."""
        if self._delivery is None:
            self._decided.set()
            self.answer.hand_over()

    @property
    def in_hand(self) -> JobDelivery | None:
        """The delivery, unless it is lost."""
        return self._delivery

    async def delivery(self) -> JobDelivery | None:
        """What there is to settle; waits while that may come back."""
        await self._decided.wait()
        return self._delivery


class HeldJobs(dict[str, HeldJob]):
    """By request id."""

    def __init__(self) -> None:
        super().__init__()
        self.num_answered = 0

    def obey(self, command: Cancel | Continue) -> None:
        """Follow a command for one of the jobs. No error of that job leaves this."""
        held = self.get(command.request_id)
        if held is not None:
            request_id = command.request_id
            with incidents.survived("job", "command not obeyed", request_id=request_id):
                held.answer.obey(command)
