"""The CPU variant of `worker.model.decoders.stack`: a whole step is a single call of the C++
library."""

import logging
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from kernels.native.decoder import (
    PackedDecoder,
    PackedExpertNorms,
    PackedExperts,
    PackedJunction,
    PackedLatent,
    PackedLayer,
    PackedLayerInput,
    PackedLayerInputs,
    PackedMlp,
    PackedModel,
    PackedNorm,
    num_multiplications,
)
from kernels.native.huge_pages import CommittedAhead
from kernels.native.library import Library, library
from kernels.native.packed import PACKED_BLOCKS, CodeBits, OddScale, PackedWeight, Packer
from kernels.native.recurrences import MAX_KEY_DIM, MAX_STATE_DIM, MAX_TAPS
from kernels.providers import Provider
from shared.errors import StartupError
from worker.model.cache_layout import CacheLayout, LayerPlace
from worker.model.decoders.positions import PositionTables
from worker.model.decoders.stack import SpecDecoder, attention_spec
from worker.model.forward import ForwardInputs, Traits
from worker.model.kv_cache import KVCache
from worker.model.numerics import INT8_INPUTS
from worker.model.provision import native_obstacle
from worker.model.spec import (
    Attention,
    DeltaNet,
    Experts,
    KimiDelta,
    Layer,
    LayerInputs,
    Mamba,
    Mamba2,
    Mlp,
    ModelSpec,
    Norm,
    Recurrence,
)
from worker.model.weights.layers import (
    AttentionWeights,
    ExpertWeights,
    LayerInputsWeights,
    LayerWeights,
    MlpWeights,
    NormWeights,
    WeightReader,
)
from worker.model.weights.predictor import read_predictor
from worker.model.weights.weight import Linear, Weight

logger = logging.getLogger(__name__)

_NO_PLACE = LayerPlace(0, 0)
"""The place of a layer without keys and values."""
_PANEL = 16
"""The outputs of a head are a multiple of it."""


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
        cache_dtype: torch.dtype | None = None,
        code_bits: CodeBits = 8,
    ) -> None:
        """Pack the weights as they are read, so that at most one layer is in memory twice.

        ``dtype`` is float32 or bfloat16, and the cache's by default; ``cache_dtype`` may be
        float8_e4m3fn, too. Where weights are quantized, activations are rounded to integers of
        ``code_bits``. Raises `StartupError` as `WeightReader` does.
        """
        super().__init__(spec, max_seq_len, cache_dtype)
        self._dtype = dtype
        tables = PositionTables(max_seq_len, self.device)
        packing = _Packing(library(), num_threads, tables, dtype)
        try:
            model = replace(packing.model(spec, weights), code_bits=code_bits)
        except OddScale as error:
            raise StartupError(str(error)) from error
        has_int8 = packing.has_blocks and code_bits == 8
        self._numerics = f"{weights.numerics} {INT8_INPUTS}" if has_int8 else weights.numerics
        self._decoder = PackedDecoder(library(), model, num_threads)
        self._predictor: PackedDecoder | None = None
        self._prediction_cost: float | None = None
        if (predictor := packing.predictor(spec, weights, model)) is None:
            self._spec = replace(spec, predictor=None)
        else:
            self._predictor = PackedDecoder(library(), predictor, num_threads)
            self._prediction_cost = num_multiplications(predictor) / num_multiplications(model)
        self._hidden = torch.empty(0, spec.hidden_size)
        self._committed: CommittedAhead | None = None
        self._layout: CacheLayout | None = None
        self._places = torch.empty(0)
        self._states: Tensor | None = None

    @property
    def traits(self) -> Traits:
        return Traits(
            numerics=self._numerics,
            is_row_exact=True,
            prediction_cost=self._prediction_cost,
            has_own_threads=True,
        )

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
        self._committed = CommittedAhead(library(), *kv_cache.tensors)
        self._committed.use(0)

    def profile(self) -> dict[str, float]:
        """See `Decoder.profile`."""
        return self._decoder.profile()

    def forward(self, inputs: ForwardInputs, kv_cache: KVCache) -> Tensor:
        """See `Decoder.forward`."""
        return self._prepared(inputs, kv_cache)()

    def prepare(self, inputs: ForwardInputs, kv_cache: KVCache) -> Callable[[], Tensor]:
        """See `Decoder.prepare`."""
        if self._predictor is not None:  # it still reads the hidden states of the step before
            return super().prepare(inputs, kv_cache)
        return self._prepared(inputs, kv_cache)

    def predict(self, inputs: ForwardInputs, kv_cache: KVCache) -> Tensor:
        """See `Decoder.predict`."""
        assert self._predictor is not None, "the model has no predictor"
        hidden = self._room_for(len(inputs.token_ids))
        layers = slice(self.num_layers, None)
        return self._step(self._predictor, inputs, kv_cache, layers, hidden)()

    def _prepared(self, inputs: ForwardInputs, kv_cache: KVCache) -> Callable[[], Tensor]:
        if self._committed is not None:
            self._committed.use(_num_used(inputs, kv_cache) * kv_cache.slot_bytes)
        has_predictor = self._predictor is not None
        hidden = self._room_for(len(inputs.token_ids)) if has_predictor else None
        return self._step(self._decoder, inputs, kv_cache, slice(self.num_layers), hidden)

    def _step(
        self,
        decoder: PackedDecoder,
        inputs: ForwardInputs,
        kv_cache: KVCache,
        layers: slice,
        hidden: Tensor | None,
    ) -> Callable[[], Tensor]:
        """A step of a decoder with these of the model's layers."""
        if kv_cache.layout is not self._layout:
            self._use(kv_cache.layout)
        state = kv_cache.layout.state
        return decoder.prepare(
            inputs.token_ids,
            inputs.positions,
            inputs.slots,
            inputs.sampled_rows,
            kv_cache.keys,
            kv_cache.values,
            self._places[layers],
            inputs.block_tables,
            inputs.query_starts,
            inputs.context_lens,
            self._states,
            0 if state is None else state.num_blocks,
            hidden,
        )

    def _use(self, layout: CacheLayout) -> None:
        """Keep the places of layers and states as the library reads them."""
        self._layout = layout
        sources = [self._spec.kv_layer(index) for index in range(self.num_layers)]
        if len(layout.places) > self.num_layers:
            sources.append(self.num_layers)
        places = [layout.places[source] or _NO_PLACE for source in sources]
        self._places = torch.tensor(places, dtype=torch.int32)
        self._states = None
        if layout.state is not None:
            firsts = [0 if first is None else first for first in layout.states]
            self._states = torch.tensor(firsts, dtype=torch.int32)

    def _room_for(self, num_tokens: int) -> Tensor:
        if num_tokens > len(self._hidden):
            self._hidden = torch.empty(num_tokens, self._spec.hidden_size)
        return self._hidden[:num_tokens]


