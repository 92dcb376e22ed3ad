"""What an engine tells a worker."""

from collections.abc import Sequence
from queue import SimpleQueue

from tests.support import PATIENCE_S
from worker.engine.interface import Charges, Output, SequenceFailed


class Listener:
    """An `EngineListener` that keeps what it hears."""

    def __init__(self) -> None:
        self.outputs: SimpleQueue[Sequence[Output]] = SimpleQueue()
        self.failed: SimpleQueue[Sequence[SequenceFailed]] = SimpleQueue()
        self.failures: SimpleQueue[BaseException] = SimpleQueue()
        self.ready: SimpleQueue[bool] = SimpleQueue()

    def hear_outputs(self, outputs: Sequence[Output], charges: Charges) -> None:
        self.outputs.put(outputs)

    def hear_failed(self, failed: Sequence[SequenceFailed]) -> None:
        self.failed.put(failed)

    def hear_failure(self, error: BaseException) -> None:
        self.failures.put(error)

    def hear_ready(self, is_ready: bool) -> None:
        self.ready.put(is_ready)

    def hear_some(self) -> Sequence[Output]:
        """The next outputs."""
        while not (outputs := self.outputs.get(timeout=PATIENCE_S)):
            pass  # the machine time of sequences alone
        return outputs

    def hear_ends(self, num_ends: int) -> list[Output]:
        """All outputs up to the given number of finished sequences."""
        outputs: list[Output] = []
        while sum(output.finish_reason is not None for output in outputs) < num_ends:
            outputs += self.outputs.get(timeout=PATIENCE_S)
        return outputs
