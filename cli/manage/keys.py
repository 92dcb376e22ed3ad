"""The command ``warren keys``: manage API keys."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer

from cli.runtime import user_name
from cli.terminal import notices, output
from gateway.intake.keys.api_key import SCOPES, ApiKey, id_of, read_options
from gateway.intake.keys.key_file import KeyFile, read_keys
from shared.errors import StartupError
from shared.settings import variable
from shared.telemetry import audit

app = typer.Typer(
    help="Add, list, rotate and revoke the API keys of gateways.", no_args_is_help=True
)
KeysFile = Annotated[
    Path,
    typer.Option(envvar=variable("keys_file"), help="File of API keys that gateways read."),
]
AuditFile = Annotated[
    Path | None,
    typer.Option(
        envvar=variable("audit_file"), help="File to which a record of the change is appended."
    ),
]
_MAX_GRACE_HOURS = 87_600
KeyId = Annotated[str, typer.Argument(metavar="ID", help="Key id, as shown by `list`.")]


@app.command()
def add(
    tenant: Annotated[str, typer.Argument(help="Tenant that the key belongs to.")],
    keys_file: KeysFile,
    label: Annotated[str | None, typer.Option(help="What the key is for.")] = None,
    expires: Annotated[
        str | None,
        typer.Option(help="Date or time, in UTC, at which the key becomes invalid: 2027-01-31."),
    ] = None,
    scopes: Annotated[
        str | None,
        typer.Option(
            help=f"Comma-separated: {', '.join(SCOPES)}. Without it: generate and cancel."
        ),
    ] = None,
    models: Annotated[
        str | None,
        typer.Option(help="Comma-separated models that the key may use, each a name or a pattern."),
    ] = None,
    requests_per_minute: Annotated[
        int | None,
        typer.Option(min=1, help="Maximum number of requests per minute, at all gateways."),
    ] = None,
    tokens_per_minute: Annotated[
        int | None,
        typer.Option(min=1, help="Maximum number of prompt and answer tokens per minute."),
    ] = None,
    max_concurrent: Annotated[
        int | None,
        typer.Option(min=1, help="Maximum number of concurrent requests, at all gateways."),
    ] = None,
    max_detached: Annotated[
        int | None,
        typer.Option(min=1, help="Maximum number of detached requests that have not ended."),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Largest max_tokens of a request.")
    ] = None,
    audit_file: AuditFile = None,
) -> None:
    """Create a key and print it once; the file stores only its hash.

    warren keys add alice --label 'Web app' --keys-file /etc/warren/keys
    """
    given = {
        "label": label,
        "expires": expires,
        "scopes": scopes,
        "models": models,
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "max_concurrent": max_concurrent,
        "max_detached": max_detached,
        "max_tokens": max_tokens,
    }
    try:
        options = read_options({name: str(one) for name, one in given.items() if one is not None})
    except ValueError as error:
        raise StartupError(str(error)) from None
    if "expires" in options and options["expires"] <= datetime.now(UTC):
        raise StartupError(f"--expires {expires} is in the past: the key would never be valid")
    _open(audit_file)
    key = KeyFile(keys_file).add(tenant, **options)
    _show(key)
    _record("API key added", id_of(key), tenant)


@app.command("list")
def list_(keys_file: KeysFile) -> None:
    """List the keys in the file, without their hashes. The id is the second part of a key.

    warren keys list --keys-file /etc/warren/keys
    """
    for key in read_keys(keys_file).values():
        _show(_described(key))


@app.command()
def rotate(
    key_id: KeyId,
    keys_file: KeysFile,
    grace_hours: Annotated[
        float,
        typer.Option(help="Hours for which the old key remains valid, at most 87600: ten years."),
    ] = 24.0,
    audit_file: AuditFile = None,
) -> None:
    """Replace a key and print the new one. It has the same id, limits and expiry.

    warren keys rotate 3c5c4c7894 --keys-file /etc/warren/keys
    """
    if not 0 <= grace_hours <= _MAX_GRACE_HOURS:  # nor is NaN
        raise StartupError(f"--grace-hours: {grace_hours} is not from 0 to {_MAX_GRACE_HOURS}")
    _open(audit_file)
    file = KeyFile(keys_file)
    key = file.rotate(key_id, timedelta(hours=grace_hours))
    _show(key)
    _record("API key rotated", key_id, read_keys(keys_file)[key_id].tenant)


@app.command()
def revoke(key_id: KeyId, keys_file: KeysFile, audit_file: AuditFile = None) -> None:
    """Revoke a key. If it was rotated, the old key becomes invalid, too. Gateways reject both
    within a second.

    warren keys revoke 3c5c4c7894 --keys-file /etc/warren/keys
    """
    _open(audit_file)
    tenant = KeyFile(keys_file).revoke(key_id).tenant
    _record("API key revoked", key_id, tenant)
    notices.print(f"key {key_id} of {tenant} was revoked", markup=False, highlight=False)


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