def _num_used(inputs: ForwardInputs, kv_cache: KVCache) -> int:
    """The number of slots of the longest keys up to the last slot that the step uses."""
    key_blocks = kv_cache.layout.key_blocks
    ends = [int(slots.max()) // n + 1 for slots, n in zip(inputs.slots, key_blocks, strict=True)]
    if kv_cache.layout.state is not None:
        ends.append((int(inputs.block_tables[-1].max()) + 1) * kv_cache.block_size)
    return max(ends)


def why_not(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> str | None:
    """The reason why `FusedDecoder` does not support this model; None if it does."""
    sizes = {spec.hidden_size}
    for layer in spec.layers:
        if layer.recurrence is not None:
            obstacle = _why_not_recurrence(layer.recurrence)
            if obstacle is not None:
                return f"the native kernels have no {obstacle}"
        part = layer.feed_forward
        mlps = [part.expert, part.shared] if isinstance(part, Experts) else [part]
        sizes |= {mlp.size for mlp in mlps if mlp is not None}
        if isinstance(part, Experts) and part.latent_size is not None:
            sizes.add(part.latent_size)
    if spec.layer_inputs is not None:
        sizes.add(spec.layer_inputs.size)
    latents = [attention.latent for attention in spec.attentions if attention.latent]
    sizes |= {size for latent in latents for size in (latent.key_dim, latent.query_rank or 0)}
    if any(size % 2 for size in sizes):
        return "the native kernels need even sizes"
    if any(latent.rank % _PANEL or latent.value_dim % _PANEL for latent in latents):
        return f"the native kernels need latent vectors and values of a multiple of {_PANEL}"
    for head_dim in sorted({attention.head_dim for attention in spec.attentions}):
        if (obstacle := native_obstacle(head_dim, dtype, device)) is not None:
            return obstacle
    return None


def _why_not_recurrence(spec: Recurrence) -> str | None:
    """What the native kernels lack; None if they have everything."""
    if not 2 <= spec.num_taps <= MAX_TAPS:
        return f"convolution of {spec.num_taps} tokens"
    match spec:
        case DeltaNet() if spec.key_dim > MAX_KEY_DIM or spec.value_dim % _PANEL:
            return f"delta rule for keys of {spec.key_dim} and values of {spec.value_dim}"
        case KimiDelta() if spec.head_dim > MAX_KEY_DIM or spec.head_dim % _PANEL or spec.rank % 2:
            return f"delta rule for heads of {spec.head_dim} and vectors of {spec.rank}"
        case Mamba() if spec.state_dim > MAX_STATE_DIM or spec.size % _PANEL or spec.rank % 2:
            return (
                f"state space of {spec.size} channels, each with {spec.state_dim} numbers, and "
                f"steps made from {spec.rank} numbers"
            )
        case Mamba2() if (
            spec.state_dim > MAX_STATE_DIM or spec.state_dim % 4 or spec.head_dim % _PANEL
        ):
            return (
                f"state space with heads of {spec.head_dim} and {spec.state_dim} numbers of each "
                "element"
            )
    return None


class _Packing:
    """Packs weights without keeping the originals."""

    def __init__(
        self, native: Library, num_threads: int, tables: PositionTables, dtype: torch.dtype
    ) -> None:
        self._packer = Packer(native, num_threads)
        self._tables = tables
        self._dtype = dtype
        self.has_blocks = False
        """Whether a matrix packed so far has quantized weights."""

    def model(self, spec: ModelSpec, weights: WeightReader) -> PackedModel:
        embedding = self._pack(weights.embedding())
        embedding_norm = _norm(spec.embedding_norm, weights.embedding_norm())
        lm_head = embedding
        if not weights.is_tied:
            lm_head = self._pack(weights.lm_head(), weights.head_bias())
        inputs = self._layer_inputs(spec.layer_inputs, weights.layer_inputs())
        layers = [
            self._layer(spec, layer, part)
            for layer, part in zip(spec.layers, weights.layers(), strict=True)
        ]
        norm = _some_norm(spec.final_norm, weights.norm())
        weights.check_complete()
        self._packer.finish()
        return PackedModel(
            layers=layers,
            embedding=embedding,
            norm=norm,
            lm_head=lm_head,
            embedding_norm=embedding_norm,
            # As in transformers, the factor is rounded to the type of the embedding.
            embedding_scale=torch.tensor(spec.embedding_scale).to(self._dtype).item(),
            logit_scale=spec.logit_scale,
            logit_softcap=spec.logit_softcap,
            inputs=inputs,
        )

    def predictor(
        self, spec: ModelSpec, weights: WeightReader, model: PackedModel
    ) -> PackedModel | None:
        """The predictor as a model of a single layer, which shares the matrices of ``model``; None,
        with the reason in the log, if there is none that can be read."""
        predictor = spec.predictor
        if predictor is None:
            return None
        try:
            parts = read_predictor(weights, spec, predictor)
            predicting = replace(
                model,
                layers=[self._layer(spec, predictor.layer, parts.layer)],
                norm=_some_norm(predictor.norm, parts.norm),
                junction=PackedJunction(
                    embedding_norm=_some_norm(predictor.norm, parts.embedding_norm),
                    hidden_norm=_some_norm(predictor.norm, parts.hidden_norm),
                    projection=self._linear(parts.projection),
                    is_hidden_first=predictor.is_hidden_first,
                ),
            )
            self._packer.finish()
        except (StartupError, OddScale) as reason:
            extra = {"reason": str(reason)}
            logger.warning("the layer that predicts tokens is not used", extra=extra)
            return None
        return predicting

    def _layer_inputs(
        self, spec: LayerInputs | None, weights: LayerInputsWeights | None
    ) -> PackedLayerInputs | None:
        if spec is None or weights is None:
            return None
        return PackedLayerInputs(
            table=self._pack(weights.table),
            projection=self._linear(weights.projection),
            norm=_some_norm(spec.norm, weights.norm),
            size=spec.size,
            activation=spec.activation,
            table_scale=torch.tensor(spec.size**0.5).to(self._dtype).item(),
        )

    def _layer(self, model: ModelSpec, spec: Layer, weights: LayerWeights) -> PackedLayer:
        feed_forward, recurrence = spec.feed_forward, weights.recurrence
        layer = PackedLayer(
            feed_forward=None
            if feed_forward is None
            else self._feed_forward(feed_forward, weights.feed_forward),
            before_attention=_norm(spec.before_attention, weights.before_attention),
            after_attention=_norm(spec.after_attention, weights.after_attention),
            before_feed_forward=_norm(spec.before_feed_forward, weights.before_feed_forward),
            after_feed_forward=_norm(spec.after_feed_forward, weights.after_feed_forward),
            is_parallel=spec.is_parallel,
            multiplier=spec.multipliers.attention,
            feed_forward_multiplier=spec.multipliers.feed_forward,
            input=None
            if model.layer_inputs is None or weights.input is None
            else PackedLayerInput(
                gate=self._linear(weights.input.gate),
                expansion=self._linear(weights.input.expansion),
                norm=_some_norm(model.layer_inputs.norm, weights.input.norm),
            ),
            scalar=weights.scalar,
        )
        if spec.attention is not None and weights.attention is not None:
            layer = self._with_attention(layer, spec.attention, weights.attention)
        if recurrence is None:
            return layer
        recurrent = PackedLayer(
            recurrence=recurrence.packed(self._linear),
            after_attention=layer.after_attention,
            multiplier=spec.multipliers.recurrence,
        )
        if spec.attention is not None:
            return replace(layer, beside=recurrent)
        return replace(layer, recurrence=recurrent.recurrence, multiplier=recurrent.multiplier)

    def _with_attention(
        self, layer: PackedLayer, attention: Attention, parts: AttentionWeights
    ) -> PackedLayer:
        qk_norm = None if attention.qk_norm is None else attention.qk_norm.norm
        key_norm = qk_norm if attention.latent is None else attention.latent.norm
        return replace(
            layer,
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            attention=attention_spec(attention, parts, self._tables),
            qkv=self._linear(parts.qkv),
            attention_output=self._linear(parts.output),
            latent=self._latent(attention, parts),
            rope_table=self._tables.angles(attention),
            temperatures=self._tables.temperatures(attention),
            query_norm=_norm(qk_norm, parts.query_norm),
            key_norm=_norm(key_norm, parts.key_norm),
            value_norm=_norm(attention.value_norm, NormWeights(None)),
            norms_all_heads=attention.qk_norm is not None and attention.qk_norm.over == "all heads",
            has_gate=attention.has_gate,
            norms_after_rope=attention.qk_norm is not None and attention.qk_norm.is_after_rope,
        )

    def _latent(self, spec: Attention, weights: AttentionWeights) -> PackedLatent | None:
        if spec.latent is None or weights.latent is None:
            return None
        up = weights.latent.query_up
        return PackedLatent(
            absorb=self._linear(weights.latent.absorb),
            expand=self._linear(weights.latent.expand),
            query_up=None if up is None else self._linear(up),
            query_norm=_norm(spec.latent.norm, weights.query_norm),
            key_dim=spec.latent.key_dim,
            value_dim=spec.latent.value_dim,
        )

    def _feed_forward(
        self, spec: Mlp | Experts, weights: MlpWeights | ExpertWeights | None
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
            factors=weights.factors,
            latent_down=None if weights.latents is None else self._linear(weights.latents.down),
            latent_up=None if weights.latents is None else self._linear(weights.latents.up),
            norms=None
            if spec.own_norm is None or weights.norms is None
            else PackedExpertNorms(
                router=_some_norm(spec.own_norm, weights.norms.router),
                before=_some_norm(spec.own_norm, weights.norms.before),
                after=_some_norm(spec.own_norm, weights.norms.after),
                after_shared=_some_norm(spec.own_norm, weights.norms.after_shared),
            ),
        )

    def _mlp(self, spec: Mlp, weights: MlpWeights) -> PackedMlp:
        return PackedMlp(
            gate_up=self._linear(weights.gate_up),
            down=self._linear(weights.down),
            activation=spec.activation,
            is_gated=spec.is_gated,
            gate_multiplier=spec.gate_multiplier,
            constants=weights.constants,
        )

    def _linear(self, linear: Linear) -> PackedWeight:
        return self._pack(linear.weight, linear.bias)

    def _pack(self, weight: Weight, bias: Tensor | None = None) -> PackedWeight:
        rows = weight.native_rows()
        self.has_blocks |= any(part.format in PACKED_BLOCKS for part in rows)
        return self._packer.pack(rows, bias)


def _norm(spec: Norm | None, weights: NormWeights | None) -> PackedNorm | None:
    return None if spec is None or weights is None else _some_norm(spec, weights)


def _some_norm(spec: Norm, weights: NormWeights) -> PackedNorm:
    weight, bias = (
        None if vector is None else vector.float() for vector in (weights.weight, weights.bias)
    )
    return PackedNorm(kind=spec.kind, eps=spec.eps, weight=weight, bias=bias)
