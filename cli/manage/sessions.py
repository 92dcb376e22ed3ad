"""The command ``warren sessions``: people who have signed in to the console."""

from typing import Annotated
from urllib.parse import quote

import typer

from cli.gateway_client import answer_of
from cli.options import GatewayAccess, takes_gateway
from cli.terminal import output
from shared.errors import StartupError
from shared.printable import printable

app = typer.Typer(
    help="End the sessions of people who have signed in to the console.", no_args_is_help=True
)


@app.callback()
def _has_commands() -> None:
    """Without a callback, the only command would have no name."""


@app.command()
@takes_gateway
def end(
    gateway: GatewayAccess,
    person: Annotated[
        str | None,
        typer.Argument(metavar="PERSON", help="Name or id of a person, as in the audit log."),
    ] = None,
    everyone: Annotated[bool, typer.Option("--all", help="End the sessions of everyone.")] = False,
) -> None:
    """End the sessions of a person, with a key of the scope operator. An account that the provider
    has closed cannot sign in again.

    warren sessions end olga@example.com
    """
    if everyone == (person is not None):
        raise StartupError("name a person, or give --all")
    path = (
        "/admin/v1/sessions" if person is None else f"/admin/v1/sessions/{quote(person, safe='')}"
    )
    answer_of(gateway, "DELETE", path)
    whose = "everyone" if person is None else person
    output.print(printable(f"the sessions of {whose} have ended"), soft_wrap=True, markup=False)
