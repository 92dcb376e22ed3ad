"""How the process of a service runs and ends."""

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

    ended = subprocess.run([sys.executable, "-c", program], check=False)

    assert ended.returncode == INTERRUPTED


def test_old_garbage_is_collected_in_time() -> None:
    program = textwrap.dedent(
        """
        import asyncio, gc, weakref
        from cli import runtime

        class Node:
            pass

        async def leave_garbage():
            node = Node()
            node.itself, found = node, weakref.ref(node)
            gc.collect()  # a survivor, which only a full collection looks at
            del node
            while found() is not None:
                await asyncio.sleep(0.01)

        runtime._GC_INTERVAL_S = 0.1
        runtime.run(leave_garbage())
        """
    )

    subprocess.run([sys.executable, "-c", program], check=True)


def test_garbage_is_collected_as_often_on_a_busy_machine() -> None:
    """The third collection would come after more than ten minutes if the second had used as much
    CPU time as it took."""
    program = textwrap.dedent(
        """
        import asyncio, gc, time
        from cli import runtime

        num_collections = 0

        def collect_on_a_busy_machine():
            global num_collections
            time.sleep(0.1)
            num_collections += 1

        async def wait():
            while num_collections < 3:  # the first one is not repeated
                await asyncio.sleep(0.01)

        gc.collect = collect_on_a_busy_machine
        runtime._GC_INTERVAL_S, runtime._GC_SHARE = 0.1, 1e-4
        runtime.run(wait())
        """
    )

    subprocess.run([sys.executable, "-c", program], check=True)


def test_opening_streams_does_not_stop_a_service_again_and_again() -> None:
    """As many objects as a thousand streams have, in a heap that has a tenth of them at first."""
    program = textwrap.dedent(
        """
        import gc
        from cli.runtime import run

        async def open_streams():
            streams = [{} for _ in range(30_000)]
            before = gc.get_stats()[2]["collections"]
            streams += [[stream] for stream in streams * 10]
            print(gc.get_stats()[2]["collections"] - before)

        run(open_streams())
        """
    )

    ended = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)

    assert int(ended.stdout) == 0


def test_what_a_service_has_imported_is_passed_over() -> None:
    program = textwrap.dedent(
        """
        import asyncio, gc
        from cli.runtime import run

        async def serve():
            imported = [[k] for k in range(30_000)]
            await asyncio.sleep(0.1)
            print(len(imported) - len(gc.get_objects()))

        run(serve())
        """
    )

    ended = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)

    assert int(ended.stdout) > 0
