"""Tokens of the text of a server."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import processors

from shared.errors import EngineFailed
from shared.messages import SamplingParams, TextPrompt
from tests.support.text.tokenizers import (
    byte_level_tokenizer,
    metaspace_tokenizer,
    save_tokenizer,
    sentencepiece_tokenizer,
)
from worker.engines.adapter import Ask
from worker.engines.adapters.openai import OpenAICall
from worker.text import Tokenizer

PROMPT = "a hello"


@pytest.fixture(scope="module", params=[byte_level_tokenizer, sentencepiece_tokenizer])
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    return Tokenizer.load(save_tokenizer(request.param(), directory))


def call_of(tokenizer: Tokenizer, output_ids: list[int]) -> OpenAICall:
    """A request that continues `PROMPT` and this output."""
    token_ids = [*tokenizer.encode(TextPrompt(text=PROMPT)), *output_ids]
    ask = Ask(token_ids, 9, SamplingParams(), seed=0, num_output_ids=len(output_ids))
    return OpenAICall(ask, "m", tokenizer)


def tokens_of(call: OpenAICall, texts: list[str]) -> list[int]:
    events = [{"choices": [{"text": text, "finish_reason": None}]} for text in texts]
    return [token_id for event in events for token_id in call.read(event).token_ids]


@given(texts=st.lists(st.text(alphabet="ab hélo世🙂\n.", max_size=6), min_size=2, max_size=8))
def test_the_tokens_of_a_text_in_pieces_are_that_text(
    tokenizer: Tokenizer, texts: list[str]
) -> None:
    before = tokens_of(call_of(tokenizer, []), texts[:1])
    continued = call_of(tokenizer, before)
    output_ids = [*before, *tokens_of(continued, texts[1:])]

    assert continued.body["prompt"] == PROMPT + texts[0]
    assert tokenizer.decode(output_ids) == "".join(texts)


def test_the_prompt_has_no_special_tokens_that_the_server_adds(tmp_path: Path) -> None:
    encoder = sentencepiece_tokenizer()
    encoder.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    tokenizer = Tokenizer.load(save_tokenizer(encoder, tmp_path))

    assert call_of(tokenizer, []).body["prompt"] == PROMPT


def test_a_text_that_no_tokens_have_is_the_engines_failure(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(save_tokenizer(metaspace_tokenizer(), tmp_path))

    with pytest.raises(EngineFailed, match="cannot be written"):
        tokens_of(call_of(tokenizer, []), ["漢"])
