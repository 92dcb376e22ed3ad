"""What a line about a job costs: ``python -m bench.job_lines 2>/dev/null``."""

import time

from shared.messages import GenerationJob, TextPrompt
from shared.settings import WorkerSettings
from shared.telemetry import requests, setup

_NUM_LINES = 500
_NUM_ROUNDS = 20
_JOB = GenerationJob(
    request_id="cmpl-" + "a" * 32,
    model="smollm2",
    prompts=(TextPrompt(text="x"),),
    tenant="alice",
    trace={"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"},
)
_FACTS = {
    "worker": "worker." + "a" * 32,
    "attempt": 1,
    "status": 200,
    "code": None,
    "prompt_tokens": 10,
    "completion_tokens": 500,
    "duration_s": 1.2345,
}


def _seconds() -> float:
    began = time.process_time()
    for _ in range(_NUM_LINES):
        requests.write_line("request ended", _JOB, _FACTS)
    return (time.process_time() - began) / _NUM_LINES


def main() -> None:
    setup.configure(WorkerSettings(log_format="json"), "bench")
    for level in ("info", "warning"):
        requests.set_level(level)
        best_s = min(_seconds() for _ in range(_NUM_ROUNDS))
        print(
            f"{level}: {best_s * 1e6:.1f} us a line, {best_s * 2e5:.1f} % of a core at 1,000 "
            "requests a second with two lines each"
        )


if __name__ == "__main__":
    main()
