"""The reference of Warren's classes for Python programs, from their signatures and docstrings."""

import ast
import re
from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path

from shared.settings import DEFAULT_MODEL

ROOT = Path(__file__).parents[2]
_CLASSES = (
    ("worker/offline.py", "LLM"),
    ("shared/client/client.py", "AsyncClient"),
    ("shared/client/client.py", "Options"),
    ("shared/client/client.py", "ChatOptions"),
)


def reference() -> str:
    """Every public method of each class."""
    parts = []
    for path, name in _CLASSES:
        module = ast.parse((ROOT / path).read_text())
        (found,) = (
            node for node in module.body if isinstance(node, ast.ClassDef) and node.name == name
        )
        parts.append("\n\n".join(_class(found)))
    return "\n\n".join(parts)


def _class(node: ast.ClassDef) -> Iterator[str]:
    yield f"### `{node.name}`"
    yield _text(node)
    fields = [
        f"- `{ast.unparse(field)}`: {_shown(doc.value.value)}"
        for field, doc in zip(node.body, node.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign)
        and isinstance(doc, ast.Expr)
        and isinstance(doc.value, ast.Constant)
        and isinstance(doc.value.value, str)
    ]
    if fields:
        yield "\n".join(fields)
    for method in node.body:
        if not isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if method.name == "__init__":
            yield f"#### `{node.name}({_arguments(method)})`"
        elif not method.name.startswith("_"):
            yield f"#### `{_signature(method)}`"
        else:
            continue
        yield _text(method)


def _signature(method: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    returns = "None" if method.returns is None else ast.unparse(method.returns)
    if any(isinstance(one, ast.Name) and one.id == "property" for one in method.decorator_list):
        return f"{method.name}: {returns}"
    is_awaited = isinstance(method, ast.AsyncFunctionDef) and not _yields(method)
    return f"{'await ' * is_awaited}{method.name}({_arguments(method)}) -> {returns}"


def _yields(method: ast.AsyncFunctionDef) -> bool:
    return any(isinstance(node, ast.Yield) for node in ast.walk(method))


def _arguments(method: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    shown = ast.unparse(method.args).replace("=_DEFAULT", "=SamplingParams()")
    shown = shown.replace("DEFAULT_MODEL", f"{DEFAULT_MODEL!r}")
    return re.sub(r"^self(, )?", "", shown)


def _text(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    return _shown(ast.get_docstring(node) or "")


def _shown(docstring: str) -> str:
    paragraphs = cleandoc(docstring).split("\n\n")
    return "\n\n".join(" ".join(part.split()) for part in paragraphs).replace("``", "`")
