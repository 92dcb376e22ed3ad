"""State spaces behind a short convolution: Mamba 2."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kernels.native.packed import PackedWeight
from kernels.native.recurrences import PackedConvolution, PackedRecurrence, PackedStateSpace
from kernels.providers import Ops
from worker.model.spec import Mamba2
from worker.model.weights.recurrences.interface import LayerTensors, Recurrent, decay_of
from worker.model.weights.weight import Linear


@dataclass(frozen=True, slots=True)
class Mamba2Layer(Recurrent):
    """A `Mamba2` and its weights. Vectors are float32."""

    spec: Mamba2
    inputs: Linear
    factors: Tensor | None
    """[made_size]: multiply what ``inputs`` makes."""
    taps: Tensor
    """[num_taps, convolved_size], the oldest token's first."""
    bias: Tensor | None
    """[convolved_size]."""
    step_bias: Tensor
    """[num_heads]."""
    rates: Tensor
    """[num_heads], negative."""
    skips: Tensor
    """[num_heads]."""
    norm: Tensor | None
    """[size]."""
    ones: Tensor | None
    """[size of a group]: the norm's operation has the same weights for all groups."""
    output: Linear

    def mix(
        self, hidden: Tensor, states: Tensor, query_starts: Tensor, ops: Ops
    ) -> tuple[Tensor, Tensor]:
        """See `Recurrent.mix`."""
        spec = self.spec
        made = self.inputs.product(hidden, ops).float()
        if self.factors is not None:
            made = made * self.factors
        gates, convolved, steps = torch.split(
            made, [spec.size, spec.convolved_size, spec.num_heads], dim=1
        )
        kept, memory = torch.split(
            states, [spec.kept_size, spec.state_size - spec.kept_size], dim=1
        )
        kept = kept.reshape(-1, spec.num_taps - 1, spec.convolved_size)
        convolved, kept = ops.short_convolution(convolved, self.taps, self.bias, kept, query_starts)
        of_groups = spec.num_groups * spec.state_dim
        inputs, writes, reads = torch.split(
            functional.silu(convolved), [spec.size, of_groups, of_groups], dim=1
        )
        heads = inputs.reshape(-1, spec.num_heads, spec.head_dim)
        steps = functional.softplus(steps + self.step_bias)
        results, memory = ops.state_space(
            heads,
            steps.clamp(spec.least_step, spec.greatest_step),
            self.rates,
            writes.reshape(-1, spec.num_groups, spec.state_dim),
            reads.reshape(-1, spec.num_groups, spec.state_dim),
            memory.reshape(-1, spec.num_heads, spec.head_dim, spec.state_dim),
            query_starts,
        )
        results = (results + self.skips.unsqueeze(1) * heads).flatten(1)
        mixed = self._gated(results, functional.silu(gates), ops).to(hidden.dtype)
        states = torch.cat((kept.flatten(1), memory.flatten(1)), dim=1)
        return self.output.product(mixed, ops), states

    def _gated(self, results: Tensor, gates: Tensor, ops: Ops) -> Tensor:
        norm = self.spec.norm
        if norm is None or self.norm is None or self.ones is None:
            return results * gates
        if not self.spec.is_gated_last:
            results = results * gates
        groups = results.view(len(results), self.spec.num_groups, -1)
        results = ops.rms_norm(groups, self.ones, norm.eps).flatten(1) * self.norm
        return results * gates if self.spec.is_gated_last else results

    def packed(self, pack: Callable[[Linear], PackedWeight]) -> PackedRecurrence:
        """See `Recurrent.packed`."""
        spec = self.spec
        return PackedStateSpace(
            inputs=pack(self.inputs),
            output=pack(self.output),
            convolution=PackedConvolution(taps=self.taps, bias=self.bias),
            factors=self.factors,
            step_bias=self.step_bias,
            rates=self.rates,
            skips=self.skips,
            norm=self.norm,
            eps=0.0 if spec.norm is None else spec.norm.eps,
            num_groups=spec.num_groups,
            head_dim=spec.head_dim,
            state_dim=spec.state_dim,
            is_gated_last=spec.is_gated_last,
            least_step=spec.least_step,
            greatest_step=spec.greatest_step,
        )


def read_mamba2(spec: Mamba2, tensors: LayerTensors) -> Mamba2Layer:
    """Read the weights of a layer."""
    names, hidden = tensors.names.state_space, tensors.hidden_size
    heads, convolved = (spec.num_heads,), spec.convolved_size
    factors = None
    taps = tensors.floats(f"{names.convolution}.weight", (convolved, 1, spec.num_taps))
    norm = None if spec.norm is None else tensors.floats(f"{names.norm}.weight", (spec.size,))
    if spec.factors is not None:
        of_outputs = [
            torch.full((size,), factor)
            for size, factor in zip(spec.made_sizes, spec.factors, strict=True)
        ]
        factors = torch.cat(of_outputs).to(taps.device)
    return Mamba2Layer(
        spec=spec,
        inputs=tensors.linear(
            [names.input], (sum(spec.made_sizes), hidden), has_bias=spec.has_bias
        ),
        factors=factors,
        taps=taps[:, 0].t().contiguous(),
        bias=tensors.floats(f"{names.convolution}.bias", (convolved,))
        if spec.has_convolution_bias
        else None,
        step_bias=tensors.floats(names.step_bias, heads),
        rates=-decay_of(tensors, names.decay, heads),
        skips=tensors.floats(names.skips, heads),
        norm=norm,
        ones=None if norm is None else torch.ones_like(norm[: spec.size // spec.num_groups]),
        output=tensors.linear([names.output], (hidden, spec.size), has_bias=spec.has_output_bias),
    )
