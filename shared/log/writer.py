"""The writer's side of the log protocol: gives each event its position."""

from collections.abc import Sequence

from shared.log.chain import TokenChain
from shared.messages import Continue, Failed, Finished, FinishReason, TokenDelta, TokenLogprobs


class LogWriter:
    """Writes the events of one attempt, each with its position in the log."""

    def __init__(self, attempt: int, num_choices: int) -> None:
        self.attempt = attempt
        self.chains = [TokenChain() for _ in range(num_choices)]

    @classmethod
    def resume(cls, command: Continue) -> "LogWriter":
        """Create the writer that continues from the reader's position."""
        writer = cls(command.attempt, len(command.choices))
        for chain, progress in zip(writer.chains, command.choices, strict=True):
            chain.extend(progress.token_ids)
            chain.is_finished = progress.is_finished
        return writer

    @property
    def is_ended(self) -> bool:
        return all(chain.is_finished for chain in self.chains)

    def delta(
        self,
        choice: int,
        token_ids: Sequence[int],
        text: str,
        *,
        num_chars: Sequence[int] = (),
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> TokenDelta:
        chain = self.chains[choice]
        event = TokenDelta(
            choice=choice,
            attempt=self.attempt,
            index=len(chain.token_ids),
            prefix_hash=chain.prefix_hash,
            token_ids=tuple(token_ids),
            text=text,
            num_chars=tuple(num_chars),
            logprobs=tuple(logprobs),
        )
        chain.extend(token_ids)
        return event

    def finish(
        self,
        choice: int,
        token_ids: Sequence[int],
        text: str,
        finish_reason: FinishReason,
        stop_reason: str | int | None = None,
        *,
        num_cached_tokens: int = 0,
        num_chars: Sequence[int] = (),
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> Finished:
        chain = self.chains[choice]
        event = Finished(
            choice=choice,
            attempt=self.attempt,
            index=len(chain.token_ids),
            prefix_hash=chain.prefix_hash,
            token_ids=tuple(token_ids),
            text=text,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            num_cached_tokens=num_cached_tokens,
            num_chars=tuple(num_chars),
            logprobs=tuple(logprobs),
        )
        chain.extend(token_ids)
        chain.is_finished = True
        return event

    def fail(self, code: str, message: str, param: str | None = None) -> Failed:
        """The failure of the whole request, at the position of its first unfinished choice."""
        choice, chain = next(
            (k, chain) for k, chain in enumerate(self.chains) if not chain.is_finished
        )
        return Failed(
            code=code,
            message=message,
            param=param,
            choice=choice,
            attempt=self.attempt,
            index=len(chain.token_ids),
            prefix_hash=chain.prefix_hash,
        )
