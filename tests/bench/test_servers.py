"""Systems are started, waited for, and ended with all their descendants."""

import signal
import subprocess
import sys

import psutil
import pytest

from bench.servers import ServerDied, running, trees
from bench.systems import System
from tests.support.deployment.processes import ROOT

SERVER = """
import http.server, json, subprocess, sys

class Answer(http.server.BaseHTTPRequestHandler):
    asked = 0

    def do_GET(self):
        Answer.asked += 1
        self.send_response(503 if Answer.asked < 3 else 200)
        self.end_headers()
        self.wfile.write(json.dumps({"data": [{"id": "smollm2"}]}).encode())

    do_POST = do_GET

child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
"""


BENCH = """
import asyncio, sys, uvloop
from bench.comparison import run_loop
from bench.interrupt import ends_on_sigterm
from bench.servers import running, trees
from bench.systems import System

@ends_on_sigterm
def main(server):
    system = System("toy", "none", lambda port, _: [[sys.executable, "-c", server, str(port)]])
    with running(system) as server:
        print(*(process.pid for process in trees(server.roots)), flush=True)
        run_loop(asyncio.sleep(600))

main(sys.argv[1])
"""


def _system(script: str) -> System:
    return System("toy", "none", lambda port, _: [[sys.executable, "-c", script, str(port)]])


def test_a_server_is_measured_and_ends_with_its_children() -> None:
    with running(_system(SERVER)) as server:
        tree = trees(server.roots)
        assert len(tree) == 2
        assert server.start_s > 0
        assert server.peak_memory_bytes() >= max(one.memory_info().rss for one in tree) * 0.9

    assert not any(map(psutil.Process.is_running, tree))


def test_a_server_that_dies_shows_its_log() -> None:
    with (
        pytest.raises(ServerDied, match="no such weights"),
        running(_system("exit('no such weights')")),
    ):
        pass


def test_servers_end_with_a_bench_that_fails() -> None:
    with pytest.raises(KeyboardInterrupt), running(_system(SERVER)) as server:  # noqa: PT012
        tree = trees(server.roots)
        raise KeyboardInterrupt

    assert not any(map(psutil.Process.is_running, tree))


def test_servers_end_with_a_bench_that_is_terminated_in_the_background() -> None:
    def ignore_sigint() -> None:  # as a shell does for its background jobs
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    with subprocess.Popen(
        [sys.executable, "-c", BENCH, SERVER],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        preexec_fn=ignore_sigint,
    ) as bench:
        assert bench.stdout is not None
        pids = [int(pid) for pid in bench.stdout.readline().split()]
        bench.terminate()
        bench.wait()

    assert len(pids) == 2
    assert not any(map(psutil.pid_exists, pids))
