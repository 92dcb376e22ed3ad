"""Linear attention by the gated delta rule, as in Qwen3-Next, Qwen 3.5 and OLMo Hybrid."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kernels.native.packed import PackedWeight
from kernels.native.recurrences import PackedConvolution, PackedDeltaNet, PackedRecurrence
from kernels.providers import Ops
from worker.model.spec import DeltaNet
from worker.model.weights.recurrences.interface import LayerTensors, Recurrent, decay_of
from worker.model.weights.weight import Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaRule(Recurrent):
    """The weights that every delta rule has. Vectors are float32."""

    inputs: Linear
    """Makes queries, keys and values; gates may follow."""
    rates: Linear
    """[any, hidden_size]: how much of a correction is made, and how much decays."""
    taps: Tensor
    """[num_taps, size of queries, keys and values], the oldest token's first."""
    decay: Tensor
    """[num_heads]: the factor of how much decays."""
    decay_bias: Tensor
    """[num_heads], or a number for each element of the keys."""
    norm: Tensor
    """[value_dim]."""
    output: Linear

    def packed_rule(
        self,
        pack: Callable[[Linear], PackedWeight],
        *,
        eps: float,
        num_key_heads: int,
        key_dim: int,
        greatest_strength: float = 1.0,
    ) -> PackedDeltaNet:
        """The weights for the native kernels."""
        return PackedDeltaNet(
            inputs=pack(self.inputs),
            output=pack(self.output),
            rates=pack(self.rates),
            convolution=PackedConvolution(taps=self.taps, bias=None),
            decay=self.decay,
            decay_bias=self.decay_bias,
            norm=self.norm,
            eps=eps,
            num_key_heads=num_key_heads,
            key_dim=key_dim,
            greatest_strength=greatest_strength,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetLayer(DeltaRule):
    """A `DeltaNet`. `rates` is [2 * num_heads, hidden_size], with the parts of corrections
    first."""

    spec: DeltaNet

    def mix(
        self, hidden: Tensor, states: Tensor, query_starts: Tensor, ops: Ops
    ) -> tuple[Tensor, Tensor]:
        """See `Recurrent.mix`."""
        spec, num_tokens = self.spec, len(hidden)
        sizes = [spec.mixed_size, spec.values_size]
        mixed, gates = torch.split(self.inputs.product(hidden, ops), sizes, dim=1)
        strengths, fading = self.rates.product(hidden, ops).float().chunk(2, dim=1)
        decays = torch.exp(-self.decay * functional.softplus(fading + self.decay_bias))
        num_kept = (spec.num_taps - 1) * spec.mixed_size
        kept = states[:, :num_kept].view(-1, spec.num_taps - 1, spec.mixed_size)
        matrices = states[:, num_kept:].view(-1, spec.num_heads, spec.key_dim, spec.value_dim)
        mixed, kept = ops.short_convolution(mixed, self.taps, None, kept, query_starts)
        sizes = [spec.keys_size, spec.keys_size, spec.values_size]
        query, key, value = torch.split(functional.silu(mixed), sizes, dim=1)
        found, matrices = ops.gated_delta_rule(
            query.view(num_tokens, -1, spec.key_dim),
            key.view(num_tokens, -1, spec.key_dim),
            value.view(num_tokens, -1, spec.value_dim),
            decays,
            torch.sigmoid(strengths) * spec.greatest_strength,
            matrices,
            query_starts,
        )
        found = ops.rms_norm(found, self.norm, spec.norm.eps)
        found = found.flatten(1) * functional.silu(gates.float())
        states = torch.cat((kept.flatten(1), matrices.flatten(1)), dim=1)
        return self.output.product(found.to(hidden.dtype), ops), states

    def packed(self, pack: Callable[[Linear], PackedWeight]) -> PackedRecurrence:
        """See `Recurrent.packed`."""
        return self.packed_rule(
            pack,
            eps=self.spec.norm.eps,
            num_key_heads=self.spec.num_key_heads,
            key_dim=self.spec.key_dim,
            greatest_strength=self.spec.greatest_strength,
        )


def read_delta_net(spec: DeltaNet, tensors: LayerTensors) -> DeltaNetLayer:
    """Read the weights of a layer."""
    names, hidden, heads = tensors.names.delta, tensors.hidden_size, (spec.num_heads,)
    taps = tensors.stacked_floats(
        [f"{name}.weight" for name in names.convolution], (spec.mixed_size, 1, spec.num_taps)
    )
    return DeltaNetLayer(
        spec=spec,
        inputs=tensors.linear(names.inputs, (spec.mixed_size + spec.values_size, hidden)),
        rates=tensors.float_linear(names.rates, (2 * spec.num_heads, hidden)),
        taps=taps[:, 0].t().contiguous(),
        decay=decay_of(tensors, names.decay, heads),
        decay_bias=tensors.floats(names.decay_bias, heads),
        norm=tensors.floats(f"{names.norm}.weight", (spec.value_dim,)),
        output=tensors.linear([names.output], (hidden, spec.values_size)),
    )
