"""Streams the text of a choice: incremental detokenization, token by token, up to the first stop
string.

The concatenation of the pieces that a detokenizer's `push` and `flush` return equals
``tokenizer.decode(token_ids)``. tokenizers' own ``DecodeStream`` (0.23) is not suitable: it raises
if a run of byte tokens is not valid text, and takes quadratic time within such a run.
"""

import codecs
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import tokenizers

from shared.errors import StartupError

_BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Detokenizer(Protocol):
    """The text of a choice."""

    def push(self, token_id: int) -> str:
        """The text that this token completes; never ends within a character."""
        ...

    def flush(self) -> str:
        """The remaining text at the end of the tokens; incomplete bytes become U+FFFD."""
        ...


DetokenizerFactory: TypeAlias = Callable[[], Detokenizer]


def detokenizer_factory(
    tokenizer: tokenizers.Tokenizer,
    decoder: Mapping[str, Any] | None,
    *,
    skips_special: bool = True,
) -> DetokenizerFactory:
    """Choose the detokenizer for ``decoder``, that entry of tokenizer.json.

    With ``skips_special``, special tokens have no text. Raises `StartupError` for a decoder that
    does not support incremental decoding.
    """
    pieces = _Pieces(tokenizer, skips_special=skips_special)
    steps = _steps(decoder)
    names = [step["type"] for step in steps]
    if names == ["ByteLevel"]:
        table = _ByteLevelTable(pieces)
        return lambda: ByteLevelDetokenizer(table)
    for step in steps:
        _check_step(step)
    decode = " ".join if decoder is None else tokenizer.decoder.decode
    has_bytes = "ByteFallback" in names
    return lambda: PieceDetokenizer(pieces, decode, has_bytes=has_bytes)


def token_bytes_of(
    tokenizer: tokenizers.Tokenizer, decoder: Mapping[str, Any] | None
) -> Mapping[int, bytes]:
    """The bytes that each token adds within a text, special tokens included."""
    pieces = _Pieces(tokenizer, skips_special=False)
    if [step["type"] for step in _steps(decoder)] == ["ByteLevel"]:
        return _ByteLevelTable(pieces)
    return _PieceBytes(pieces, " ".join if decoder is None else tokenizer.decoder.decode)


class ByteLevelDetokenizer:
    """For vocabularies of byte strings (GPT-2 and most later models)."""

    def __init__(self, table: "_ByteLevelTable") -> None:
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._table[token_id])

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class PieceDetokenizer:
    """For vocabularies of text pieces (SentencePiece), in which a piece's text depends on the piece
    before it: the first piece of a text loses its space.

    Each group of new pieces is decoded together with the previous group, whose text is then
    removed. Byte pieces are held back until their run ends, because one invalid byte invalidates
    the run.
    """

    def __init__(
        self, pieces: "_Pieces", decode: Callable[[Sequence[str]], str], *, has_bytes: bool
    ) -> None:
        self._pieces = pieces
        self._decode = decode
        self._has_bytes = has_bytes
        self._context: list[str] = []
        self._context_text = ""
        self._held: list[str] = []

    def push(self, token_id: int) -> str:
        piece = self._pieces[token_id]
        if not piece:
            return ""
        self._held.append(piece)
        if self._has_bytes and _BYTE_PIECE.fullmatch(piece):
            return ""
        return self.flush()

    def flush(self) -> str:
        group, self._held = self._held, []
        text = self._decode(self._context + group)
        new_text = text[len(self._context_text) :]
        if new_text:
            self._context, self._context_text = group, self._decode(group)
        else:
            # This group is no context yet: the piece after an empty start would be decoded as the
            # first piece.
            self._context, self._context_text = self._context + group, text
        return new_text


class _Pieces(dict[int, str]):
    """Maps token ids to vocabulary entries; empty for skipped tokens and unknown ids."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, *, skips_special: bool) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder().values()
        self._skipped = {token.content for token in added if token.special and skips_special}

    def __missing__(self, token_id: int) -> str:
        piece = self._tokenizer.id_to_token(token_id) or ""
        self[token_id] = "" if piece in self._skipped else piece
        return self[token_id]


class _ByteLevelTable(dict[int, bytes]):
    """Maps token ids to bytes."""

    def __init__(self, pieces: _Pieces) -> None:
        super().__init__()
        self._pieces = pieces

    def __missing__(self, token_id: int) -> bytes:
        piece = self._pieces[token_id]
        try:
            self[token_id] = bytes(map(_BYTE_OF_CHAR.__getitem__, piece))
        except KeyError:  # an added token, which is not byte-encoded
            self[token_id] = piece.encode()
        return self[token_id]


class _PieceBytes(dict[int, bytes]):
    """Maps token ids to bytes."""

    def __init__(self, pieces: _Pieces, decode: Callable[[Sequence[str]], str]) -> None:
        super().__init__()
        self._pieces = pieces
        self._decode = decode

    def __missing__(self, token_id: int) -> bytes:
        piece = self._pieces[token_id]
        if _BYTE_PIECE.fullmatch(piece):
            self[token_id] = bytes.fromhex(piece[3:-1])
        else:
            # The piece follows another piece, because the first piece of a text loses its space.
            self[token_id] = self._decode(["a", piece]).removeprefix("a").encode()
        return self[token_id]


def _byte_of_char() -> dict[str, int]:
    """GPT-2's alphabet: a printable character for each byte, the byte itself if it is printable."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + k): byte for k, byte in enumerate(others)
    }


