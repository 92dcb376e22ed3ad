"""A pgbouncer before the PostgreSQL server of the test session."""

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support.deployment.processes import START_TIMEOUT_S, free_port

_CONFIG = """
[databases]
* = host={host} port={port}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {own_port}
unix_socket_dir =
logfile = {directory}/log
auth_type = trust
auth_file = {directory}/users
pool_mode = transaction
default_pool_size = 4
max_client_conn = 200
"""


@contextmanager
def running_pgbouncer(url: str) -> Iterator[str]:
    """Pool the transactions of the database at ``url``; yields the URL of the pool."""
    program = shutil.which("pgbouncer", path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None:
        pytest.skip("pgbouncer is not installed")
    server, own_port = urlsplit(url), free_port()
    # pgbouncer refuses to run as root.
    user = "postgres" if os.geteuid() == 0 else None
    with tempfile.TemporaryDirectory(prefix="warren-pgbouncer-") as name:
        config = Path(name) / "pgbouncer.ini"
        config.write_text(
            _CONFIG.format(
                host=server.hostname, port=server.port, own_port=own_port, directory=name
            )
        )
        (Path(name) / "users").write_text(f'"{server.username}" ""\n')
        if user is not None:
            os.chown(name, pwd.getpwnam(user).pw_uid, -1)
        process = subprocess.Popen([program, "-q", config], user=user, cwd="/")
        try:
            deadline = time.monotonic() + START_TIMEOUT_S
            while not _takes_connections(own_port):
                assert process.poll() is None, (Path(name) / "log").read_text()
                assert time.monotonic() < deadline, (Path(name) / "log").read_text()
                time.sleep(0.05)
            yield f"postgresql://{server.username}@127.0.0.1:{own_port}{server.path}"
        finally:
            process.kill()
            process.wait()


def _takes_connections(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True
