"""What commands say when a gateway refuses them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from cli.gateway_client import connect, request, request_json
from cli.main import app
from gateway.intake.keys.key_file import KeyFile
from shared.errors import (
    InvalidRequest,
    RequestError,
    StartupError,
    Unavailable,
    WarrenError,
)
from tests.support.gateway.serving import served

COMMANDS = [
    ["batches", "list"],
    ["status"],
    ["usage"],
    ["usage", "erase", "alice", "--yes"],
    ["webhooks", "dead"],
]


def error_of(status: int, body: str, api_key: str | None = None) -> WarrenError:
    """The error of a request that is answered with this body."""
    transport = httpx.MockTransport(lambda _: httpx.Response(status, text=body))
    with pytest.raises(WarrenError) as caught, connect("http://g", api_key, transport) as client:
        request(client, "GET", "/")
    return caught.value


def refused(status: int, message: str, api_key: str | None = None) -> str:
    """What a request says whose answer is this error."""
    body = {"error": {"code": "x", "message": message, "param": None}}
    error = error_of(status, json.dumps(body), api_key)
    assert isinstance(error, StartupError)
    return error.message


def test_a_missing_key_names_what_the_user_can_set() -> None:
    shown = refused(401, "Send the header Authorization: Bearer KEY.")

    assert "OPENAI_API_KEY" in shown
    assert "--api-key-file" in shown
    assert "Authorization" not in shown


def test_a_refused_key_is_named_with_the_reason_and_without_its_secret() -> None:
    shown = refused(401, "This API key has expired.", "wk-3c5c4c7894-secret")

    assert "does not accept the API key wk-3c5c4c7894-... of --api-key, --api-key-file" in shown
    assert shown.endswith(": This API key has expired.")
    assert "secret" not in shown


@pytest.mark.parametrize("api_key", [None, "wk-1-x"])
def test_a_missing_scope_asks_for_another_key(api_key: str | None) -> None:
    shown = refused(403, "Missing scope: operator.", api_key)

    assert shown.startswith("Missing scope: operator; use an API key")
    assert "--api-key-file" in shown


@pytest.fixture(scope="module")
def access(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The options for a gateway that requires a key, which is in a file."""
    directory = tmp_path_factory.mktemp("keys")
    keys, key = KeyFile(directory / "keys"), directory / "key"
    key.write_text(f"{keys.add('ops', scopes=('generate', 'cancel', 'operator'))}\n")
    with served(keys_file=str(keys.path)) as url:
        yield ["--url", url, "--api-key-file", str(key)]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_each_command_reads_its_key_from_a_file(access: list[str], command: list[str]) -> None:
    done = CliRunner().invoke(app, [*command, *access], catch_exceptions=False)

    assert done.exit_code == 0, done.output


def test_an_empty_key_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "key").touch()

    with pytest.raises(StartupError, match=r"key is empty"):
        CliRunner().invoke(
            app, ["status", "--api-key-file", str(tmp_path / "key")], catch_exceptions=False
        )


def test_https_to_a_port_without_tls_is_named() -> None:
    with (
        served() as url,
        connect(url.replace("http:", "https:")) as client,
        pytest.raises(Unavailable, match="does not speak TLS; try http:// instead"),
    ):
        request(client, "GET", "/live")


@pytest.mark.parametrize("error", ["no", {"message": "no"}, {"message": "no", "code": [4]}])
@pytest.mark.parametrize("status", [400, 401, 403, 429, 500])
def test_an_error_of_another_server_is_shown(status: int, error: Any) -> None:
    shown = error_of(status, json.dumps({"error": error}), "k")

    assert "no" in shown.message
    assert isinstance(shown, Unavailable) == (status in (429, 500))


def test_an_error_needs_only_its_message_and_code() -> None:
    shown = error_of(400, '{"error": {"message": "no", "code": "invalid_request"}}')

    assert (type(shown), shown.message, shown.param) == (InvalidRequest, "no", None)


@pytest.mark.parametrize("body", ["<h1>No</h1>", '{"error": {}}', '{"error": null}', "[]", "1"])
def test_an_answer_without_an_error_is_named_by_its_status(body: str) -> None:
    shown = error_of(413, body)

    assert (type(shown), shown.message) == (RequestError, "HTTP 413 from http://g")


def test_the_page_of_another_server_is_an_error_of_its_address() -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(200, text="<h1>Hello</h1>"))

    with (
        connect("http://g", transport=transport) as client,
        pytest.raises(RequestError, match="http://g/x is not answered with JSON"),
    ):
        request_json(client, "GET", "/x")
