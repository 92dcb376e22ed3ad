"""What all tests share: a quiet, equal environment, and the real model."""

import gc
import os
import signal
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

from shared.settings import PREFIX
from shared.telemetry import floods
from tests.support.deployment.broker import broker, own_broker, own_cluster, pytest_runtest_setup
from tests.support.deployment.chromium import chromium
from tests.support.deployment.forking.client import ForkServer
from tests.support.deployment.postgres import postgres
from tests.support.spans import spans

# Started once in a session, if it is registered here: a module that imports it starts its own.
__all__ = [
    "broker",
    "chromium",
    "own_broker",
    "own_cluster",
    "postgres",
    "pytest_runtest_setup",
    "spans",
]

gc.disable()  # until the tests are collected: imports leave hardly any garbage
# Before any test module imports torch or the hub's client, which read these once.
os.environ["OMP_NUM_THREADS"] = "1"  # the test processes share two cores, and OpenMP's threads spin
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"
# What a shell starts in the background ignores this signal, and so would all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
for _variable in [name for name in os.environ if name.startswith(PREFIX)]:
    if not _variable.startswith(f"{PREFIX}TEST_"):
        del os.environ[_variable]

with suppress(ImportError):  # machines that only run the GPU's tests may lack it, and hypothesis
    from tests.support.deployment.scheduling import pytest_xdist_make_scheduler

    __all__ += ["pytest_xdist_make_scheduler"]
with suppress(ImportError):
    from hypothesis import HealthCheck, settings

    # On a busy machine a single example may take any time.
    settings.register_profile("warren", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("warren")

# Gateways whose tests store nothing find no database.
os.environ[f"{PREFIX}DATA_DIR"] = str(Path(tempfile.gettempdir()) / f"warren-tests-{os.getpid()}")

_GC_THRESHOLDS = (20_000, 10, 20)
"""Rare collections: gateways leave much garbage, among much that stays."""
_PULL_TIMEOUT_S = 900
_LONGEST = (
    *("tests/system/", "tests/infra/", "tests/examples/", "tests/worker/", "tests/shared/"),
    *("tests/kernels/", "tests/docs/", "tests/cli/", "tests/bench/"),
)
"""What takes longest goes first, so that all test processes end at about the same time: the modules
of the gateway, which go last, are many and short."""


def pytest_sessionstart(session: pytest.Session) -> None:
    """Start the fork server of all test processes, before xdist starts these."""
    if not hasattr(session.config, "workerinput"):
        session.config.add_cleanup(ForkServer().close)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the tests; the first that asks for the model may have to download and convert it."""
    items.sort(key=lambda item: [not item.nodeid.startswith(path) for path in _LONGEST])
    users = [item for item in items if "smollm2" in getattr(item, "fixturenames", ())]
    for item in users[:1]:
        item.add_marker(pytest.mark.timeout(_PULL_TIMEOUT_S))


def pytest_collection_finish() -> None:
    """Spare the collections of garbage what was imported and collected, which stays."""
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
    gc.enable()


@pytest.fixture(autouse=True)
def _own_log_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no test use up the log lines of another test."""
    own = floods.Limiter(floods.write_summary, later=lambda _delay_s, _summarise: None)
    monkeypatch.setattr(floods, "LINES", own)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The directory of SmolLM2-135M-Instruct in the user's cache, pulled if it is not there."""
    from worker.checkpoints import store

    return store.pull("smollm2", lambda stage, done, total: None)
