"""Fixtures of worker tests."""

from contextlib import suppress
from pathlib import Path

import pytest

from worker.text import Tokenizer

_PATIENCE_S = 240.0


@pytest.fixture(autouse=True)
def _patient_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial of a constraint that waits for a core is not taken for a trial that hangs."""
    with suppress(ImportError):  # machines that only run the GPU's tests may lack llguidance
        for limit in ("_MAX_TRIAL_S", "_MAX_WAIT_S"):
            monkeypatch.setattr(f"shared.grammars.trials.{limit}", _PATIENCE_S)


@pytest.fixture(scope="session")
def tokenizer(smollm2: Path) -> Tokenizer:
    """The real tokenizer of SmolLM2."""
    return Tokenizer.load(smollm2)
