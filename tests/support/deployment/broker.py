"""A RabbitMQ node or cluster that belongs to the tests, or the broker that the environment names.

A node shares nothing with other nodes of the machine: it has its own name, ports, data, and, alone
or with its cluster, its own cookie and port mapper. All of them are removed when the session ends.
"""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from yarl import URL

from tests.support.deployment.processes import free_port

ROOT = Path(__file__).parents[3]
INFRA = ROOT / "infra" / "rabbitmq"
URL_VARIABLE = "WARREN_TEST_AMQP_URL"
ROOT_VARIABLE = "WARREN_TEST_RABBITMQ_ROOT"
"""Of a directory with a Debian that has RabbitMQ 4: see infra/rabbitmq/with_rabbitmq4.sh."""
BREAKS_BROKER = "breaks_broker"

_START_TIMEOUT_S = 180
_STOP_TIMEOUT_S = 60
_TOOL_TIMEOUT_S = 150
_SCRIPTS = (Path("/usr/lib/rabbitmq/bin"), Path("/opt/rabbitmq/sbin"))
"""Debian's scripts in PATH require another user; the scripts behind them do not."""
_RABBITMQ4 = {
    # Denied by default from 4.3 on.
    "deprecated_features.permit.global_qos": "false",
    "deprecated_features.permit.transient_nonexcl_queues": "false",
}
_PRELOAD = (
    'os:unsetenv(\\"ERL_AFLAGS\\"),'
    'code:ensure_modules_loaded([list_to_atom(filename:basename(File,\\".beam\\"))||'
    "App<-[rabbit,rabbit_common,rabbitmq_prelaunch,ra,osiris,cuttlefish,ranch,mnesia,ssl,"
    "public_key,inets,xmerl,compiler,tools,observer_cli,syslog,jsx,syntax_tools,os_mon,stdlib],"
    'Dir<-[code:lib_dir(App)],is_list(Dir),File<-filelib:wildcard(Dir++\\"/ebin/*.beam\\")])'
)
"""Loading these modules at once halves the time of a start, which would load each by itself. The
node starts a virtual machine every minute to keep the port mapper alive. Without the variable, that
machine does not load the modules, too, which took it seconds of CPU time."""
_SETTLE = (
    # The write-ahead log begins its next file in the background, and then hands over the last file.
    "#{names := #{wal := Log, segment_writer := Writer}} = ra_system:fetch(quorum_queues),"
    "ra_log_wal:force_roll_over(Log), timer:sleep(1000), ra_log_segment_writer:await(Writer),"
    "[garbage_collect(Process) || Process <- processes()],"
)
_LIST_QUEUES = """
    Text = fun Text({resource, _, queue, Name}) -> Name;
               Text(Value) when is_binary(Value) -> Value;
               Text(Values) when is_list(Values) -> lists:join(",", lists:map(Text, Values));
               Text(Value) -> io_lib:format("~w", [Value]) end,
    Print = fun(Queue) ->
        io:format("~ts~n", [lists:join("\\t", [Text(Value) || {_, Value} <- Queue])]) end,
    lists:foreach(Print, rabbit_amqqueue:info_all(<<"warren">>, [COLUMNS]))
"""


class Broker:
    """A broker whose ``url`` is the operator's: for what a test does itself. Gateways, workers and
    publishers connect as their own users, so that each test also tests the permissions."""

    def __init__(self, url: str) -> None:
        self.url = url

    def url_of(self, user: str) -> str:
        """The URL of a user of infra/rabbitmq. All users share a password here."""
        if URL(self.url).user != "operator":
            pytest.skip(f"the broker of {URL_VARIABLE} does not have Warren's users")
        return str(URL(self.url).with_user(user))


