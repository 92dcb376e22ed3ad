from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from tokenizers import Tokenizer as Encoder
from tokenizers import processors

from shared.errors import InvalidRequest, StartupError
from shared.messages import ChatMessage, ChatPrompt, TextPrompt, TokenPrompt, Tool
from tests.support.text.tokenizers import (
    byte_level_tokenizer,
    save_tokenizer,
    sentencepiece_tokenizer,
    word_tokenizer,
)
from worker.text import Tokenizer, tool_parser

HELLO = ChatPrompt(messages=(ChatMessage(role="user", content="one"),))


def test_text_gets_the_special_tokens_and_a_chat_only_those_of_its_template(tmp_path: Path) -> None:
    words = word_tokenizer()
    words.post_processor = processors.TemplateProcessing(
        single="</s> $A", special_tokens=[("</s>", 1)]
    )
    tokenizer = Tokenizer.load(
        save_tokenizer(
            words, tmp_path, tokenizer_config={"chat_template": "two {{ messages[0].content }}"}
        )
    )

    assert tokenizer.encode(TextPrompt(text="one")) == [1, 2]
    assert tokenizer.encode(TextPrompt(text="")) == [1]
    assert tokenizer.encode(HELLO) == [3, 2]


@pytest.mark.parametrize("are_files", [True, False], ids=["files", "list"])
def test_a_conversation_with_tools_is_rendered_by_the_template_for_it(
    are_files: bool, tmp_path: Path
) -> None:
    template = "{{ messages[0].content }}"
    tool_use = "{{ tools[0].function.name }}<tool_call>"
    config: dict[str, Any] = {}
    if are_files:
        (tmp_path / "chat_template.jinja").write_text(template)
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(tool_use)
    else:
        named = {"tool_use": tool_use, "default": template, "rag": "{{ documents }}"}
        entries = [{"name": name, "template": source} for name, source in named.items()]
        config = {"tokenizer_config": {"chat_template": entries}}
    tokenizer = Tokenizer.load(save_tokenizer(word_tokenizer(), tmp_path, **config))
    assert tokenizer.template is not None

    with_tools = structs.replace(HELLO, tools=(Tool(name="f", parameters={}),))

    assert tokenizer.template.render(HELLO) == "one"
    assert tokenizer.template.render(with_tools) == "f<tool_call>"
    assert tool_parser(tokenizer) == "hermes"
    written = tokenizer.with_written_tools().template
    assert written is not None
    assert "You may call" in written.render(with_tools)


def test_token_ids_are_taken_as_they_are(smollm2: Path) -> None:
    assert Tokenizer.load(smollm2).encode(TokenPrompt(token_ids=(49151, 0))) == [49151, 0]


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (TokenPrompt(token_ids=(5,)), "prompt"),
        (TextPrompt(text=""), "prompt"),
        (HELLO, "messages"),
    ],
    ids=["an id past the vocabulary", "an empty text", "a chat without a template"],
)
def test_a_prompt_that_the_model_cannot_read_is_refused(
    prompt: TokenPrompt | TextPrompt | ChatPrompt, param: str, tmp_path: Path
) -> None:
    tokenizer = Tokenizer.load(save_tokenizer(word_tokenizer(), tmp_path))

    with pytest.raises(InvalidRequest) as error:
        tokenizer.encode(prompt)

    assert error.value.param == param


