"""Loads a model directory into a runner."""

import hashlib
import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch

from kernels.native.library import library
from kernels.providers import load_ops
from kernels.quantized import BLOCKS, QuantFormat
from shared.control_groups import usable_cpus
from shared.errors import StartupError
from shared.host_memory import free_bytes, readable_size
from worker.checkpoints.gguf_file import gguf_files
from worker.engine.interface import NO_TOKEN
from worker.model.config import read_json_config
from worker.model.decoders import fused
from worker.model.decoders.stack import StackDecoder
from worker.model.families import FAMILIES, spec_of
from worker.model.forward import Decoder
from worker.model.provision import can_be_native, code_bits_of, foreign_ops, provider_on
from worker.model.runner import TorchRunner, use_device
from worker.model.spec import ModelSpec
from worker.model.start import (
    DEFAULT_LIMITS,
    RunnerLimits,
    SequenceMemory,
    can_record,
    sequence_memory,
    start_runner,
)
from worker.model.warm_up import first_steps
from worker.model.weights.formats.blocks import Gguf
from worker.model.weights.formats.coded import method_of
from worker.model.weights.formats.dense import Dense
from worker.model.weights.formats.interface import Format, Target
from worker.model.weights.formats.registry import format_of
from worker.model.weights.gguf_names import as_stored
from worker.model.weights.layers import WeightReader, read_weights
from worker.model.weights.predictor import with_stored_predictor
from worker.model.weights.sources import TensorSource, open_source, stored_in

logger = logging.getLogger(__name__)

_SAMPLES = 64
_SAMPLE_BYTES = 4096
_MAX_REHEARSED_BYTES = 512 << 20
"""A rehearsal reads and runs models of transformers up to this size."""


def load_runner(
    directory: Path,
    limits: RunnerLimits = DEFAULT_LIMITS,
    *,
    dtype: str = "auto",
    weight_format: str = "auto",
    kv_dtype: str = "auto",
    kernels: str = "auto",
    is_batch_invariant: bool = False,
    device: str = "auto",
    compute_threads: int | None = None,
) -> TorchRunner:
    """Load config.json and safetensors from ``directory`` and allocate the KV cache.

    ``dtype`` is auto (that of the checkpoint), float32, bfloat16 or float16; ``weight_format`` is
    auto (not quantized), q8_0, q4_0 or q4_1; ``kv_dtype`` is auto (that of activations) or, on the
    CPU, float8; ``kernels`` is auto (triton on a GPU; native on the CPU if it supports the model),
    triton, native, native-int16 or reference; ``device`` is auto, cpu, cuda or cuda:N. With
    ``is_batch_invariant`` a token's result on a GPU does not depend on the rest of its step, which
    always holds for the CPU kernels. No code of the checkpoint is executed. Raises `StartupError`.
    """
    refuse_foreign_kernels()
    chosen = device_named(device)
    use_device(chosen)
    free = _free_bytes(chosen)
    if limits.kv_cache_bytes is not None and limits.kv_cache_bytes > free:
        raise StartupError(
            f"the KV cache of {limits.kv_cache_bytes:,} bytes is larger than the {free:,} bytes "
            f"of memory that are free on {chosen}: set a smaller --kv-cache-bytes"
        )
    num_threads = compute_threads or usable_cpus()
    began = time.monotonic()
    facts = {"bytes": _num_bytes(directory), "device": str(chosen)}
    logger.info("reading weights", extra=facts)
    decoder = load_decoder(
        directory,
        dtype=dtype,
        weight_format=weight_format,
        kv_dtype=kv_dtype,
        kernels=kernels,
        is_batch_invariant=is_batch_invariant,
        device=chosen,
        limits=limits,
        num_threads=num_threads,
    )
    logger.info("weights read", extra={"seconds": round(time.monotonic() - began, 1)})
    has_own_threads = decoder.traits.has_own_threads
    torch.set_num_threads(1 if has_own_threads else num_threads)
    if has_own_threads:
        library().num_threads = num_threads
    provider = "native" if has_own_threads else provider_on(chosen, kernels)
    ops = load_ops(provider, is_batch_invariant=is_batch_invariant)
    runner = start_runner(decoder, ops, limits, has_graphs=can_record(decoder))
    _refuse_not_finite(runner, directory.name, limits.max_num_batched_tokens)
    return runner


