"""Public chat templates render as transformers renders them.

    python -m tests.system.chat_templates [--directory DIRECTORY] [TEMPLATE ...]

Renders the conversations of `tests.support.text.chat_templates` with SmolLM2's template, with the
templates that llama.cpp collects of other models, and with the given files. llama.cpp's templates
are taken from a source distribution on PyPI, which pip downloads into ``--directory`` the first
time.

Prints a line for each template, and each difference. The exit code is 0 if there is none.
"""

import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from tests.support.text.chat_templates import (
    CONVERSATIONS,
    DIRECTORY,
    Verdict,
    cached_templates,
    rendered_by_transformers,
    rendered_by_warren,
    verdict,
)
from worker.checkpoints import store

_PACKAGE, _VERSION = "llama-cpp-python", "0.3.36"
_FOLDER = "/vendor/llama.cpp/models/templates/"


def main(
    templates: Annotated[list[Path] | None, typer.Argument(help="Further files.")] = None,
    directory: Annotated[Path, typer.Option(help="Of downloaded templates.")] = DIRECTORY,
) -> None:
    if not cached_templates(directory):
        download(directory)
    smollm2 = store.pull("smollm2", lambda stage, done, total: None)
    sources = {"SmolLM2": (smollm2 / "chat_template.jinja").read_text()}
    sources |= cached_templates(directory)
    sources |= {path.stem: path.read_text() for path in templates or ()}
    counts = sum((compared(name, source) for name, source in sources.items()), Counter[Verdict]())
    num_compared = counts.total() - counts["incomparable"]
    num_equal = num_compared - counts["different"]
    print(
        f"{len(sources)} templates: {num_equal} of {num_compared} comparable renderings are equal "
        f"({counts['both refuse']} of them are refused by both); "
        f"{counts['incomparable']} are not comparable"
    )
    raise SystemExit(counts["different"] > 0)


def compared(name: str, source: str) -> Counter[Verdict]:
    verdicts = {label: verdict(source, body) for label, body in CONVERSATIONS.items()}
    counts = Counter(verdicts.values())
    print(f"{name:<50}", *(f"{count:>3} {what}" for what, count in sorted(counts.items())))
    for label, found in verdicts.items():
        if found == "different":
            _show_difference(source, label)
    return counts


def download(directory: Path) -> None:
    """Write llama.cpp's templates into ``directory``."""
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as downloads:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += [f"--no-binary={_PACKAGE}", f"--dest={downloads}", f"{_PACKAGE}=={_VERSION}"]
        subprocess.run(command, check=True)
        (archive,) = Path(downloads).iterdir()
        for name, source in templates_in(archive).items():
            (directory / name).write_bytes(source)


def templates_in(archive: Path) -> Mapping[str, bytes]:
    """The template files of a source distribution, by their names."""
    with tarfile.open(archive) as files:
        return {
            Path(member.name).name: content.read()
            for member in files
            if _FOLDER in member.name and member.name.endswith(".jinja")
            if (content := files.extractfile(member)) is not None
        }


def _show_difference(source: str, label: str) -> None:
    body = CONVERSATIONS[label]
    print(f"  {label}:")
    print(f"    Warren:       {rendered_by_warren(source, body)!r}")
    print(f"    transformers: {rendered_by_transformers(source, body)!r}")


if __name__ == "__main__":
    typer.run(main)
