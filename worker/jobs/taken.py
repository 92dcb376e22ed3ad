"""The inputs of a run."""

from dataclasses import dataclass

from shared.bus.base import Bus
from shared.messages import GenerationJob, JobClass
from shared.topology import Lane
from worker.decode.bridge import Generations
from worker.decode.served_model import ServedModel
from worker.jobs.publisher import ReplyPublisher


@dataclass(frozen=True, slots=True)
class TakenJob:
    """A job as delivered, with the facts of its delivery."""

    job: GenerationJob
    lane: Lane
    num_returns: int
    publisher: ReplyPublisher
    is_copy: bool = False
    """An earlier delivery of the same job was still running here."""

    @property
    def is_suspect(self) -> bool:
        return self.lane == "suspect"

    @property
    def job_class(self) -> JobClass:
        return "batch" if self.lane == "batch" else "interactive"


@dataclass(frozen=True, slots=True)
class Workplace:
    """What all runs of a worker share."""

    bus: Bus
    model: ServedModel
    generations: Generations
    address: str
    """The routing key of the worker's commands."""
    job_timeout_s: float
