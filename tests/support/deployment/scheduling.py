"""Divides the tests among the test processes."""

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

_SHARES_DEPLOYMENTS = "tests/system/smollm2/"
"""The package whose modules share deployments of the real model, which take gigabytes."""


class Scheduling(LoadFileScheduling):  # type: ignore[misc]
    """A module runs in a single test process, and modules that share deployments in the same
    process."""

    def _split_scope(self, nodeid: str) -> str:
        module: str = super()._split_scope(nodeid)
        is_shared = module.startswith(_SHARES_DEPLOYMENTS)
        return _SHARES_DEPLOYMENTS if is_shared else module


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling | None:
    """See xdist's hook of this name. Another ``--dist`` than the suite's is left to xdist."""
    return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None
