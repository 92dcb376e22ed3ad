"""Weights and configurations that give NaN or infinite numbers: refused at the start as far as any
prompt shows them, otherwise an error of the requests concerned."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shared.errors import NotFinite, StartupError
from shared.messages import SamplingParams
from tests.support.models.batches import batch, share
from tests.support.models.tiny import VOCAB_SIZE, write_tiny_model
from worker.engine.interface import NO_TOKEN
from worker.model.embedder import start_embedder
from worker.model.loading import load_runner
from worker.model.start import RunnerLimits

KERNELS = ("native", "reference")
ODD = 77
"""A token whose row of the embedding has a NaN."""

Damage = Callable[[dict[str, Tensor]], object]
DAMAGES: dict[str, Damage] = {
    "NaN in the last norm": lambda w: w["model.norm.weight"].fill_(torch.nan),
    "NaN in a row of lm_head": lambda w: w["lm_head.weight"][40, 3].fill_(torch.nan),
    "infinity in down_proj": lambda w: w["model.layers.1.mlp.down_proj.weight"][5, 5].fill_(
        torch.inf
    ),
}
ROPES: dict[str, dict[str, Any]] = {
    "rope_theta 0": {"rope_theta": 0.0},
    "YaRN factor 0": {
        "rope_theta": 1e4,
        "rope_type": "yarn",
        "factor": 0.0,
        "original_max_position_embeddings": 64,
    },
    "linear factor 0": {"rope_theta": 1e4, "rope_type": "linear", "factor": 0.0},
}


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directories = {name: tmp_path_factory.mktemp(name) for name in ("llama", "phi")}
    write_tiny_model(directories["llama"], "llama", head_dim=16, tie_word_embeddings=False)
    write_tiny_model(directories["phi"], "phi", hidden_size=96, tie_word_embeddings=False)
    return directories


@pytest.fixture
def model(originals: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(originals["llama"], tmp_path / "sound-name"))


def change(model: Path, damage: Damage) -> None:
    weights = load_file(model / "model.safetensors")
    damage(weights)
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})


def configure(model: Path, **fields: object) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_weights_are_refused_by_the_name_of_the_model(
    model: Path, damage: str, kernels: str
) -> None:
    change(model, DAMAGES[damage])
    with pytest.raises(StartupError, match="sound-name computes NaN or infinite logits: its wei"):
        load_runner(model, device="cpu", kernels=kernels)


@pytest.mark.parametrize("kernels", KERNELS)
def test_the_weights_of_a_model_of_transformers_are_checked_too(
    originals: dict[str, Path], tmp_path: Path, kernels: str
) -> None:
    model = Path(shutil.copytree(originals["phi"], tmp_path / "phi"))
    load_runner(model, device="cpu", kernels=kernels).close()
    change(model, lambda w: w["model.final_layernorm.weight"].fill_(torch.nan))
    with pytest.raises(
        StartupError, match="phi cannot be served: it computes NaN or infinite logits"
    ):
        load_runner(model, device="cpu", kernels=kernels)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("rope", ROPES)
def test_rotary_positions_that_are_no_numbers_are_refused(
    model: Path, rope: str, kernels: str
) -> None:
    configure(model, rope_parameters=ROPES[rope])
    with pytest.raises(StartupError, match="computes NaN or infinite logits"):
        load_runner(model, device="cpu", kernels=kernels)


def test_numbers_beyond_the_range_of_float16_are_refused_with_a_remedy(model: Path) -> None:
    change(model, lambda w: w["model.layers.1.mlp.down_proj.weight"].mul_(1e6))
    configure(model, dtype="bfloat16")
    load_runner(model, device="cpu", kernels="reference", dtype="bfloat16").close()
    with pytest.raises(StartupError, match=r"range of float16 \(use --dtype bfloat16\)"):
        load_runner(model, device="cpu", kernels="reference", dtype="float16")


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0.0), SamplingParams(logprobs=1)])
@pytest.mark.parametrize("kernels", KERNELS)
def test_a_token_with_nan_ends_its_own_row_alone(
    model: Path, kernels: str, sampling: SamplingParams
) -> None:
    def drawn() -> list[int]:
        runner = load_runner(
            model, RunnerLimits(max_num_seqs=4), device="cpu", kernels=kernels, dtype="float32"
        )
        good = [1, 2, 3, ODD + 1]
        prompts = [good, [9, 8, 9, ODD], good]
        shares = [share(p, [k], sampling=sampling) for k, p in enumerate(prompts)]
        tokens = runner.launch(batch(*shares)).result()
        # A step that was launched meanwhile carries the token that there is not; the block of the
        # ended sequence has NaN, and becomes another's.
        carried = [share([0], [k], start=4, previous_row=k, sampling=sampling) for k in range(3)]
        tokens += runner.launch(batch(*carried)).result()
        tokens += runner.launch(batch(share([5, 6], [1], sampling=sampling))).result()
        runner.close()
        return tokens

    expected = drawn()
    change(model, lambda w: w["model.embed_tokens.weight"][ODD, 0].fill_(torch.nan))

    tokens = drawn()

    assert [tokens[1], tokens[4]] == [NO_TOKEN, NO_TOKEN]
    assert [t for k, t in enumerate(tokens) if k not in (1, 4)] == [
        t for k, t in enumerate(expected) if k not in (1, 4)
    ]
    assert all(t in range(VOCAB_SIZE) for t in expected)


def test_an_embedding_with_nan_is_an_error_of_its_request(model: Path) -> None:
    change(model, lambda w: w["model.embed_tokens.weight"][ODD, 0].fill_(torch.nan))
    (model / "1_Pooling").mkdir()
    (model / "1_Pooling" / "config.json").write_text('{"pooling_mode": "mean"}')
    modules = [{"type": "x.Transformer", "path": ""}, {"type": "x.Pooling", "path": "1_Pooling"}]
    (model / "modules.json").write_text(json.dumps(modules))
    runner = load_runner(model, device="cpu", kernels="reference")
    embedder = start_embedder(model, runner, max_num_batched_tokens=64)
    assert embedder is not None

    with pytest.raises(NotFinite, match="NaN or infinite"):
        list(embedder.embed([[1, 2], [3, ODD]]))
    ((vector,),) = embedder.embed([[1, 2]])

    assert sum(x * x for x in vector) == pytest.approx(1)
    runner.close()
