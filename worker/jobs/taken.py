"""What an answer begins with."""

from dataclasses import dataclass

from shared.bus.base import Bus
from shared.messages import GenerationJob, JobClass
from shared.topology import Lane
from worker.decode.bridge import Generations
from worker.decode.served_model import ServedModel
from worker.jobs.publisher import ReplyPublisher


@dataclass(frozen=True, slots=True)
class TakenJob:
    """A job as one delivery has brought it."""

    job: GenerationJob
    lane: Lane
    num_returns: int
    publisher: ReplyPublisher
    is_copy: bool = False
    """An earlier delivery of it was still being answered here."""

    @property
    def is_suspect(self) -> bool:
        return self.lane == "suspect"

    @property
    def job_class(self) -> JobClass:
        return "batch" if self.lane == "batch" else "interactive"


@dataclass(frozen=True, slots=True)
class Workplace:
    """What all answers of a worker share."""

    bus: Bus
    model: ServedModel
    generations: Generations
    address: str
    """Where the worker's commands go."""
    job_timeout_s: float
