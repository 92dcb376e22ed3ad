"""Recurrences with packed weights, as parts of a step of the native library."""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from kernels.native.library import (
    ConvolutionView,
    DeltaView,
    KimiDeltaView,
    NormView,
    SelectiveScanView,
    StateSpaceView,
    pointer,
)
from kernels.native.packed import PackedWeight

MAX_TAPS = 8
"""`kMaxTaps` of src/convolution.hpp."""
MAX_KEY_DIM = 256
"""`kMaxKeyDim` of src/delta.hpp."""
MAX_STATE_DIM = 256
"""`kMaxStateDim` of src/states.hpp."""
_NO_NORM = 0
"""`kNoNorm` of src/elementwise.hpp."""
_RMS_NORM = 1
"""`kRmsNorm` of src/elementwise.hpp."""


class PackedRecurrence(Protocol):
    """A recurrence between two products."""

    @property
    def inputs(self) -> PackedWeight:
        """What the recurrence is given: a product with the hidden state."""
        ...

    @property
    def output(self) -> PackedWeight:
        """The product with the recurrence's results."""
        ...

    def views(self) -> Mapping[str, Any]:
        """The fields of `LayerView` that no other kind of layer has."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedConvolution:
    """A causal convolution of each channel over at most `MAX_TAPS` tokens."""

    taps: Tensor
    """[num_taps, size] float32, the oldest token's first."""
    bias: Tensor | None
    """[size] float32."""

    def view(self) -> ConvolutionView:
        return ConvolutionView(
            taps=pointer(self.taps),
            bias=pointer(self.bias),
            size=self.taps.shape[1],
            num_taps=self.taps.shape[0],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedShortConv:
    """See `worker.model.spec.ShortConv`."""

    inputs: PackedWeight
    output: PackedWeight
    convolution: PackedConvolution

    def views(self) -> Mapping[str, Any]:
        return {"convolution": ctypes.pointer(self.convolution.view())}


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedDeltaNet:
    """See `worker.model.spec.DeltaNet`. Keys are at most `MAX_KEY_DIM` long, and values are of a
    multiple of 16."""

    inputs: PackedWeight
    output: PackedWeight
    rates: PackedWeight
    convolution: PackedConvolution
    decay: Tensor
    """[num_heads] float32."""
    decay_bias: Tensor
    """[num_heads] float32."""
    norm: Tensor
    """[value_dim] float32."""
    eps: float
    num_key_heads: int
    key_dim: int
    greatest_strength: float

    def view(self) -> DeltaView:
        return DeltaView(
            rates=self.rates.view(),
            convolution=self.convolution.view(),
            decay=pointer(self.decay),
            decay_bias=pointer(self.decay_bias),
            norm=NormView(weight=pointer(self.norm), kind=_RMS_NORM, eps=self.eps),
            num_heads=len(self.decay),
            num_key_heads=self.num_key_heads,
            key_dim=self.key_dim,
            value_dim=len(self.norm),
            greatest_strength=self.greatest_strength,
        )

    def views(self) -> Mapping[str, Any]:
        return {"delta": ctypes.pointer(self.view())}


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedKimiDelta:
    """See `worker.model.spec.KimiDelta`. Heads are at most `MAX_KEY_DIM` long and of a multiple of
    16."""

    rule: PackedDeltaNet
    """The rates are the vector that tells how much fades, the vector of gates, and how much of a
    correction is made."""
    fading: PackedWeight
    gates: PackedWeight

    @property
    def inputs(self) -> PackedWeight:
        return self.rule.inputs

    @property
    def output(self) -> PackedWeight:
        return self.rule.output

    def views(self) -> Mapping[str, Any]:
        view = KimiDeltaView(
            delta=self.rule.view(), fading=self.fading.view(), gates=self.gates.view()
        )
        return {"kimi_delta": ctypes.pointer(view)}


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedStateSpace:
    """See `worker.model.spec.Mamba2`. All tensors are float32. Heads are of a multiple of 16, and
    what is kept of each element of a multiple of 4, at most `MAX_STATE_DIM`."""

    inputs: PackedWeight
    output: PackedWeight
    convolution: PackedConvolution
    factors: Tensor | None
    """[outputs of ``inputs``]."""
    step_bias: Tensor
    """[num_heads]."""
    rates: Tensor
    """[num_heads]."""
    skips: Tensor
    """[num_heads]."""
    norm: Tensor | None
    """[num_heads * head_dim]; None: there is no norm."""
    eps: float
    num_groups: int
    head_dim: int
    state_dim: int
    is_gated_last: bool
    least_step: float
    greatest_step: float

    def views(self) -> Mapping[str, Any]:
        view = StateSpaceView(
            convolution=self.convolution.view(),
            norm=NormView(
                weight=pointer(self.norm),
                kind=_NO_NORM if self.norm is None else _RMS_NORM,
                eps=self.eps,
            ),
            factors=pointer(self.factors),
            step_bias=pointer(self.step_bias),
            rates=pointer(self.rates),
            skips=pointer(self.skips),
            num_heads=len(self.skips),
            head_dim=self.head_dim,
            num_groups=self.num_groups,
            state_dim=self.state_dim,
            is_gated_last=self.is_gated_last,
            least_step=self.least_step,
            greatest_step=self.greatest_step,
        )
        return {"state_space": ctypes.pointer(view)}


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSelectiveScan:
    """See `worker.model.spec.Mamba`. All tensors are float32. The number of channels is a multiple
    of 16, and at most `MAX_STATE_DIM` numbers are kept of each."""

    inputs: PackedWeight
    output: PackedWeight
    convolution: PackedConvolution
    parts: PackedWeight
    steps: PackedWeight
    has_norms: bool
    norms: Sequence[Tensor | None]
    """The weights of the norms of the vector of steps, of writes and of reads."""
    eps: float
    rates: Tensor
    """[state_dim, size], negative."""
    skips: Tensor
    """[size]."""

    def views(self) -> Mapping[str, Any]:
        of_steps, of_writes, of_reads = (
            NormView(
                weight=pointer(weight),
                kind=_RMS_NORM if self.has_norms else _NO_NORM,
                eps=self.eps,
            )
            for weight in self.norms
        )
        view = SelectiveScanView(
            convolution=self.convolution.view(),
            parts=self.parts.view(),
            steps=self.steps.view(),
            norm_of_steps=of_steps,
            norm_of_writes=of_writes,
            norm_of_reads=of_reads,
            rates=pointer(self.rates),
            skips=pointer(self.skips),
            state_dim=self.rates.shape[0],
        )
        return {"selective_scan": ctypes.pointer(view)}
