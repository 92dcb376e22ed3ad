"""The self-signed certificate of Compose's proxy."""

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "infra" / "proxy" / "certificate.sh"

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")


def run(*command: str | Path) -> None:
    subprocess.run(command, check=True, capture_output=True)


def write_certificate(directory: Path, name: str, *, num_days: int) -> None:
    files = ("-keyout", directory / "tls.key", "-out", directory / "tls.crt")
    kind = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    run("openssl", "req", "-x509", *kind, "-days", str(num_days), "-subj", f"/CN={name}", *files)


@pytest.mark.parametrize(
    ("name", "num_days", "is_replaced"),
    [
        pytest.param("localhost", 29, True, id="its own, which expires soon"),
        pytest.param("localhost", 31, False, id="its own"),
        pytest.param("llm.example", 29, False, id="the user's, which expires soon"),
    ],
)
def test_only_the_scripts_own_certificate_is_replaced_before_it_expires(
    tmp_path: Path, name: str, num_days: int, is_replaced: bool
) -> None:
    write_certificate(tmp_path, name, num_days=num_days)
    before = [(tmp_path / file).read_bytes() for file in ("tls.crt", "tls.key")]

    run("sh", SCRIPT, tmp_path)
    after = [(tmp_path / file).read_bytes() for file in ("tls.crt", "tls.key")]

    assert (after != before) is is_replaced
    run("openssl", "x509", "-in", tmp_path / "tls.crt", "-noout", "-checkend", "0")


def test_a_certificate_that_it_has_made_stays(tmp_path: Path) -> None:
    run("sh", SCRIPT, tmp_path)
    first = (tmp_path / "tls.crt").read_bytes()

    run("sh", SCRIPT, tmp_path)

    assert (tmp_path / "tls.crt").read_bytes() == first
