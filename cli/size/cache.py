"""How many streams the cache of a worker holds, from the sizes of a model."""

from dataclasses import dataclass

from shared.errors import StartupError
from shared.host_memory import readable_size


@dataclass(frozen=True, kw_only=True)
class StreamCache:
    """What a stream takes of a worker's cache."""

    num_tokens: int
    """The tokens of a stream's prompt and answer together."""
    token_bytes: int
    """The stream's keys and values."""
    state_bytes: int
    """The recurrent states of a stream, whatever its length."""
    num_streams: int | None
    """The streams that fit; None if the size of the cache is unknown."""

    @property
    def stream_bytes(self) -> int:
        return self.token_bytes + self.state_bytes


def stream_cache(model: str, num_tokens: int, cache_bytes: float | None) -> StreamCache:
    """What a stream of ``num_tokens`` takes of a cache of ``cache_bytes``.

    Only the configuration of the model, which must be on this machine, and the names of its
    weights are read. Raises `StartupError`, also if not even one stream fits.
    """
    try:
        from worker.checkpoints import store
        from worker.model.loading import sequence_memory_of
    except ModuleNotFoundError as error:
        raise StartupError(f"--model: {error.name} is not installed: no worker runs here") from None
    if not store.is_here(model):
        raise StartupError(f"--model: {model} is not on this machine: run `warren pull {model}`")
    memory = sequence_memory_of(store.resolve(model), num_tokens)
    num_streams = None if cache_bytes is None else int(cache_bytes // memory.total)
    if num_streams == 0:
        raise StartupError(
            f"--cache-memory: a stream of {num_tokens:,} tokens takes "
            f"{readable_size(memory.total)} of the cache"
        )
    return StreamCache(
        num_tokens=num_tokens,
        token_bytes=memory.tokens,
        state_bytes=memory.states,
        num_streams=num_streams,
    )
