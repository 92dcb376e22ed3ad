"""Computes embeddings of texts from the last hidden states of their tokens."""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from itertools import chain
from pathlib import Path
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from shared.errors import NotFinite, OutOfMemory, StartupError
from shared.messages import SamplingParams
from shared.model_files import read_json
from worker.engine.interface import ScheduledBatch, ScheduledSequence, SequenceId
from worker.model.forward import Decoder
from worker.model.inputs import build_inputs
from worker.model.kv_cache import KVCache
from worker.model.loading import device_named
from worker.model.runner import TorchRunner
from worker.model.start import whole_cache

logger = logging.getLogger(__name__)

Pooling: TypeAlias = Literal["mean", "last"]
Vectors: TypeAlias = list[tuple[float, ...]]

_BLOCK_SIZE = 16
_POOLINGS: dict[str, Pooling] = {
    "mean": "mean",
    "mean_tokens": "mean",
    "lasttoken": "last",
}
_MODULES = ("Transformer", "Pooling", "Normalize")


def read_pooling(directory: Path) -> Pooling | None:
    """The pooling of a directory in the format of sentence-transformers; None for any other
    directory.

    Raises `StartupError` for an unsupported pooling, because the vectors would be wrong.
    """
    modules = read_json(directory / "modules.json")
    if modules is None:
        return None
    names = {module["type"].rsplit(".", 1)[-1]: module["path"] for module in modules}
    if not set(names) <= set(_MODULES) or "Pooling" not in names:
        raise StartupError(f"embeddings by {', '.join(names)} are not supported")
    # A name in an untrusted file must not lead out of the directory.
    folder = Path(names["Pooling"]).name
    config = read_json(directory / folder / "config.json")
    if config is None:
        raise StartupError(f"the model has no {folder}/config.json, which says how to pool")
    modes = [name.removeprefix("pooling_mode_") for name, is_on in config.items() if is_on is True]
    modes = [config["pooling_mode"]] if "pooling_mode" in config else modes
    modes = [mode for mode in modes if mode != "include_prompt"]
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        raise StartupError(
            f"embeddings pooled by {', '.join(modes) or 'no mode'} are not supported"
        )
    return _POOLINGS[modes[0]]


def kernels_for(directory: Path, kernels: str, device: str) -> str:
    """The kernels to use on the device of the setting: the native CPU kernels do not provide hidden
    states. Raises `StartupError` if torch does not have it."""
    is_free = kernels == "auto" and device_named(device).type == "cpu"
    return "reference" if is_free and (directory / "modules.json").exists() else kernels


def start_embedder(
    directory: Path, runner: TorchRunner, *, max_num_batched_tokens: int
) -> "Embedder | None":
    """The embedder of an embedding model; None for any other model.

    Logs the reason if an embedding model has no embedder.
    """
    try:
        pooling = read_pooling(directory)
    except StartupError as error:
        logger.warning("embeddings unavailable", extra={"reason": error.message})
        return None
    if pooling is None:
        return None
    decoder, hidden_size = runner.decoder.without_head(), runner.decoder.traits.hidden_size
    if decoder is None or hidden_size is None:
        reason = "embeddings require a native model family and kernels other than native"
        logger.warning("embeddings unavailable", extra={"reason": reason})
        return None
    return Embedder(
        decoder,
        pooling,
        hidden_size,
        runner.submit,
        max_num_batched_tokens=max_num_batched_tokens,
    )


