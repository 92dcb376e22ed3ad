"""Divides the tests among the test processes."""

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

_SHARE_DEPLOYMENTS = frozenset(
    f"tests/system/test_{name}.py"
    for name in ("chat", "command_line", "deployment", "openai_client")
)
"""The modules with deployments of the real model that last a session and take gigabytes."""


class Scheduling(LoadFileScheduling):  # type: ignore[misc]
    """A module runs in one test process, and in the same one all that share deployments."""

    def _split_scope(self, nodeid: str) -> str:
        module: str = super()._split_scope(nodeid)
        return "deployments" if module in _SHARE_DEPLOYMENTS else module


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling | None:
    """See xdist's hook of this name. Another ``--dist`` than the suite's is left to xdist."""
    return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None
