"""From a model's directory to a runner that is ready to compute."""

import hashlib
import logging
import os
from importlib import metadata
from pathlib import Path

import torch

from kernels.providers import load_ops
from kernels.quantized import QuantFormat
from shared.errors import StartupError
from worker.model import fused
from worker.model.checkpoint import Checkpoint, weight_files
from worker.model.config import decoder_config, is_native, read_json_config
from worker.model.decoder import NativeDecoder
from worker.model.interface import Decoder
from worker.model.kv_cache import BlockShape, KVCache, num_blocks_for
from worker.model.runner import TorchRunner
from worker.model.weights import read_weights

logger = logging.getLogger(__name__)

_SAMPLES = 64
_SAMPLE_BYTES = 4096


def load_runner(
    directory: Path,
    *,
    dtype: str = "auto",
    weight_format: str = "auto",
    kernels: str = "auto",
    device: str = "auto",
    block_size: int = 16,
    max_num_seqs: int = 64,
    max_num_batched_tokens: int = 512,
    max_seq_len: int | None = None,
    kv_cache_bytes: int | None = None,
    compute_threads: int | None = None,
) -> TorchRunner:
    """Load config.json and safetensors from ``directory`` and allocate the KV cache.

    ``dtype`` is auto (as the weights are stored), float32, bfloat16 or float16; ``weight_format``
    is auto (that same type), q8_0, q4_0 or q4_1; ``kernels`` is auto (native where they can compute
    this model), native or reference; ``device`` is auto, cpu, cuda or cuda:N. Without
    ``kv_cache_bytes`` the cache takes a share of the free memory, but no more than ``max_num_seqs``
    sequences of ``max_seq_len`` can fill. Without ``max_seq_len`` a sequence may be as long as the
    model and the cache allow. No code of the checkpoint is run. Raises `StartupError` saying what
    cannot work.
    """
    refuse_foreign_kernels()
    num_threads = compute_threads or len(os.sched_getaffinity(0))
    decoder = load_decoder(
        directory,
        dtype=dtype,
        weight_format=weight_format,
        kernels=kernels,
        device=_device(device),
        max_seq_len=max_seq_len,
        num_threads=num_threads,
    )
    longest = max_seq_len or decoder.max_seq_len
    if longest > decoder.max_seq_len:
        raise StartupError(f"max_seq_len is {longest}, the model's is {decoder.max_seq_len}")
    block = BlockShape(
        decoder.num_layers, block_size, decoder.num_kv_heads, decoder.head_dim, decoder.dtype
    )
    num_blocks = num_blocks_for(
        block,
        decoder.device,
        kv_cache_bytes=kv_cache_bytes,
        max_num_seqs=max_num_seqs,
        max_seq_len=longest,
    )
    num_slots = num_blocks * block_size
    if max_seq_len is not None and max_seq_len > num_slots:
        raise StartupError(f"max_seq_len is {max_seq_len}, the KV cache holds {num_slots} tokens")
    kv_cache = KVCache.allocate(block, num_blocks, decoder.device)
    if isinstance(decoder, fused.FusedDecoder):
        decoder.commit(kv_cache)
        # What is left to torch is short, and its threads would be in the way of the decoder's.
        torch.set_num_threads(1)
    else:
        torch.set_num_threads(num_threads)
    return TorchRunner(
        decoder,
        kv_cache,
        load_ops(),
        max_seq_len=min(longest, num_slots),
        max_num_batched_tokens=max_num_batched_tokens,
    )


def load_decoder(
    directory: Path,
    *,
    dtype: str = "auto",
    weight_format: str = "auto",
    kernels: str = "auto",
    device: torch.device,
    max_seq_len: int | None = None,
    num_threads: int = 1,
) -> Decoder:
    """Load the weights, through transformers where the family has no decoder of its own.

    ``max_seq_len`` spares what longer contexts would need. Raises `StartupError`.
    """
    config = read_json_config(directory)
    checkpoint = Checkpoint(directory)
    wanted = checkpoint.dtype if dtype == "auto" else _dtype(dtype)
    if not is_native(config):
        if weight_format != "auto":
            raise StartupError(
                f"weight_format {weight_format}: only the Llama family has packed weights"
            )
        # transformers takes seconds to import and no native family needs it.
        from worker.model import foreign

        return foreign.load(directory, dtype=wanted, device=device, ops=load_ops())
    native = decoder_config(config)
    longest = min(max_seq_len or native.max_seq_len, native.max_seq_len)
    packed = _quant_format(weight_format)
    if packed is not None and dtype == "auto":
        wanted = torch.bfloat16
    is_fused = kernels != "reference" and _is_fused(kernels, fused.why_not(native, wanted, device))
    vectors = torch.float32 if is_fused else wanted
    weights = read_weights(checkpoint, native, packed or wanted, device, vector_dtype=vectors)
    if is_fused:
        return fused.FusedDecoder(native, weights, longest, dtype=wanted, num_threads=num_threads)
    return NativeDecoder(native, weights.dequantized(wanted), load_ops(), longest)


def _is_fused(kernels: str, obstacle: str | None) -> bool:
    if kernels == "native" and obstacle is not None:
        raise StartupError(obstacle)
    if obstacle is not None:
        logger.warning("reference kernels", extra={"reason": obstacle})
    return obstacle is None


def fingerprint(directory: Path, weight_format: str = "auto") -> str:
    """Tell weights and tokenizer apart from others, in milliseconds: 32 hexadecimal digits.

    Covers the weight format, config.json, tokenizer.json, and of each safetensors file, and of
    GGUF files where weights are packed, its size and 64 samples of 4 KiB spread evenly, the
    header's beginning among them. Two fine-tunes of one model differ throughout; a file with a few
    weights changed by hand may go unnoticed. Raises `StartupError` where there are no weights.
    """
    digest = hashlib.sha256(weight_format.encode())
    for name in ("config.json", "tokenizer.json"):
        path = directory / name
        digest.update(hashlib.sha256(path.read_bytes() if path.exists() else b"").digest())
    packed = sorted(directory.glob("*.gguf")) if weight_format != "auto" else []
    for path in [*weight_files(directory), *packed]:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for sample in range(_SAMPLES):
                file.seek(sample * size // _SAMPLES)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32]


def refuse_foreign_kernels() -> None:
    """Raise `StartupError` where another distribution provides the package ``kernels``.

    transformers would use it, and Python would take one for the other.
    """
    try:
        version = metadata.version("kernels")
    except metadata.PackageNotFoundError:
        return
    raise StartupError(
        f"the distribution kernels {version} is installed; its package hides Warren's of the same "
        "name: uninstall it"
    )


def _quant_format(name: str) -> QuantFormat | None:
    known: dict[str, QuantFormat] = {"q8_0": "q8_0", "q4_0": "q4_0", "q4_1": "q4_1"}
    if name != "auto" and name not in known:
        raise StartupError(f"weight_format {name!r} is not one of auto, {', '.join(known)}")
    return known.get(name)


def _dtype(name: str) -> torch.dtype:
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in known:
        raise StartupError(f"dtype {name!r} is not one of auto, {', '.join(known)}")
    return known[name]


def _device(name: str) -> torch.device:
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
