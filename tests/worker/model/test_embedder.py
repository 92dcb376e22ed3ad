"""Text embeddings, against transformers' hidden states."""

import asyncio
import dataclasses
import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.echo_worker import echo_model
from shared import settings
from shared.errors import InvalidRequest, OutOfMemory, StartupError
from shared.messages import Embedded, EmbeddingJob, TextPrompt
from shared.settings import WorkerSettings
from tests.support.models.tiny import write_tiny_model
from worker.decode import embedding
from worker.decode.embedding import ComputeTime
from worker.jobs.quick import answer
from worker.model.embedder import Embedder, Vectors, kernels_for, read_pooling, start_embedder
from worker.model.loading import load_runner
from worker.model.runner import TorchRunner
from worker.model.start import RunnerLimits

PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5], list(range(1, 40)), [7, 7]]
MAX_TOKENS = 16


def write_pooling(directory: Path, **config: Any) -> None:
    modules = [
        {"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"idx": 2, "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(config))


def headless(directory: Path) -> None:
    """As sentence-transformers saves a model, in which no name starts with ``model``."""
    file = directory / "model.safetensors"
    tensors = {name.removeprefix("model."): tensor for name, tensor in load_file(file).items()}
    tensors.pop("lm_head.weight", None)
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("qwen3")
    module = write_tiny_model(directory, "qwen3", tie_word_embeddings=request.param)
    headless(directory)
    return directory, module


@pytest.fixture
def runner(model: tuple[Path, Any]) -> Iterator[TorchRunner]:
    directory, _ = model
    write_pooling(directory, pooling_mode_mean_tokens=True)
    limits = RunnerLimits(kv_cache_bytes=1 << 20)
    runner = load_runner(
        directory,
        limits,
        dtype="float32",
        device="cpu",
        kernels=kernels_for(directory, "auto", "cpu"),
    )
    yield runner
    runner.close()


def test_the_cpu_of_a_machine_with_a_gpu_gets_kernels_that_can_embed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_pooling(tmp_path, pooling_mode_mean_tokens=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    assert kernels_for(tmp_path, "auto", "cpu") == "reference"


def vectors(embedder: Embedder, num_dimensions: int | None = None) -> torch.Tensor:
    steps = embedder.embed(PROMPTS, num_dimensions)
    found = []
    while (more := embedder.submit(steps).result()) is not None:
        found += more
    return torch.tensor(found)


@pytest.mark.parametrize(
    ("mode", "num_dimensions"), [("mean_tokens", None), ("lasttoken", None), ("lasttoken", 10)]
)
def test_vectors_are_those_of_transformers(
    mode: str, num_dimensions: int | None, model: tuple[Path, Any], runner: TorchRunner
) -> None:
    """Whether prompts share a pass, or a prompt takes several."""
    directory, module = model
    write_pooling(directory, pooling_mode_cls_token=False, **{f"pooling_mode_{mode}": True})
    embedder = start_embedder(directory, runner, max_num_batched_tokens=MAX_TOKENS)
    assert embedder is not None

    found = vectors(embedder, num_dimensions)

    for prompt, vector in zip(PROMPTS, found, strict=True):
        with torch.inference_mode():
            states = module.model(torch.tensor([prompt]), use_cache=False).last_hidden_state[0]
        pooled = states.mean(dim=0) if mode == "mean_tokens" else states[-1]
        expected = torch.nn.functional.normalize(pooled[:num_dimensions], dim=0)
        torch.testing.assert_close(vector, expected, rtol=1e-4, atol=1e-5)


async def test_an_empty_input_is_named(runner: TorchRunner, model: tuple[Path, Any]) -> None:
    directory, _ = model
    write_pooling(directory, pooling_mode_mean_tokens=True)
    embedder = start_embedder(directory, runner, max_num_batched_tokens=MAX_TOKENS)
    assert embedder is not None
    served = dataclasses.replace(echo_model(settings.load(WorkerSettings)), embedder=embedder)

    prompts = (TextPrompt(text="a"), TextPrompt(text=""))
    job = EmbeddingJob(request_id="r", model="echo", prompts=prompts)

    with pytest.raises(InvalidRequest) as caught:
        await answer(job, served, ComputeTime())

    assert caught.value.param == "input"


@pytest.mark.parametrize("kernels", ["reference", "native"])
def test_only_a_model_for_embeddings_may_lack_its_output(tmp_path: Path, kernels: str) -> None:
    write_tiny_model(tmp_path, "qwen3")
    headless(tmp_path)
    limits = RunnerLimits(kv_cache_bytes=1 << 20)

    def load() -> TorchRunner:
        return load_runner(tmp_path, limits, dtype="float32", device="cpu", kernels=kernels)

    with pytest.raises(StartupError, match=r"has no tensor lm_head\.weight"):
        load()
    write_pooling(tmp_path, pooling_mode_mean_tokens=True)
    load().close()


def test_a_model_that_is_not_made_for_it_has_none(tmp_path: Path, runner: TorchRunner) -> None:
    assert start_embedder(tmp_path, runner, max_num_batched_tokens=MAX_TOKENS) is None


@pytest.mark.parametrize(
    "config",
    [{"pooling_mode_cls_token": True}, {"pooling_mode": "weightedmean"}, {}],
    ids=["first token", "weighted", "nothing said"],
)
def test_other_ways_of_pooling_are_refused(config: dict[str, Any], tmp_path: Path) -> None:
    write_pooling(tmp_path, **config)
    with pytest.raises(StartupError, match="not supported"):
        read_pooling(tmp_path)


def test_a_missing_description_of_the_pooling_is_named(tmp_path: Path) -> None:
    write_pooling(tmp_path, pooling_mode_mean_tokens=True)
    (tmp_path / "1_Pooling" / "config.json").unlink()
    with pytest.raises(StartupError, match=r"has no 1_Pooling/config\.json"):
        read_pooling(tmp_path)


def test_further_modules_are_refused(tmp_path: Path) -> None:
    write_pooling(tmp_path, pooling_mode_mean_tokens=True)
    modules = json.loads((tmp_path / "modules.json").read_text())
    modules.append({"idx": 3, "path": "3_Dense", "type": "sentence_transformers.models.Dense"})
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(StartupError, match="Dense"):
        read_pooling(tmp_path)


async def test_a_text_waits_for_a_pass_of_a_longer_one_and_not_for_all_of_it(
    runner: TorchRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a line of a batch, which another gateway may have sent, holds up no client."""
    # Each step takes as long as any other, whatever the machine does meanwhile.
    monkeypatch.setattr(embedding, "time", SimpleNamespace(monotonic=count(step=1.0).__next__))
    has_begun = asyncio.Event()

    def submit(work: Callable[[], Vectors | None]) -> "Future[Vectors | None]":
        has_begun.set()
        return runner.submit(work)

    decoder, size = runner.decoder.without_head(), runner.decoder.traits.hidden_size
    assert decoder is not None
    assert size is not None
    embedder = Embedder(decoder, "mean", size, submit, max_num_batched_tokens=1)
    served = dataclasses.replace(echo_model(settings.load(WorkerSettings)), embedder=embedder)
    text = TextPrompt(text="a")
    line = EmbeddingJob(request_id="line", model="echo", prompts=(text,) * 500)
    request = EmbeddingJob(request_id="request", model="echo", prompts=(text,))

    of_line = ComputeTime()
    answering = asyncio.create_task(answer(line, served, of_line))
    await has_begun.wait()
    of_request = ComputeTime()
    await answer(request, served, of_request)

    assert not answering.done()
    answered = await answering
    assert isinstance(answered, Embedded)
    assert len(answered.vectors) == 500
    assert 0 < of_request.seconds < of_line.seconds


def test_prompts_for_which_memory_does_not_suffice_fail_as_such(
    runner: TorchRunner, model: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    embedder = start_embedder(model[0], runner, max_num_batched_tokens=MAX_TOKENS)
    assert embedder is not None

    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("worker.model.kv_cache.allocate", fail)

    with pytest.raises(OutOfMemory):
        vectors(embedder)