class Embedder:
    """Embeds prompts pass by pass, so that generation steps can run in between."""

    def __init__(
        self,
        decoder: Decoder,
        pooling: Pooling,
        num_dimensions: int,
        submit: "Callable[[Callable[[], Vectors | None]], Future[Vectors | None]]",
        *,
        max_num_batched_tokens: int,
    ) -> None:
        """``decoder`` returns hidden states; ``submit`` runs work on the compute thread."""
        self.num_dimensions = num_dimensions
        self._decoder = decoder
        self._pooling = pooling
        self._submit = submit
        self._max_num_tokens = max_num_batched_tokens

    def submit(self, steps: Iterator[Vectors]) -> "Future[Vectors | None]":
        """Compute the next step of `embed` on the compute thread; None if there are no more."""
        return self._submit(lambda: next(steps, None))

    def embed(
        self, prompts: Sequence[Sequence[int]], num_dimensions: int | None = None
    ) -> Iterator[Vectors]:
        """The prompts' vectors, normalized and in order; each step yields the vectors that it
        completes. Raises `NotFinite`, and `OutOfMemory` if there is no room for the keys and
        values."""
        for group in _groups(prompts, self._max_num_tokens):
            yield from self._embed_group(group, num_dimensions)

    def _embed_group(
        self, prompts: list[Sequence[int]], num_dimensions: int | None
    ) -> Iterator[Vectors]:
        """Embed several prompts in one pass, or one prompt in several passes."""
        cache, tables = self._scratch(prompts)
        sums = torch.zeros(len(prompts), self.num_dimensions, device=self._decoder.device)
        longest = max(map(len, prompts))
        for start in range(0, longest, self._max_num_tokens):
            end = start + self._max_num_tokens
            shares = [
                _share(prompt, table, start, end, is_mean=self._pooling == "mean")
                for prompt, table in zip(prompts, tables, strict=True)
            ]
            sums += self._pooled(shares, cache)
            if end < longest:
                yield []
        vectors = functional.normalize(sums[:, :num_dimensions], dim=-1).tolist()
        if not all(map(math.isfinite, chain.from_iterable(vectors))):
            raise NotFinite("The model computed NaN or infinite numbers.")
        yield [tuple(vector) for vector in vectors]

    @torch.inference_mode()
    def _pooled(self, shares: list[ScheduledSequence], cache: KVCache) -> Tensor:
        """The sum of the pooled hidden states of each prompt: [num_prompts, num_dimensions].

        The normalized sum equals the normalized mean.
        """
        inputs = build_inputs(ScheduledBatch(shares), _BLOCK_SIZE, self._decoder.device).forward
        hidden = self._decoder.forward(inputs, cache)
        counts = [len(share.scored_ids) + share.is_sampled for share in shares]
        return torch.stack([part.sum(dim=0) for part in torch.split(hidden, counts)])

    def _scratch(self, prompts: list[Sequence[int]]) -> tuple[KVCache, list[range]]:
        tables: list[range] = []
        num_blocks = 0
        for prompt in prompts:
            end = num_blocks + -(-len(prompt) // _BLOCK_SIZE)
            tables.append(range(num_blocks, end))
            num_blocks = end
        try:
            return whole_cache(self._decoder, _BLOCK_SIZE, num_blocks), tables
        except StartupError as error:
            raise OutOfMemory("The worker does not have enough memory for this request.") from error


def _groups(prompts: Sequence[Sequence[int]], max_num_tokens: int) -> Iterator[list[Sequence[int]]]:
    """Group adjacent prompts that fit into one pass; a longer prompt is alone."""
    group: list[Sequence[int]] = []
    for prompt in prompts:
        if group and sum(map(len, group)) + len(prompt) > max_num_tokens:
            yield group
            group = []
        group.append(prompt)
    if group:
        yield group


def _share(
    prompt: Sequence[int], table: range, start: int, end: int, *, is_mean: bool
) -> ScheduledSequence:
    """The tokens ``start`` .. ``end`` - 1, with all their states sampled, or only the last
    state."""
    token_ids = prompt[start:end]
    return ScheduledSequence(
        sequence_id=SequenceId("embedding", 0),
        start=start,
        token_ids=token_ids,
        block_tables=[table],
        is_sampled=not is_mean and end >= len(prompt),
        sampling=SamplingParams(temperature=0.0),
        seed=0,
        position=0,
        scored_start=start,
        scored_ids=token_ids if is_mean else (),
    )
