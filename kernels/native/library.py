"""The C interface of the compiled library: structures, functions and thread teams."""

import ctypes
import logging
import threading
import time
import weakref
from ctypes import POINTER, Structure, c_float, c_int, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.native.build import BUILT, LibraryUnavailable, best_variant, build, cpu_flags

logger = logging.getLogger(__name__)

TILE_FLAGS = frozenset({"amx_tile", "amx_int8"})
"""What /proc/cpuinfo lists for a processor with tile registers."""
_Q8_0, _BLOCK, _PANEL = 3, 32, 16
"""Of src/layouts.hpp."""


class WeightView(Structure):
    """`Weight` of src/packed.hpp."""


WeightView._fields_ = (
    ("panels", c_void_p),
    ("bias", c_void_p),
    ("format", c_int32),
    ("outputs", c_int32),
    ("inputs", c_int32),
    ("num_panels", c_int32),
    ("next", POINTER(WeightView)),
    ("order", c_void_p),
)


class RuleView(Structure):
    """`Rule` of src/attention.hpp."""

    _fields_ = (
        ("sinks", c_void_p),
        ("slopes", c_void_p),
        ("scale", c_float),
        ("softcap", c_float),
        ("window", c_int32),
        ("chunk", c_int32),
    )


class NormView(Structure):
    """`Norm` of src/elementwise.hpp."""

    _fields_ = (
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("kind", c_int32),
        ("eps", c_float),
    )


class MlpView(Structure):
    """`Mlp` of src/experts.hpp."""

    _fields_ = (
        ("gate_up", WeightView),
        ("down", WeightView),
        ("activation", c_int32),
        ("is_gated", c_int32),
        ("constants", c_float * 4),
        ("gate_multiplier", c_float),
    )


class ExpertNormsView(Structure):
    """`ExpertNorms` of src/experts.hpp."""

    _fields_ = (
        ("router", NormView),
        ("before", NormView),
        ("after", NormView),
        ("after_shared", NormView),
    )


class ExpertsView(Structure):
    """`Experts` of src/experts.hpp."""

    _fields_ = (
        ("experts", POINTER(MlpView)),
        ("shared", POINTER(MlpView)),
        ("correction", c_void_p),
        ("factors", c_void_p),
        ("norms", POINTER(ExpertNormsView)),
        ("router", WeightView),
        ("shared_gate", WeightView),
        ("latent_down", WeightView),
        ("latent_up", WeightView),
        ("count", c_int32),
        ("top_k", c_int32),
        ("scores", c_int32),
        ("is_normalized", c_int32),
        ("num_groups", c_int32),
        ("num_chosen_groups", c_int32),
        ("weighs_inputs", c_int32),
        ("scale", c_float),
        ("spread", c_float),
    )


class ConvolutionView(Structure):
    """`Convolution` of src/convolution.hpp."""

    _fields_ = (
        ("taps", c_void_p),
        ("bias", c_void_p),
        ("size", c_int32),
        ("num_taps", c_int32),
    )


class DeltaView(Structure):
    """`Delta` of src/delta.hpp."""

    _fields_ = (
        ("rates", WeightView),
        ("convolution", ConvolutionView),
        ("decay", c_void_p),
        ("decay_bias", c_void_p),
        ("norm", NormView),
        ("num_heads", c_int32),
        ("num_key_heads", c_int32),
        ("key_dim", c_int32),
        ("value_dim", c_int32),
        ("greatest_strength", c_float),
    )


class KimiDeltaView(Structure):
    """`KimiDelta` of src/kimi_delta.hpp."""

    _fields_ = (
        ("delta", DeltaView),
        ("fading", WeightView),
        ("gates", WeightView),
    )


class StateSpaceView(Structure):
    """`StateSpace` of src/state_space.hpp."""

    _fields_ = (
        ("convolution", ConvolutionView),
        ("norm", NormView),
        ("factors", c_void_p),
        ("step_bias", c_void_p),
        ("rates", c_void_p),
        ("skips", c_void_p),
        ("num_heads", c_int32),
        ("head_dim", c_int32),
        ("num_groups", c_int32),
        ("state_dim", c_int32),
        ("is_gated_last", c_int32),
        ("least_step", c_float),
        ("greatest_step", c_float),
    )


class SelectiveScanView(Structure):
    """`SelectiveScan` of src/selective_scan.hpp."""

    _fields_ = (
        ("convolution", ConvolutionView),
        ("parts", WeightView),
        ("steps", WeightView),
        ("norm_of_steps", NormView),
        ("norm_of_writes", NormView),
        ("norm_of_reads", NormView),
        ("rates", c_void_p),
        ("skips", c_void_p),
        ("state_dim", c_int32),
    )


