from pathlib import Path

import pytest
import typer

from bench.batches import ChatWork, chat_prompt, run_vllm
from shared import settings
from worker.checkpoints import store
from worker.text import Tokenizer

MODEL = settings.DEFAULT_MODEL


def test_lines_are_different_unless_they_are_to_repeat_one_another() -> None:
    different = ChatWork.draw(MODEL, num_lines=60, num_tokens=32, step_ms=0)
    repeating = ChatWork.draw(MODEL, num_lines=60, num_tokens=32, step_ms=0, duplicates=0.3)

    assert len(set(different.contents)) == 60
    assert len(set(repeating.contents)) == 42
    with pytest.raises(typer.BadParameter, match="too few tokens"):
        ChatWork.draw(MODEL, num_lines=1000, num_tokens=32, step_ms=0)


def test_a_prompt_has_as_many_tokens_as_its_answer() -> None:
    work = ChatWork.draw(MODEL, num_lines=20, num_tokens=64, step_ms=0)

    tokenizer = Tokenizer.load(store.resolve(MODEL))
    lengths = {len(tokenizer.encode(chat_prompt(content))) for content in work.contents}
    assert lengths == {64}


def vllm(tmp_path: Path, answer: str) -> str:
    """A program in the place of vLLM."""
    program = tmp_path / "vllm"
    program.write_text(f"#!/bin/sh\n[ $1$2$4 = run-batch-i-o ] && {answer}\n")
    program.chmod(0o755)
    return str(program)


def test_vllm_is_timed_beyond_its_start(tmp_path: Path) -> None:
    work = ChatWork.draw(MODEL, num_lines=3, num_tokens=64, step_ms=0)

    assert run_vllm(vllm(tmp_path, "cp $3 $5"), work) < 60


def test_vllm_must_answer_every_line(tmp_path: Path) -> None:
    work = ChatWork.draw(MODEL, num_lines=3, num_tokens=64, step_ms=0)

    with pytest.raises(RuntimeError, match="not all lines"):
        run_vllm(vllm(tmp_path, "head -n 1 $3 >$5"), work)
