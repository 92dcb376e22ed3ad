"""Fixtures of worker tests."""

from pathlib import Path

import pytest

from worker.text import Tokenizer


@pytest.fixture(scope="session")
def tokenizer(smollm2: Path) -> Tokenizer:
    """The real tokenizer of SmolLM2."""
    return Tokenizer.load(smollm2)