def _refuse_not_finite(runner: TorchRunner, name: str, max_num_batched_tokens: int) -> None:
    """Raise `StartupError` if the model's logits are NaN or infinite."""
    steps = first_steps(
        max_num_tokens=min(max_num_batched_tokens, runner.max_seq_len),
        vocab_size=runner.vocab_size,
        block_size=runner.block_size,
        groups=runner.groups,
    )
    if all(runner.launch(step).result() != [NO_TOKEN] for step in steps):
        return
    runner.close()
    is_float16 = runner.decoder.dtype == torch.float16
    raise StartupError(
        f"{name} computes NaN or infinite logits: "
        + ("its numbers exceed the range of float16 (use --dtype bfloat16), or " * is_float16)
        + "its weights or its config.json are damaged"
    )


def load_decoder(
    directory: Path,
    *,
    dtype: str = "auto",
    weight_format: str = "auto",
    kv_dtype: str = "auto",
    kernels: str = "auto",
    is_batch_invariant: bool = False,
    device: torch.device,
    limits: RunnerLimits = DEFAULT_LIMITS,
    num_threads: int = 1,
) -> Decoder:
    """Load the weights, through transformers if there is no native decoder for the model.

    The context length of ``limits`` limits the memory for position tables. Raises `StartupError`;
    for a native model, limits that the model cannot have raise it before the weights are read.
    """
    config = read_json_config(directory)
    packed = _quant_format(weight_format)
    cache_dtype = _cache_dtype(kv_dtype, device)
    source = open_source(directory, packed)
    served, stored_as = _formats(config, source, device, dtype, packed)
    room = weight_room(
        config, source, device, dtype=dtype, weight_format=weight_format, kernels=kernels
    )
    with room_for_weights(room, device):
        if (spec := _spec(config, source, device, kernels)) is not None:
            limits.check(spec, cache_dtype or served, provider_on(device, kernels))
            return _native_decoder(
                spec,
                source,
                _Compute(kernels, is_batch_invariant, device, num_threads),
                stored_as,
                served,
                cache_dtype,
                limits.longest(spec.max_seq_len),
            )
        _refuse_foreign(config, packed)
        # transformers takes seconds to import, and native models do not need it.
        from worker.model.decoders import fallback

        choose = partial(
            foreign_ops,
            kernels,
            device,
            block_size=limits.block_size,
            is_batch_invariant=is_batch_invariant,
        )
        return fallback.load(
            source,
            dtype=served,
            device=device,
            ops=lambda shape: choose(cache_dtype or shape.dtype, head_dims=shape.head_dims),
            cache_dtype=cache_dtype,
        )


def sequence_memory_of(
    directory: Path, num_tokens: int, *, kv_dtype: str = "auto", device: str = "auto"
) -> SequenceMemory:
    """The memory in the cache of a sequence of ``num_tokens``, without its weights being read.

    Raises `StartupError` if the model supports a shorter context, or has no decoder of our own.
    """
    chosen, config = device_named(device), read_json_config(directory)
    source = open_source(directory, has_data=False)
    spec = _spec(config, source, chosen, "auto")
    if spec is None:
        raise StartupError(
            f"{directory.name} runs through transformers, whose caches are only known to a worker: "
            "it logs kv_cache_sequences at its start"
        )
    served, _ = _formats(config, source, chosen, "auto", None)
    return sequence_memory(
        spec,
        RunnerLimits(max_seq_len=num_tokens).longest(spec.max_seq_len),
        _cache_dtype(kv_dtype, chosen) or served,
        provider_on(chosen, "auto"),
    )


def _spec(
    config: dict[str, Any], source: TensorSource, device: torch.device, kernels: str
) -> ModelSpec | None:
    """What our own decoders run; None: they do not know the model."""
    if (spec := spec_of(config)) is None:
        return None
    spec = with_stored_predictor(as_stored(spec, source), source)
    if kernels == "reference" or provider_on(device, kernels) != "reference":
        spec = replace(spec, predictor=None)
    return spec


