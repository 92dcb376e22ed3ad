"""The load of the benchmark and its servers does not count as other load."""

import subprocess
import sys

from bench.other_load import own_cpu_s

BURN = """
import time
while time.process_time() < 0.3: pass
print("burnt", flush=True)
input()
"""


def test_children_count_while_they_live_and_after_they_ended() -> None:
    before = own_cpu_s()

    with subprocess.Popen(
        [sys.executable, "-c", BURN], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        while_it_lives = own_cpu_s()
        child.communicate(b"\n")

    assert while_it_lives - before >= 0.28
    assert own_cpu_s() - before >= 0.28
