"""The operations of a model, and the choice of their provider.

Every provider is a subpackage with a function for each op, with the name and signature of its twin
in `kernels.reference`. The reference is the specification, and is used for ops that a provider
lacks.
"""

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, TypeAlias

from kernels.reference.activate import activate
from kernels.reference.add_rms_norm import add_rms_norm
from kernels.reference.adjust_logits import adjust_logits
from kernels.reference.awq_linear import awq_linear
from kernels.reference.choose_experts import choose_experts
from kernels.reference.draw_rows import draw_rows
from kernels.reference.filter_floors import filter_floors
from kernels.reference.gated_delta_rule import gated_delta_rule
from kernels.reference.group_rows import group_rows
from kernels.reference.grouped_plane_linear import grouped_plane_linear
from kernels.reference.grouped_projection import grouped_projection
from kernels.reference.logits import logits
from kernels.reference.mask_logits import mask_logits
from kernels.reference.most_likely import most_likely
from kernels.reference.paged_attention import paged_attention
from kernels.reference.plane_linear import plane_linear
from kernels.reference.projection import projection
from kernels.reference.rank_logits import rank_logits
from kernels.reference.read_states import read_states
from kernels.reference.rms_norm import rms_norm
from kernels.reference.rope_store_kv import rope_store_kv
from kernels.reference.scaled_linear import scaled_linear
from kernels.reference.selective_scan import selective_scan
from kernels.reference.short_convolution import short_convolution
from kernels.reference.silu_mul import silu_mul
from kernels.reference.state_space import state_space
from kernels.reference.store_kv import store_kv
from kernels.reference.sum_experts import sum_experts
from kernels.reference.write_states import write_states

Provider: TypeAlias = Literal["reference", "native", "triton"]
TILE_TOKENS: Mapping[Provider, int] = {"reference": 1, "native": 1, "triton": 128}
"""Attention reads tokens from a multiple of this number on, or of a divisor of it. Tokens before a
window have no weight, but must be of the same sequence: zero times NaN is NaN."""


class Ops:
    """The operations of a provider, with the signatures of the reference's."""

    rms_norm = staticmethod(rms_norm)
    add_rms_norm = staticmethod(add_rms_norm)
    store_kv = staticmethod(store_kv)
    rope_store_kv = staticmethod(rope_store_kv)
    paged_attention = staticmethod(paged_attention)
    read_states = staticmethod(read_states)
    write_states = staticmethod(write_states)
    short_convolution = staticmethod(short_convolution)
    gated_delta_rule = staticmethod(gated_delta_rule)
    state_space = staticmethod(state_space)
    selective_scan = staticmethod(selective_scan)
    silu_mul = staticmethod(silu_mul)
    activate = staticmethod(activate)
    choose_experts = staticmethod(choose_experts)
    group_rows = staticmethod(group_rows)
    grouped_projection = staticmethod(grouped_projection)
    grouped_plane_linear = staticmethod(grouped_plane_linear)
    sum_experts = staticmethod(sum_experts)
    projection = staticmethod(projection)
    awq_linear = staticmethod(awq_linear)
    scaled_linear = staticmethod(scaled_linear)
    plane_linear = staticmethod(plane_linear)
    logits = staticmethod(logits)
    adjust_logits = staticmethod(adjust_logits)
    mask_logits = staticmethod(mask_logits)
    most_likely = staticmethod(most_likely)
    rank_logits = staticmethod(rank_logits)
    filter_floors = staticmethod(filter_floors)
    draw_rows = staticmethod(draw_rows)

    def __init__(self, provider: Provider, **own: Callable[..., Any]) -> None:
        """``own`` stand in for operations of the reference. Raises `TypeError` for other names."""
        if unknown := own.keys() - set(OPERATIONS):
            raise TypeError(f"no such operation: {', '.join(sorted(unknown))}")
        self.provider: Provider = provider
        self._own = own
        vars(self).update(own)

    def replace(self, **own: Callable[..., Any]) -> "Ops":
        """The same operations, except for ``own``."""
        return Ops(self.provider, **{**self._own, **own})


OPERATIONS = tuple(name for name, op in vars(Ops).items() if isinstance(op, staticmethod))


def load_ops(provider: Provider = "reference", *, is_batch_invariant: bool = False) -> Ops:
    """Import a provider: op ``x`` is function ``x`` of module ``kernels.<provider>.x``.

    With ``is_batch_invariant`` a row's result is bit-identical whatever else is in the batch; ops
    that otherwise adapt to the batch for speed are instructed not to. The native ops never adapt.
    """
    modules = {name: f"{__package__}.{provider}.{name}" for name in OPERATIONS}
    own = {
        name: getattr(importlib.import_module(module), name)
        for name, module in modules.items()
        if importlib.util.find_spec(module)
    }
    if is_batch_invariant:
        own = {name: _invariant(op) for name, op in own.items()}
    return Ops(provider, **own)


def _invariant(op: Callable[..., Any]) -> Callable[..., Any]:
    has_choice = "is_batch_invariant" in inspect.signature(op).parameters
    return partial(op, is_batch_invariant=True) if has_choice else op
