"""SECURITY.md: each claim names tests that exist."""

import ast
import re

from tests.support.pages import ROOT

_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
_ROW = re.compile(r"^\| (?!Claim|---)(.+) \| (.+) \|$", re.MULTILINE)


def table() -> list[tuple[str, str]]:
    text = (ROOT / "SECURITY.md").read_text()
    _, _, section = text.partition("## What the tests show")
    return _ROW.findall(section.partition("\n## ")[0])


def named_in(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)}


def test_each_claim_has_tests_that_exist() -> None:
    claims = table()

    missing = [
        f"{path}::{name}"
        for _, tests in claims
        for path, name in _TEST.findall(tests)
        if name not in named_in(path)
    ]

    assert len(claims) > 20
    assert [claim for claim, tests in claims if not _TEST.search(tests)] == []
    assert missing == []