class Family:
    """What the nodes of a cluster share: the directory with their cookie, the port mapper and the
    password of all users."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.mapper_port = free_port()
        self.password = secrets.token_hex(16)
        self._mapper: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the port mapper, unless that was done before."""
        if self._mapper is None:
            self._mapper = subprocess.Popen(
                ["epmd", "-port", str(self.mapper_port)],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def close(self) -> None:
        if self._mapper is not None:
            _kill_group(self._mapper)
            self._mapper = None


class RabbitNode(Broker):
    """A node with Warren's configuration. ``kill`` acts like a power cut; data survives it."""

    def __init__(
        self,
        directory: Path,
        definitions: str | None = None,
        *,
        family: Family | None = None,
        peer: str = "",
    ) -> None:
        """``definitions`` replace the shipped definitions, with their own passwords. ``peer`` is
        the name of a running node that it joins when it starts for the first time."""
        self._directory = directory
        self._definitions = definitions
        self._is_in_cluster = family is not None
        self._family = family or Family(directory)
        self._peer = peer
        self._root = os.environ.get(ROOT_VARIABLE)
        self._has_khepri = False
        self._port = free_port()
        self._distribution_port = free_port()
        self.name = f"warren-test-{self._port}@localhost"
        self._node: subprocess.Popen[bytes] | None = None
        password = self._family.password
        super().__init__(f"amqp://operator:{password}@127.0.0.1:{self._port}/warren")
        self._write_files()

    def start(self) -> None:
        """Start the node and wait until it takes connections."""
        self.launch()
        self.wait_started()
        if self._root is not None and not self._peer and not self._has_khepri:
            # Not earlier: before 4.1.4 an exchange is lost that is imported into Khepri after its
            # topic permissions (rabbitmq-server's pull request 14407).
            self.ctl("enable_feature_flag", "--opt-in", "khepri_db")
            self._has_khepri = True

    def launch(self) -> None:
        """Start the node."""
        self._family.start()
        self._node = self._spawn(*self._script("rabbitmq-server"), ERL_AFLAGS=f"-eval {_PRELOAD}")

    def wait_started(self) -> None:
        """Wait until the node takes connections."""
        assert self._node is not None
        deadline = time.monotonic() + _START_TIMEOUT_S
        may_fail = self._root is not None
        while not self._is_listening():
            if may_fail and self._node.poll() is not None:
                # Before 4.0.7 the first start after a kill fails where exclusive queues were left
                # in Khepri (rabbitmq-server's issue 13352).
                may_fail = False
                self.launch()
            assert self._node.poll() is None, f"the broker died at its start:\n{self.log}"
            assert time.monotonic() < deadline, f"the broker does not start:\n{self.log}"
            time.sleep(0.05)

    def stop(self) -> None:
        """Shut the node down."""
        if self._node is not None:
            self._signal(signal.SIGTERM)
            self._node.wait(_STOP_TIMEOUT_S)
            self._node = None

    def kill(self) -> None:
        """End the node at once."""
        if self._node is not None:
            with suppress(FileNotFoundError, ProcessLookupError):
                # Kill the virtual machine before the shell that started it and waits for it.
                self._signal(signal.SIGKILL)
                self._node.wait(_STOP_TIMEOUT_S)
            _kill_group(self._node)
            self._node = None

    def close(self) -> None:
        """Remove everything."""
        self.kill()
        self._family.close()

    def ctl(self, *args: str) -> str:
        """Run rabbitmqctl; returns what it prints."""
        return self._run("rabbitmqctl", *args)

    def queues(self, *args: str) -> str:
        """Run rabbitmq-queues; returns what it prints."""
        return self._run("rabbitmq-queues", *args)

    def upgrade(self, *args: str) -> str:
        """Run rabbitmq-upgrade; returns what it prints."""
        return self._run("rabbitmq-upgrade", *args)

    def _run(self, script: str, *args: str) -> str:
        return self._output_of([*self._script(script), *args])

    def _output_of(self, command: list[str], typed: str = "") -> str:
        done = subprocess.run(
            command,
            env=self._environment,
            check=False,
            input=typed,
            text=True,
            capture_output=True,
            timeout=_TOOL_TIMEOUT_S,
        )
        assert done.returncode == 0, f"{command} failed:\n{done.stdout}{done.stderr}"
        return done.stdout

    def evaluate(self, expressions: str) -> str:
        """What Erlang expressions print at the node, and the value of the last expression. `ctl`
        would need a second and a half of CPU time to start."""
        address = ("-address", f"localhost:{self._distribution_port}")
        cookie = (self._family.directory / ".erlang.cookie").read_text()
        block = f'io:format("~tp~n", [begin {expressions.strip().removesuffix(".")} end]).\n'
        command = ["erl_call", *address, "-c", cookie, "-fetch_stdout", "-e"]
        printed, succeeded, result = self._output_of(command, block).rpartition("{ok, ok}")
        assert succeeded, f"{expressions} failed: {result}"
        return printed

    def list_queues(self, *columns: str) -> list[list[str]]:
        """These columns of the queues in the virtual host "warren", as rabbitmqctl names them. The
        value of a list is its members between commas."""
        printed = self.evaluate(_LIST_QUEUES.replace("COLUMNS", ", ".join(columns)))
        return [line.split("\t") for line in printed.splitlines()[:-1]]

    def used_bytes(self) -> int:
        """The memory that Erlang's terms occupy, without garbage, what its allocators keep, and the
        entries of the write-ahead log: up to 16 MB, which come and go with each of its files."""
        return int(self.evaluate(_SETTLE + "erlang:memory(total)"))

    @property
    def pid(self) -> int:
        return int((self._directory / "pid").read_text())

    @property
    def is_alive(self) -> bool:
        return self._node is not None and self._node.poll() is None

    @property
    def log(self) -> str:
        """The output and the log of the node."""
        files = [self._directory / "output", *sorted((self._directory / "log").glob("*.log"))]
        return "".join(file.read_text() for file in files)

    def _signal(self, signum: int) -> None:
        os.kill(self.pid, signum)

    def _write_files(self) -> None:
        definitions = self._directory / "definitions.json"
        self._write_definitions(definitions)
        overrides = {
            "load_definitions": str(definitions),
            "listeners.tcp.1": f"127.0.0.1:{self._port}",
            "disk_free_limit.absolute": "50MB",
            "consumer_timeout": "86400000",
        }
        if self._root is not None:
            overrides |= _RABBITMQ4
        if self._is_in_cluster:
            overrides["cluster_partition_handling"] = "pause_minority"
        if self._peer:
            overrides["cluster_formation.classic_config.nodes.1"] = self._peer
        shipped = (INFRA / "rabbitmq.conf").read_text().splitlines()
        kept = [line for line in shipped if line.split("=")[0].strip() not in overrides]
        lines = kept + [f"{key} = {value}" for key, value in overrides.items()]
        (self._directory / "rabbitmq.conf").write_text("\n".join(lines) + "\n")
        (self._directory / "enabled_plugins").write_text("[].")

    def _write_definitions(self, definitions: Path) -> None:
        if self._definitions is not None:
            definitions.write_text(self._definitions)
            return
        users = ("GATEWAY", "WORKER", "PUBLISHER", "OPERATOR")
        subprocess.run(
            [sys.executable, INFRA / "render_definitions.py", definitions],
            env={f"{user}_PASSWORD": self._family.password for user in users},
            check=True,
        )

    @property
    def _environment(self) -> dict[str, str]:
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self._family.directory),  # where Erlang keeps its cookie
            "LANG": "C.UTF-8",
            "ERL_EPMD_PORT": str(self._family.mapper_port),
            # One thread for processes and one for files, which do not spin while they wait: they
            # leave the cores to others.
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+S 1:1 +SDio 1 "
            "+sbwt none +sbwtdcpu none +sbwtdio none",
            "RABBITMQ_NODENAME": self.name,
            "RABBITMQ_DIST_PORT": str(self._distribution_port),
            "RABBITMQ_MNESIA_BASE": str(self._directory / "data"),
            "RABBITMQ_PID_FILE": str(self._directory / "pid"),
            "RABBITMQ_LOG_BASE": str(self._directory / "log"),
            "RABBITMQ_CONFIG_FILE": str(self._directory / "rabbitmq.conf"),
            "RABBITMQ_CONF_ENV_FILE": str(self._directory / "no-such-file"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self._directory / "enabled_plugins"),
        }

    def _script(self, name: str) -> list[str]:
        """The command that runs a script of RabbitMQ."""
        if self._root is not None:
            into = [str(INFRA / "in_root.sh"), self._root, tempfile.gettempdir()]
            return [*into, str(_SCRIPTS[0] / name)]
        found = next((str(d / name) for d in _SCRIPTS if (d / name).exists()), shutil.which(name))
        assert found is not None, f"{name} is not installed; `make test` installs RabbitMQ"
        return [found]

    def _spawn(self, *command: str, **variables: str) -> subprocess.Popen[bytes]:
        with (self._directory / "output").open("ab") as output:
            return subprocess.Popen(
                command,
                env={**self._environment, **variables},
                cwd=self._directory,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def _is_listening(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self._port), timeout=10) as connection:
                connection.sendall(b"AMQP\x00\x00\x09\x01")
                return bool(connection.recv(1))
        except OSError:
            return False


