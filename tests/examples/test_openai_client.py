import subprocess
import sys
from pathlib import Path

from tests.support.gateway.serving import served
from tests.support.workers.scripted_worker import MODEL

EXAMPLE = Path(__file__).parents[2] / "examples" / "openai_client.py"


def test_the_example_writes_the_answer() -> None:
    with served() as url:
        done = subprocess.run(
            [sys.executable, EXAMPLE, f"{url}/v1", MODEL],
            check=True,
            text=True,
            capture_output=True,
        )

    assert done.stdout == "What is the capital of France?\n"