def test_a_prompt_is_refused_by_its_clients_name_or_may_be_empty(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(save_tokenizer(word_tokenizer(), tmp_path))
    empty = TextPrompt(text="")

    assert tokenizer.encode(empty, may_be_empty=True) == []
    with pytest.raises(InvalidRequest, match="input") as error:
        tokenizer.encode(empty, name="input")
    assert error.value.param == "input"


def test_text_with_a_token_that_the_model_has_no_weights_for_is_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(save_tokenizer(word_tokenizer(), tmp_path, config={"vocab_size": 4}))

    assert tokenizer.encode(TextPrompt(text="two")) == [3]
    with pytest.raises(InvalidRequest, match="vocabulary of 4"):
        tokenizer.encode(TextPrompt(text="three"))


def test_every_end_of_sequence_that_any_file_names_counts(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(
        save_tokenizer(
            word_tokenizer(),
            tmp_path,
            config={"eos_token_id": 2},
            generation_config={"eos_token_id": [3, 4]},
            tokenizer_config={"eos_token": {"content": "</s>"}},
        )
    )

    assert tokenizer.eos_ids == {1, 2, 3, 4}


@pytest.mark.parametrize("template", ["<|channel|>analysis<|message|>", "{{ messages }}"])
def test_an_answer_of_harmony_ends_with_its_call(template: str, tmp_path: Path) -> None:
    words = word_tokenizer()
    words.add_special_tokens(["<|return|>", "<|call|>"])
    config = {"chat_template": template, "eos_token": "</s>"}

    tokenizer = Tokenizer.load(save_tokenizer(words, tmp_path, tokenizer_config=config))

    ends = ("</s>", "<|return|>", "<|call|>") if "channel" in template else ("</s>",)
    assert tokenizer.eos_ids == {words.token_to_id(end) for end in ends}


def test_truncation_and_padding_of_the_training_are_off(tmp_path: Path) -> None:
    words = word_tokenizer()
    words.enable_truncation(1)
    words.enable_padding(length=4)

    tokenizer = Tokenizer.load(save_tokenizer(words, tmp_path))

    assert tokenizer.encode(TextPrompt(text="one two")) == [2, 3]


def test_smollm2_knows_its_vocabulary_and_its_end(smollm2: Path) -> None:
    tokenizer = Tokenizer.load(smollm2)

    assert tokenizer.vocab_size == 49152
    assert tokenizer.eos_ids == {0, 2, 4}


def test_a_stop_string_across_tokens_ends_the_text_before_it(smollm2: Path) -> None:
    encoder = Encoder.from_file(str(smollm2 / "tokenizer.json"))
    stream = Tokenizer.load(smollm2).text_stream(["\n\nUser:"])

    pieces = [stream.push(token_id) for token_id in encoder.encode("Paris.\n\nUser: and").ids]

    assert "".join(pieces) + stream.flush() == "Paris."
    assert stream.stop_reason == "\n\nUser:"


def test_the_last_bytes_may_complete_a_stop_string(tmp_path: Path) -> None:
    encoder = byte_level_tokenizer()
    stream = Tokenizer.load(save_tokenizer(encoder, tmp_path)).text_stream(["�"])
    stream.push(encoder.encode("é").ids[0])

    assert stream.flush() == ""
    assert stream.stop_reason == "�"


def test_a_directory_without_a_tokenizer_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json"])
def test_a_broken_file_stops_the_start(name: str, tmp_path: Path) -> None:
    save_tokenizer(word_tokenizer(), tmp_path)
    (tmp_path / name).write_text("{")

    with pytest.raises(StartupError, match=name):
        Tokenizer.load(tmp_path)


def test_a_prompt_may_do_without_special_tokens(tmp_path: Path) -> None:
    words = word_tokenizer()
    words.post_processor = processors.TemplateProcessing(
        single="</s> $A", special_tokens=[("</s>", 1)]
    )
    tokenizer = Tokenizer.load(save_tokenizer(words, tmp_path))

    assert tokenizer.encode(TextPrompt(text="one", add_special_tokens=False)) == [2]


def test_the_bytes_of_tokens_are_those_of_their_text(smollm2: Path) -> None:
    tokenizer = Tokenizer.load(smollm2)
    text = "Zürich, 東京 and 🙂!\n\tdone"

    token_ids = tokenizer.encode_text(text)

    assert b"".join(map(tokenizer.token_bytes, token_ids)).decode() == text
    assert tokenizer.token_bytes(2) == b"<|im_end|>"
    assert tokenizer.decode([1, *token_ids, 2]) == f"<|im_start|>{text}<|im_end|>"


def test_the_bytes_of_pieces_are_those_within_a_text(tmp_path: Path) -> None:
    encoder = sentencepiece_tokenizer()
    tokenizer = Tokenizer.load(save_tokenizer(encoder, tmp_path))
    text = "one two 🙂"

    token_ids = tokenizer.encode_text(text)

    assert b"".join(map(tokenizer.token_bytes, token_ids)).decode() == f" {text}"


@pytest.mark.parametrize("kind", [byte_level_tokenizer, sentencepiece_tokenizer])
@pytest.mark.parametrize("text", ["", "a", " a", "  ", "hello", "\n\n", "é🙂", "漢 字"])
def test_the_tokens_of_a_text_within_a_text_have_its_bytes(
    kind: Callable[[], Encoder], text: str, tmp_path: Path
) -> None:
    tokenizer = Tokenizer.load(save_tokenizer(kind(), tmp_path))

    token_ids = tokenizer.encode_within(text)

    assert token_ids is not None
    assert b"".join(map(tokenizer.token_bytes, token_ids)) == text.encode()


def test_a_text_without_tokens_has_none_within_a_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(save_tokenizer(word_tokenizer(), tmp_path))

    assert tokenizer.encode_within("four") is None