class RabbitCluster(Broker):
    """Nodes that form a cluster. Its URL names all of them."""

    def __init__(self, directory: Path, num_nodes: int = 3) -> None:
        self._family = Family(directory)
        self.nodes: list[RabbitNode] = []
        for number in range(num_nodes):
            (directory / str(number)).mkdir()
            peer = self.nodes[0].name if self.nodes else ""
            self.nodes.append(RabbitNode(directory / str(number), family=self._family, peer=peer))
        super().__init__(",".join(node.url for node in self.nodes))

    def start(self) -> None:
        """Start all nodes and wait until each takes connections."""
        self.nodes[0].start()
        for node in self.nodes[1:]:
            node.launch()
        for node in self.nodes[1:]:
            node.wait_started()

    def close(self) -> None:
        """Remove everything."""
        for node in self.nodes:
            node.kill()
        self._family.close()

    def url_of(self, user: str) -> str:
        return ",".join(node.url_of(user) for node in self.nodes)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextmanager
def new_node(definitions: str | None = None) -> Iterator[RabbitNode]:
    """A node that is not started, which is removed with all its data afterwards."""
    directory = Path(tempfile.mkdtemp(prefix="warren-broker-"))
    node = RabbitNode(directory, definitions)
    try:
        yield node
    finally:
        node.close()
        shutil.rmtree(directory)


