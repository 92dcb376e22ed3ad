"""What a family takes: one short file in the program, found by its name."""

from pathlib import Path

import pytest

from worker.model import families

ROOT = Path(families.__file__).parents[3]
PROGRAM = ("cli", "gateway", "kernels", "shared", "worker")
MAX_LINES = 120


@pytest.mark.parametrize(
    ("family", "in_gguf_files"), [("helium", []), ("arcee", ["architectures/arcee.py"])]
)
def test_a_family_is_a_single_file(family: str, in_gguf_files: list[str]) -> None:
    sources = [path for part in PROGRAM for path in (ROOT / part).rglob("*.[chp]*")]
    naming = {
        "/".join(path.parts[-2:])
        for path in sources
        if path.suffix in (".py", ".cpp", ".hpp") and family in path.read_text()
    }

    assert family in families.FAMILIES
    assert naming <= {f"families/{family}.py", *in_gguf_files}


@pytest.mark.parametrize("family", families.FAMILIES)
def test_a_family_is_short(family: str) -> None:
    path = Path(families.__file__).with_name(f"{family}.py")
    assert len(path.read_text().splitlines()) <= MAX_LINES
