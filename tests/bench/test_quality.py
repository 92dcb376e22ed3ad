"""The comparison of two models' predictions, and its inputs."""

import math
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bench.agreement import compare, perplexity
from bench.quality import load, qualities, text_logits
from tests.support.models.numerics import assert_close
from tests.support.models.tiny import VOCAB_SIZE, reference_logits, write_tiny_model
from tests.worker.checkpoints.gguf_files import write_tiny_gguf
from worker.checkpoints.convert import convert
from worker.checkpoints.gguf_file import write_file_list

PROMPT = [(7 * i + i // 3) % VOCAB_SIZE for i in range(300)]
"""Longer than the part that is computed at once."""


def random_logits(num_positions: int, vocab_size: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(num_positions, vocab_size, generator=generator)


def naive_divergence(reference: list[float], other: list[float]) -> float:
    """The definition of KL."""
    ours = [math.exp(logit) for logit in reference]
    theirs = [math.exp(logit) for logit in other]
    shares = [(p / sum(ours), q / sum(theirs)) for p, q in zip(ours, theirs, strict=True)]
    return sum(p * math.log(p / q) for p, q in shares)


@settings(max_examples=25, deadline=None)
@given(num_positions=st.integers(1, 150), vocab_size=st.integers(2, 9), seed=st.integers(0, 99))
def test_agreement_is_that_of_the_definitions(
    num_positions: int, vocab_size: int, seed: int
) -> None:
    reference = random_logits(num_positions, vocab_size, seed)
    other = reference + random_logits(num_positions, vocab_size, seed + 100) / 3

    found = compare(reference, other)

    rows = list(zip(reference.tolist(), other.tolist(), strict=True))
    divergences = sorted(naive_divergence(ours, theirs) for ours, theirs in rows)
    num_same = sum(ours.index(max(ours)) == theirs.index(max(theirs)) for ours, theirs in rows)
    assert found.kl_mean == pytest.approx(sum(divergences) / num_positions, rel=1e-5, abs=1e-9)
    assert divergences[int(0.99 * (num_positions - 1))] <= found.kl_p99 + 1e-6
    assert found.kl_p99 <= divergences[-1] + 1e-6
    assert found.top1 == pytest.approx(num_same / num_positions)


def test_one_position_in_fifty_shows_in_the_99th_percentile_alone() -> None:
    reference = random_logits(100, 50)
    other = reference.clone()
    other[[3, 71]] = -reference[[3, 71]]

    found = compare(reference, other)

    assert found.kl_p99 > 10 * found.kl_mean > 0
    assert found.top1 == 0.98


def test_what_softmax_does_not_see_is_no_difference() -> None:
    reference = random_logits(70, 50)

    found = compare(reference, reference + torch.arange(70)[:, None])

    assert found.kl_mean == pytest.approx(0, abs=1e-10)
    assert found.top1 == 1


def test_logits_that_cannot_be_compared_are_refused() -> None:
    logits = random_logits(4, 5)
    with pytest.raises(ValueError, match=r"logits have shapes \[4, 5\] and \[3, 5\]"):
        compare(logits, logits[:3])
    with pytest.raises(ValueError, match=r"logits have shapes \[0, 5\] and \[0, 5\]"):
        compare(logits[:0], logits[:0])
    with pytest.raises(ValueError, match="logits hold NaN"):
        compare(logits, logits.index_fill(0, torch.tensor([2]), torch.nan))


def test_perplexity_is_the_number_of_tokens_between_which_a_model_wavers() -> None:
    token_ids = torch.tensor([6, 2, 0, 5, 1])
    between_two = torch.full((5, 7), -torch.inf)
    between_two[range(4), token_ids[1:]] = 0.5
    between_two[range(4), [3, 3, 3, 3]] = 0.5
    assert perplexity(torch.zeros(5, 7), token_ids) == pytest.approx(7)
    assert perplexity(between_two, token_ids) == pytest.approx(2)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensor]:
    """A model, and transformers' logits for the prompt."""
    directory = tmp_path_factory.mktemp("tiny")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    model = write_tiny_model(
        directory, "qwen3", max_shard_size="1GB", max_position_embeddings=512, **sizes
    )
    return directory, reference_logits(model, PROMPT)


def test_a_text_in_chunks_has_the_logits_of_the_whole(tiny: tuple[Path, Tensor]) -> None:
    directory, expected = tiny
    assert_close(text_logits(load(directory, "float32", "reference"), PROMPT), expected, 1e-5)


def test_less_precise_formats_agree_less(tiny: tuple[Path, Tensor]) -> None:
    directory, expected = tiny
    formats = ["float16", "bfloat16", "q8_0", "q4_0"]

    rows = qualities(directory, PROMPT, formats)

    divergences = [row.agreement.kl_mean for row in rows]
    assert [row.weights for row in rows] == ["float32", *formats]
    assert divergences[0] == 0
    assert divergences == sorted(divergences)
    assert rows[0].agreement.top1 == 1 > rows[-1].agreement.top1
    assert rows[0].perplexity == pytest.approx(perplexity(expected, torch.tensor(PROMPT)), rel=1e-4)


def served_from(path: Path) -> Path:
    """The directory from which a worker loads a GGUF file."""
    directory = path.with_suffix("")
    directory.mkdir()
    convert(path, directory, has_weights=False)
    write_file_list(directory, [path])
    return directory


def test_files_are_rows_with_activations_of_8_and_of_16_bits(tmp_path: Path) -> None:
    model, coarse = (
        served_from(write_tiny_gguf(tmp_path / f"{kind.name}.gguf", kind))
        for kind in (Kind.F32, Kind.Q8_0)
    )

    rows = qualities(model, PROMPT[:100], [], files={"Q8_0": coarse})

    divergences = {row.weights: row.agreement.kl_mean for row in rows}
    assert [*divergences] == ["float32", "Q8_0", "Q8_0+int16"]
    assert 0 < divergences["Q8_0+int16"] < divergences["Q8_0"]
