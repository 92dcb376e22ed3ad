"""The GPU benchmark in miniature, except for what needs a GPU."""

import json
import random
from pathlib import Path

import pytest
import torch

from bench.gpu import __main__, peers, requests
from bench.gpu.figures import Ceilings, Figure
from bench.gpu.peers import Peer
from bench.gpu.report import table
from bench.gpu.scale import SCALES, with_requests
from bench.gpu.where import Span, idle

CPU = torch.device("cpu")
TINY = SCALES["tiny"]


def test_all_sections_run_on_the_cpu_and_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    sections = [f"--only={section}" for section in ("kernels", "engine", "awq")]

    code = __main__.main(["--device=cpu", "--shape=tiny", f"--out={tmp_path}", *sections])

    written = json.loads((tmp_path / "gpu.json").read_text())
    assert code == 0
    assert {"commit", "device", "versions"} <= set(written)
    found = {figure["section"] for figure in written["figures"]}
    assert found == {"device", "correct", "kernels", "decode", "prefill", "where", "engine", "awq"}
    correct = [figure for figure in written["figures"] if figure["section"] == "correct"]
    assert len(correct) > 10
    assert all(figure["is_met"] for figure in correct)
    assert (tmp_path / "gpu.svg").read_text().startswith("<?xml")


def test_a_section_that_fails_is_a_figure_and_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setitem(SCALES, "tiny", with_requests(TINY, -1))
    arguments = ["--device=cpu", "--shape=tiny", f"--out={tmp_path}", "--only=engine"]
    assert __main__.main(arguments) == 1
    failed = json.loads((tmp_path / "gpu.json").read_text())["figures"][-1]
    assert failed["note"].startswith("ValueError")
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.timeout(300)
def test_transformers_runs_the_same_requests() -> None:
    """Runs in a process of its own, which has to import transformers."""
    asked = requests.mixed(TINY)
    ours, vllm = peers.run_all(TINY, asked, CPU, torch.float32, timeout_s=250)
    assert ours.run is not None, ours.reason
    assert ours.run.num_outputs == sum(request.num_outputs for request in asked)
    assert ours.run.outputs_per_s > 0
    assert (vllm.run, vllm.reason) == (None, "is not installed")


def test_a_peer_that_fails_or_hangs_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = (Peer("gone", "json", "bench.gpu.gone", 1), Peer("slow", "json", "asyncio", 1))
    monkeypatch.setattr(peers, "PEERS", odd)
    gone, slow = peers.run_all(TINY, [], CPU, torch.float32, timeout_s=5)
    assert "No module named bench.gpu.gone" in gone.reason
    assert gone.run is slow.run is None


def test_requests_have_the_means_and_the_bounds_that_were_asked_for() -> None:
    asked = requests.mixed(SCALES["llama-3.1-8b"])
    prompts = [len(request.prompt_ids) for request in asked]
    outputs = [request.num_outputs for request in asked]
    assert 205 < sum(prompts) / len(asked) < 235
    assert 185 < sum(outputs) / len(asked) < 215
    assert min(prompts + outputs) >= 1
    assert max(prompts) <= 880
    assert requests.mixed(TINY) == requests.mixed(TINY)


def test_idle_time_is_what_no_span_covers() -> None:
    draw = random.Random(0)
    for _ in range(50):
        starts = [draw.randrange(100) for _ in range(draw.randint(1, 8))]
        spans = [Span(name="", start=at, end=at + draw.randint(1, 30)) for at in starts]
        covered = {tick for span in spans for tick in range(int(span.start), int(span.end))}
        whole = max(covered) + 1 - min(covered)
        assert idle(spans) == (whole - len(covered), len(covered))
    assert idle([]) == (0, 0)


def test_a_floor_is_the_slower_of_bytes_and_products() -> None:
    ceilings = Ceilings(bytes_per_s=1000, flops_per_s=10)
    assert ceilings.floor_ms(2000) == 2000
    assert ceilings.floor_ms(2000, 30) == 3000


def test_the_table_says_which_goals_are_missed() -> None:
    figures = [
        Figure(section="a", name="fast", value=1.0, unit="ms", ratio=0.9, goal=0.8),
        Figure(section="a", name="slow", value=2.0, unit="ms", ratio=0.7, goal=0.8),
        Figure(section="a", name="gone", value=None, unit="ms", note="no such thing"),
    ]
    _, fast, slow, gone = table(figures).splitlines()
    assert fast.endswith("met")
    assert slow.endswith("MISSED")
    assert gone.endswith("no such thing")
