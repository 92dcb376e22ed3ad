"""Long texts do not hold up anything else."""

import asyncio
import os
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from textwrap import dedent

import pytest

from shared.messages import TextPrompt
from worker.text import TextThreads, Tokenizer

TEXT = "A worker reads a prompt. " * 20_000
"""Half a megabyte, which takes a tenth of a second or more."""


def _niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


async def test_other_threads_go_on_while_a_long_text_is_tokenized(smollm2: Path) -> None:
    tokenizer = Tokenizer.load(smollm2)
    num_turns = 0

    encoding = asyncio.create_task(
        TextThreads().run("", partial(tokenizer.encode, TextPrompt(text=TEXT)))
    )
    while not encoding.done():
        await asyncio.sleep(0.001)
        num_turns += 1

    assert len(await encoding) > 100_000
    # A tokenizer that keeps the interpreter's lock lets the loop run before and after it.
    assert num_turns > 10


async def test_long_texts_of_one_tenant_do_not_hold_up_another() -> None:
    threads, is_over = TextThreads(), threading.Event()
    long_texts = [asyncio.create_task(threads.run("a", is_over.wait)) for _ in range(9)]
    await asyncio.sleep(0)

    assert await threads.run("b", lambda: 1) == 1

    assert not any(text.done() for text in long_texts)
    is_over.set()
    await asyncio.gather(*long_texts)


async def test_the_engine_comes_first_but_other_processes_do_not_stop_the_worker() -> None:
    """A thread of very low priority would wait for them, and might hold the interpreter's lock."""
    before = _niceness()

    niceness = await TextThreads().run("", _niceness)

    assert before < niceness <= before + 5
    assert _niceness() == before


def test_a_worker_of_low_priority_gives_its_threads_a_lower_one() -> None:
    """Only a privileged process may reduce a thread's niceness."""
    program = dedent("""
        import asyncio, os, threading
        from worker.text import TextThreads

        def niceness():
            return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

        async def main():
            print(await TextThreads().run("", niceness) - niceness())

        asyncio.run(main())
        os.nice(10)
        if os.getuid() == 0:
            os.setuid(65534)
        asyncio.run(main())
    """)

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)

    before, of_low_priority = done.stdout.split()
    assert before == of_low_priority


async def test_an_error_is_the_callers() -> None:
    threads = TextThreads()

    with pytest.raises(ZeroDivisionError):
        await threads.run("", lambda: 1 // 0)

    assert await threads.run("", lambda: 1) == 1
