"""The lines that long operations write into a log."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.worker.checkpoints.gguf_files import write_tiny_gguf
from worker.checkpoints import convert
from worker.checkpoints.progress import LoggedProgress


def test_a_line_every_few_seconds_and_at_the_ends_of_a_stage(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    now = 100.0
    progress = LoggedProgress(lambda: now)

    for done in range(0, 101, 10):
        progress("download", done, 100)
        now += 2
    progress("convert", 1, 4)

    lines = [(vars(record)["stage"], vars(record)["done"]) for record in caplog.records]
    assert lines == [
        ("download", 0),
        ("download", 30),
        ("download", 60),
        ("download", 90),
        ("download", 100),
        ("convert", 1),
    ]


def test_the_converter_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    reading, writing = os.pipe()
    converter = subprocess.Popen(
        [sys.executable, "-P", convert.__file__, path, tmp_path, convert.WITH_PARENT],
        stdin=reading,
        stdout=subprocess.DEVNULL,
    )
    os.close(reading)

    os.close(writing)  # as the kernel does when the other process is killed

    assert converter.wait(timeout=240) == 1
    assert not (tmp_path / "tokenizer.json").exists()
