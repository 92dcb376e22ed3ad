"""Tool calls as a list of Python calls that is the whole answer, ``[f(a=1), g()]``, as Llama 4 and
Llama 3.2 write them."""

import ast
import json
import re
import warnings
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from gateway.text.pieces import CallArguments, CallStart, Content, Piece
from gateway.text.tools.calls import Names, encodable, is_declared

START, END = "<|python_start|>", "<|python_end|>"
_BEGUN = re.compile(r"\[\s*([A-Za-z_][\w.]*\s*(\(.*)?)?", re.DOTALL)
"""A list of calls, as far as it has been read."""
_CONSTANTS = {"true": True, "false": False, "null": None}


class PythonicParser:
    """A text that cannot become a list of calls is content. What can is held until its end,
    because only then is it known to be one."""

    open_call = None

    def __init__(self, names: Names = None) -> None:
        self._names = names
        self._held = ""
        self._is_content = False

    def read(self, text: str) -> list[Piece]:
        if not self._is_content:
            self._held += text
            if _may_be_calls(self._held):
                return []
            self._is_content, text = True, self._held
        return [Content(text)] if text else []

    def end(self) -> list[Piece]:
        if self._is_content or not self._held:
            return []
        # The list of an answer that ends because it repeats itself is not closed.
        for text in (self._held, f"{self._held}]"):
            with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
                return list(_pieces(text, self._names))
        return [Content(self._held)]


def _may_be_calls(text: str) -> bool:
    text = text.lstrip()
    if START.startswith(text):
        return True
    text = text.removeprefix(START).lstrip()
    return not text or _BEGUN.fullmatch(text) is not None


def _pieces(text: str, names: Names) -> Iterator[Piece]:
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


def _call(node: ast.expr, names: Names) -> tuple[str, dict[str, Any]]:
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
    """What JSON has, too."""
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
