"""The vocabulary of a model as llguidance knows it, in which no text is a special token."""

import functools
import json
import logging
import re
import secrets
from typing import Any

import msgspec
from llguidance import LLTokenizer
from msgspec import structs

from shared.grammars import ENTRY_RULE
from shared.messages import Constraint
from worker.text import Tokenizer

logger = logging.getLogger(__name__)

_USUAL_ENDS = ("</s>", "<eos>", "<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>")
"""Tokens that end a text if the model's configuration names none."""
_MAX_KEPT = 4
_ENTRY = re.compile(rf'^(?P<name>{ENTRY_RULE}\w+): (?P<text>"(?:[^"\\\n]|\\.)*")$', re.MULTILINE)
"""A rule that stands for an entry of the vocabulary: see `ENTRY_RULE`."""
_LEXEME = re.compile(
    r"""(?P<token><[^<>\s\[\]]+>)
    | "(?:[^"\\\n]|\\.)*+" | //[^\n]*+ | \#[^\n]*+ | /(?:[^/\\\n]|\\.)++/""",
    re.VERBOSE,
)
"""A token in a grammar, or what may contain its text without meaning it."""


class GrammarVocabulary:
    """Names tokens by their ids in grammars.

    llguidance tokenizes the text that a grammar forces, such as a constant or the name of a
    property. A tokenizer reads the text of a special token as that token, which matches no text and
    may end the answer. The tokenizer that llguidance gets has other names for these tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.llguidance: LLTokenizer | None = _new(tokenizer)
        """None: llguidance cannot read the tokenizer."""

    def with_token_ids(self, constraint: Constraint) -> Constraint:
        """The constraint with the ids of tokens in place of their names."""
        if constraint.kind != "lark":
            return constraint
        source = _ENTRY.sub(self._entry_id, constraint.source)
        return structs.replace(constraint, source=_LEXEME.sub(self._named_id, source))

    def _entry_id(self, rule: "re.Match[str]") -> str:
        try:
            token_id = self._tokenizer.token_id(json.loads(rule["text"]))
        except ValueError:  # a client's rule, with an escape that JSON lacks
            return rule[0]
        return rule[0] if token_id is None else f"{rule['name']}: <[{token_id}]>"

    def _named_id(self, lexeme: "re.Match[str]") -> str:
        name = lexeme["token"]
        token_id = None if name is None else self._tokenizer.token_id(name)
        return lexeme[0] if token_id is None else f"<[{token_id}]>"


@functools.lru_cache(_MAX_KEPT)
def vocabulary_of(tokenizer: Tokenizer) -> GrammarVocabulary:
    """The vocabulary of a tokenizer, which all models with this tokenizer share. The first model
    waits up to a second, in which no other thread runs."""
    return GrammarVocabulary(tokenizer)


def _new(tokenizer: Tokenizer) -> LLTokenizer | None:
    # The configuration may name ids that the tokenizer lacks.
    ends = sorted(one for one in tokenizer.eos_ids if one < tokenizer.num_entries)
    usual = (tokenizer.token_id(text) for text in _USUAL_ENDS)
    try:
        return LLTokenizer(
            _with_other_names(tokenizer.source),
            n_vocab=max(tokenizer.vocab_size, tokenizer.num_entries),
            eos_token=ends or [one for one in usual if one is not None] or None,
        )
    except ValueError as error:  # it reads byte-level tokenizers, and those with a byte fallback
        logger.warning("constraints are not supported", extra={"reason": str(error)})
        return None


def _with_other_names(source: str) -> str:
    """A tokenizer as JSON, in which the tokens that llguidance takes for special tokens have names
    that no text contains."""
    tokenizer: dict[str, Any] = msgspec.json.decode(source)
    secret = secrets.token_hex(8)
    names: dict[str, str] = {}
    for token in tokenizer["added_tokens"]:
        text = token["content"]
        if token["special"] or (text.startswith("<") and text.endswith(">")):
            token["content"] = names[text] = f"<{secret} {token['id']}>"
    model = tokenizer["model"]
    if isinstance(vocab := model["vocab"], dict):
        model["vocab"] = {names.get(text, text): token_id for text, token_id in vocab.items()}
    else:
        model["vocab"] = [[names.get(text, text), score] for text, score in vocab]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    return msgspec.json.encode(tokenizer).decode()