_BYTE_OF_CHAR = _byte_of_char()


def _steps(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for part in decoder["decoders"] for step in _steps(part)]
    return [decoder]


def _check_step(step: Mapping[str, Any]) -> None:
    """Reject decoder steps whose result depends on more than the previous piece."""
    match step:
        case {"type": "Replace" | "ByteFallback" | "Fuse" | "Metaspace" | "BPEDecoder"}:
            return
        case {"type": "Strip", "start": 0 | 1, "stop": 0}:
            return
    raise StartupError(f"the tokenizer's decoder {step['type']} is not supported")


class StopFinder:
    """Passes text on up to the first stop string, which is removed unless it is to be included.

    The first stop string is the string whose last character comes first; of several that end at the
    same position, it is the longest. Exactly the longest suffix that may still become a stop string
    is held back, so the output does not depend on how the text is divided.
    """

    def __init__(self, stop: Sequence[str], *, includes_stop: bool = False) -> None:
        self.met: str | None = None
        """The matched stop string."""
        self._matchers = [_Matcher(string) for string in stop]
        self._held = ""
        self._includes_stop = includes_stop

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """The text that is certain to precede any stop string, or to belong to an included stop
        string.

        Unless it ``may_stop``, stop strings that end in ``text`` do not count."""
        if self.met is not None:
            return ""
        if not self._matchers:
            return text
        pending = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            ended = [matcher.stop for matcher in self._matchers if matcher.advance(char)]
            if ended and may_stop:
                self.met = max(ended, key=len)
                return pending[: end if self._includes_stop else end - len(self.met)]
        num_safe = len(pending) - max(matcher.num_matched for matcher in self._matchers)
        self._held = pending[num_safe:]
        return pending[:num_safe]

    def flush(self) -> str:
        """The held-back text, at the end of the text."""
        held, self._held = self._held, ""
        return "" if self.met is not None else held


class _Matcher:
    """The algorithm of Knuth, Morris and Pratt (1977), in amortized constant time per character."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        """Length of the longest proper prefix of ``stop`` that is a suffix of the text so far."""
        self._borders = [0]
        for char in stop[1:]:
            self._borders.append(self._next(self._borders[-1], char))

    def advance(self, char: str) -> bool:
        """Advance by ``char``; returns whether it completes the stop string."""
        num_matched = self._next(self.num_matched, char)
        is_complete = num_matched == len(self.stop)
        self.num_matched = self._borders[-1] if is_complete else num_matched
        return is_complete

    def _next(self, num_matched: int, char: str) -> int:
        while num_matched and self.stop[num_matched] != char:
            num_matched = self._borders[num_matched - 1]
        return num_matched + (self.stop[num_matched] == char)


class TextStream:
    """Converts the tokens of a choice into text that is safe to send.

    What each call returns depends only on all token ids so far. It never ends within a character,
    and never contains text that may still become part of a stop string.
    """

    def __init__(self, detokenizer: Detokenizer, stop: StopFinder, *, min_tokens: int = 0) -> None:
        """Stop strings that end within the first ``min_tokens`` tokens do not count, as in vLLM."""
        self.stop_reason: str | None = None
        """The matched stop string; the text ends before it."""
        self.num_completed = 0
        """The number of characters that the last token completed; some of them may be held back, or
        belong to a stop string."""
        self._detokenizer = detokenizer
        self._stop = stop
        self._num_unstoppable = min_tokens
        """How many of the next tokens cannot end the text."""
        self._may_stop = not min_tokens

    def push(self, token_id: int) -> str:
        """The text that the token completes; empty after a stop string."""
        self._may_stop = not self._num_unstoppable
        self._num_unstoppable -= not self._may_stop
        completed = self._detokenizer.push(token_id)
        self.num_completed = len(completed)
        text = self._stop.push(completed, may_stop=self._may_stop)
        self.stop_reason = self._stop.met
        return text

    def flush(self) -> str:
        """The held-back text at the natural end; incomplete bytes become U+FFFD.

        The last bytes may complete a stop string, in which case `stop_reason` is set.
        """
        text = self._stop.push(self._detokenizer.flush(), may_stop=self._may_stop)
        text += self._stop.flush()
        self.stop_reason = self._stop.met
        return text
