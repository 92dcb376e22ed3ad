"""Checks requests for embeddings against the model, and measures what they take."""

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from shared.errors import ContextLengthExceeded, InvalidRequest
from shared.messages import Prompt
from worker.decode.served_model import ServedModel

if TYPE_CHECKING:
    from worker.model.embedder import Embedder, Vectors

MAX_TEXT_BYTES = 1 << 19
"""A byte may be a token, and two million tokens take ten seconds and fit in no message."""


class ComputeTime:
    """The time of the forward passes of a job, in seconds."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def of(self, steps: "Iterator[Vectors]") -> "Iterator[Vectors]":
        """The same steps, whose time is measured where they run."""
        while True:
            began = time.monotonic()
            try:
                vectors = next(steps, None)
            finally:
                self.seconds += time.monotonic() - began
            if vectors is None:
                return
            yield vectors


def embedder_of(model: ServedModel, num_dimensions: int | None) -> "Embedder":
    """The model's embedder. Raises `InvalidRequest` if it does not have so many dimensions."""
    embedder = model.embedder
    if embedder is None:
        raise InvalidRequest(f"The model {model.name} has no embeddings.", param="model")
    if (num_dimensions or 1) > embedder.num_dimensions:
        raise InvalidRequest(
            f"{num_dimensions} dimensions wanted, the model has {embedder.num_dimensions}.",
            param="dimensions",
        )
    return embedder


def embedding_prompt(prompt: Prompt, model: ServedModel) -> list[int]:
    """The token ids of an input. Raises `InvalidRequest` and `ContextLengthExceeded`."""
    token_ids = model.tokenizer.encode(prompt, name="input", max_bytes=MAX_TEXT_BYTES)
    if len(token_ids) > model.max_seq_len:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {model.max_seq_len} tokens, the input has "
            f"{len(token_ids)}.",
            param="input",
        )
    return token_ids
