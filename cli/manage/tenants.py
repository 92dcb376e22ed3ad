"""The command ``warren tenants``: tenants as operators administer them."""

from typing import Annotated

import typer

from cli.gateway_client import answer_of
from cli.options import GatewayAccess, takes_gateway
from cli.terminal import output

app = typer.Typer(help="Manage the tenants of gateways.", no_args_is_help=True)
Tenant = Annotated[str, typer.Argument(metavar="TENANT", help="Name of the tenant.")]

_PATH = "/admin/v1/tenants"


@app.command()
@takes_gateway
def erase(
    tenant: Tenant,
    gateway: GatewayAccess,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Cancel the work of a tenant and delete all that is stored of it, with a key of the scope
    operator. Revoke its API keys first.

    warren tenants erase alice
    """
    if not yes:
        # Without the scope, nothing is to be confirmed.
        answer_of(gateway, "GET", "/admin/v1/status")
        typer.confirm(f"Permanently delete all that is stored of {tenant!r}?", abort=True)
    # Millions of rows take minutes.
    erased = answer_of(gateway, "DELETE", f"{_PATH}/{tenant}", timeout=None)
    for table, num_rows in sorted(erased["num_rows"].items()):
        output.print(f"{num_rows} rows of {table} deleted", highlight=False)
    output.print(f"{erased['num_logs']} logs deleted", highlight=False)
    output.print(f"{erased['num_dead_letters']} dead letters dropped", highlight=False)
