"""A model in a program, which the program uses without a service."""

import shutil
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.errors import ContextLengthExceeded, InternalError, InvalidRequest, StartupError
from tests.support.models.tiny import write_tiny_model
from tests.worker.model.test_embedder import write_pooling
from warren import LLM, Constraint, SamplingParams

PROMPTS = ["The capital of France is", "Once upon a time, there"]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
MAX_NUM_SEQS = 4
GREEDY = SamplingParams(temperature=0.0, max_tokens=5)


@pytest.fixture(scope="module")
def llm(smollm2: Path) -> Iterator[LLM]:
    options: dict[str, Any] = {"max_seq_len": 256, "kv_cache_bytes": 1 << 27, "compute_threads": 1}
    options["max_num_seqs"] = MAX_NUM_SEQS
    options["kernels"] = "reference"  # the native kernels would have to be compiled
    with LLM(str(smollm2), dtype="float32", served_name="smollm2", **options) as llm:
        yield llm


def test_answers_are_those_of_transformers_in_the_order_of_the_prompts(
    llm: LLM, smollm2: Path
) -> None:
    from transformers import AutoModelForCausalLM

    reference: Any = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)

    answers = llm.generate(PROMPTS, GREEDY)

    for prompt, answer in zip(PROMPTS, answers, strict=True):
        token_ids = torch.tensor([llm.tokenize(prompt)])
        whole = reference.generate(
            token_ids, attention_mask=torch.ones_like(token_ids), max_new_tokens=5, do_sample=False
        )
        assert list(answer.choices[0].token_ids) == whole[0, token_ids.shape[1] :].tolist()


def test_a_stream_has_the_text_of_the_answer(llm: LLM) -> None:
    events = list(llm.stream(PROMPTS[0], GREEDY))
    chat = list(llm.stream_chat(QUESTION, GREEDY))

    assert len(events) > 1
    assert "".join(event.text for event in events) == llm.generate(PROMPTS[0], GREEDY)[0].text
    assert "".join(event.text for event in chat) == llm.chat(QUESTION, GREEDY)[0].text


def test_streams_and_threads_take_turns_and_do_not_change_each_other(llm: LLM) -> None:
    alone = [answer.text for answer in llm.generate(PROMPTS, GREEDY)]
    first, second = llm.stream(PROMPTS[0], GREEDY), llm.stream(PROMPTS[1], GREEDY)

    pairs = list(zip_longest(first, second))
    mixed = [
        "".join(event.text for event in events if event) for events in zip(*pairs, strict=True)
    ]
    with ThreadPoolExecutor() as threads:
        together = threads.map(lambda prompt: llm.generate(prompt, GREEDY)[0].text, PROMPTS)

    assert mixed == alone
    assert list(together) == alone


def test_an_abandoned_stream_leaves_its_place_to_others(llm: LLM) -> None:
    endless = SamplingParams(temperature=0.0, ignore_eos=True)
    streams = [llm.stream(PROMPTS[0], endless) for _ in range(MAX_NUM_SEQS)]
    for stream in streams:
        next(stream)
    assert isinstance(streams[0], Generator)

    streams[0].close()

    # Only one place is free, and the other streams would keep theirs for 250 tokens.
    assert llm.generate(PROMPTS[0], GREEDY)[0].choices[0].finish_reason == "length"


def test_answers_may_have_a_form_several_choices_and_log_probabilities(llm: LLM) -> None:
    number = Constraint(kind="regex", source="[0-9]{3}")
    sampling = SamplingParams(constraint=number, logprobs=2, prompt_logprobs=0, seed=1)

    (answer,) = llm.generate("A number: ", sampling, num_choices=2)

    assert all(len(choice.text) == 3 and choice.text.isdigit() for choice in answer.choices)
    assert len(answer.choices) == 2
    assert len(answer.choices[0].logprobs[0].top) == 2
    assert len(answer.prompt_logprobs[0]) == len(llm.tokenize("A number: "))


@pytest.mark.parametrize(
    ("sampling", "error"),
    [
        ({"temperature": -1.0}, InvalidRequest),
        ({"max_tokens": 1000}, ContextLengthExceeded),
        ({"logit_bias": {1_000_000: 1.0}}, InvalidRequest),
        ({"constraint": Constraint(kind="regex", source="(")}, InvalidRequest),
    ],
)
def test_what_the_model_cannot_do_is_refused_before_anything_runs(
    sampling: dict[str, Any], error: type[Exception], llm: LLM
) -> None:
    with pytest.raises(error):
        llm.stream(PROMPTS[0], SamplingParams(**sampling))


def test_a_stream_that_cannot_have_scores_says_so(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="prompt_logprobs"):
        llm.stream(PROMPTS[0], SamplingParams(prompt_logprobs=0))


def test_settings_are_named_if_there_are_none_or_if_they_are_invalid() -> None:
    with pytest.raises(StartupError, match="no setting devise: did you mean device"):
        LLM(devise="cpu")
    with pytest.raises(StartupError, match="max_num_seqs: the value must be greater than 0"):
        LLM(max_num_seqs=0)


def test_texts_become_vectors_and_a_closed_model_answers_nothing(
    smollm2: Path, tmp_path: Path
) -> None:
    write_tiny_model(tmp_path, "qwen3", vocab_size=49152)
    shutil.copy(smollm2 / "tokenizer.json", tmp_path)
    write_pooling(tmp_path, pooling_mode_mean_tokens=True)
    llm = LLM(str(tmp_path), dtype="float32", kv_cache_bytes=1 << 20)

    vectors = torch.tensor(llm.embed(["a cat", "a dog and a horse"]))
    short = llm.embed("a cat", 10)
    llm.close()

    assert vectors.norm(dim=1).tolist() == pytest.approx([1.0, 1.0])
    assert (len(short), len(short[0])) == (1, 10)
    with pytest.raises(InternalError, match="load the model again"):
        llm.generate("a", GREEDY)


def test_a_model_without_embeddings_says_so(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="smollm2 has no embeddings"):
        llm.embed("a")
