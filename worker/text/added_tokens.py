"""The tokens that only the files beside tokenizer.json name: tokenizer_config.json, and the older
added_tokens.json and special_tokens_map.json.

They are read as transformers reads them: without them, a chat's control tokens fall into pieces.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from msgspec import Struct
from msgspec.structs import replace

from shared.errors import StartupError
from shared.model_files import check_fields, read_json_object

logger = logging.getLogger(__name__)

CONFIG = "tokenizer_config.json"
_ADDED = "added_tokens.json"
_SPECIAL = "special_tokens_map.json"
_ROLES = [f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]


class TokenEntry(Struct):
    """A token as these files describe it."""

    content: str
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool | None = None
    """None: true unless the token is special."""
    special: bool = False

    def added(self, *, is_special: bool = False) -> tokenizers.AddedToken:
        flags = {} if self.normalized is None else {"normalized": self.normalized}
        return tokenizers.AddedToken(
            self.content,
            lstrip=self.lstrip,
            rstrip=self.rstrip,
            single_word=self.single_word,
            special=self.special or is_special,
            **flags,
        )


class _TokenizerFields(Struct):
    """The fields of tokenizer_config.json and of special_tokens_map.json that name tokens."""

    added_tokens_decoder: dict[str, TokenEntry] | None = None
    additional_special_tokens: list[str | TokenEntry] | None = None
    extra_special_tokens: list[str | TokenEntry] | dict[str, str | TokenEntry] | None = None


@dataclass(frozen=True, slots=True)
class NamedTokens:
    """The tokens that have a role, and further special tokens."""

    roles: Mapping[str, TokenEntry]
    """The tokens by the names of their roles: ``bos_token`` and the like."""
    extra: Sequence[TokenEntry]

    @property
    def contents(self) -> dict[str, str]:
        """The variables of a chat template."""
        return {name: entry.content for name, entry in self.roles.items()}


def add_tokens(encoder: tokenizers.Tokenizer, directory: Path, vocab_size: int) -> dict[str, str]:
    """Add the tokens that only these files name to ``encoder``; returns the texts of the tokens
    with a role, by name.

    A token that the model's ``vocab_size`` leaves no place for stays text. Raises `StartupError` if
    a file is malformed, or if a token would get another id than the file says.
    """
    config = read_json_object(directory / CONFIG) or {}
    fields = check_fields(config, _TokenizerFields, CONFIG)
    if fields.added_tokens_decoder is not None:
        named = _named(config, CONFIG)
        listed = _by_id(fields.added_tokens_decoder)
    else:
        special = read_json_object(directory / _SPECIAL) or {}
        named = _merged(config, special)
        listed = _listed(directory, named, encoder)
    tokens = list(_tokens(listed, named, encoder))
    _add(encoder, tokens, listed, vocab_size)
    return named.contents


def _named(config: dict[str, Any], name: str) -> NamedTokens:
    fields = check_fields(config, _TokenizerFields, name)
    extra = fields.extra_special_tokens or fields.additional_special_tokens or ()
    roles = {
        key: token
        for key, token in config.items()
        # Flags such as add_bos_token have such names, too.
        if key.endswith("_token") and token and isinstance(token, str | dict)
    }
    entries = check_fields(roles, dict[str, str | TokenEntry], name)
    if isinstance(extra, dict):
        entries, extra = entries | extra, ()
    return NamedTokens(
        {key: _entry(entries[key]) for key in _in_order(entries)},
        [_entry(token) for token in extra],
    )


def _merged(config: dict[str, Any], special: dict[str, Any]) -> NamedTokens:
    """The tokens of tokenizer_config.json; a token of special_tokens_map.json replaces the token of
    the same role."""
    older, newer = _named(config, CONFIG), _named(special, _SPECIAL)
    roles = {**older.roles, **{k: replace(role, special=True) for k, role in newer.roles.items()}}
    adds = "extra_special_tokens" in special or not older.extra
    extra = {entry.content: entry for entry in (*older.extra, *(newer.extra if adds else ()))}
    return NamedTokens({key: roles[key] for key in _in_order(roles)}, list(extra.values()))


def _in_order(roles: Iterable[str]) -> list[str]:
    """In the order in which their tokens get ids: roles that every tokenizer may have first."""
    return sorted(roles, key=lambda role: _ROLES.index(role) if role in _ROLES else len(_ROLES))


def _entry(token: str | TokenEntry) -> TokenEntry:
    return TokenEntry(token, special=True) if isinstance(token, str) else token


def _by_id(listed: Mapping[str, TokenEntry]) -> dict[int, tokenizers.AddedToken]:
    for token_id in listed:
        if not token_id.isdecimal():
            raise StartupError(f"{CONFIG}: added_tokens_decoder has the id {token_id!r}")
    return {int(token_id): entry.added() for token_id, entry in listed.items()}


def _listed(
    directory: Path, named: NamedTokens, encoder: tokenizers.Tokenizer
) -> dict[int, tokenizers.AddedToken]:
    """The tokens of added_tokens.json, by id, unless tokenizer.json has others with these ids."""
    ids = check_fields(read_json_object(directory / _ADDED) or {}, dict[str, int], _ADDED)
    entries = [named.roles[role] for role in _ROLES if role in named.roles]
    special = {entry.content for entry in (*entries, *named.extra) if entry.special}
    listed = {
        token_id: TokenEntry(
            content, special=content in special, normalized=content not in special
        ).added()
        for content, token_id in ids.items()
    }
    return listed | encoder.get_added_tokens_decoder()


def _tokens(
    listed: Mapping[int, tokenizers.AddedToken],
    named: NamedTokens,
    encoder: tokenizers.Tokenizer,
) -> Iterator[tokenizers.AddedToken]:
    """All tokens that are not as these files describe them, in the order of their ids."""
    with_role = set(named.contents.values())
    stored = {token.content: token for token in encoder.get_added_tokens_decoder().values()}
    known = {*stored, *(token.content for token in listed.values())}
    for _, token in sorted(listed.items()):
        token.special = token.special or token.content in with_role
        is_stored = token.content in stored and stored[token.content].special
        yield _special(token) if is_stored and not token.special else token
    for entry in (*named.roles.values(), *named.extra):
        if entry.content not in known:
            yield entry.added(is_special=entry.content in with_role)


def _special(token: tokenizers.AddedToken) -> tokenizers.AddedToken:
    """A token that is special in tokenizer.json alone: decoding leaves it out all the same."""
    return tokenizers.AddedToken(
        token.content,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        single_word=token.single_word,
        normalized=token.normalized,
        special=True,
    )


def _add(
    encoder: tokenizers.Tokenizer,
    tokens: Iterable[tokenizers.AddedToken],
    listed: Mapping[int, tokenizers.AddedToken],
    vocab_size: int,
) -> None:
    wanted = {token.content: token_id for token_id, token in listed.items()}
    added_ids = encoder.get_added_tokens_decoder()
    next_id = max(encoder.get_vocab_size(with_added_tokens=False), max(added_ids, default=-1) + 1)
    taken: list[tokenizers.AddedToken] = []
    new: set[str] = set()
    left_out: list[str] = []
    for token in tokens:
        if not token.content:
            continue
        if token.content not in new and encoder.token_to_id(token.content) is None:
            if next_id >= vocab_size:
                left_out.append(token.content)
                continue
            if wanted.get(token.content, next_id) != next_id:
                raise StartupError(
                    f"the token {token.content!r} has the id {wanted[token.content]} in the files "
                    f"beside tokenizer.json, and the next free id of tokenizer.json is {next_id}: "
                    "the files belong to different versions of the tokenizer"
                )
            new.add(token.content)
            next_id += 1
        taken.append(token)
    encoder.add_tokens(taken)
    if left_out:
        facts = {"tokens": left_out[:10], "count": len(left_out), "vocab_size": vocab_size}
        logger.warning("tokens without an embedding are read as text", extra=facts)
