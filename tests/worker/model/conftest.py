"""Tiny models that several tests read."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from tests.support.models.tiny import write_tiny_model

TinyModels: TypeAlias = Callable[[str], tuple[Path, Any]]


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    """The directory and transformers' module of each family's model, which no test may change."""

    @cache
    def written(family: str) -> tuple[Path, Any]:
        directory = tmp_path_factory.mktemp(family)
        return directory, write_tiny_model(directory, family)

    return written
