from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders

from shared.errors import StartupError
from tests.support.text.tokenizers import (
    byte_level_tokenizer,
    metaspace_tokenizer,
    save_tokenizer,
    sentencepiece_tokenizer,
    word_suffix_tokenizer,
    word_tokenizer,
)
from worker.text import Tokenizer as WarrenTokenizer

KINDS = [
    byte_level_tokenizer,
    metaspace_tokenizer,
    sentencepiece_tokenizer,
    word_suffix_tokenizer,
    word_tokenizer,
]
WRITTEN = (
    "naïve 👩‍👩‍👧‍👦 café 日本語のテキスト、한국어 ไทย\n\n\t  def f(x):   return 'é́' 🇩🇪\x00\u2028 ﷽"
)


def streamed(tokenizer: WarrenTokenizer, token_ids: list[int]) -> list[str]:
    """The text that each token adds, and the rest at the end."""
    stream = tokenizer.text_stream()
    return [stream.push(token_id) for token_id in token_ids] + [stream.flush()]


def token_id_of(tokenizer: Tokenizer, piece: str) -> int:
    token_id = tokenizer.token_to_id(piece)
    assert token_id is not None
    return token_id


@pytest.fixture(scope="module")
def smollm2_pair(smollm2: Path) -> tuple[WarrenTokenizer, Tokenizer]:
    return WarrenTokenizer.load(smollm2), Tokenizer.from_file(str(smollm2 / "tokenizer.json"))


@given(token_ids=st.lists(st.integers(0, 49151), max_size=60))
def test_any_tokens_of_smollm2_stream_to_their_decoded_text(
    smollm2_pair: tuple[WarrenTokenizer, Tokenizer], token_ids: list[int]
) -> None:
    tokenizer, theirs = smollm2_pair

    assert "".join(streamed(tokenizer, token_ids)) == theirs.decode(token_ids)


def test_text_of_many_scripts_streams_from_smollm2_in_whole_characters(
    smollm2_pair: tuple[WarrenTokenizer, Tokenizer],
) -> None:
    tokenizer, theirs = smollm2_pair

    pieces = streamed(tokenizer, theirs.encode(WRITTEN).ids)

    assert "".join(pieces) == WRITTEN
    assert pieces[-1] == ""


@given(text=st.text(max_size=60))
def test_any_text_streams_back_without_a_rest(
    text: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    theirs = byte_level_tokenizer()
    tokenizer = WarrenTokenizer.load(save_tokenizer(theirs, tmp_path_factory.mktemp("model")))

    pieces = streamed(tokenizer, theirs.encode(text, add_special_tokens=False).ids)

    assert "".join(pieces) == text.replace("</s>", "")
    assert pieces[-1] == ""


@pytest.mark.parametrize("build", KINDS)
def test_any_tokens_of_any_kind_stream_to_their_decoded_text(
    build: Callable[[], Tokenizer], tmp_path: Path
) -> None:
    theirs = build()
    tokenizer = WarrenTokenizer.load(save_tokenizer(theirs, tmp_path))
    # Ids beyond the vocabulary occur, because models pad their tables.
    last_id = theirs.get_vocab_size() + 2

    @given(token_ids=st.lists(st.integers(0, last_id), max_size=40))
    def check(token_ids: list[int]) -> None:
        assert "".join(streamed(tokenizer, token_ids)) == theirs.decode(token_ids)

    check()


@given(chunks=st.lists(st.binary(max_size=6), max_size=12))
def test_any_bytes_of_a_sentencepiece_model_stream_to_their_decoded_text(
    chunks: list[bytes], tmp_path_factory: pytest.TempPathFactory
) -> None:
    theirs = sentencepiece_tokenizer()
    tokenizer = WarrenTokenizer.load(save_tokenizer(theirs, tmp_path_factory.mktemp("model")))
    pieces = [piece for chunk in chunks for piece in [*(f"<0x{byte:02X}>" for byte in chunk), "▁a"]]
    token_ids = [token_id_of(theirs, piece) for piece in pieces]

    assert "".join(streamed(tokenizer, token_ids)) == theirs.decode(token_ids)


def test_a_character_of_several_tokens_comes_with_its_last_one(tmp_path: Path) -> None:
    theirs = byte_level_tokenizer()
    tokenizer = WarrenTokenizer.load(save_tokenizer(theirs, tmp_path))

    assert streamed(tokenizer, theirs.encode("é🙂").ids) == ["", "é", "", "", "", "🙂", ""]


def test_incomplete_bytes_become_one_replacement_character_at_the_end(tmp_path: Path) -> None:
    theirs = byte_level_tokenizer()
    tokenizer = WarrenTokenizer.load(save_tokenizer(theirs, tmp_path))

    assert streamed(tokenizer, theirs.encode("a🙂").ids[:3]) == ["a", "", "", "�"]


def test_the_first_space_of_a_sentencepiece_model_is_dropped_and_no_other(tmp_path: Path) -> None:
    theirs = sentencepiece_tokenizer()
    tokenizer = WarrenTokenizer.load(save_tokenizer(theirs, tmp_path))
    token_ids = [token_id_of(theirs, piece) for piece in ("▁a", "</s>", "▁a", "▁", "▁a")]

    assert streamed(tokenizer, token_ids) == ["a", "", " a", " ", " a", ""]


@pytest.mark.parametrize(
    ("build", "piece"), [(byte_level_tokenizer, "ä"), (sentencepiece_tokenizer, "<0xE4>")]
)
def test_a_token_costs_the_same_wherever_it_stands(
    build: Callable[[], Tokenizer], piece: str, tmp_path: Path
) -> None:
    """An endless half character is the worst case of detokenizers that decode repeatedly."""
    theirs = build()
    tokenizer = WarrenTokenizer.load(save_tokenizer(theirs, tmp_path))

    text = "".join(streamed(tokenizer, [token_id_of(theirs, piece)] * 100_000))

    assert text == "�" * 100_000


def test_a_decoder_that_looks_ahead_is_refused(tmp_path: Path) -> None:
    theirs = word_tokenizer()
    theirs.decoder = decoders.WordPiece()

    with pytest.raises(StartupError, match="WordPiece"):
        WarrenTokenizer.load(save_tokenizer(theirs, tmp_path))