class LatentView(Structure):
    """`Latent` of src/decoder.hpp."""

    _fields_ = (
        ("query_norm", NormView),
        ("query_up", WeightView),
        ("absorb", WeightView),
        ("expand", WeightView),
        ("rank", c_int32),
        ("key_dim", c_int32),
        ("value_dim", c_int32),
        ("query_rank", c_int32),
    )


class LayerInputView(Structure):
    """`LayerInput` of src/decoder.hpp."""

    _fields_ = (
        ("gate", WeightView),
        ("expansion", WeightView),
        ("norm", NormView),
    )


class LayerInputsView(Structure):
    """`LayerInputs` of src/decoder.hpp."""

    _fields_ = (
        ("table", WeightView),
        ("projection", WeightView),
        ("norm", NormView),
        ("size", c_int32),
        ("activation", c_int32),
        ("table_scale", c_float),
        ("projection_scale", c_float),
        ("scale", c_float),
    )


class LayerView(Structure):
    """`Layer` of src/decoder.hpp."""


LayerView._fields_ = (
    ("before_attention", NormView),
    ("after_attention", NormView),
    ("before_feed_forward", NormView),
    ("after_feed_forward", NormView),
    ("query_norm", NormView),
    ("key_norm", NormView),
    ("value_norm", NormView),
    ("qkv", WeightView),
    ("attention_output", WeightView),
    ("rope_table", c_void_p),
    ("temperatures", c_void_p),
    ("experts", POINTER(ExpertsView)),
    ("convolution", POINTER(ConvolutionView)),
    ("delta", POINTER(DeltaView)),
    ("kimi_delta", POINTER(KimiDeltaView)),
    ("state_space", POINTER(StateSpaceView)),
    ("selective_scan", POINTER(SelectiveScanView)),
    ("latent", POINTER(LatentView)),
    ("input", POINTER(LayerInputView)),
    ("beside", POINTER(LayerView)),
    ("rule", RuleView),
    ("mlp", MlpView),
    ("num_heads", c_int32),
    ("num_kv_heads", c_int32),
    ("head_dim", c_int32),
    ("norms_all_heads", c_int32),
    ("norms_after_rope", c_int32),
    ("is_parallel", c_int32),
    ("has_gate", c_int32),
    ("multiplier", c_float),
    ("feed_forward_multiplier", c_float),
    ("scalar", c_float),
)


class JunctionView(Structure):
    """`Junction` of src/decoder.hpp."""

    _fields_ = (
        ("embedding_norm", NormView),
        ("hidden_norm", NormView),
        ("projection", WeightView),
        ("is_hidden_first", c_int32),
    )


class ModelView(Structure):
    """`Model` of src/decoder.hpp."""

    _fields_ = (
        ("layers", POINTER(LayerView)),
        ("embedding", WeightView),
        ("embedding_norm", NormView),
        ("norm", NormView),
        ("lm_head", WeightView),
        ("inputs", POINTER(LayerInputsView)),
        ("junction", POINTER(JunctionView)),
        ("num_layers", c_int32),
        ("code_bits", c_int32),
        ("embedding_scale", c_float),
        ("logit_scale", c_float),
        ("logit_softcap", c_float),
    )


