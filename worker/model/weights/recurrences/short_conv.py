"""Short convolutions between two gates, as in LFM2."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from kernels.native.packed import PackedWeight
from kernels.native.recurrences import PackedConvolution, PackedRecurrence, PackedShortConv
from kernels.providers import Ops
from worker.model.spec import ShortConv
from worker.model.weights.recurrences.interface import LayerTensors, Recurrent
from worker.model.weights.weight import Linear


@dataclass(frozen=True, slots=True)
class ShortConvLayer(Recurrent):
    """A `ShortConv`: the matrices around the convolution, and the factors of its taps."""

    spec: ShortConv
    inputs: Linear
    taps: Tensor
    """[num_taps, size] float32, the oldest token's first."""
    bias: Tensor | None
    """[size] float32."""
    output: Linear

    def mix(
        self, hidden: Tensor, states: Tensor, query_starts: Tensor, ops: Ops
    ) -> tuple[Tensor, Tensor]:
        """See `Recurrent.mix`."""
        first, second, third = self.inputs.product(hidden, ops).chunk(3, dim=-1)
        kept = states.view(-1, self.spec.num_taps - 1, self.spec.size)
        mixed, kept = ops.short_convolution(first * third, self.taps, self.bias, kept, query_starts)
        return self.output.product(second * mixed, ops), kept.flatten(1)

    def packed(self, pack: Callable[[Linear], PackedWeight]) -> PackedRecurrence:
        """See `Recurrent.packed`."""
        return PackedShortConv(
            inputs=pack(self.inputs),
            output=pack(self.output),
            convolution=PackedConvolution(taps=self.taps, bias=self.bias),
        )


def read_short_conv(spec: ShortConv, tensors: LayerTensors) -> ShortConvLayer:
    """Read the weights of a layer."""
    names, hidden = tensors.names, tensors.hidden_size
    taps = tensors.floats(f"{names.convolution}.weight", (spec.size, 1, spec.num_taps))
    return ShortConvLayer(
        spec=spec,
        inputs=tensors.linear(
            [names.convolution_input], (3 * spec.size, hidden), has_bias=spec.has_bias
        ),
        taps=taps[:, 0].t().contiguous(),
        bias=tensors.floats(f"{names.convolution}.bias", (spec.size,)) if spec.has_bias else None,
        output=tensors.linear(
            [names.convolution_output], (hidden, spec.size), has_bias=spec.has_bias
        ),
    )
