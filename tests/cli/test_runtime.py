"""How the process of a service ends."""

import subprocess
import sys
import textwrap

from cli.runtime import INTERRUPTED


def test_a_signal_ends_a_process_that_still_loads_its_model() -> None:
    program = textwrap.dedent(
        """
        import os, signal, time
        from cli.runtime import on_signals, run, this_task
        from worker.process.background_loading import in_daemon_thread

        def work():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(600)

        async def load():
            on_signals(this_task().cancel)
            await in_daemon_thread(work)

        run(load())
        """
    )

    ended = subprocess.run([sys.executable, "-c", program], timeout=60, check=False)

    assert ended.returncode == INTERRUPTED
