"""A sequence that an engine over HTTP runs: which request comes next, and whether its tokens are as
requested."""

import hashlib
from collections.abc import Sequence

from shared.errors import EngineFailed
from shared.messages import FinishReason
from worker.engine.interface import Output, PromptScored, StepOutput, Submit, TokenScore
from worker.engines.adapter import Ask, EngineContent, EngineTraits

_MAX_SEED = (1 << 31) - 1


class RemoteSequence:
    """The state of one `Submit`.

    A sequence is one request, or several that follow each other. The engine obeys a constraint only
    from the start of the output, in its own form, if it has one. Otherwise it generates freely, and
    every token is checked; a token that the constraint does not allow is drawn again, from the
    tokens that it allows. This gives each token the probability that it has among the allowed
    tokens.
    """

    def __init__(
        self, submit: Submit, traits: EngineTraits, *, vocab_size: int, arrival: int
    ) -> None:
        self.submit = submit
        self.is_batch = submit.job_class == "batch"
        self.arrival = arrival
        self.output_ids = [*submit.output_ids]
        self.is_at_work = False
        """Whether the engine may have begun: if it ends, the sequence may be the reason."""
        self.num_violations = 0
        """Tokens that the constraint did not allow."""
        self._traits = traits
        self._vocab_size = vocab_size
        eos_ids = frozenset() if submit.sampling.ignore_eos else submit.eos_ids
        self._end_ids = eos_ids.union(submit.sampling.stop_token_ids)
        self._must_draw_again = False
        self._must_score = submit.scores_prompt
        wanted = submit.sampling.constraint
        self._sends_constraint = wanted is not None and wanted.kind in traits.constraints
        self._has_sent_constraint = False
        """Whether the last request had the constraint."""
        self._asked_until = 0
        """The output's length after all tokens of the last request."""

    def next_ask(self) -> Ask:
        """The next request."""
        submit = self.submit
        if self._must_score:
            num_top = submit.sampling.prompt_logprobs
            return Ask(
                submit.prompt_ids,
                1,
                submit.sampling,
                self._seed(),
                is_batch=self.is_batch,
                num_prompt_top=num_top,
            )
        num_left = submit.max_tokens - len(self.output_ids)
        banned: tuple[int, ...] = ()
        constraint = None
        num_before_end = submit.sampling.min_tokens - len(self.output_ids)
        if self._must_draw_again:
            num_left = 1
        elif num_before_end > 0 and not self._traits.has_min_tokens:
            num_left, banned = min(num_left, num_before_end), tuple(sorted(self._end_ids))
        elif not self.output_ids and self._sends_constraint:
            constraint = submit.sampling.constraint
        self._has_sent_constraint = constraint is not None
        self._asked_until = len(self.output_ids) + num_left
        return Ask(
            token_ids=[*submit.prompt_ids, *self.output_ids],
            max_tokens=num_left,
            sampling=submit.sampling,
            seed=self._seed(),
            min_tokens=max(0, num_before_end),
            allowed_ids=self._allowed(),
            banned_ids=banned,
            constraint=constraint,
            is_batch=self.is_batch,
            num_output_ids=len(self.output_ids),
        )

    def withdraw_constraint(self) -> bool:
        """The engine has refused the last request: leave the constraint to the worker from now on.
        Returns whether the request had it, and can be made again."""
        self._sends_constraint = False
        return self._has_sent_constraint and not self.output_ids

    def take(self, piece: EngineContent) -> tuple[Sequence[Output], bool]:
        """The outputs of a piece, and whether the request goes on. Raises `EngineFailed` and
        `InvalidRequest`."""
        if self._must_score:
            return [self._scored(piece.prompt_scores)], False
        outputs: list[StepOutput] = []
        scores = piece.scores or [None] * len(piece.token_ids)
        if len(scores) != len(piece.token_ids):
            raise EngineFailed(f"The engine scored {len(scores)} tokens of {len(piece.token_ids)}.")
        for token_id, score in zip(piece.token_ids, scores, strict=True):
            if not self._is_token(token_id):
                raise EngineFailed(
                    f"The engine returned token {token_id!r}, and the vocabulary has "
                    f"{self._vocab_size}."
                )
            if score is not None:
                self._check_score(score)
            if not self._is_allowed(token_id):
                self._violated()
                return outputs, False
            self._must_draw_again = False
            outputs.append(self._advance(token_id, score))
            # Some servers return more tokens than they were asked for, drawn with the same bans.
            if outputs[-1].finish_reason is not None or len(self.output_ids) == self._asked_until:
                return outputs, False
        if piece.end == "stop" and not self._must_draw_again:
            outputs += self._end_of_text()
        return outputs, piece.end is None

    def _scored(self, scores: Sequence[TokenScore]) -> PromptScored:
        if len(scores) != len(self.submit.prompt_ids) - 1:
            raise EngineFailed(
                f"The engine scored {len(scores)} tokens of a prompt of "
                f"{len(self.submit.prompt_ids)}."
            )
        for score in scores:
            self._check_score(score)
        self._must_score = False
        is_all = not self.submit.max_tokens
        return PromptScored(self.submit.sequence_id, [*scores], "length" if is_all else None)

    def _is_token(self, token_id: object) -> bool:
        return type(token_id) is int and 0 <= token_id < self._vocab_size

    def _check_score(self, score: TokenScore) -> None:
        numbers = (score.logprob, *score.top_logprobs)
        is_sound = all(type(number) in (float, int) for number in numbers)
        if not is_sound or not all(map(self._is_token, score.top_ids)):
            raise EngineFailed(f"The engine's logprobs make no sense: {score}")

    def _end_of_text(self) -> list[StepOutput]:
        """The engine has ended the text without a token that the worker knows as its end."""
        ends = sorted(self.submit.eos_ids)
        if self.submit.sampling.ignore_eos or not ends:
            raise EngineFailed("The engine ended the text, which it was told not to do.")
        if self._is_allowed(ends[0]):
            return [self._advance(ends[0], None)]
        self._violated()
        return []

    def _violated(self) -> None:
        if self._must_draw_again:
            raise EngineFailed("The engine drew a token that it was told not to draw.")
        self.num_violations += 1
        self._must_draw_again = True

    def _is_allowed(self, token_id: int) -> bool:
        constraint = self.submit.constraint
        mask = self.submit.allowed if constraint is None else constraint.mask()
        return mask is None or bool(mask[token_id // 8] >> token_id % 8 & 1)

    def _allowed(self) -> Sequence[int] | None:
        """The allowed tokens, if the next request must be limited to them."""
        constraint = self.submit.constraint
        if constraint is None:
            return None if self.submit.allowed is None else _ids_in(self.submit.allowed)
        return _ids_in(constraint.mask()) if self._must_draw_again else None

    def _advance(self, token_id: int, score: TokenScore | None) -> StepOutput:
        self.output_ids.append(token_id)
        return StepOutput(self.submit.sequence_id, token_id, self._finish(token_id), 0, score)

    def _finish(self, token_id: int) -> FinishReason | None:
        if token_id in self._end_ids:
            return "stop"
        constraint = self.submit.constraint
        if constraint is not None:
            constraint.advance(token_id)
            if constraint.is_complete:
                return "stop"
        return "length" if len(self.output_ids) >= self.submit.max_tokens else None

    def _seed(self) -> int:
        """The engine's seed: the same for the same choice and position. A continuation must not
        draw the numbers of the beginning again."""
        drawn = f"{self.submit.seed} {self.submit.sequence_id.choice} {len(self.output_ids)}"
        digest = hashlib.blake2b(drawn.encode(), digest_size=4).digest()
        return int.from_bytes(digest, "little") & _MAX_SEED


def _ids_in(mask: bytes) -> list[int]:
    return [
        8 * place + bit for place, byte in enumerate(mask) for bit in range(8) if byte >> bit & 1
    ]