class CacheView(Structure):
    """`Cache` of src/cache.hpp."""

    _fields_ = (
        ("keys", c_void_p),
        ("values", c_void_p),
        ("type", c_int32),
        ("block_size", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
    )


class BatchView(Structure):
    """`Batch` of src/attention.hpp."""

    _fields_ = (
        ("block_tables", c_void_p),
        ("query_starts", c_void_p),
        ("context_lens", c_void_p),
        ("num_seqs", c_int32),
        ("max_num_blocks", c_int32),
    )


class HeadsView(Structure):
    """`Heads` of src/attention.hpp."""

    _fields_ = (
        ("query", c_void_p),
        ("stride", c_int64),
        ("out", c_void_p),
        ("num_heads", c_int32),
        ("rule", RuleView),
        ("format", c_int32),
    )


class StepView(Structure):
    """`Step` of src/decoder.hpp."""

    _fields_ = (
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("sampled_rows", c_void_p),
        ("logits", c_void_p),
        ("batch", BatchView),
        ("slots_stride", c_int64),
        ("places", c_void_p),
        ("states", c_void_p),
        ("state_group", c_int32),
        ("num_state_blocks", c_int32),
        ("num_places", c_int32),
        ("num_tokens", c_int32),
        ("num_sampled", c_int32),
        ("seconds", c_void_p),
        ("hidden", c_void_p),
    )


class UnpackedView(Structure):
    """`Unpacked` of src/packed.hpp."""

    _fields_ = (
        ("rows", c_void_p),
        ("row_bytes", c_int64),
        ("panels", c_void_p),
        ("format", c_int32),
        ("outputs", c_int32),
        ("inputs", c_int32),
    )


STRUCTURES: tuple[type[Structure], ...] = (
    WeightView,
    RuleView,
    NormView,
    MlpView,
    ExpertNormsView,
    ExpertsView,
    ConvolutionView,
    DeltaView,
    KimiDeltaView,
    StateSpaceView,
    SelectiveScanView,
    LatentView,
    LayerInputView,
    LayerInputsView,
    LayerView,
    JunctionView,
    ModelView,
    CacheView,
    BatchView,
    HeadsView,
    StepView,
    UnpackedView,
)
"""All structures; each library is asked whether its own have the same sizes."""

PARTS = (
    "embedding",
    "qkv",
    "attention",
    "attention output",
    "gate and up",
    "down",
    "logits",
)
"""`Part` of src/decoder.hpp."""


_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "warren_sizes": (None, [c_void_p]),
    "warren_lanes": (c_int, []),
    "warren_has_bf16_dot": (c_int, []),
    "warren_use_bf16_dot": (None, [c_int]),
    "warren_use_tiles": (c_int, [c_int]),
    "warren_team": (c_void_p, [c_int]),
    "warren_disband": (None, [c_void_p]),
    "warren_panel_bytes": (c_int64, [c_int32, c_int64]),
    "warren_pack": (c_int32, [c_void_p, POINTER(UnpackedView), c_int32]),
    "warren_unpack_rows": (None, [POINTER(WeightView), c_void_p, c_int32, c_void_p]),
    "warren_linear": (None, [c_void_p, c_void_p, c_int32, POINTER(WeightView), c_int32, c_void_p]),
    "warren_attention": (
        None,
        [c_void_p, POINTER(CacheView), POINTER(BatchView), POINTER(HeadsView)],
    ),
    "warren_filter_floors": (None, [c_void_p, c_void_p, c_int32, c_int32, *[c_void_p] * 5]),
    "warren_most_likely": (None, [c_void_p, c_void_p, c_int32, c_int32, c_void_p]),
    "warren_mask_logits": (
        None,
        [c_void_p, c_void_p, c_int32, c_void_p, c_void_p, c_int32, c_int32],
    ),
    "warren_rank_logits": (None, [c_void_p, c_void_p, c_int32, c_int32, c_int32, *[c_void_p] * 3]),
    "warren_draw_rows": (None, [c_void_p, c_void_p, c_int32, c_int32, *[c_void_p] * 4]),
    "warren_commit": (None, [c_void_p, c_int64]),
    "warren_workspace": (c_void_p, []),
    "warren_free_workspace": (None, [c_void_p]),
    "warren_forward": (
        c_int,
        [
            c_void_p,
            c_void_p,
            POINTER(ModelView),
            POINTER(CacheView),
            c_int64,
            POINTER(StepView),
        ],
    ),
}


class Library:
    """The functions of a compiled library, and the threads that they run on."""

    def __init__(self, path: Path) -> None:
        self.functions = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(self.functions, name)
            function.restype, function.argtypes = result, arguments
        check_sizes(self.functions)
        self.num_threads: int | None = None
        """The threads of operations outside a decoder; None: as many as torch uses."""
        self._teams: dict[int, int] = {}
        self._lock = threading.Lock()

    @property
    def lanes(self) -> int:
        """The number of floats in a vector register."""
        lanes: int = self.functions.warren_lanes()
        return lanes

    @property
    def has_bf16_dot(self) -> bool:
        """Whether it can multiply bfloat16 numbers with a single instruction."""
        return bool(self.functions.warren_has_bf16_dot())

    def use_bf16_dot(self, *, is_used: bool) -> None:
        """Use that instruction or not; the bits are the same. Not during any other call."""
        self.functions.warren_use_bf16_dot(is_used)

    def use_tiles(self, *, is_used: bool) -> bool:
        """Use the processor's tile registers or not, and return whether they are used: the system
        may refuse them. The bits are the same. Not during any other call, and only if the processor
        has the `TILE_FLAGS`."""
        return bool(self.functions.warren_use_tiles(is_used))

    def team(self, num_threads: int | None = None) -> int:
        """A team of threads for one operation at a time; shared by all callers with the same
        number, by default `num_threads`."""
        num_threads = num_threads or self.num_threads or torch.get_num_threads()
        with self._lock:
            if num_threads not in self._teams:
                self._teams[num_threads] = self.functions.warren_team(num_threads)
            return self._teams[num_threads]

    def workspace(self, owner: object) -> int:
        """Memory for activations, freed together with its owner."""
        workspace: int = self.functions.warren_workspace()
        weakref.finalize(owner, self.functions.warren_free_workspace, workspace)
        return workspace


