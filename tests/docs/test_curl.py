"""The shell blocks of the pages run against a live server and print what the pages show."""

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from joserfc.jwk import OKPKey

from gateway.intake.keys.api_key import SCOPES
from gateway.intake.keys.key_file import KeyFile
from tests.support.deployment import processes
from tests.support.gateway.serving import operated, served
from tests.support.openid.fixtures import described, provider, sign_in_options
from tests.support.pages import GATEWAY, PAGES, Block, blocks, name_of
from tests.support.workers.scripted_worker import MODEL as SCRIPTED

__all__ = ["described", "provider", "sign_in_options"]
_HOOK = "https://example.com/hook"
_STRICT_CURL = 'curl() { command curl --silent --show-error --fail-with-body "$@"; }\n'
_MARK = "\\n=== next block ===\\n"


@pytest.fixture(scope="module")
def smollm2_url(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with the demonstration model."""
    log = tmp_path_factory.mktemp("served") / "log"
    keys = tmp_path_factory.mktemp("keys") / "receipts.pem"
    keys.write_bytes(OKPKey.generate_key("Ed25519").as_pem(private=True))
    sizes = ("--dtype=float32", "--compute-threads=1", "--kv-cache-bytes=268435456")
    patience = "--stall-timeout-s=3600"
    named = (f"--model={smollm2}", "--served-name=smollm2")
    with processes.serve(log, *named, *sizes, patience, f"--receipt-keys-file={keys}") as process:
        yield process.url


def marked(page: Path, *marks: str) -> list[Block]:
    return [block for block in blocks(page) if block.mark in marks]


def run(script: str, directory: Path, **variables: str) -> str:
    """The output of a script. The script must succeed, and so must every request in it."""
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", _STRICT_CURL + script],
        cwd=directory,
        env={**os.environ, **variables},
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def outputs(page: Path, url: str, directory: Path) -> list[tuple[Block, str]]:
    """Each block of output that a page shows, and the actual output of the commands before it."""
    shown, script = [], ""
    num_runs = 0
    for block in marked(page, "run", "output", "contains"):
        if block.mark == "run":
            script += f"printf '{_MARK}'\n{block.text.replace(GATEWAY, url)}\n"
            num_runs += 1
        else:
            shown.append((block, num_runs))
    written = run(script, directory).split(_MARK.replace("\\n", "\n"))
    return [(block, written[k]) for block, k in shown]


def shape(value: Any) -> Any:
    """The names and types of a JSON value, where all numbers have the same type."""
    if isinstance(value, dict):
        return {name: shape(item) for name, item in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return "number" if isinstance(value, int | float) else type(value).__name__


def last_json(text: str) -> Any:
    """The last of several consecutive JSON values."""
    decoder, value = json.JSONDecoder(), None
    text = text.strip()
    while text:
        value, end = decoder.raw_decode(text)
        text = text[end:].strip()
    return value


@pytest.mark.parametrize("page", [page for page in PAGES if marked(page, "run")], ids=name_of)
def test_commands_succeed_and_answer_as_documented(
    page: Path, smollm2_url: str, tmp_path: Path
) -> None:
    for block, written in outputs(page, smollm2_url, tmp_path):
        if block.mark == "contains":
            assert block.text.strip() in written
        else:
            assert shape(last_json(written)) == shape(json.loads(block.text)), written


@pytest.mark.parametrize(
    "page", [page for page in PAGES if marked(page, "run scripted")], ids=name_of
)
def test_commands_for_other_models_succeed(page: Path, tmp_path: Path) -> None:
    with served() as url:
        for block in marked(page, "run scripted"):
            run(block.text.replace(GATEWAY, url).replace("my-embedder", SCRIPTED), tmp_path)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if marked(page, "run operator")], ids=name_of
)
def test_commands_of_operators_succeed(page: Path, tmp_path: Path) -> None:
    texts = [block.text for block in marked(page, "run operator")]
    with operated() as (url, hook_url):
        run("\n".join(texts).replace(GATEWAY, url).replace(_HOOK, hook_url), tmp_path)


@pytest.mark.parametrize("page", [page for page in PAGES if marked(page, "run keys")], ids=name_of)
def test_commands_of_operators_with_keys_succeed(page: Path, tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys")
    key = file.add("ops", scopes=SCOPES)
    with served(key=key, keys_file=file.path) as url:
        for block in marked(page, "run keys"):
            run(block.text.replace(GATEWAY, url), tmp_path, OPENAI_API_KEY=key)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if marked(page, "run sign-in")], ids=name_of
)
def test_commands_of_operators_whose_people_sign_in_succeed(
    page: Path, sign_in_options: Mapping[str, Any], tmp_path: Path
) -> None:
    key = KeyFile(sign_in_options["keys_file"]).add("ops", scopes=SCOPES)
    options = {name: value for name, value in sign_in_options.items() if name != "port"}
    with served(key=key, **options) as url:
        for block in marked(page, "run sign-in"):
            run(block.text.replace(GATEWAY, url), tmp_path, OPENAI_API_KEY=key)
