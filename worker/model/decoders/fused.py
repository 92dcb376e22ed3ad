"""The CPU variant of `worker.model.decoders.stack`: a whole step is one call of the C++
library."""

import logging

import torch
from torch import Tensor

from kernels.native.decoder import (
    PackedDecoder,
    PackedExperts,
    PackedLayer,
    PackedMlp,
    PackedModel,
    PackedNorm,
)
from kernels.native.huge_pages import CommittedAhead
from kernels.native.library import Library, library
from kernels.native.packed import PackedWeight, pack
from kernels.providers import Provider
from worker.model.cache_layout import CacheLayout
from worker.model.decoders.positions import PositionTables
from worker.model.decoders.stack import SpecDecoder, attention_spec
from worker.model.forward import ForwardInputs, Traits
from worker.model.kv_cache import KVCache
from worker.model.provision import native_obstacle
from worker.model.spec import Experts, Layer, Mlp, ModelSpec, Norm
from worker.model.weights.layers import (
    ExpertWeights,
    LayerWeights,
    Linear,
    MlpWeights,
    NormWeights,
    WeightReader,
)
from worker.model.weights.weight import Weight

logger = logging.getLogger(__name__)


class FusedDecoder(SpecDecoder):
    """A `Decoder` of any spec whose operations the library has.

    Activations are float32 throughout. A token's logits are bit-identical whatever else is in the
    step and however its prompt was chunked.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: WeightReader,
        max_seq_len: int,
        *,
        dtype: torch.dtype,
        num_threads: int,
    ) -> None:
        """Pack the weights as they are read, so that at most one layer is in memory twice.

        ``dtype`` is the cache's: float32 or bfloat16. Raises `StartupError` as `WeightReader` does.
        """
        super().__init__(spec, max_seq_len)
        self._dtype = dtype
        tables = PositionTables(max_seq_len, self.device)
        model = _Packing(library(), num_threads, tables, dtype).model(spec, weights)
        self._decoder = PackedDecoder(library(), model, num_threads)
        self._committed: CommittedAhead | None = None
        self._layout: CacheLayout | None = None
        self._places = torch.empty(0)

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
            key_blocks = kv_cache.layout.key_blocks
            ends = [
                int(slots.max()) // n for slots, n in zip(inputs.slots, key_blocks, strict=True)
            ]
            self._committed.use((max(ends) + 1) * kv_cache.slot_bytes)
        if kv_cache.layout is not self._layout:
            self._layout = kv_cache.layout
            self._places = torch.tensor(self._layout.places, dtype=torch.int32)
        return self._decoder.forward(
            inputs.token_ids,
            inputs.positions,
            inputs.slots,
            inputs.sampled_rows,
            kv_cache.keys,
            kv_cache.values,
            self._places,
            inputs.block_tables,
            inputs.query_starts,
            inputs.context_lens,
        )


def why_not(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> str | None:
    """The reason why `FusedDecoder` does not support this model; None if it does."""
    sizes = {spec.hidden_size}
    for layer in spec.layers:
        part = layer.feed_forward
        mlps = [part] if isinstance(part, Mlp) else [part.expert, part.shared]
        sizes |= {mlp.size for mlp in mlps if mlp is not None}
    if any(size % 2 for size in sizes):
        return "the native kernels need even sizes"
    for head_dim in sorted({layer.attention.head_dim for layer in spec.layers}):
        if (obstacle := native_obstacle(head_dim, dtype, device)) is not None:
            return obstacle
    return None


class _Packing:
    """Packs weights without keeping the originals."""

    def __init__(
        self, native: Library, num_threads: int, tables: PositionTables, dtype: torch.dtype
    ) -> None:
        self._library = native
        self._num_threads = num_threads
        self._tables = tables
        self._dtype = dtype

    def model(self, spec: ModelSpec, weights: WeightReader) -> PackedModel:
        embedding = self._pack(weights.embedding())
        lm_head = embedding if weights.is_tied else self._pack(weights.lm_head())
        layers = [
            self._layer(layer, part)
            for layer, part in zip(spec.layers, weights.layers(), strict=True)
        ]
        norm = _norm(spec.final_norm, weights.norm())
        assert norm is not None
        weights.check_complete()
        return PackedModel(
            layers=layers,
            embedding=embedding,
            norm=norm,
            lm_head=lm_head,
            # As in transformers, the factor is rounded to the type of the embedding.
            embedding_scale=torch.tensor(spec.embedding_scale).to(self._dtype).item(),
            logit_scale=spec.logit_scale,
            logit_softcap=spec.logit_softcap,
        )

    def _layer(self, spec: Layer, weights: LayerWeights) -> PackedLayer:
        attention, parts = spec.attention, weights.attention
        qk_norm = None if attention.qk_norm is None else attention.qk_norm.norm
        return PackedLayer(
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            attention=attention_spec(attention, parts),
            qkv=self._linear(parts.qkv),
            attention_output=self._linear(parts.output),
            feed_forward=self._feed_forward(spec.feed_forward, weights.feed_forward),
            rope_table=self._tables.angles(attention),
            temperatures=self._tables.temperatures(attention),
            before_attention=_norm(spec.before_attention, weights.before_attention),
            after_attention=_norm(spec.after_attention, weights.after_attention),
            before_feed_forward=_norm(spec.before_feed_forward, weights.before_feed_forward),
            after_feed_forward=_norm(spec.after_feed_forward, weights.after_feed_forward),
            query_norm=_norm(qk_norm, parts.query_norm),
            key_norm=_norm(qk_norm, parts.key_norm),
            value_norm=_norm(attention.value_norm, NormWeights(None)),
            norms_all_heads=attention.qk_norm is not None and attention.qk_norm.over == "all heads",
            norms_after_rope=attention.qk_norm is not None and attention.qk_norm.is_after_rope,
            is_parallel=spec.is_parallel,
            multiplier=spec.multiplier,
            scalar=weights.scalar,
        )

    def _feed_forward(
        self, spec: Mlp | Experts, weights: MlpWeights | ExpertWeights
    ) -> PackedMlp | PackedExperts:
        if isinstance(spec, Mlp):
            assert isinstance(weights, MlpWeights)
            return self._mlp(spec, weights)
        assert isinstance(weights, ExpertWeights)
        shared = None
        if spec.shared is not None and weights.shared is not None:
            shared = self._mlp(spec.shared, weights.shared)
        return PackedExperts(
            experts=[self._mlp(spec.expert, expert) for expert in weights.experts],
            router=self._linear(weights.router),
            correction=weights.correction,
            shared=shared,
            shared_gate=None if weights.shared_gate is None else self._linear(weights.shared_gate),
            rule=spec.router,
        )

    def _mlp(self, spec: Mlp, weights: MlpWeights) -> PackedMlp:
        return PackedMlp(
            gate_up=self._linear(weights.gate_up),
            down=self._linear(weights.down),
            activation=spec.activation,
            is_gated=spec.is_gated,
        )

    def _linear(self, linear: Linear) -> PackedWeight:
        return self._pack(linear.weight, linear.bias)

    def _pack(self, weight: Weight, bias: Tensor | None = None) -> PackedWeight:
        return pack(self._library, weight.native_rows(), bias, num_threads=self._num_threads)


def _norm(spec: Norm | None, weights: NormWeights | None) -> PackedNorm | None:
    if spec is None or weights is None:
        return None
    weight, bias = (
        None if vector is None else vector.float() for vector in (weights.weight, weights.bias)
    )
    return PackedNorm(kind=spec.kind, eps=spec.eps, weight=weight, bias=bias)
