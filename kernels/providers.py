"""The operations of a model, and the choice of their provider.

Every provider is a subpackage with a function for each op, with the name and signature of its twin
in `kernels.reference`. The reference is the specification, and is used for ops that a provider
lacks.
"""

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from types import ModuleType
from typing import Any, Literal, Protocol, TypeAlias

from torch import Tensor

from kernels.attention_spec import AttentionSpec
from kernels.router import Router

Provider: TypeAlias = Literal["reference", "native", "triton"]
TILE_TOKENS: Mapping[Provider, int] = {"reference": 1, "native": 1, "triton": 128}
"""Attention reads tokens from a multiple of this number on, or of a divisor of it. Tokens before a
window have no weight, but must be of the same sequence: zero times NaN is NaN."""


class RmsNorm(Protocol):
    """See `kernels.reference.rms_norm`."""

    def __call__(self, hidden: Tensor, weight: Tensor, eps: float) -> Tensor: ...


class AddRmsNorm(Protocol):
    """See `kernels.reference.add_rms_norm`."""

    def __call__(
        self, hidden: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]: ...


class StoreKv(Protocol):
    """See `kernels.reference.store_kv`."""

    def __call__(
        self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
    ) -> None: ...


class RopeStoreKv(Protocol):
    """See `kernels.reference.rope_store_kv`."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        positions: Tensor,
        rope_table: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slots: Tensor,
    ) -> Tensor: ...


class PagedAttention(Protocol):
    """See `kernels.reference.paged_attention`."""

    def __call__(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_tables: Tensor,
        query_starts: Tensor,
        context_lens: Tensor,
        *,
        num_decodes: int,
        max_query_len: int,
        spec: AttentionSpec,
    ) -> Tensor: ...


class ShortConvolution(Protocol):
    """See `kernels.reference.short_convolution`."""

    def __call__(
        self,
        hidden: Tensor,
        taps: Tensor,
        bias: Tensor | None,
        states: Tensor,
        query_starts: Tensor,
    ) -> tuple[Tensor, Tensor]: ...


class StateSpace(Protocol):
    """See `kernels.reference.state_space`."""

    def __call__(
        self,
        hidden: Tensor,
        steps: Tensor,
        rates: Tensor,
        writes: Tensor,
        reads: Tensor,
        states: Tensor,
        query_starts: Tensor,
    ) -> tuple[Tensor, Tensor]: ...


class SelectiveScan(StateSpace, Protocol):
    """See `kernels.reference.selective_scan`."""


class GatedDeltaRule(Protocol):
    """See `kernels.reference.gated_delta_rule`."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decays: Tensor,
        strengths: Tensor,
        states: Tensor,
        query_starts: Tensor,
    ) -> tuple[Tensor, Tensor]: ...


class Activate(Protocol):
    """See `kernels.reference.activate`."""

    def __call__(
        self, hidden: Tensor, activation: str, *, is_gated: bool, constants: Sequence[float] = ()
    ) -> Tensor: ...


class ChooseExperts(Protocol):
    """See `kernels.reference.choose_experts`."""

    def __call__(
        self, logits: Tensor, router: Router, correction: Tensor | None = None
    ) -> tuple[Tensor, Tensor]: ...


class SiluMul(Protocol):
    """See `kernels.reference.silu_mul`."""

    def __call__(self, gate_up: Tensor) -> Tensor: ...


class Projection(Protocol):
    """See `kernels.reference.projection`."""

    def __call__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor: ...


class AwqLinear(Protocol):
    """See `kernels.reference.awq_linear`."""

    def __call__(
        self,
        hidden: Tensor,
        qweight: Tensor,
        scales: Tensor,
        zeros: Tensor,
        bias: Tensor | None = None,
        *,
        group_size: int,
    ) -> Tensor: ...


class Logits(Protocol):
    """See `kernels.reference.logits`."""

    def __call__(self, hidden: Tensor, weight: Tensor) -> Tensor: ...


class AdjustLogits(Protocol):
    """See `kernels.reference.adjust_logits`."""

    def __call__(
        self, logits: Tensor, rows: Tensor, token_ids: Tensor, repetitions: Tensor, biases: Tensor
    ) -> Tensor: ...


class MaskLogits(Protocol):
    """See `kernels.reference.mask_logits`."""

    def __call__(self, logits: Tensor, rows: Tensor, masks: Tensor) -> Tensor: ...


class MostLikely(Protocol):
    """See `kernels.reference.most_likely`."""

    def __call__(self, logits: Tensor) -> Tensor: ...


class RankLogits(Protocol):
    """See `kernels.reference.rank_logits`."""

    def __call__(self, logits: Tensor, depth: int) -> tuple[Tensor, Tensor, Tensor]: ...


class FilterFloors(Protocol):
    """See `kernels.reference.filter_floors`."""

    def __call__(
        self,
        logits: Tensor,
        temperatures: Tensor,
        top_ks: Tensor,
        top_ps: Tensor,
        min_ps: Tensor,
    ) -> Tensor: ...


class DrawRows(Protocol):
    """See `kernels.reference.draw_rows`."""

    def __call__(
        self, logits: Tensor, temperatures: Tensor, floors: Tensor, uniforms: Tensor
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Ops:
    """The operations of a provider."""

    provider: Provider
    rms_norm: RmsNorm
    add_rms_norm: AddRmsNorm
    store_kv: StoreKv
    rope_store_kv: RopeStoreKv
    paged_attention: PagedAttention
    short_convolution: ShortConvolution
    gated_delta_rule: GatedDeltaRule
    state_space: StateSpace
    selective_scan: SelectiveScan
    silu_mul: SiluMul
    activate: Activate
    choose_experts: ChooseExperts
    projection: Projection
    awq_linear: AwqLinear
    logits: Logits
    adjust_logits: AdjustLogits
    mask_logits: MaskLogits
    most_likely: MostLikely
    rank_logits: RankLogits
    filter_floors: FilterFloors
    draw_rows: DrawRows


def load_ops(provider: Provider = "reference", *, is_batch_invariant: bool = False) -> Ops:
    """Import a provider: op ``x`` is function ``x`` of module ``kernels.<provider>.x``.

    With ``is_batch_invariant`` a row's result is bit-identical whatever else is in the batch; ops
    that otherwise adapt to the batch for speed are instructed not to. The native ops never adapt.
    """
    names = [field.name for field in fields(Ops) if field.name != "provider"]
    ops = {name: getattr(_module(provider, name), name) for name in names}
    if is_batch_invariant:
        ops = {name: _invariant(op) for name, op in ops.items()}
    return Ops(provider, **ops)


def _invariant(op: Callable[..., Any]) -> Callable[..., Any]:
    has_choice = "is_batch_invariant" in inspect.signature(op).parameters
    return partial(op, is_batch_invariant=True) if has_choice else op


def _module(provider: Provider, name: str) -> ModuleType:
    own = f"{__package__}.{provider}.{name}"
    return importlib.import_module(
        own if importlib.util.find_spec(own) else f"{__package__}.reference.{name}"
    )
