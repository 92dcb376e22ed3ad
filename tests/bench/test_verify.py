"""The cost of verifying receipts, and what no run may show."""

from pathlib import Path

import pytest

from bench.load import LoadError
from bench.verify import CpuTimes, RequestShape, copies, measured, rows_of, summary
from tests.support.models.tiny import VOCAB_SIZE, write_tiny_model
from tests.support.text.tokenizers import byte_level_tokenizer, save_tokenizer

TEXT = [(7 * k + 3) % VOCAB_SIZE for k in range(200)]
SHAPE = RequestShape(prompt_tokens=20, answer_tokens=12)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_tiny_model(directory, "llama")
    save_tokenizer(byte_level_tokenizer(), directory)
    return directory


def test_answers_are_verified_in_each_shape(checkpoint: Path) -> None:
    shapes = (SHAPE, RequestShape(prompt_tokens=8, answer_tokens=4))

    rows = rows_of(checkpoint, "float32", TEXT, runs=1, shapes=shapes)

    assert [(row.prompt_tokens, row.answer_tokens) for row in rows] == [(20, 12), (8, 4)]
    assert all(row.generating_s > 0 and row.verifying_s > 0 for row in rows)


def test_an_answer_of_other_weights_is_not_measured(checkpoint: Path) -> None:
    shape = RequestShape(prompt_tokens=20, answer_tokens=60)
    with (
        copies(checkpoint, "float32") as (generator, _),
        copies(checkpoint, "bfloat16") as (_, verifier),
    ):
        costs = (measured(generator, verifier, TEXT, shape, run) for run in range(20))

        with pytest.raises(LoadError, match="run"):
            list(costs)


def test_a_ratio_is_the_median_of_the_ratios_of_the_runs() -> None:
    costs = [CpuTimes(generating_s=s, verifying_s=1.0) for s in (10.0, 4.0, 5.0)]

    row = summary("float32", SHAPE, costs)

    assert (row.generating_s, row.verifying_s, row.ratio) == (5.0, 1.0, 0.2)
