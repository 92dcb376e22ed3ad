"""The programs of the pages that run a model themselves run, one after another in a process."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.pages import ROOT, blocks

_NAMES = re.compile(r"\b(?:LLM|llm)\b")


@pytest.mark.timeout(300)
def test_programs_with_a_model_print_its_answers(smollm2: Path) -> None:
    pages = (ROOT / "docs" / "python.md", ROOT / "README.md")
    programs = [
        block.text
        for page in pages
        for block in blocks(page)
        if block.kind == "python" and _NAMES.search(block.text)
    ]

    done = subprocess.run(
        [sys.executable, "-c", "\n".join(programs)], capture_output=True, text=True
    )

    assert len(programs) == 4
    assert done.returncode == 0, done.stderr
    assert re.search(r"Paris.*\d{1,3} \[-\d", done.stdout, re.DOTALL), done.stdout
