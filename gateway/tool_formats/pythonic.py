"""Tool calls as a list of Python calls that is the whole answer, ``[f(a=1), g()]``, as Llama 4 and
Llama 3.2 write them."""

import ast
import json
import re
import warnings
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from gateway.text.calls import FunctionNames, encodable, is_declared
from gateway.text.pieces import CallArguments, CallStart, Content, Piece
from gateway.tool_formats.arguments import LiteralArguments
from gateway.tool_formats.rules import Rules, quoted
from gateway.tool_formats.tool_format import ToolFormat

START, END = "<|python_start|>", "<|python_end|>"
_BEGUN = re.compile(r"\[\s*([A-Za-z_][\w.]*\s*(\(.*)?)?", re.DOTALL)
"""A list of calls, as far as it has been read."""
_SPACES = re.compile(r"\s+")
_MAX_HEAD_CHARS = 512
"""The characters before the arguments of the first call. Several spaces count as a single space."""
_CONSTANTS = {"true": True, "false": False, "null": None}


class PythonicParser:
    """A text that cannot become a list of calls is content. A text that can is held until its end,
    because only the end proves that it is a list of calls."""

    open_call = None

    def __init__(self, names: FunctionNames = None) -> None:
        self._names = names
        self._held: list[str] = []
        self._head: str | None = ""
        """The beginning of a text that may be a list of calls, with single spaces; None once it has
        the name of a function, after which anything may follow."""
        self._is_content = False

    def read(self, text: str) -> list[Piece]:
        if not self._is_content:
            self._held.append(text)
            if self._may_be_calls(text):
                return []
            self._is_content, text = True, "".join(self._held)
        return [Content(text)] if text else []

    def end(self) -> list[Piece]:
        held = "".join(self._held)
        if self._is_content or not held:
            return []
        # The list of an answer that ends because it repeats itself is not closed.
        for text in (held, f"{held}]"):
            with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
                return list(_pieces(text, self._names))
        return [Content(held)]

    def _may_be_calls(self, text: str) -> bool:
        """Whether the text so far may be a list of calls; ``text`` is its last part."""
        if self._head is None:
            return True
        self._head = _SPACES.sub(" ", self._head + text)
        begun = self._head.lstrip()
        if START.startswith(begun):
            return True
        begun = begun.removeprefix(START).lstrip()
        match = _BEGUN.fullmatch(begun)
        has_name = match is not None and match[2] is not None
        num_chars = match.start(2) if match is not None and has_name else len(begun)
        if has_name and num_chars <= _MAX_HEAD_CHARS:
            self._head = None
        return not begun or (match is not None and num_chars <= _MAX_HEAD_CHARS)


def _pieces(text: str, names: FunctionNames) -> Iterator[Piece]:
    """Raises `SyntaxError` and `ValueError` if it is no list of calls of declared functions."""
    text = text.strip().removeprefix(START).removesuffix(END).strip()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of unknown escape sequences
        calls = ast.parse(text, mode="eval").body
    if not isinstance(calls, ast.List) or not calls.elts:
        raise ValueError("no list of calls")
    read = [_call(node, names) for node in calls.elts]
    for index, (name, arguments) in enumerate(read):
        yield CallStart(index, name)
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        yield CallArguments(index, encodable(written))


def _call(node: ast.expr, names: FunctionNames) -> tuple[str, dict[str, Any]]:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("no call with named arguments")
    name = ast.unparse(node.func)
    if not is_declared(name, names):
        raise ValueError("no declared function")
    arguments = {keyword.arg: _value(keyword.value) for keyword in node.keywords}
    if None in arguments:
        raise ValueError("no call with named arguments")
    return name, {str(key): value for key, value in arguments.items()}


def _value(node: ast.expr | None) -> Any:
    """The value of an expression. Raises `ValueError` if JSON has no such value."""
    match node:
        case ast.Constant(value=value) if isinstance(value, str | int | float | None):
            return value
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {
                str(_value(key)): _value(value) for key, value in zip(keys, values, strict=True)
            }
    raise ValueError("no JSON")


_LITERALS: Rules = {
    "string": r"""/"([^"\\\n]|\\.)*"|'([^'\\\n]|\\.)*'/""",
    "boolean": '"True" | "False"',
    "null": '"None"',
    "key": "string",
}
FORMAT = ToolFormat(
    parser=PythonicParser,
    inside='"[" call MORE "]"',
    calls={"call": '"NAME(" ARGUMENTS ")"'},
    more="/, ?/ call",
    arguments=LiteralArguments('"="', "/, ?/", _LITERALS, lambda text: quoted(quoted(text))),
)
