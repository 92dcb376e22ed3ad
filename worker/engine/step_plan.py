"""One step while it is planned."""

from dataclasses import dataclass, field

from worker.engine.interface import ScheduledSequence
from worker.engine.sequence import Sequence
from worker.engine.step_cost import StepWork


@dataclass(slots=True)
class StepPlan:
    """One step as it grows: its sequences' shares, and whose the rows of its result are."""

    num_tokens_left: int
    block_size: int
    shares: list[ScheduledSequence] = field(default_factory=list)
    sampled: list[Sequence] = field(default_factory=list)
    prompts: list[Sequence] = field(default_factory=list)
    """Sequences with more than one token in this step."""
    work: StepWork = field(default_factory=StepWork)
    has_streams: bool = False
    """Somebody waits for a token that this step decodes."""
    is_cut: bool = False
    """A prompt did not fit in whole."""

    def add_decode(self, sequence: Sequence) -> None:
        """Compute the one token that the sequence lacks."""
        self.has_streams = self.has_streams or not sequence.is_batch
        self._add(sequence, 1)

    def add_prompt(self, sequence: Sequence, max_tokens: int) -> int:
        """Compute as much of the sequence as ``max_tokens`` allow; returns how many that are."""
        num_tokens = min(sequence.num_uncomputed, max_tokens)
        self.is_cut = self.is_cut or num_tokens < sequence.num_uncomputed
        if num_tokens:
            self.prompts.append(sequence)
            self._add(sequence, num_tokens)
        return num_tokens

    def _add(self, sequence: Sequence, num_tokens: int) -> None:
        self.work.add(sequence.num_computed, num_tokens)
        self.num_tokens_left -= num_tokens
        share = sequence.take(num_tokens, len(self.sampled), self.block_size)
        self.shares.append(share)
        if share.is_sampled:
            self.sampled.append(sequence)
