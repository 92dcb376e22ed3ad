"""The GPU benchmark in miniature, except for what needs a GPU."""

import json
import random
import time
from pathlib import Path

import psutil
import pytest
import torch

from bench.gpu import __main__, model, peers, requests
from bench.gpu.figures import Ceilings, Figure
from bench.gpu.model import prompt_flops, step_bytes
from bench.gpu.peers import Peer
from bench.gpu.report import table
from bench.gpu.scale import SCALES, with_requests
from bench.gpu.steps import Steps
from bench.gpu.where import Span, idle
from kernels.providers import load_ops

CPU = torch.device("cpu")
TINY = SCALES["tiny"]


def test_all_sections_run_on_the_cpu_and_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    sections = [f"--only={section}" for section in ("kernels", "engine", "awq")]

    code = __main__.main(["--device=cpu", "--shape=tiny", f"--out={tmp_path}", *sections])

    written = json.loads((tmp_path / "gpu-kernels-engine-awq.json").read_text())
    assert code == 0
    assert {"commit", "device", "versions"} <= set(written)
    found = {figure["section"] for figure in written["figures"]}
    assert found == {"device", "correct", "kernels", "decode", "prefill", "where", "engine", "awq"}
    correct = [figure for figure in written["figures"] if figure["section"] == "correct"]
    assert len(correct) > 10
    assert all(figure["is_met"] for figure in correct)
    assert (tmp_path / "gpu-kernels-engine-awq.svg").read_text().startswith("<?xml")


def test_a_section_that_fails_is_a_figure_and_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setitem(SCALES, "tiny", with_requests(TINY, -1))
    arguments = ["--device=cpu", "--shape=tiny", f"--out={tmp_path}", "--only=engine"]
    assert __main__.main(arguments) == 1
    failed = json.loads((tmp_path / "gpu-engine.json").read_text())["figures"][-1]
    assert failed["note"].startswith("ValueError")
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.timeout(300)
def test_transformers_runs_the_same_requests(tmp_path: Path) -> None:
    """Runs in a process of its own, which has to import transformers."""
    asked = requests.mixed(TINY)
    ours, vllm = peers.run_all(TINY, asked, CPU, torch.float32, timeout_s=250, logs=tmp_path)
    assert ours.run is not None, ours.reason
    assert ours.run.num_outputs == sum(request.num_outputs for request in asked)
    assert ours.run.outputs_per_s > 0
    assert (vllm.run, vllm.reason) == (None, "is not installed")


def test_a_peer_that_fails_says_so_and_leaves_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "PEERS", (Peer("gone", "json", "bench.gpu.gone", 1),))
    (gone,) = peers.run_all(TINY, [], CPU, torch.float32, timeout_s=250, logs=tmp_path)
    assert "No module named bench.gpu.gone" in gone.reason
    assert gone.run is None
    assert gone.reason in (tmp_path / "peer-json.log").read_text()


def test_a_peer_that_hangs_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "PEERS", (Peer("slow", "json", "tests.bench.hanging_peer", 1),))
    (slow,) = peers.run_all(TINY, [], CPU, torch.float32, timeout_s=0.1, logs=tmp_path)
    assert slow.run is None
    assert slow.reason.startswith("took longer")


def test_nothing_remains_of_a_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = Peer("left", "json", "tests.bench.leaving_peer", 1)
    monkeypatch.setattr(peers, "PEERS", (left,))
    (outcome,) = peers.run_all(TINY, [], CPU, torch.float32, timeout_s=250, logs=tmp_path)
    assert outcome.run is None
    while is_running(int((tmp_path / "peer-json.log").read_text())):
        time.sleep(0.01)


def is_running(process_id: int) -> bool:
    try:
        return psutil.Process(process_id).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_floors_count_each_byte_once() -> None:
    config = TINY.model
    layers = config.num_layers * config.hidden_size * (256 + 128 + 3 * config.intermediate_size)
    head = config.vocab_size * config.hidden_size
    kv = 2 * config.num_layers * config.num_kv_heads * config.head_dim * TINY.context_len
    one, two = (step_bytes(TINY, torch.float32, num_seqs) for num_seqs in (1, 2))
    assert one == 4 * (layers + head + config.hidden_size + kv)
    assert two - one == 4 * (config.hidden_size + kv)
    assert prompt_flops(TINY, 1) == 2 * (layers + head) + 4 * config.num_layers * config.hidden_size


def test_sequences_share_no_blocks() -> None:
    ops = load_ops("reference")
    runner = model.runner(TINY, model.decoder(TINY, ops, CPU, torch.float32), ops)
    try:
        tables = Steps(TINY, runner, CPU).tables(4, TINY.context_len)
        with pytest.raises(ValueError, match="blocks"):
            Steps(TINY, runner, CPU).tables(10_000, TINY.context_len)
    finally:
        runner.close()
    blocks = [block for table in tables for block in table]
    assert len(set(blocks)) == len(blocks) == 4 * -(-TINY.context_len // TINY.block_size)


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
