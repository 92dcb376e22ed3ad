"""``warren batches``, with a gateway in a thread."""

from typer.testing import CliRunner

from cli.main import app
from tests.support.gateway.serving import served


def test_no_batches_are_said_to_be_none() -> None:
    with served() as url:
        result = CliRunner().invoke(app, ["batches", "list", "--url", url])

    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "No batches.\n")
