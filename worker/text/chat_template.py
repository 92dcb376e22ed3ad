"""A model's chat template, rendered as transformers renders it."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shared.errors import InvalidRequest, StartupError
from shared.messages import ChatMessage

# What a template of correct syntax can raise over messages that it was not written for.
_RENDER_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class ChatTemplate:
    """Turns a conversation into the text that the model was trained to continue."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """``special_tokens`` are the template's variables ``bos_token``, ``eos_token``, ...

        Raises `StartupError` for a template of wrong syntax.
        """
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise StartupError(f"the model's chat template is wrong: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """The prompt, up to where the answer begins. Raises `InvalidRequest`."""
        try:
            return self._template.render(
                messages=[_to_dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except _RENDER_ERRORS as error:
            raise InvalidRequest(
                f"The model's chat template refuses these messages: {error}", param="messages"
            ) from error


def _to_dict(message: ChatMessage) -> dict[str, str]:
    fields = {"role": message.role, "content": message.content}
    return fields if message.name is None else fields | {"name": message.name}


class _GenerationTag(Extension):
    """``{% generation %}`` marks answers for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML, which no model was trained on.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:  # noqa: A002 - templates may name the argument
    return datetime.now().strftime(format)