def rehearse(directory: Path, weight_format: str = "auto") -> str:
    """How a worker runs the model, as the end of a sentence.

    Raises the `StartupError` with which `load_decoder` would refuse it, as far as large weights
    need not be read for that.
    """
    config = read_json_config(directory)
    packed = _quant_format(weight_format)
    source = open_source(directory, packed, has_data=False)
    if (spec := spec_of(config)) is not None:
        without_data = Target(torch.float32, torch.device("meta"))
        stored_as = format_of(config, source, packed)
        WeightReader(source, as_stored(spec, source), stored_as, without_data).rehearse()
        return "natively"
    _refuse_foreign(config, packed)
    from worker.model.decoders import fallback

    is_small = _num_bytes(directory) <= _MAX_REHEARSED_BYTES
    fallback.rehearse(open_source(directory, has_data=is_small), reads_weights=is_small)
    if is_small:
        return "through transformers"
    return "through transformers, if its attention does, which a worker finds out at its start"


def _num_bytes(directory: Path) -> int:
    """The size of the weights. Files that an index names and that do not exist are refused where
    they are read."""
    return sum(path.stat().st_size for path in stored_in(directory) if path.exists())


def _refuse_foreign(config: dict[str, Any], packed: QuantFormat | None) -> None:
    """Raise `StartupError` for weights that only our own decoders read."""
    if packed is not None:
        raise StartupError(f"weight_format {packed}: only native families have packed weights")
    if (method := method_of(config)) is not None:
        raise StartupError(
            f"the model's weights are quantized with {method}, which is only supported for "
            "families with a decoder of our own: use the model in its original precision"
        )


