"""The protocol of a decoder: a packed step in, the logits of the sampled rows out."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from kernels.providers import Provider
from worker.model.cache_layout import CacheLayout, one_group
from worker.model.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    """A packed step: the tokens of all sequences concatenated, without padding.

    Sequences with a single token come first, then the chunks of prompts. All tensors are on the
    decoder's device.
    """

    token_ids: Tensor
    """[num_tokens] int64."""
    positions: Tensor
    """[num_tokens] int64: each token's position in its sequence, from 0."""
    slots: Tensor
    """[num_groups, num_tokens] int64: where keys and values are written in each group of layers,
    block * block_size + offset in the block. Only a row is contiguous."""
    query_starts: Tensor
    """[num_seqs + 1] int32: sequence s has the tokens query_starts[s] .. query_starts[s + 1]."""
    context_lens: Tensor
    """[num_seqs] int32: the length of each sequence including this step; 0 for sequences that only
    pad a batch."""
    block_tables: Tensor
    """[num_groups, num_seqs, max_num_blocks] int32; entries beyond a sequence's context are 0, and
    so are the entries of blocks that were released. The table of states has the blocks of the state
    that the step reads, which are 0 at the start of a sequence, then the blocks of the state that
    it writes."""
    sampled_rows: Tensor
    """[num_sampled] int64: the tokens whose logits are returned, in the order of the result."""
    num_decodes: int
    """The number of sequences with a single token; they all come first."""
    max_query_len: int
    """The maximum number of tokens of a sequence in this step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What a decoder is capable of, for its callers to choose by."""

    numerics: str
    """The name of the decoder's arithmetic in the numerics of a worker, which fleets compare while
    they are upgraded: a name must not change while the bits stay the same."""
    can_record: bool = False
    """Whether a step on a GPU never waits for the device, so that it can be recorded as a graph."""
    is_row_exact: bool = False
    """Whether a token's logits have the same bits whatever else is in its step, at little more cost
    than alone, and on every processor."""
    prediction_cost: float | None = None
    """The multiplications with which `Decoder.predict` predicts a token, as a share of those of a
    token in `Decoder.forward`; None if it cannot."""
    has_own_threads: bool = False
    """Whether the decoder computes on threads of its own, with which torch's would compete."""
    hidden_size: int | None = None
    """The size of the hidden states that `Decoder.without_head` returns; None if it cannot."""


class Decoder(Protocol):
    """A model's weights and their computation. Holds no state between steps."""

    @property
    def traits(self) -> Traits: ...

    @property
    def num_layers(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    def cache_layout(self, block_size: int) -> CacheLayout:
        """The groups that the layers form with blocks of so many tokens: by default a single
        group, which keeps all tokens.

        `forward` accepts a cache with this layout, and, without states, a cache with a single
        group.
        """
        return one_group(self.num_layers)

    @property
    def vocab_size(self) -> int:
        """The length of a row of logits."""
        ...

    @property
    def max_seq_len(self) -> int:
        """The model's maximum context length."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The data type of weights and activations."""
        ...

    @property
    def cache_dtype(self) -> torch.dtype:
        """The data type of keys and values: by default that of activations."""
        return self.dtype

    @property
    def device(self) -> torch.device: ...

    @property
    def provider(self) -> Provider:
        """The provider of the kernels that compute attention."""
        ...

    def without_head(self) -> "Decoder | None":
        """A decoder with the same weights that returns hidden states [num_sampled, hidden_size] in
        float32 instead of logits; None without a ``hidden_size`` among the traits."""
        return None

    def profile(self) -> dict[str, float]:
        """The seconds that each kind of operation has taken since the last call. Empty by default:
        the decoder does not measure them."""
        return {}

    def expect(self, kv_cache: KVCache) -> None:
        """Prepare for steps that all use this cache. Does nothing by default."""
        return

    def forward(self, inputs: ForwardInputs, kv_cache: KVCache) -> Tensor:
        """Write the step's keys and values and return logits [num_sampled, vocab_size].

        Called in inference mode; must not wait for the device. The result may be overwritten by
        the next call.
        """
        ...

    def prepare(self, inputs: ForwardInputs, kv_cache: KVCache) -> Callable[[], Tensor]:
        """Do the part of `forward` that reads no ``token_ids``, and return the other part.

        May be called while another thread computes the step before, which may draw some of the
        ``token_ids``. By default, all of `forward` is the other part.
        """
        return partial(self.forward, inputs, kv_cache)

    def predict(self, inputs: ForwardInputs, kv_cache: KVCache) -> Tensor:
        """Write what predictions keep of the tokens of the step that `forward` has just computed,
        and return logits [num_sampled, vocab_size] for the tokens behind the next tokens. What
        steps without this call leave out makes later predictions worse.

        ``inputs`` are those of the step, except that ``token_ids`` are the tokens that follow, and
        ``sampled_rows`` are the tokens after whose next tokens a token is predicted. Only with a
        ``prediction_cost`` among the traits; other decoders raise `ValueError`. Called in inference
        mode; the result may be overwritten by the next call.
        """
        raise ValueError("the model predicts no tokens")
