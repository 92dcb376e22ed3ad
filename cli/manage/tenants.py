"""The command ``warren tenants``: tenants as operators administer them."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from cli.gateway_client import answer_of
from cli.manage.keys import MaxConcurrent, MaxDetached, RequestsPerMinute, TokensPerMinute
from cli.options import GatewayAccess, takes_gateway
from cli.tables import Column, FittedTable, print_tables
from cli.terminal import output

app = typer.Typer(help="Manage the tenants of gateways.", no_args_is_help=True)
Tenant = Annotated[str, typer.Argument(metavar="TENANT", help="Name of the tenant.")]

_PATH = "/admin/v1/tenants"
_LIMITS = {
    "requests_per_minute": "num_requests",
    "tokens_per_minute": "num_tokens",
    "max_concurrent": "num_running",
    "max_detached": None,
    "monthly_budget": "spent",
}
"""The limits, and the key of each limit's use in a status."""


@app.command("list")
@takes_gateway
def list_(gateway: GatewayAccess) -> None:
    """List the tenants that have API keys or limits, and what they use of their limits, with a key
    of the scope operator.

    warren tenants list
    """
    tenants = answer_of(gateway, "GET", _PATH)["data"]
    columns = [Column("tenant"), Column("keys", is_number=True)]
    columns += [Column(name.replace("_", " "), is_number=True) for name in _LIMITS]
    rows = [_row(tenant) for tenant in tenants]
    print_tables(FittedTable("Tenants, with the used part of each limit", columns, rows))


@app.command()
@takes_gateway
def limits(
    tenant: Tenant,
    gateway: GatewayAccess,
    requests_per_minute: RequestsPerMinute = None,
    tokens_per_minute: TokensPerMinute = None,
    max_concurrent: MaxConcurrent = None,
    max_detached: MaxDetached = None,
    monthly_budget: Annotated[
        float | None,
        typer.Option(help="What the requests of a month may cost, by the gateway's prices."),
    ] = None,
    unset: Annotated[
        list[str] | None,
        typer.Option(help="A limit that ends, such as max_concurrent. Repeatable."),
    ] = None,
) -> None:
    """Show or change the limits that all API keys of a tenant have together, with a key of the
    scope operator.

    warren tenants limits alice --tokens-per-minute 500000 --unset max_concurrent
    """
    values = locals()
    changes = {name: values[name] for name in _LIMITS if values[name] is not None}
    if unset:
        changes["unset"] = [one.replace("-", "_") for one in unset]
    if changes:
        shown = answer_of(gateway, "POST", f"{_PATH}/{tenant}", json=changes)
    else:
        shown = answer_of(gateway, "GET", f"{_PATH}/{tenant}")
    for name in _LIMITS:
        output.print(f"{name}: {_shown(shown, name)}", highlight=False)


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


def _row(tenant: Mapping[str, Any]) -> list[str]:
    limits = (_shown(tenant, name) for name in _LIMITS)
    return [tenant["tenant"], str(tenant["num_keys"]), *limits]


def _shown(tenant: Mapping[str, Any], name: str) -> str:
    """A limit after the part of it that is used."""
    limit, used = tenant[name], tenant.get(_LIMITS[name] or "")
    if limit is None:
        return "-"
    return f"{limit:,}" if used is None else f"{used:,}/{limit:,}"
