"""A model as GGUF files store it: llama.cpp gives the tensors of all families the same names, adds
1 to the weights of norms that are stored without it, and orders heads as it rotates them."""

from collections.abc import Callable
from dataclasses import replace
from typing import overload

from worker.checkpoints.architectures import architecture_of
from worker.model.spec import (
    Attention,
    DeltaNames,
    DeltaNet,
    LatentNames,
    Layer,
    LayerNames,
    ModelSpec,
    Names,
    Norm,
    Predictor,
    StateSpaceNames,
)
from worker.model.weights.gguf import GgufSource
from worker.model.weights.sources import TensorSource

_LAYER = LayerNames(
    qkv=("attn_q", "attn_k", "attn_v"),
    attention_output="attn_output",
    convolution_input="shortconv.in_proj",
    convolution="shortconv.conv",
    convolution_output="shortconv.out_proj",
    state_space=StateSpaceNames(
        input="ssm_in",
        convolution="ssm_conv1d",
        parts="ssm_x",
        steps="ssm_dt",
        step_bias="ssm_dt.bias",
        decay="ssm_a",
        skips="ssm_d",
        norm="ssm_norm",
        part_norms=("ssm_dt_norm", "ssm_b_norm", "ssm_c_norm"),
        output="ssm_out",
    ),
    are_decays_logarithms=False,
    query_norm="attn_q_norm",
    key_norm="attn_k_norm",
    sinks="attn_sinks.weight",
    latent=LatentNames(
        query="attn_q",
        query_down="attn_q_a",
        query_norm="attn_q_a_norm",
        query_up="attn_q_b",
        down="attn_kv_a_mqa",
        norm="attn_kv_a_norm",
        up="attn_kv_b",
    ),
    delta=DeltaNames(
        inputs=("attn_qkv", "attn_gate"),
        rates=("ssm_beta", "ssm_alpha"),
        convolution=("ssm_conv1d",),
        decay="ssm_a",
        decay_bias="ssm_dt.bias",
        norm="ssm_norm",
        output="ssm_out",
    ),
    before_attention="attn_norm",
    after_attention="post_attention_norm",
    before_feed_forward="ffn_norm",
    after_feed_forward="post_ffw_norm",
    gate_up=("ffn_gate", "ffn_up"),
    down="ffn_down",
    router="ffn_gate_inp",
    correction="exp_probs_b.bias",
    expert_gate_up=("ffn_gate_exps.{}", "ffn_up_exps.{}"),
    expert_down="ffn_down_exps.{}",
    shared_gate_up=("ffn_gate_shexp", "ffn_up_shexp"),
    shared_down="ffn_down_shexp",
    shared_gate="ffn_gate_inp_shexp",
    activation="xielu",
    latent_down="ffn_latent_down",
    latent_up="ffn_latent_up",
    router_norm="ffn_gate_inp.scale",
    factors="ffn_down_exps.scale",
    before_experts="pre_ffw_norm_2",
    after_experts="post_ffw_norm_2",
    after_shared="post_ffw_norm_1",
    scalar="layer_output_scale.weight",
    input_gate="inp_gate",
    input_expansion="proj",
    after_input="post_norm",
)


_KIMI_DELTA = DeltaNames(
    inputs=("attn_q", "attn_k", "attn_v"),
    rates=("ssm_f_a", "ssm_g_a", "ssm_beta"),
    fading="ssm_f_b",
    gates="ssm_g_b",
    convolution=("ssm_conv1d_q", "ssm_conv1d_k", "ssm_conv1d_v"),
    decay="ssm_a",
    decay_bias="ssm_dt.bias",
    norm="ssm_norm",
    output="attn_output",
    has_flat_decay=True,
)

_NAMES = Names(
    layers=_LAYER,
    prefixes=("",),
    embedding="token_embd",
    embedding_norm="token_embd_norm",
    layer="blk",
    heads=("output",),
    input_table="per_layer_token_embd",
    input_projection="per_layer_model_proj",
    input_norm="per_layer_proj_norm",
    has_further_layers=True,
)


def as_stored(spec: ModelSpec, source: TensorSource) -> ModelSpec:
    """The model with the names and the arrangement of tensors that a source has for it."""
    if not isinstance(source, GgufSource):
        return spec
    architecture = architecture_of(source.architecture)
    rotates_pairs = architecture is not None and architecture.rotates_pairs
    layers = tuple(_layer(layer, rotates_pairs=rotates_pairs) for layer in spec.layers)
    names = _names(spec, source)
    if architecture is not None and architecture.has_tiled_values:
        layers, names = _untiled(layers, names)
    return replace(
        spec,
        layers=layers,
        embedding_norm=_whole(spec.embedding_norm),
        final_norm=_whole(spec.final_norm),
        names=names,
        predictor=_predictor(spec, rotates_pairs=rotates_pairs),
    )


