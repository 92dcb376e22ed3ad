"""The command ``warren keys``: manage API keys."""

from pathlib import Path
from typing import Annotated

import typer

from cli.terminal import notices, output
from gateway.intake.api_keys import KeyFile
from shared.settings import variable

app = typer.Typer(help="Add, list and revoke the API keys of gateways.", no_args_is_help=True)
KeysFile = Annotated[
    Path,
    typer.Option(envvar=variable("keys_file"), help="File of API keys that gateways read."),
]


@app.command()
def add(
    tenant: Annotated[str, typer.Argument(help="Tenant that the key belongs to.")],
    keys_file: KeysFile,
    scopes: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated: generate, cancel, operator. Without it: generate and cancel."
        ),
    ] = None,
) -> None:
    """Create a key and print it once; the file stores only its hash.

    [dim]warren keys add alice --keys-file /etc/warren/keys[/]
    """
    chosen = () if scopes is None else tuple(scopes.split(","))
    _show(KeyFile(keys_file).add(tenant, chosen))


@app.command("list")
def list_(keys_file: KeysFile) -> None:
    """List the keys: id, date of creation and tenant. The id is the second part of a key.

    [dim]warren keys list --keys-file /etc/warren/keys[/]
    """
    for key in KeyFile(keys_file).read().values():
        _show(f"{key.key_id}  {key.created}  {key.tenant}")


@app.command()
def revoke(
    key_id: Annotated[str, typer.Argument(metavar="ID", help="Key id, as shown by `list`.")],
    keys_file: KeysFile,
) -> None:
    """Revoke a key. Gateways reject it within a second.

    [dim]warren keys revoke 3c5c4c7894 --keys-file /etc/warren/keys[/]
    """
    tenant = KeyFile(keys_file).revoke(key_id).tenant
    notices.print(f"key {key_id} of {tenant} was revoked", markup=False, highlight=False)


def _show(line: str) -> None:
    output.print(line, markup=False, highlight=False, soft_wrap=True)
