"""The families whose decoder is ours: a module for each ``model_type``, found by its name.

A module has a function ``read``, from a `worker.model.config.Config` to a `ModelSpec` with the
names of its tensors. `spec_of` reads a configuration; all other models run through transformers'
modules, as far as they can.
"""

import importlib
import logging
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any

from worker.model.config import Config, NotNative
from worker.model.spec import ModelSpec

logger = logging.getLogger(__name__)

FAMILIES = tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))
"""The names of all families."""


def spec_of(config: Mapping[str, Any]) -> ModelSpec | None:
    """The computation of a model of this configuration; None, with the reason in the log, if the
    operations cannot compute it. Raises `StartupError` if the configuration of one of `FAMILIES` is
    malformed."""
    name = config.get("model_type")
    if name not in FAMILIES:
        return None
    read: Callable[[Config], ModelSpec] = importlib.import_module(f"{__name__}.{name}").read
    try:
        return read(Config(config))
    except NotNative as reason:
        logger.warning(
            "the model runs through transformers", extra={"family": name, "reason": str(reason)}
        )
        return None
