"""Layers that keep a state in place of the tokens before them: a file for each kind.

`recurrence_of` reads the weights of a layer's recurrence, which is a `Recurrent`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from worker.model.spec import DeltaNet, KimiDelta, Mamba, Mamba2, Recurrence, ShortConv
from worker.model.weights.recurrences.delta_net import read_delta_net
from worker.model.weights.recurrences.interface import LayerTensors, Recurrent
from worker.model.weights.recurrences.kimi_delta import read_kimi_delta
from worker.model.weights.recurrences.mamba import read_mamba
from worker.model.weights.recurrences.mamba2 import read_mamba2
from worker.model.weights.recurrences.short_conv import read_short_conv

_KINDS: Mapping[type, Callable[[Any, LayerTensors], Recurrent]] = {
    DeltaNet: read_delta_net,
    KimiDelta: read_kimi_delta,
    Mamba: read_mamba,
    Mamba2: read_mamba2,
    ShortConv: read_short_conv,
}


def recurrence_of(spec: Recurrence, tensors: LayerTensors) -> Recurrent:
    """The recurrence of a layer, with its weights. Raises `StartupError` as `LayerTensors` does."""
    return _KINDS[type(spec)](spec, tensors)
