"""The command ``warren keys``: manage API keys, in a file or in the database of a gateway."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import typer

from cli.gateway_client import answer_of
from cli.options import GatewayAccess, takes_gateway
from cli.runtime import user_name
from cli.terminal import notices, output
from gateway.intake.keys.api_key import SCOPES, SETTABLE, ApiKey, id_of, read_options
from gateway.intake.keys.key_file import KeyFile, read_keys
from shared.errors import StartupError
from shared.settings import variable
from shared.telemetry import audit

app = typer.Typer(
    help="Add, list, rotate and revoke the API keys of gateways.", no_args_is_help=True
)
KeysFile = Annotated[
    Path | None,
    typer.Option(
        envvar=variable("keys_file"),
        help="File of API keys that gateways read. Without it, the keys are in the database of the "
        "gateway at --url.",
    ),
]
AuditFile = Annotated[
    Path | None,
    typer.Option(
        envvar=variable("audit_file"), help="File to which a record of the change is appended."
    ),
]
_MAX_GRACE_HOURS = 87_600
KeyId = Annotated[str, typer.Argument(metavar="ID", help="Key id, as shown by `list`.")]


_PATH = "/admin/v1/keys"
Label = Annotated[str | None, typer.Option(help="What the key is for.")]
Expires = Annotated[
    str | None,
    typer.Option(help="Date or time, in UTC, at which the key becomes invalid: 2027-01-31."),
]
ScopesOption = Annotated[
    str | None,
    typer.Option(help=f"Comma-separated: {', '.join(SCOPES)}. Without it: generate and cancel."),
]
Models = Annotated[
    str | None,
    typer.Option(help="Comma-separated models that the key may use, each a name or a pattern."),
]
RequestsPerMinute = Annotated[
    int | None, typer.Option(min=1, help="Maximum number of requests per minute, at all gateways.")
]
TokensPerMinute = Annotated[
    int | None, typer.Option(min=1, help="Maximum number of prompt and answer tokens per minute.")
]
MaxConcurrent = Annotated[
    int | None, typer.Option(min=1, help="Maximum number of concurrent requests, at all gateways.")
]
MaxDetached = Annotated[
    int | None, typer.Option(min=1, help="Maximum number of detached requests that have not ended.")
]
MaxTokens = Annotated[int | None, typer.Option(min=1, help="Largest max_tokens of a request.")]
Receipts = Annotated[
    bool | None,
    typer.Option("--receipts/--no-receipts", help="Whether all answers have a receipt."),
]

CacheOption = Annotated[
    str | None, typer.Option("--cache", help="exact: compute equal requests once.")
]


@app.command()
@takes_gateway
def add(
    tenant: Annotated[str, typer.Argument(help="Tenant that the key belongs to.")],
    gateway: GatewayAccess,
    keys_file: KeysFile = None,
    label: Label = None,
    expires: Expires = None,
    scopes: ScopesOption = None,
    models: Models = None,
    requests_per_minute: RequestsPerMinute = None,
    tokens_per_minute: TokensPerMinute = None,
    max_concurrent: MaxConcurrent = None,
    max_detached: MaxDetached = None,
    max_tokens: MaxTokens = None,
    receipts: Receipts = None,
    cache: CacheOption = None,
    audit_file: AuditFile = None,
) -> None:
    """Create a key and print it once; only its hash is stored.

    warren keys add alice --label 'Web app' --keys-file /etc/warren/keys
    """
    values = locals()
    options = _read({name: values[name] for name in SETTABLE})
    if keys_file is None:
        body = {"tenant": tenant, **_as_json(options, expires)}
        _show(answer_of(gateway, "POST", _PATH, json=body)["key"])
        return
    _open(audit_file)
    key = KeyFile(keys_file).add(tenant, **options)
    _show(key)
    _record("API key added", id_of(key), tenant)


@app.command("list")
@takes_gateway
def list_(gateway: GatewayAccess, keys_file: KeysFile = None) -> None:
    """List the keys, without their hashes. The id is the second part of a key.

    warren keys list --keys-file /etc/warren/keys
    """
    if keys_file is None:
        for one in answer_of(gateway, "GET", _PATH)["data"]:
            _show(_described_at_gateway(one))
        return
    for key in read_keys(keys_file).values():
        _show(_described(key))


@app.command()
@takes_gateway
def change(
    key_id: KeyId,
    gateway: GatewayAccess,
    label: Label = None,
    expires: Expires = None,
    scopes: ScopesOption = None,
    models: Models = None,
    requests_per_minute: RequestsPerMinute = None,
    tokens_per_minute: TokensPerMinute = None,
    max_concurrent: MaxConcurrent = None,
    max_detached: MaxDetached = None,
    max_tokens: MaxTokens = None,
    receipts: Receipts = None,
    cache: CacheOption = None,
    unset: Annotated[
        list[str] | None,
        typer.Option(help="A field that the key has no longer, such as max_tokens. Repeatable."),
    ] = None,
) -> None:
    """Change a key of the database, at all gateways within seconds. A line of a file of keys can be
    edited.

    warren keys change 3c5c4c7894 --tokens-per-minute 60000 --unset expires
    """
    values = locals()
    options = _read({name: values[name] for name in SETTABLE})
    body = {**_as_json(options, expires), "unset": [one.replace("-", "_") for one in unset or ()]}
    _show(_described_at_gateway(answer_of(gateway, "POST", f"{_PATH}/{key_id}", json=body)))


@app.command()
@takes_gateway
def rotate(
    key_id: KeyId,
    gateway: GatewayAccess,
    keys_file: KeysFile = None,
    grace_hours: Annotated[
        float,
        typer.Option(help="Hours for which the old key remains valid, at most 87600: ten years."),
    ] = 24.0,
    audit_file: AuditFile = None,
) -> None:
    """Replace a key and print the new key, which has the same id, limits and expiry.

    warren keys rotate 3c5c4c7894 --keys-file /etc/warren/keys
    """
    if not 0 <= grace_hours <= _MAX_GRACE_HOURS:  # nor is NaN
        raise StartupError(f"--grace-hours: {grace_hours} is not from 0 to {_MAX_GRACE_HOURS}")
    grace = timedelta(hours=grace_hours)
    if keys_file is None:
        body = {"grace_seconds": round(grace.total_seconds())}
        _show(answer_of(gateway, "POST", f"{_PATH}/{key_id}/rotate", json=body)["key"])
        return
    _open(audit_file)
    file = KeyFile(keys_file)
    key = file.rotate(key_id, grace)
    _show(key)
    _record("API key rotated", key_id, read_keys(keys_file)[key_id].tenant)


@app.command()
@takes_gateway
def revoke(
    key_id: KeyId,
    gateway: GatewayAccess,
    keys_file: KeysFile = None,
    stop_work: Annotated[
        bool,
        typer.Option(
            "--stop-work",
            help="Cancel the key's streams, batches and detached requests, too, at the gateways of "
            "--url. It takes another key, of the scope operator.",
        ),
    ] = False,
    audit_file: AuditFile = None,
) -> None:
    """Revoke a key. If it was rotated, the old key becomes invalid, too. Gateways reject both
    within a second, or within two if the key is in the database.

    warren keys revoke 3c5c4c7894 --keys-file /etc/warren/keys
    """
    if keys_file is None:
        tenant = answer_of(gateway, "DELETE", f"{_PATH}/{key_id}")["tenant"]
    else:
        _open(audit_file)
        tenant = KeyFile(keys_file).revoke(key_id).tenant
        _record("API key revoked", key_id, tenant)
    notices.print(f"key {key_id} of {tenant} was revoked", markup=False, highlight=False)
    if stop_work:
        stopped = answer_of(gateway, "POST", f"/admin/v1/keys/{key_id}/stop-work")
        counts = f"{stopped['num_batches']} batches and {stopped['num_detached']} requests"
        notices.print(f"its streams, {counts} without a client are cancelled", highlight=False)


def _read(given: dict[str, Any]) -> dict[str, Any]:
    """The fields of a key that options name. Raises `StartupError`."""
    try:
        options = read_options({name: str(one) for name, one in given.items() if one is not None})
    except ValueError as error:
        raise StartupError(str(error)) from None
    if "expires" in options and options["expires"] <= datetime.now(UTC):
        raise StartupError(
            f"--expires {given['expires']} is in the past: the key would never be valid"
        )
    return options


def _as_json(options: dict[str, Any], expires: str | None) -> dict[str, Any]:
    return {**options, "expires": expires} if "expires" in options else options


def _described_at_gateway(key: dict[str, Any]) -> str:
    expired = "  (expired)" if key["is_expired"] else ""
    until = key["expires_at"]
    shown = {
        "label": f'"{key["label"]}"' if key["label"] else None,
        "expires": None
        if until is None
        else f"{datetime.fromtimestamp(until, UTC):%Y-%m-%dT%H:%M:%SZ}",
        "scopes": ",".join(key["scopes"]),
        "models": ",".join(key["models"]) or None,
        **{name: key[name] or None for name in SETTABLE[4:]},
        "source": key["source"],
    }
    words = [f"{name}={value}" for name, value in shown.items() if value is not None]
    return f"{key['id']}  {key['tenant']}  {key['created']} {' '.join(words)}{expired}"


def _open(audit_file: Path | None) -> None:
    """Before the change: a key that was stored and not shown would be lost."""
    if audit_file is not None:
        audit.write_to(audit_file)


def _record(act: audit.Act, key_id: str, tenant: str) -> None:
    audit.record(act, tenant=tenant, key_id=key_id, by=user_name())


def _described(key: ApiKey) -> str:
    words = key.line.split(maxsplit=3)
    is_expired = key.expires is not None and key.expires <= datetime.now(UTC)
    rest = " ".join(one for one in words[3].split(" ") if not one.startswith("previous="))
    return f"{key.key_id}  {key.tenant}  {rest.rstrip()}{'  (expired)' if is_expired else ''}"


def _show(line: str) -> None:
    output.print(line, markup=False, highlight=False, soft_wrap=True)
