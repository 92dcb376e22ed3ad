"""The CPU variant of `worker.model.decoders.native`: a whole step is one call of the C++
library."""

import logging

import torch
from torch import Tensor

from kernels.native.decoder import PackedDecoder, PackedLayer, PackedModel
from kernels.native.huge_pages import CommittedAhead
from kernels.native.library import Library, library
from kernels.native.packed import PackedWeight, pack
from kernels.providers import Provider
from worker.model.config import DecoderConfig
from worker.model.decoders.native import LlamaFamily
from worker.model.forward import ForwardInputs, Traits
from worker.model.kv_cache import KVCache
from worker.model.provision import native_obstacle
from worker.model.weights.layers import LayerWeights, Linear, WeightReader
from worker.model.weights.weight import Weight

logger = logging.getLogger(__name__)


class FusedDecoder(LlamaFamily):
    """A `Decoder` of the Llama family.

    Activations are float32 throughout. A token's logits are bit-identical whatever else is in the
    step and however its prompt was chunked.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: WeightReader,
        max_seq_len: int,
        *,
        dtype: torch.dtype,
        num_threads: int,
    ) -> None:
        """Pack the weights as they are read, so that at most one layer is in memory twice.

        ``dtype`` is the cache's: float32 or bfloat16. Raises `StartupError` as `WeightReader` does.
        """
        super().__init__(config, max_seq_len)
        self._dtype = dtype
        packing = _Packing(library(), num_threads)
        model = packing.model(config, weights, self._rope_table)
        self._decoder = PackedDecoder(library(), model, num_threads)
        self._committed: CommittedAhead | None = None

    @property
    def traits(self) -> Traits:
        return Traits(numerics="fused", is_row_exact=True, has_own_threads=True)

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def provider(self) -> Provider:
        return "native"

    def expect(self, kv_cache: KVCache) -> None:
        """Commit the memory of this cache in the background."""
        self._committed = CommittedAhead(library(), kv_cache.keys, kv_cache.values)
        self._committed.use(0)

    def profile(self) -> dict[str, float]:
        """See `PackedDecoder.profile`."""
        return self._decoder.profile()

    def forward(self, inputs: ForwardInputs, kv_cache: KVCache) -> Tensor:
        """See `Decoder.forward`."""
        if self._committed is not None:
            self._committed.use((int(inputs.slots.max()) + 1) * kv_cache.slot_bytes)
        return self._decoder.forward(
            inputs.token_ids,
            inputs.positions,
            inputs.slots,
            inputs.sampled_rows,
            kv_cache.keys,
            kv_cache.values,
            inputs.block_tables,
            inputs.query_starts,
            inputs.context_lens,
        )


def why_not(config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> str | None:
    """The reason why `FusedDecoder` does not support this model; None if it does."""
    if config.hidden_size % 2 or config.intermediate_size % 2:
        return "the native kernels need even sizes"
    return native_obstacle(config.head_dim, dtype, device)


class _Packing:
    """Packs weights without keeping the originals."""

    def __init__(self, native: Library, num_threads: int) -> None:
        self._library = native
        self._num_threads = num_threads

    def model(self, config: DecoderConfig, weights: WeightReader, table: Tensor) -> PackedModel:
        embedding = self._pack(weights.embedding())
        lm_head = embedding if weights.is_tied else self._pack(weights.lm_head())
        layers = [
            self._layer(layer, window)
            for layer, window in zip(weights.layers(), config.sliding_windows, strict=True)
        ]
        norm = weights.norm()
        weights.check_complete()
        return PackedModel(
            layers=layers,
            embedding=embedding,
            norm=norm.float(),
            lm_head=lm_head,
            rope_table=table,
            num_heads=config.num_heads,
            eps=config.rms_norm_eps,
            scale=config.head_dim**-0.5,
        )

    def _layer(self, layer: LayerWeights, window: int | None) -> PackedLayer:
        return PackedLayer(
            input_norm=layer.input_norm.float(),
            qkv=self._linear(layer.qkv),
            query_norm=None if layer.query_norm is None else layer.query_norm.float(),
            key_norm=None if layer.key_norm is None else layer.key_norm.float(),
            attention_output=self._linear(layer.attention_output),
            mlp_norm=layer.mlp_norm.float(),
            gate_up=self._linear(layer.gate_up),
            down=self._linear(layer.down),
            sliding_window=window,
        )

    def _linear(self, linear: Linear) -> PackedWeight:
        return self._pack(linear.weight, linear.bias)

    def _pack(self, weight: Weight, bias: Tensor | None = None) -> PackedWeight:
        return pack(self._library, weight.native_rows(), bias, num_threads=self._num_threads)
