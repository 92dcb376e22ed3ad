"""A PostgreSQL server that belongs to the test session."""

import os
import pwd
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.support.deployment.processes import free_port

_START_TIMEOUT_S = 120
_USER = "warren"


def _programs() -> Path:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    if not found:
        pytest.skip("PostgreSQL is not installed")
    return found[-1]


class PostgresServer:
    """A server whose data survives ``kill``."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._port = free_port()
        self._password = secrets.token_hex(16)
        self._server: subprocess.Popen[bytes] | None = None
        # PostgreSQL refuses to run as root.
        self._user = "postgres" if os.geteuid() == 0 else None
        if self._user is not None:
            owner = pwd.getpwnam(self._user)
            os.chown(directory, owner.pw_uid, owner.pw_gid)
        self.run("initdb", "--auth=trust", f"--username={_USER}", "--no-sync", str(self._data))

    @property
    def url(self) -> str:
        """The URL of the server's first database."""
        return self.url_of("postgres")

    def url_of(self, database: str) -> str:
        return f"postgresql://{_USER}@127.0.0.1:{self._port}/{database}"

    def create_database(self, template: str = "template1") -> str:
        """Create a database as a copy of the database whose name or URL is ``template``; returns
        the URL of the copy."""
        name = f"test_{secrets.token_hex(8)}"
        place = ("-h127.0.0.1", f"-p{self._port}", f"-U{_USER}")
        self.run("createdb", *place, f"--template={template.rpartition('/')[2]}", name)
        return self.url_of(name)

    def start(self) -> None:
        """Start the server and wait until it takes connections."""
        place = [f"-p{self._port}", "-h127.0.0.1", f"-k{self._directory}"]
        options = [*place, "-cfsync=off", "-cautovacuum=off"]
        with (self._directory / "log").open("ab") as log:
            self._server = subprocess.Popen(
                [_programs() / "postgres", f"-D{self._data}", *options],
                user=self._user,
                stdout=log,
                stderr=log,
                cwd=self._directory,
                start_new_session=True,
            )
        deadline = time.monotonic() + _START_TIMEOUT_S
        while subprocess.run(
            [_programs() / "pg_isready", "-q", "-h127.0.0.1", f"-p{self._port}"], check=False
        ).returncode:
            assert self._server.poll() is None, (self._directory / "log").read_text()
            assert time.monotonic() < deadline, (self._directory / "log").read_text()
            time.sleep(0.05)

    def kill(self) -> None:
        """End the server and all its processes at once."""
        if self._server is not None:
            import psutil  # which machines that only run the GPU's tests may lack

            # Each of its processes has a group of its own, and holds the memory that all share.
            children: list[psutil.Process] = []
            with suppress(psutil.NoSuchProcess):
                children = psutil.Process(self._server.pid).children(recursive=True)
            self._server.kill()
            for child in children:
                with suppress(psutil.NoSuchProcess):
                    child.kill()
            psutil.wait_procs(children)
            self._server.wait()
            self._server = None

    def restart(self) -> None:
        """Kill and start it."""
        self.kill()
        self.start()

    def run(self, program: str, *args: str) -> None:
        """Run a program of PostgreSQL, in the server's directory and as its user."""
        subprocess.run(
            [_programs() / program, *args],
            check=True,
            user=self._user,
            cwd=self._directory,
            stdout=subprocess.DEVNULL,
        )

    @property
    def _data(self) -> Path:
        return self._directory / "data"


@contextmanager
def running_postgres() -> Iterator[PostgresServer]:
    """Run a server, and remove it with all its data afterwards."""
    directory = Path(tempfile.mkdtemp(prefix="warren-postgres-"))
    server = PostgresServer(directory)
    try:
        server.start()
        yield server
    finally:
        server.kill()
        shutil.rmtree(directory)


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """The session's server."""
    with running_postgres() as server:
        yield server
