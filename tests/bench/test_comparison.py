"""The systems and commands of a comparison, and the results of vLLM's client."""

import shlex
from pathlib import Path

import pytest
import typer
from gguf import GGUFWriter, LlamaFileType

from bench.comparison import ComparisonPlan
from bench.interference import Interference
from bench.load import LoadError
from bench.options import ours, selected
from bench.systems import (
    Room,
    gguf_weights,
    llama_server,
    warren,
    warren_before,
    warren_serve,
)
from bench.vllm_client import figures_of_result

FILE = Path("/models/random.gguf")
RESULT = {
    "completed": 8,
    "output_throughput": 100.0,
    "median_ttft_ms": 10.0,
    "p99_ttft_ms": 20.0,
    "median_tpot_ms": 3.0,
    "p99_itl_ms": 4.0,
    "mean_e2el_ms": 50.0,
    "p90_e2el_ms": 60.0,
}


def test_every_setting_of_every_run_has_prompts_of_its_own() -> None:
    plan = ComparisonPlan(users=[1, 8], requests_per_user=4, min_requests=8)
    settings = [setting for run in (1, 2) for setting in plan.settings(run)]

    assert [setting.num_requests for setting in settings] == [8, 32, 8, 32]
    assert len({setting.seed for setting in settings}) == 4


def test_prompts_of_several_lengths_have_nothing_in_common() -> None:
    plan = ComparisonPlan(
        users=[1, 8], requests_per_user=1, min_requests=1, prompt_lens=[128, 2048]
    )
    settings = list(plan.settings(run=1))

    assert [(one.prompt_len, one.num_users) for one in settings] == [
        (128, 1),
        (128, 8),
        (2048, 1),
        (2048, 8),
    ]
    assert len({one.seed for one in settings}) == 4
    assert plan.room.max_len == 2048 + 128 + 1


def test_a_file_is_served_as_it_is_under_the_name_that_clients_ask_for() -> None:
    for system in (warren("q4_k_m", None, (), FILE), warren_serve("q4_k_m", (), FILE)):
        *_, worker = system.commands(8000, "amqp://broker")
        assert {f"--model={FILE}", "--served-name=smollm2"} <= set(worker)
        assert not any(option.startswith(("--dtype", "--weight-format")) for option in worker)


@pytest.mark.parametrize(
    ("weights", "option"), [("float32", "--dtype=float32"), ("q8_0", "--weight-format=q8_0")]
)
def test_a_format_is_a_dtype_or_a_weight_format(weights: str, option: str) -> None:
    for system in ours([weights], None, ["--compute-threads=1"]):
        *_, worker = system.commands(8000, "amqp://broker")
        assert {option, "--compute-threads=1"} <= set(worker)
        assert system.weights == weights


def test_only_what_was_asked_for_is_measured() -> None:
    systems = ours(["bfloat16", "q8_0"], None, None)

    assert selected(systems, None) == systems
    assert [one.weights for one in selected(systems, ["Warren"])] == ["bfloat16", "q8_0"]
    with pytest.raises(typer.BadParameter, match="llama"):
        selected(systems, ["llama"])


def test_a_foreign_result_is_refused_where_requests_failed() -> None:
    assert figures_of_result(RESULT, 8).tokens_per_s == 100
    with pytest.raises(LoadError, match="8 of 9"):
        figures_of_result(RESULT, 9)


def test_a_gap_counts_if_any_of_it_lies_in_the_prefill() -> None:
    gaps = [(-0.1, 0.02), (0.2, 0.3), (1.0, 0.1), (2.5, 0.6), (2.6, 0.5), (3.0, 0.1)]
    measured = Interference("ours", "bfloat16", "", gaps, prefill_s=2.0, other_cores=0.0)

    assert measured.before_ms() == [20]
    assert measured.during_ms() == [300, 100, 600]


def write_gguf(path: Path, declared: LlamaFileType) -> Path:
    writer = GGUFWriter(path, "llama")
    writer.add_file_type(declared)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_a_worker_starts_the_peer_that_is_its_engine(tmp_path: Path) -> None:
    gguf = write_gguf(tmp_path / "model.gguf", LlamaFileType.MOSTLY_Q4_1)
    peer = llama_server("/opt/llama-server", gguf, Room(9, 256))

    system = warren_before(peer, None)
    gateway, worker = system.commands(8000, "amqp://broker")

    options = dict(option.split("=", 1) for option in worker if "=" in option)
    engine = shlex.split(options["--engine-command"])
    assert options["--engine"] == "llama-server"
    assert engine[0] == "/opt/llama-server"
    assert options["--engine-url"].endswith(f":{engine[engine.index('--port') + 1]}")
    assert "--port=8000" in gateway
    assert (system.name, system.weights) == ("Warren + llama-server", "q4_1")


@pytest.mark.parametrize(
    ("declared", "weights"),
    [
        (LlamaFileType.MOSTLY_BF16, "bfloat16"),
        (LlamaFileType.MOSTLY_Q4_1, "q4_1"),
        (LlamaFileType.ALL_F32, "float32"),
    ],
)
def test_a_gguf_file_says_its_weights(
    tmp_path: Path, declared: LlamaFileType, weights: str
) -> None:
    path = write_gguf(tmp_path / "model.gguf", declared)

    assert gguf_weights(path) == weights
    assert llama_server("llama-server", path, Room(9, 256)).weights == weights
