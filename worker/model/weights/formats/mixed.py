"""Checkpoints whose modules are packed in different formats: compressed-tensors' groups
(llm-compressor), and the layers of TensorRT Model Optimizer's mixed precision."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Self

from kernels.providers import Provider
from shared.errors import StartupError
from worker.model.weights.formats.coded import (
    FLOATS,
    Coded,
    CodedMatrices,
    declared,
    method_of,
)
from worker.model.weights.formats.compressed import CompressedTensors
from worker.model.weights.formats.device_weights import DeviceMatrix
from worker.model.weights.formats.fp8 import Fp8
from worker.model.weights.formats.interface import Target
from worker.model.weights.formats.mxfp4 import Mxfp4
from worker.model.weights.formats.nvfp4 import Nvfp4
from worker.model.weights.sources import TensorSource
from worker.model.weights.weight import Weight

_PATTERN = "re:"
_ANY_MATRIX = "Linear"
"""The class of every module whose matrix is packed."""
_OF_GROUPS: tuple[type[Coded], ...] = (Mxfp4, Nvfp4, CompressedTensors)
_OF_MATRICES = ("num_bits", "strategy", "group_size", "block_structure")
"""What a group says of its weights on which the reading of a matrix depends."""
_OF_LAYERS: tuple[type[Coded], ...] = (Nvfp4, Fp8)


class Mixed(CodedMatrices):
    """Each matrix is read in the format of its module."""

    name: ClassVar[str] = "mixed"
    kinds: ClassVar[str] = "compressed-tensors' `config_groups`, ModelOpt's `MIXED_PRECISION`"
    packed_for: ClassVar[frozenset[Provider]] = frozenset({"native", "triton"})
    bytes_per_weight: ClassVar[str] = "those of each format"
    numerics: ClassVar[str] = "fused integers float8"

    def __init__(self, formats: Mapping[str, Coded]) -> None:
        """The formats by their targets: names of modules, which include the modules within,
        patterns of such names after ``re:``, and ``Linear``. Names count before patterns, and
        ``Linear`` counts last. Raises `StartupError` for a pattern that cannot be read."""
        self._formats = dict.fromkeys(formats.values())
        self._named = {target: one for target, one in formats.items() if not _is_pattern(target)}
        self._patterns = [
            (_compiled(target), one) for target, one in formats.items() if _is_pattern(target)
        ]
        self._found: dict[str, Coded | None] = {}

    @classmethod
    def detect(cls, config: Mapping[str, Any], source: TensorSource) -> Self | None:
        described, method = declared(config) or {}, method_of(config)
        if method == "modelopt" and described.get("quant_algo") == "MIXED_PRECISION":
            return cls(dict(_of_layers(described.get("quantized_layers") or {}, source)))
        if method != "compressed-tensors":
            return None
        groups = [
            group
            for group in (described.get("config_groups") or {}).values()
            if group.get("weights")
        ]
        layouts = {
            (
                group.get("format") or described.get("format"),
                *(str(group["weights"].get(key)) for key in _OF_MATRICES),
            )
            for group in groups
        }
        if len(layouts) < 2:
            return None
        formats: dict[str, Coded] = {}
        for group in groups:
            stored_as = _of_group(described, group, source)
            for target in group.get("targets") or ():
                formats.setdefault(target, stored_as)
        return cls(formats)

    def is_coded(self, source: TensorSource, stem: str) -> bool:
        """Raises `StartupError` for codes in no format."""
        if (found := self._format_of(stem)) is not None:
            return found.is_coded(source, stem)
        plain = f"{stem}weight"
        is_plain = source.has(plain) and source.kind(plain) in FLOATS
        if not is_plain and any(source.has(f"{plain}{ending}") for ending in ("", "_packed")):
            raise StartupError(f"config.json names no format for {plain}, which is packed")
        return False

    def shape(self, source: TensorSource, stem: str) -> tuple[int, int]:
        return self._required(stem).shape(source, stem)

    def block_format(self, source: TensorSource, stem: str) -> str | None:
        return self._required(stem).block_format(source, stem)

    def codes(self, source: TensorSource, stem: str, target: Target) -> DeviceMatrix | None:
        return self._required(stem).codes(source, stem, target)

    def device_bytes(self, source: TensorSource, stem: str) -> float | None:
        return self._required(stem).device_bytes(source, stem)

    def stem(self, name: str) -> str | None:
        for one in self._formats:
            stem = one.stem(name)
            if stem is not None and self._format_of(stem) is one:
                return stem
        return None

    def coded(self, source: TensorSource, stem: str, target: Target) -> Weight:
        return self._required(stem).coded(source, stem, target)

    def _required(self, stem: str) -> Coded:
        """The format of a matrix of codes."""
        found = self._format_of(stem)
        assert found is not None
        return found

    def _format_of(self, stem: str) -> Coded | None:
        """The format of the matrix with this name, if its module is a target."""
        if stem not in self._found:
            self._found[stem] = self._targeted(stem.removesuffix("."))
        return self._found[stem]

    def _targeted(self, module: str) -> Coded | None:
        around = module
        while around:
            if around in self._named:
                return self._named[around]
            around = around.rpartition(".")[0]
        matching = (one for pattern, one in self._patterns if pattern.match(module))
        return next(matching, self._named.get(_ANY_MATRIX))


def _is_pattern(target: str) -> bool:
    return target.startswith(_PATTERN)


def _compiled(target: str) -> re.Pattern[str]:
    try:
        return re.compile(target.removeprefix(_PATTERN))
    except re.error as error:
        raise StartupError(
            f"the quantization's target {target!r} cannot be read: {error}"
        ) from None


def _of_group(
    described: Mapping[str, Any], group: Mapping[str, Any], source: TensorSource
) -> Coded:
    """The format of a group. Raises `StartupError` if it is not supported."""
    alone = {"quantization_config": {**described, "config_groups": {"group": group}}}
    return next(one for kind in _OF_GROUPS if (one := kind.detect(alone, source)) is not None)


def _of_layers(
    layers: Mapping[str, Mapping[str, Any]], source: TensorSource
) -> Iterator[tuple[str, Coded]]:
    """The modules with their formats, of which modules of the same algorithm share one. Raises
    `StartupError` for an algorithm that is not supported."""
    formats: dict[Any, Coded] = {}
    for module, described in layers.items():
        algorithm = described.get("quant_algo")
        if algorithm not in formats:
            alone = {"quantization_config": {**described, "quant_method": "modelopt"}}
            kinds = (kind.detect(alone, source) for kind in _OF_LAYERS)
            found = next((one for one in kinds if one is not None), None)
            if found is None:
                raise StartupError(
                    f"the weights of {module} are quantized with modelopt ({algorithm}), which is "
                    "not supported"
                )
            formats[algorithm] = found
        yield module, formats[algorithm]