def _predictor(spec: ModelSpec, *, rotates_pairs: bool) -> Predictor | None:
    """The predictor as files have it: behind the last layer of the decoder. llama.cpp has names for
    the tensors of those that checkpoints store there, too."""
    predictor = spec.predictor
    if predictor is None or not spec.names.has_further_layers:
        return None
    stem = f"{_NAMES.layer}.{len(spec.layers)}.nextn"
    return replace(
        predictor,
        layer=_layer(predictor.layer, rotates_pairs=rotates_pairs),
        norm=_whole(predictor.norm),
        parent=_NAMES.layer,
        embedding_norm=f"{stem}.enorm",
        hidden_norm=f"{stem}.hnorm",
        projection=f"{stem}.eh_proj",
        final_norm=f"{stem}.shared_head_norm",
    )


def _untiled(layers: tuple[Layer, ...], names: Names) -> tuple[tuple[Layer, ...], Names]:
    """Give each head of values keys of its own, where those that share keys are apart. They cannot
    be brought together, because the inputs of the output's blocks have the same order."""
    found = [one.recurrence for one in layers if isinstance(one.recurrence, DeltaNet)]
    if not found:
        return layers, names
    delta = replace(names.layers.delta, num_tiled_keys=found[0].num_key_heads)
    own = tuple(
        replace(one, recurrence=replace(one.recurrence, num_key_heads=one.recurrence.num_heads))
        if isinstance(one.recurrence, DeltaNet)
        else one
        for one in layers
    )
    return own, replace(names, layers=replace(names.layers, delta=delta))


def _names(spec: ModelSpec, source: GgufSource) -> Names:
    def has(kind: str, part: str) -> bool:
        """Whether a layer that has this field in its spec has this tensor."""
        found = (index for index, layer in enumerate(spec.layers) if getattr(layer, kind))
        return any(source.has(f"blk.{index}.{part}.weight") for index in found)

    final = (name for name in ("output_norm", "token_embd_norm") if source.has(f"{name}.weight"))
    return replace(
        _NAMES,
        layers=_of_feed_forwards(_of_mixers(_LAYER, has), has),
        final_norm=next(final, "output_norm"),
    )


def _of_mixers(names: LayerNames, has: Callable[[str, str], bool]) -> LayerNames:
    """The names of attention and recurrences, which a file may have together or apart."""
    if has("attention", "attn_qkv"):
        names = replace(names, qkv=("attn_qkv",))
    if has("attention", "attn_k_b"):
        latent = replace(names.latent, keys="attn_k_b", values="attn_v_b")
        names = replace(names, latent=latent)
    if has("recurrence", "ssm_f_a"):
        names = replace(names, delta=_KIMI_DELTA)
    if has("recurrence", "ssm_ba"):
        names = replace(names, delta=replace(names.delta, rates=("ssm_ba",)))
    return names


def _of_feed_forwards(names: LayerNames, has: Callable[[str, str], bool]) -> LayerNames:
    """The names of feed-forward parts and of the norms before them: without a gate, or with the
    gate in the same matrix, there is only ``up``."""
    if not has("before_feed_forward", "ffn_norm"):
        is_alone = not has("before_feed_forward", "post_attention_norm")
        norm = names.before_attention if is_alone else names.after_attention
        names = replace(names, before_feed_forward=norm)
    if has("feed_forward", "ffn_gate_up_exps"):
        names = replace(names, expert_gate_up=("ffn_gate_up_exps.{}",))
    elif not has("feed_forward", "ffn_gate_exps"):
        names = replace(names, expert_gate_up=("ffn_up_exps.{}",))
    if not has("feed_forward", "ffn_gate"):
        names = replace(names, gate_up=("ffn_up",))
    if has("feed_forward", "post_ffw_norm_1"):
        return replace(names, shared_gate_up=names.gate_up, shared_down=names.down)
    if not has("feed_forward", "ffn_gate_shexp"):
        names = replace(names, shared_gate_up=("ffn_up_shexp",))
    return names


def _layer(layer: Layer, *, rotates_pairs: bool) -> Layer:
    return replace(
        layer,
        attention=None
        if layer.attention is None
        else _attention(layer.attention, rotates_pairs=rotates_pairs),
        before_attention=_whole(layer.before_attention),
        after_attention=_whole(layer.after_attention),
        before_feed_forward=_whole(layer.before_feed_forward),
        after_feed_forward=_whole(layer.after_feed_forward),
    )


def _attention(attention: Attention, *, rotates_pairs: bool) -> Attention:
    if attention.rope is not None:
        rope = replace(attention.rope, is_interleaved=rotates_pairs)
        attention = replace(attention, rope=rope)
    if attention.qk_norm is not None:
        norm = replace(attention.qk_norm, norm=_whole(attention.qk_norm.norm))
        attention = replace(attention, qk_norm=norm)
    return attention


@overload
def _whole(norm: Norm) -> Norm: ...
@overload
def _whole(norm: Norm | None) -> Norm | None: ...
def _whole(norm: Norm | None) -> Norm | None:
    return None if norm is None else replace(norm, adds_one=False)