def device_named(name: str) -> torch.device:
    """The device of the setting ``device``. Raises `StartupError` if torch does not have it."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise StartupError(f"there is no device {name!r}") from None
    if device.type not in ("cpu", "cuda"):
        raise StartupError(f"device {name!r} is not supported")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise StartupError(f"torch finds no device {name!r}")
    return device


def _free_bytes(device: torch.device) -> int:
    return free_bytes() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]


class WeightRoom(NamedTuple):
    """The memory that the weights of a model need on a device, and the free memory there."""

    needed: int
    free: int
    remedy: str
    """What to do if that is too little."""


def weight_room(
    config: dict[str, Any],
    source: TensorSource,
    device: torch.device,
    *,
    dtype: str = "auto",
    weight_format: str = "auto",
    kernels: str = "auto",
) -> WeightRoom:
    """The room for the weights in these formats, before they are read. Raises `StartupError`."""
    served, stored_as = _formats(config, source, device, dtype, _quant_format(weight_format))
    is_native = config.get("model_type") in FAMILIES
    if not is_native:  # transformers' modules have floats
        stored_as = Dense()
    provider = provider_on(device, kernels)
    is_on_cpu = device.type == "cpu" and code_bits_of(kernels) is not None
    target = Target(served, device, "native" if is_on_cpu else provider)
    needed = stored_as.num_bytes(source, target)
    bytes_per_weight = needed / max(1, sum(math.prod(source.shape(name)) for name in source.names))
    can_pack = is_native and stored_as.name == Dense.name
    return WeightRoom(
        needed,
        _free_bytes(device),
        memory_remedy(device, bytes_per_weight, can_pack=can_pack),
    )


def memory_remedy(device: torch.device, bytes_per_weight: float, *, can_pack: bool) -> str:
    """The options that make weights smaller, and what else helps."""
    remedies = []
    if can_pack and device.type == "cpu" and bytes_per_weight > BLOCKS["q4_1"].bytes_per_weight:
        remedies.append("--weight-format q4_1")
    if bytes_per_weight > torch.bfloat16.itemsize:
        remedies.append("--dtype bfloat16")
    place = "machine or container" if device.type == "cpu" else "GPU"
    return f"try {', '.join([*remedies, 'a smaller --model'])}, or a {place} with more memory"


@contextmanager
def room_for_weights(room: WeightRoom, device: torch.device) -> Iterator[None]:
    """Load weights into the memory of a device.

    Raises `StartupError` if they do not fit: at once, or when no memory is left, because loading
    takes more than the weights.
    """
    needed, free, remedy = room
    need = f"the weights need {readable_size(needed)} of memory on {device}"
    if needed > free:
        raise StartupError(f"{need}, but {readable_size(free)} are free: {remedy}")
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise StartupError(
            f"{need}, and more while they are loaded, but {readable_size(free)} were free: {remedy}"
        ) from error


@dataclass(frozen=True, slots=True)
class _Compute:
    """The kernels, device and threads that run the model."""

    kernels: str
    is_batch_invariant: bool
    device: torch.device
    num_threads: int


def _native_decoder(
    spec: ModelSpec,
    source: TensorSource,
    compute: _Compute,
    stored_as: Format,
    dtype: torch.dtype,
    cache_dtype: torch.dtype | None,
    max_seq_len: int,
) -> Decoder:
    """A decoder of a native family."""
    provider = provider_on(compute.device, compute.kernels)
    is_fused = provider == "reference" and can_be_native(
        compute.kernels, partial(fused.why_not, spec, dtype, compute.device)
    )
    if not is_fused:  # no other decoder predicts
        spec = replace(spec, predictor=None)
    weights = WeightReader(
        source,
        spec,
        stored_as,
        Target(dtype, compute.device, "native" if is_fused else provider),
        vector_dtype=torch.float32 if is_fused else dtype,
    )
    if is_fused and stored_as.name == Gguf.name:
        # The library packs with threads of its own. Those of torch would have small operations
        # alone, and take the cores from it as they spin for the next one.
        torch.set_num_threads(1)
    if is_fused:
        return fused.FusedDecoder(
            spec,
            weights,
            max_seq_len,
            dtype=dtype,
            num_threads=compute.num_threads,
            cache_dtype=cache_dtype,
            code_bits=code_bits_of(compute.kernels) or 8,
        )
    ops = load_ops(provider, is_batch_invariant=compute.is_batch_invariant)
    decoder = StackDecoder(spec, read_weights(weights), ops, max_seq_len, cache_dtype)
    if provider == "triton" and not decoder.has_own_kernels:
        logger.warning("some operations of this model have no GPU kernel: steps are slow")
    return decoder


def fingerprint(directory: Path, weight_format: str = "auto") -> str:
    """A digest that identifies weights and tokenizer, computed in milliseconds: 32 hexadecimal
    digits.

    It covers the weight format, config.json, tokenizer.json, and, of each safetensors file (and of
    GGUF files if weights are quantized or there are no others), the size and 64 evenly spaced
    samples of 4 KiB including the start of the header. Two fine-tunes of the same model differ
    throughout; a few weights changed by hand may go unnoticed. Raises `StartupError` if there are
    no weights.
    """
    digest = hashlib.sha256(weight_format.encode())
    for name in ("config.json", "tokenizer.json"):
        path = directory / name
        digest.update(hashlib.sha256(path.read_bytes() if path.exists() else b"").digest())
    packed = gguf_files(directory) if weight_format != "auto" else []
    if packed:  # older workers took norms and biases from the file's conversion
        digest.update(b"all tensors of the file")
    for path in dict.fromkeys([*stored_in(directory), *packed]):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for sample in range(_SAMPLES):
                file.seek(sample * size // _SAMPLES)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32]


def refuse_foreign_kernels() -> None:
    """Raise `StartupError` if another distribution provides a package named ``kernels``, and
    Warren's has this name, too, because transformers would import Warren's in its place.

    A wheel of Warren installs ``warren.kernels``.
    """
    if load_ops.__module__ != "kernels.providers":
        return
    try:
        version = metadata.version("kernels")
    except metadata.PackageNotFoundError:
        return
    raise StartupError(
        f"the distribution kernels {version} is installed, and Warren runs from a checkout with a "
        "package of the same name: uninstall it, or install Warren without --editable"
    )


def _formats(
    config: dict[str, Any],
    source: TensorSource,
    device: torch.device,
    dtype: str,
    packed: QuantFormat | None,
) -> tuple[torch.dtype, Format]:
    """The data type that is served, and the format of the weights."""
    stored_as = format_of(config, source, packed)
    return stored_as.dtype(source, device) if dtype == "auto" else _dtype(dtype), stored_as


def _quant_format(name: str) -> QuantFormat | None:
    known: tuple[QuantFormat, ...] = get_args(QuantFormat)
    if name != "auto" and name not in known:
        raise StartupError(f"weight_format {name!r} is not one of auto, {', '.join(known)}")
    return next((one for one in known if one == name), None)


def _cache_dtype(name: str, device: torch.device) -> torch.dtype | None:
    """The type of keys and values; None: that of activations."""
    if name == "auto":
        return None
    if name != "float8":
        raise StartupError(f"kv_dtype {name!r} is not one of auto, float8")
    if device.type != "cpu":
        raise StartupError(f"kv_dtype float8 is for the CPU, not for {device.type}: use auto")
    return torch.float8_e4m3fn


def _dtype(name: str) -> torch.dtype:
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in known:
        raise StartupError(f"dtype {name!r} is not one of auto, {', '.join(known)}")
    return known[name]