@contextmanager
def running_node() -> Iterator[RabbitNode]:
    """Run a node, and remove it with all its data afterwards."""
    with new_node() as node:
        node.start()
        yield node


@contextmanager
def running_cluster(num_nodes: int = 3) -> Iterator[RabbitCluster]:
    """Run a cluster, and remove it with all its data afterwards."""
    directory = Path(tempfile.mkdtemp(prefix="warren-cluster-"))
    cluster = RabbitCluster(directory, num_nodes)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()
        shutil.rmtree(directory)


@pytest.fixture(scope="session")
def broker() -> Iterator[Broker]:
    """The session's broker."""
    foreign = os.environ.get(URL_VARIABLE)
    if foreign:
        yield Broker(foreign)
        return
    with running_node() as node:
        yield node


@pytest.fixture
def own_broker() -> Iterator[RabbitNode]:
    """A broker for a single test, which may kill it. It contains only what the test creates."""
    with running_node() as node:
        yield node


@pytest.fixture
def own_cluster() -> Iterator[RabbitCluster]:
    """A cluster of three nodes for a single test, which may kill them."""
    with running_cluster() as cluster:
        yield cluster


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests that would break a foreign broker."""
    if item.get_closest_marker(BREAKS_BROKER) and os.environ.get(URL_VARIABLE):
        pytest.skip(f"{URL_VARIABLE} names a broker that this test would break")
