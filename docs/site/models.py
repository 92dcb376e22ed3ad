"""The tables of ``docs/models.md``: known models, families, and formats of weights."""

import json
import re
import sys
from collections.abc import Iterable, Sequence
from typing import get_args

import msgspec
import torch

from bench.options import RESULTS
from bench.quality import FLOAT8, INT16, Quality
from kernels.native.packed import PACKED_BLOCKS
from kernels.native.paged_attention import CACHE_TYPES
from kernels.providers import Provider
from kernels.quantized import BLOCKS, QuantFormat
from shared.settings import WorkerSettings, variable
from worker.checkpoints.architectures import architectures
from worker.checkpoints.catalogue import MODELS
from worker.model.families import FAMILIES
from worker.model.provision import provider_on
from worker.model.weights.formats.blocks import Gguf
from worker.model.weights.formats.device_weights import DEVICE_BLOCKS
from worker.model.weights.formats.interface import Format
from worker.model.weights.formats.registry import FORMATS

_CPU, _GPU = torch.device("cpu"), torch.device("cuda")
_NATIVE = "native C++ kernels"
_DIGITS = 12
"""The digits of a commit in the table of known models."""
_EXPANDED, _REFUSED = "expanded to floats", "refused through transformers"
_ROUNDED = {
    FLOAT8: ", and [keys and values](concepts/memory.md#blocks) in float8",
    INT16: ", activations of 16 bits",
}
_KERNELS = {"native": _NATIVE, "triton": "Triton kernels", "reference": "reference kernels"}


def known_models() -> str:
    rows = []
    for name, model in MODELS.items():
        runs = "natively" if model.family in FAMILIES else "through transformers"
        is_wheel = not isinstance(model.source, str)
        source = "a wheel on PyPI" if is_wheel else f"`{model.source}`"
        if model.revision is not None:
            source += f" at `{model.revision[:_DIGITS]}`"
        license_ = f"{model.license}, to be accepted" if model.is_gated else model.license
        rows.append([f"`{name}`", model.size, runs, license_, source])
    return _table(["Name", "Parameters", "Runs", "License", "Source"], rows)


def families() -> str:
    """Which decoder runs each family, with the known names of its models."""
    gpu = _KERNELS[provider_on(_GPU, "auto")]
    ways = [
        ["natively", f"{_NATIVE}, a single call for each step", gpu],
        ["through transformers", *(f"attention in {kernels}" for kernels in (_NATIVE, gpu))],
    ]
    others = sorted({model.family for model in MODELS.values()} - set(FAMILIES))
    rows = [[f"`{family}`", _names(family), "natively"] for family in FAMILIES]
    rows += [[f"`{family}`", _names(family), "through transformers"] for family in others]
    rows.append(["most other causal language models of transformers", "", "through transformers"])
    return "\n\n".join(
        [
            _table(["Runs", "CPU", "GPU"], ways),
            _table(["`model_type`", "Known names", "Runs"], rows),
        ]
    )


def formats() -> str:
    """What each value of the settings for weights takes, and which kernels run it."""
    gpu = _KERNELS[provider_on(_GPU, "auto")]
    rows = [
        [name, f"`{variable('dtype')}={name}`", f"{dtype.itemsize}", _on_cpu(dtype), gpu]
        for name, dtype in ((name, getattr(torch, name)) for name in _values("dtype"))
    ]
    quantized: Iterable[QuantFormat] = get_args(QuantFormat)
    assert set(quantized) == set(_values("weight_format"))
    rows += [
        [
            name,
            f"`{variable('weight_format')}={name}`",
            f"{BLOCKS[name].bytes_per_weight:.2f}",
            f"{_NATIVE}; {_REFUSED}",
            gpu if name in DEVICE_BLOCKS else _EXPANDED,
        ]
        for name in quantized
    ]
    rows += [
        [
            f"{kind.name}: {kind.kinds}",
            f"`{variable('model')}=FILE.gguf`" if kind is Gguf else "detected",
            kind.bytes_per_weight,
            _packed(kind, "native", _NATIVE),
            _packed(kind, "triton", gpu),
        ]
        for kind in FORMATS
    ]
    rows.append(["other quantizations", "", "", "refused", "refused"])
    return _table(["Format", "Setting", "Bytes per weight", "CPU", "GPU"], rows)


def files_read_as_they_are() -> str:
    """The architectures of GGUF files that are read as they are."""
    rows = [
        [f"`{one.name}`", str(sys.modules[one.read.__module__].__doc__).removesuffix(".")]
        for one in architectures()
    ]
    return _table(["`general.architecture`", "Models"], rows)


def blocks() -> str:
    """The formats of GGUF files."""
    gpu = _KERNELS[provider_on(_GPU, "auto")]
    rows = [
        [
            name.upper(),
            f"{size.bytes_per_weight:.2f}",
            _NATIVE if name in PACKED_BLOCKS else _EXPANDED,
            gpu if name in DEVICE_BLOCKS else _EXPANDED,
        ]
        for name, size in BLOCKS.items()
    ]
    return _table(["Type", "Bytes per weight", "CPU", "GPU"], rows)


def quality() -> str:
    """What each format costs, as `bench.quality` measured it."""
    content = json.loads((RESULTS / "quality.json").read_text())
    rows = [
        [
            _rounded(row.weights),
            f"{row.perplexity:.2f}",
            f"{row.agreement.kl_mean:.5f}",
            f"{row.agreement.kl_p99:.4f}",
            f"{100 * row.agreement.top1:.1f} %",
        ]
        for row in msgspec.convert(content["rows"], list[Quality])
    ]
    headings = ["Format", "Perplexity", "KL from float32", "KL, 99th percentile"]
    return _table([*headings, "Same best token as float32"], rows)


def _rounded(weights: str) -> str:
    """A format of `bench.quality`, with what is rounded beside the weights."""
    name, *rounding = weights.split("+")
    return "".join([name, *(_ROUNDED[one] for one in rounding)])


def _packed(kind: type[Format], provider: Provider, kernels: str) -> str:
    others = "expanded for transformers" if kind is Gguf else _REFUSED
    if kind is Gguf and provider == "triton":
        return f"see below; {others}"
    return f"{kernels if provider in kind.packed_for else _EXPANDED}; {others}"


def _names(family: str) -> str:
    return ", ".join(f"`{name}`" for name, model in MODELS.items() if model.family == family)


def _on_cpu(dtype: torch.dtype) -> str:
    return _NATIVE if dtype in CACHE_TYPES else _KERNELS[provider_on(_CPU, "auto")]


def _values(setting: str) -> list[str]:
    """The values of a setting, without ``auto``."""
    values = get_args(WorkerSettings.model_fields[setting].annotation)
    return [value for value in values if value != "auto"]


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (headings, *rows)]
    lines.insert(1, "|---" * len(headings) + "|")
    return re.sub("  +", " ", "\n".join(lines))
