"""The core imports only the distributions on its list, so that it runs where no others are
installed.

import-linter forbids imports by name; this test checks the list itself.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
CORE = [
    "worker/engine/**/*.py",
    "worker/model/**/*.py",
    "worker/checkpoints/**/*.py",
    "kernels/**/*.py",
    "shared/messages/*.py",
    "shared/log/*.py",
    "shared/bus/memory*.py",
]
OURS = {"kernels", "shared", "worker"}
ALLOWED = {"msgspec", "numpy", "safetensors", "tokenizers", "torch", "transformers", "triton"}
BY_NAME = {
    "kernels/quantized.py": {"gguf"},
    "worker/checkpoints/convert.py": {"gguf"},
    "worker/checkpoints/hub.py": {"huggingface_hub"},
}


def imports(path: Path) -> Iterator[str]:
    """The top-level name of each import, wherever in the file it stands."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.partition(".")[0]


def test_the_core_imports_only_what_is_on_its_list() -> None:
    known = sys.stdlib_module_names | OURS | ALLOWED
    files = {pattern: list(ROOT.glob(pattern)) for pattern in CORE}

    others = {
        str(path.relative_to(ROOT)): unknown
        for path in (path for found in files.values() for path in found)
        if (unknown := set(imports(path)) - known)
    }

    assert [pattern for pattern, found in files.items() if not found] == []
    assert others == BY_NAME
