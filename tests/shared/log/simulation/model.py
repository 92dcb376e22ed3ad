"""A language model in which every token shows whether it follows the right tokens."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gateway.once.copies import CopyWriter
from shared.log import LogReader, LogWriter, extend_hash
from shared.log.writer import Attempt

NUMERICS = "ab"


@dataclass(frozen=True)
class Model:
    """Choices of ``length`` tokens. Workers may disagree: there are two candidates for each token,
    and both depend on all previous tokens, like the prefix hash."""

    num_choices: int = 1
    length: int = 12
    deadly_at: int | None = None
    """The token at which every worker dies."""
    expiry_share: float = 0.0
    """How often a run's deadline may pass, per move of a worker."""
    fresh_share: float = 0.5
    """How often a run may begin before its `Started` is confirmed."""
    is_seeded: bool = False
    """Whether all workers draw the same tokens. If so, the broker may lose delivered but
    unconfirmed events when it dies."""
    is_cluster: bool = False
    """Whether the broker has several nodes, each of which may die for good with its logs."""
    is_mixed: bool = False
    """Whether workers have two different numerics."""
    requires_same_numerics: bool = False
    """Whether no worker continues tokens of other numerics. If so, all tokens of an answer are
    drawn alike."""
    has_affinity_target: bool = False
    """Whether the job is first published to the queue of a single worker."""
    has_left_job: bool = False
    """Whether the job of an earlier execution of the request is still in its queue."""
    is_hedged: bool = False
    """Whether a gateway takes runs for slow, and publishes hedges."""
    is_shared: bool = False
    """Whether several clients share the execution, at two gateways."""
    given_ids: tuple[int, ...] = ()
    """The tokens of another answer with which each choice begins."""
    generation: int = 0
    """How many forks lead to this request. Each draws other tokens than the request before it."""
    is_kept: bool = False
    """Whether the log stays when its clients have all of it, so that it can be forked."""
    origin_reader_class: type[LogReader] = LogReader
    """How the tokens of an answer are read for its fork."""
    missing: Callable[[LogWriter, int, Sequence[int]], Sequence[int]] = LogWriter.missing
    """Which of the given tokens a run writes."""
    renews_copies: bool = True
    """Whether a gateway that may have missed messages of a copy asks for another copy."""
    records_first: bool = True
    """Whether what a request has used is recorded before its end is written."""
    reader_class: type[LogReader] = LogReader
    attempt_class: type[Attempt] = Attempt
    writer_class: type[CopyWriter] = CopyWriter

    def next_tokens(
        self,
        prefix: Sequence[int],
        dice: random.Random,
        numerics: str = "",
        *,
        is_left: bool = False,
    ) -> list[int]:
        """``is_left``: of another request, whose tokens are others."""
        tokens = list(prefix)
        for _ in range(min(dice.randint(1, 3), self.length - len(prefix))):
            flavour = dice.randint(0, 1)
            if self.is_seeded:
                flavour = 0
            elif self.requires_same_numerics:
                flavour = NUMERICS.index(numerics)
            tokens.append(self._token(tokens, flavour) ^ is_left)
        return tokens[len(prefix) :]

    def execution_of(self, *, is_left: bool) -> int:
        """The execution of a job."""
        return 0 if not self.has_left_job else 1 if is_left else 2

    def text(self, token_ids: Sequence[int]) -> str:
        """A token has one or two characters."""
        return "".join(chr(97 + token_id % 26) * (1 + token_id % 2) for token_id in token_ids)

    def is_complete(self, prefix: Sequence[int], token_ids: Sequence[int]) -> bool:
        """The end may come with the last token or by itself."""
        is_late = len(prefix) % 2 == 0
        return len(prefix) + (0 if is_late else len(token_ids)) >= self.length

    def is_deadly(self, prefix: Sequence[int]) -> bool:
        return self.deadly_at is not None and len(prefix) >= self.deadly_at

    def expires(self, dice: random.Random) -> bool:
        return self.expiry_share > 0 and dice.random() < self.expiry_share

    def check(self, token_ids: Sequence[int]) -> None:
        """Assert that the answer begins with the given tokens, and that each other token follows
        exactly the tokens before it."""
        num_given = len(self.given_ids)
        assert tuple(token_ids[:num_given]) == self.given_ids[: len(token_ids)], (
            "it begins with other tokens than the given tokens"
        )
        drawn = [*enumerate(token_ids)][num_given:]
        for index, token_id in drawn:
            assert token_id in {self._token(token_ids[:index], flavour) for flavour in (0, 1)}, (
                f"token {index} belongs behind other tokens"
            )
        if self.requires_same_numerics:
            assert any(
                all(token == self._token(token_ids[:k], flavour) for k, token in drawn)
                for flavour in (0, 1)
            ), "the numerics change within the answer"

    def _token(self, prefix: Sequence[int], flavour: int) -> int:
        kind = 2 * self.generation + flavour
        return extend_hash(len(prefix), [*prefix, kind]) % (1 << 31)
