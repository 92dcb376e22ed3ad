"""``warren sessions`` against a real gateway."""

from collections.abc import Mapping
from typing import Any

import pytest
from typer.testing import CliRunner

from cli.main import app
from gateway.intake.keys.key_file import KeyFile
from shared.errors import StartupError
from tests.support.gateway.serving import served
from tests.support.openid.fixtures import described, provider, sign_in_options

__all__ = ["described", "provider", "sign_in_options"]


def run(*arguments: str) -> str:
    return CliRunner().invoke(app, ["sessions", *arguments], catch_exceptions=False).stdout


def test_sessions_end_for_a_person_or_for_everyone(sign_in_options: Mapping[str, Any]) -> None:
    key = KeyFile(sign_in_options["keys_file"]).add("ops", scopes=("operator",))
    options = {name: value for name, value in sign_in_options.items() if name != "port"}
    with served(key=key, **options) as url:
        access = ("--url", url, "--api-key", key)
        of_one = run("end", "olga@example.com", *access)
        of_all = run("end", "--all", *access)

    assert of_one == "the sessions of olga@example.com have ended\n"
    assert of_all == "the sessions of everyone have ended\n"


@pytest.mark.parametrize("arguments", [(), ("olga", "--all")])
def test_it_must_be_clear_whose_sessions_end(arguments: tuple[str, ...]) -> None:
    with pytest.raises(StartupError, match="name a person, or give --all"):
        run("end", *arguments, "--url", "http://127.0.0.1:1")
