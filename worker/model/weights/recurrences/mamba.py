"""Selective state spaces of single channels behind a short convolution: Mamba 1."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kernels.native.packed import PackedWeight
from kernels.native.recurrences import PackedConvolution, PackedRecurrence, PackedSelectiveScan
from kernels.providers import Ops
from worker.model.spec import Mamba
from worker.model.weights.recurrences.interface import LayerTensors, Recurrent, decay_of
from worker.model.weights.weight import Linear


@dataclass(frozen=True, slots=True)
class MambaLayer(Recurrent):
    """A `Mamba` and its weights. Vectors are float32."""

    spec: Mamba
    inputs: Linear
    """Makes the inputs of the channels, then gates."""
    taps: Tensor
    """[num_taps, size], the oldest token's first."""
    bias: Tensor | None
    """[size]."""
    parts: Linear
    """[rank + 2 * state_dim, size]: makes the vector of the steps, then writes and reads."""
    norms: tuple[Tensor | None, Tensor | None, Tensor | None]
    """The weights of the norm of each part: ones if the norm has none, None without a norm."""
    steps: Linear
    """[size, rank]."""
    rates: Tensor
    """[size, state_dim], negative."""
    skips: Tensor
    """[size]."""
    output: Linear

    def mix(
        self, hidden: Tensor, states: Tensor, query_starts: Tensor, ops: Ops
    ) -> tuple[Tensor, Tensor]:
        """See `Recurrent.mix`."""
        spec = self.spec
        inputs, gates = self.inputs.product(hidden, ops).float().chunk(2, dim=1)
        kept, memory = torch.split(
            states, [spec.kept_size, spec.state_size - spec.kept_size], dim=1
        )
        kept = kept.reshape(-1, spec.num_taps - 1, spec.size)
        inputs, kept = ops.short_convolution(inputs, self.taps, self.bias, kept, query_starts)
        inputs = functional.silu(inputs)
        made = self.parts.product(inputs.to(hidden.dtype), ops).float()
        parts = torch.split(made, spec.part_sizes, dim=1)
        vector, writes, reads = (
            self._normalized(part, weight, ops)
            for part, weight in zip(parts, self.norms, strict=True)
        )
        results, memory = ops.selective_scan(
            inputs,
            functional.softplus(self.steps.product(vector.to(hidden.dtype), ops).float()),
            self.rates,
            writes,
            reads,
            memory.reshape(-1, spec.size, spec.state_dim),
            query_starts,
        )
        mixed = (results + self.skips * inputs) * functional.silu(gates)
        states = torch.cat((kept.flatten(1), memory.flatten(1)), dim=1)
        return self.output.product(mixed.to(hidden.dtype), ops), states

    def _normalized(self, part: Tensor, weight: Tensor | None, ops: Ops) -> Tensor:
        norm = self.spec.norm
        return part if norm is None or weight is None else ops.rms_norm(part, weight, norm.eps)

    def packed(self, pack: Callable[[Linear], PackedWeight]) -> PackedRecurrence:
        """See `Recurrent.packed`."""
        return PackedSelectiveScan(
            inputs=pack(self.inputs),
            output=pack(self.output),
            convolution=PackedConvolution(taps=self.taps, bias=self.bias),
            parts=pack(self.parts),
            steps=pack(self.steps),
            has_norms=self.spec.norm is not None,
            norms=self.norms,
            eps=0.0 if self.spec.norm is None else self.spec.norm.eps,
            rates=self.rates.t().contiguous(),
            skips=self.skips,
        )


def read_mamba(spec: Mamba, tensors: LayerTensors) -> MambaLayer:
    """Read the weights of a layer."""
    names, hidden, norm = tensors.names.state_space, tensors.hidden_size, spec.norm
    taps = tensors.floats(f"{names.convolution}.weight", (spec.size, 1, spec.num_taps))

    def norm_of(name: str, size: int) -> Tensor | None:
        if norm is None:
            return None
        if not norm.has_weight:
            return torch.ones(size, device=taps.device)
        return tensors.floats(f"{name}.weight", (size,))

    of_steps, of_writes, of_reads = names.part_norms
    return MambaLayer(
        spec=spec,
        inputs=tensors.linear([names.input], (2 * spec.size, hidden), has_bias=spec.has_bias),
        taps=taps[:, 0].t().contiguous(),
        bias=tensors.floats(f"{names.convolution}.bias", (spec.size,))
        if spec.has_convolution_bias
        else None,
        # The errors of packed numbers would add up in the states.
        parts=tensors.float_linear([names.parts], (sum(spec.part_sizes), spec.size)),
        norms=(
            norm_of(of_steps, spec.rank),
            norm_of(of_writes, spec.state_dim),
            norm_of(of_reads, spec.state_dim),
        ),
        steps=tensors.float_linear([names.steps], (spec.size, spec.rank), has_bias=True),
        rates=-decay_of(tensors, names.decay, (spec.size, spec.state_dim)),
        skips=tensors.floats(names.skips, (spec.size,)),
        output=tensors.linear([names.output], (hidden, spec.size), has_bias=spec.has_bias),
    )
