"""``warren keys``: what operators do with API keys."""

from pathlib import Path
from typing import Annotated

import typer

from cli.terminal import notices, output
from gateway.intake.api_keys import KeyFile
from shared.settings import variable

app = typer.Typer(help="API keys: who may ask a gateway.", no_args_is_help=True)
KeysFile = Annotated[
    Path,
    typer.Option(envvar=variable("keys_file"), help="The file that gateways read."),
]


@app.command()
def add(
    tenant: Annotated[str, typer.Argument(help="Whose key it is.")], keys_file: KeysFile
) -> None:
    """Make a key, show it once, and keep its hash.

    [dim]warren keys add alice --keys-file /etc/warren/keys[/]
    """
    _show(KeyFile(keys_file).add(tenant))


@app.command("list")
def list_(keys_file: KeysFile) -> None:
    """Show whose keys there are, each with the id that is its second part.

    [dim]warren keys list --keys-file /etc/warren/keys[/]
    """
    for key in KeyFile(keys_file).read().values():
        _show(f"{key.key_id}  {key.created}  {key.tenant}")


@app.command()
def revoke(
    key_id: Annotated[str, typer.Argument(metavar="ID", help="As `list` shows it.")],
    keys_file: KeysFile,
) -> None:
    """Take a key back: within a second gateways refuse it.

    [dim]warren keys revoke 3c5c4c7894 --keys-file /etc/warren/keys[/]
    """
    tenant = KeyFile(keys_file).revoke(key_id).tenant
    notices.print(f"{key_id} of {tenant} is revoked", markup=False, highlight=False)


def _show(line: str) -> None:
    output.print(line, markup=False, highlight=False, soft_wrap=True)
