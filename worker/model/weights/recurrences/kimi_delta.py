"""Linear attention by a gated delta rule with rates for each element, as in Kimi Linear."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kernels.native.packed import PackedWeight
from kernels.native.recurrences import PackedKimiDelta, PackedRecurrence
from kernels.providers import Ops
from worker.model.spec import KimiDelta
from worker.model.weights.recurrences.delta_net import DeltaRule
from worker.model.weights.recurrences.interface import LayerTensors, decay_of
from worker.model.weights.weight import Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiDeltaLayer(DeltaRule):
    """A `KimiDelta`. `rates` is [2 * rank + num_heads, hidden_size]: the vectors that tell how much
    fades and that gates are made from, then how much of a correction is made."""

    spec: KimiDelta
    fading: Linear
    """[size, rank]: how much fades."""
    gates: Linear
    """[size, rank]."""

    def mix(
        self, hidden: Tensor, states: Tensor, query_starts: Tensor, ops: Ops
    ) -> tuple[Tensor, Tensor]:
        """See `Recurrent.mix`."""
        spec = self.spec
        heads = (len(hidden), spec.num_heads, spec.head_dim)
        sizes = [spec.rank, spec.rank, spec.num_heads]
        vector, gates, strengths = torch.split(self.rates.product(hidden, ops), sizes, dim=1)
        fading = self.fading.product(vector.contiguous(), ops).float() + self.decay_bias
        decays = torch.exp(-self.decay.unsqueeze(1) * functional.softplus(fading).view(heads))
        kept, matrices = torch.split(
            states, [spec.kept_size, spec.state_size - spec.kept_size], dim=1
        )
        kept = kept.reshape(-1, spec.num_taps - 1, 3 * spec.size)
        mixed = self.inputs.product(hidden, ops)
        mixed, kept = ops.short_convolution(mixed, self.taps, None, kept, query_starts)
        query, key, value = functional.silu(mixed).chunk(3, dim=1)
        found, matrices = ops.gated_delta_rule(
            query.view(heads),
            key.view(heads),
            value.view(heads),
            decays,
            torch.sigmoid(strengths.float()),
            matrices.reshape(-1, spec.num_heads, spec.head_dim, spec.head_dim),
            query_starts,
        )
        found = ops.rms_norm(found, self.norm, spec.norm.eps).flatten(1)
        found = found * torch.sigmoid(self.gates.product(gates.contiguous(), ops).float())
        states = torch.cat((kept.flatten(1), matrices.flatten(1)), dim=1)
        return self.output.product(found.to(hidden.dtype), ops), states

    def packed(self, pack: Callable[[Linear], PackedWeight]) -> PackedRecurrence:
        """See `Recurrent.packed`."""
        rule = self.packed_rule(
            pack,
            eps=self.spec.norm.eps,
            num_key_heads=self.spec.num_heads,
            key_dim=self.spec.head_dim,
        )
        return PackedKimiDelta(rule=rule, fading=pack(self.fading), gates=pack(self.gates))


def read_kimi_delta(spec: KimiDelta, tensors: LayerTensors) -> KimiDeltaLayer:
    """Read the weights of a layer."""
    names, hidden = tensors.names.delta, tensors.hidden_size
    heads = (spec.num_heads,) if names.has_flat_decay else (1, 1, spec.num_heads, 1)
    taps = tensors.stacked_floats(
        [f"{name}.weight" for name in names.convolution], (3 * spec.size, 1, spec.num_taps)
    )
    return KimiDeltaLayer(
        spec=spec,
        inputs=tensors.linear(names.inputs, (3 * spec.size, hidden)),
        # The errors of packed numbers would add up in the states.
        rates=tensors.float_linear(names.rates, (2 * spec.rank + spec.num_heads, hidden)),
        fading=tensors.float_linear([names.fading], (spec.size, spec.rank)),
        gates=tensors.float_linear([names.gates], (spec.size, spec.rank)),
        taps=taps[:, 0].t().contiguous(),
        decay=decay_of(tensors, names.decay, heads).flatten(),
        decay_bias=tensors.floats(names.decay_bias, (spec.size,)),
        norm=tensors.floats(f"{names.norm}.weight", (spec.head_dim,)),
        output=tensors.linear([names.output], (hidden, spec.size)),
    )