@cache
def library() -> Library:
    """The library for this processor, compiled if necessary. Raises `LibraryUnavailable`."""
    variant = best_variant()
    try:
        native = _loaded(variant)
    except OSError as error:
        raise LibraryUnavailable(f"the library cannot be loaded: {error}") from error
    choose_products(native)
    choose_tiles(native)
    return native


def _loaded(variant: str) -> Library:
    """The library of a variant. Raises `LibraryUnavailable` and `OSError`."""
    path = build(variant)
    try:
        return Library(path)
    except OSError:
        if path.parent == BUILT:
            raise
        path.unlink(missing_ok=True)  # the cache's file is damaged
        return Library(build(variant))


def check_sizes(functions: Any) -> None:
    """Raise `LibraryUnavailable` if a structure is not as large in the library as here, because
    the library would read other memory than ours."""
    sizes = (c_int32 * len(STRUCTURES))()
    functions.warren_sizes(ctypes.byref(sizes))
    for structure, size in zip(STRUCTURES, sizes, strict=True):
        if ctypes.sizeof(structure) != size:
            raise LibraryUnavailable(
                f"{structure.__name__} has {ctypes.sizeof(structure)} bytes, in the library {size}"
            )


def choose_products(native: Library) -> bool:
    """Use the instruction for bfloat16 products if it exists and is faster than multiplications of
    floats, as on AMD's processors; returns whether it is used. Takes milliseconds."""
    if not native.has_bf16_dot:
        return False
    num_rows, size = 16, 512
    panels = torch.zeros(size * size, dtype=torch.bfloat16)
    hidden, out = torch.zeros(num_rows, size), torch.zeros(num_rows, size)
    weight = WeightView(pointer(panels), None, 1, size, size)

    def seconds(*, is_used: bool) -> float:
        native.use_bf16_dot(is_used=is_used)
        began_at = time.perf_counter()
        native.functions.warren_linear(
            native.team(1), pointer(hidden), num_rows, ctypes.byref(weight), 16, pointer(out)
        )
        return time.perf_counter() - began_at

    tries = [(seconds(is_used=True), seconds(is_used=False)) for _ in range(20)]
    is_faster = min(used for used, _ in tries) < min(unused for _, unused in tries)
    native.use_bf16_dot(is_used=is_faster)
    return is_faster


def choose_tiles(native: Library) -> bool:
    """Use the tile registers if the processor has them, and the system grants them; returns whether
    they are used. Takes milliseconds.

    Tests emulate the registers, so here they first have to compute the bits of other instructions.
    """
    if not cpu_flags() >= TILE_FLAGS or not native.use_tiles(is_used=True):
        return False
    in_tiles = _q8_0_product(native)
    native.use_tiles(is_used=False)
    is_equal = torch.equal(in_tiles, _q8_0_product(native))
    if not is_equal:
        logger.warning("tile registers not used", extra={"reason": "their products differ"})
    return is_equal and native.use_tiles(is_used=True)


def _q8_0_product(native: Library) -> Tensor:
    """A product of more rows, panels and blocks than are processed at a time."""
    num_rows, num_panels, num_blocks = 20, 4, 10
    random = torch.Generator().manual_seed(1)
    scales = torch.rand(num_panels, num_blocks, _PANEL, generator=random).half().view(torch.uint8)
    size = (num_panels, num_blocks, _BLOCK * _PANEL)
    codes = torch.randint(0, 256, size, dtype=torch.uint8, generator=random)
    panels = torch.cat([scales, codes], dim=2)
    outputs, inputs = num_panels * _PANEL, num_blocks * _BLOCK
    hidden = torch.randn(num_rows, inputs, generator=random)
    out = torch.empty(num_rows, outputs)
    weight = WeightView(pointer(panels), None, _Q8_0, outputs, inputs, num_panels, None)
    native.functions.warren_linear(
        native.team(1), pointer(hidden), num_rows, ctypes.byref(weight), 8, pointer(out)
    )
    return out


def pointer(tensor: Tensor | None) -> int | None:
    """The address of a contiguous tensor. Raises `ValueError` for other tensors."""
    if tensor is None:
        return None
    if not tensor.is_contiguous():
        raise ValueError(f"a tensor of strides {tensor.stride()} is not contiguous")
    return tensor.data_ptr()
