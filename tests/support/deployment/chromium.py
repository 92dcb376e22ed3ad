"""A headless Chromium that belongs to the test session: a start takes longer than most tests."""

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_START_TIMEOUT_S = 120


def _program() -> str:
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("needs chromium")
    return program


@contextmanager
def running_chromium() -> Iterator[str]:
    """Run a browser; yields the address at which playwright connects to it. Each connection has its
    own contexts, which end with it."""
    config = {"executablePath": _program(), "args": ["--no-sandbox", "--disable-gpu"]}
    with tempfile.TemporaryDirectory(prefix="warren-chromium-") as directory:
        file = Path(directory) / "launch.json"
        file.write_text(json.dumps({**config, "headless": True, "host": "127.0.0.1"}))
        command = [sys.executable, "-m", "playwright", "launch-server", "--browser=chromium"]
        with subprocess.Popen(
            [*command, f"--config={file}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,
        ) as server:
            assert server.stdout is not None
            try:
                is_there, *_ = select.select([server.stdout], [], [], _START_TIMEOUT_S)
                address = server.stdout.readline().decode().strip() if is_there else ""
                assert address.startswith("ws://"), f"Chromium does not start: {address}"
                yield address
            finally:
                # The server ends the browser, and closes its output when it ends itself.
                os.killpg(server.pid, signal.SIGTERM)
                server.stdout.read()


@pytest.fixture(scope="session")
def chromium() -> Iterator[str]:
    """The address of the session's browser."""
    with running_chromium() as address:
        yield address
