"""Keys of objects that have been written, and the tokens that would repeat them."""

import pytest

from tests.support.text.tokenizers import byte_level_tokenizer, save_tokenizer
from worker.decode.json_keys import JsonKeys, Quoted, quoted_tokens, without
from worker.text import Tokenizer

TOKENS = ['a"', '":', '","', ',"a"', ', "ab": 1', '"a"', '{"', '""', "a", 'b":"']


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    encoder = byte_level_tokenizer()
    encoder.add_tokens(TOKENS)
    return Tokenizer.load(save_tokenizer(encoder, tmp_path_factory.mktemp("keys")))


@pytest.fixture(scope="module")
def quoted(tokenizer: Tokenizer) -> Quoted:
    return quoted_tokens(tokenizer)


@pytest.mark.parametrize(
    ("text", "is_repeated"),
    [
        ('{"a": 1, "b": 1}', False),
        ('{"a": 1, "a": 1}', True),
        ('{"a":{"a":[{"a":1},{"a":2}]},"b":"a"}', False),
        ('{"b": {"a": {}}, "a": [], "b": 1}', True),
        ('[{"a":"},{"},{"a":1}]', False),
        ('[{"a":"}","a":1}]', True),
        (r'{"a\"": 1, "a": 1, "\\": 2, "\\\"": 3}', False),
        (r'{"a\\": 1, "a\\": 1}', True),
        ('{"a": [1, -2.5e+3, true, false, null, "a", []], "b": {}, "a": 0}', True),
    ],
)
@pytest.mark.parametrize("before", ["", 'He said {so}: {"x\n', '{"a": {"b": <tool_call>', '{"a"'])
def test_a_repeated_key_is_found(before: str, text: str, is_repeated: bool, quoted: Quoted) -> None:
    keys = JsonKeys(quoted, is_json=not before)
    keys.read(before.encode())

    assert keys.read(text.encode()) is is_repeated


@pytest.mark.parametrize(
    ("text", "repeating"),
    [
        ('{"a": 1, "', {'a"'}),
        ('{"a": 1, "a', {'"', '":', '","', '""', '"a"'}),
        ('{"a": 1, "b', set()),
        ('{"ab": 1, "a', {'b":"'}),
        ('{"a": 1, ', {'"a"'}),
        ('{"a": 1', {',"a"'}),
        ('{"ab": 1', {', "ab": 1'}),
        ('{"a": {', set()),
        ('{"a": {"', set()),
        ('{"a": "', set()),
        ('{"": 1, "', {'"', '":', '","', '""', '"a"'}),
    ],
)
def test_tokens_that_would_repeat_a_key_are_known(
    text: str, repeating: set[str], quoted: Quoted, tokenizer: Tokenizer
) -> None:
    keys = JsonKeys(quoted, is_json=True)
    keys.read(text.encode())

    found = {tokenizer.token_bytes(token_id).decode() for token_id in keys.repeating()}

    assert found == repeating
    assert all(keys.copy().read(token.encode()) for token in repeating)


def test_a_copy_goes_its_own_way(quoted: Quoted) -> None:
    keys = JsonKeys(quoted, is_json=True)
    keys.read(b'{"a": 1, "')
    copy = keys.copy()

    copy.read(b'b": 1, "')

    assert keys.read(b'b"') is False
    assert copy.read(b'b"') is True


def test_tokens_are_taken_out_of_a_mask() -> None:
    assert without(b"\xff\xff", [0, 9]) == b"\xfe\xfd"
