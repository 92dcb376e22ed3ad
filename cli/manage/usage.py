"""The commands ``warren usage`` and ``warren usage erase``: what requests have used."""

from datetime import UTC, date, datetime, time
from typing import Annotated, Any

import typer

from cli.gateway_client import answer_of, connect, request
from cli.options import GatewayAccess, takes_gateway
from cli.tables import Column, FittedTable, print_tables
from cli.terminal import output
from shared.errors import StartupError

_NAMES = ("tenant", "api_key_id", "model", "day")
_COUNTS = {
    "requests": 0,
    "completed": 4,
    "input_tokens": 1,
    "cached_tokens": 5,
    "output_tokens": 1,
    "takeovers": 7,
    "cached_answers": 8,
}
"""Their ranks in the table."""
_SECONDS = {"queue_seconds": 6, "compute_seconds": 3}
_LAST_TIME = int(datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC).timestamp())
"""The last second that a `datetime` can be."""
_NUMBERS = [
    Column(name.replace("_", " "), is_number=True, rank=rank)
    for name, rank in (_COUNTS | _SECONDS).items()
]

app = typer.Typer(
    help="Show what requests have used: tokens, seconds and costs.", invoke_without_command=True
)


@app.callback()
@takes_gateway
def usage(
    context: typer.Context,
    gateway: GatewayAccess,
    since: Annotated[
        str | None,
        typer.Option(metavar="DATE", help="First day, in UTC. Unset: 30 days before the last."),
    ] = None,
    until: Annotated[
        str | None, typer.Option(metavar="DATE", help="Last day, in UTC. Unset: today.")
    ] = None,
    by: Annotated[
        str | None,
        typer.Option(help="What each row is about: tenant, key, model, day, or several of them."),
    ] = None,
    of_all: Annotated[
        bool,
        typer.Option("--all", help="All tenants, with a key of the scope operator."),
    ] = False,
    tenant: Annotated[
        str | None, typer.Option(help="One tenant, with a key of the scope operator.")
    ] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print the rows as CSV.")] = False,
) -> None:
    """Show what requests have used: tokens, seconds and costs.

    warren usage --all --by tenant,day --csv > usage.csv
    """
    if context.invoked_subcommand is not None:
        _refuse_options(context, context.invoked_subcommand)
        return
    chosen = {
        "start_time": None if since is None else _start_of("--since", since),
        "end_time": None if until is None else _end_of("--until", until),
        "group_by": by,
        "tenant": tenant,
        "format": "csv" if as_csv else "json",
    }
    params = {name: value for name, value in chosen.items() if value is not None}
    path = "/admin/v1/usage" if of_all or tenant is not None else "/v1/usage"
    if not as_csv:
        print_tables(_table(answer_of(gateway, "GET", path, params=params)))
        return
    with connect(*gateway) as client:
        rows = request(client, "GET", path, params=params).text
    output.print(rows, end="", markup=False, soft_wrap=True)


@app.command()
@takes_gateway
def erase(
    tenant: Annotated[str, typer.Argument(help="The tenant whose records are deleted.")],
    gateway: GatewayAccess,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Delete all usage records of a tenant, with a key of the scope operator.

    warren usage erase alice
    """
    if not yes:
        # Without the scope, nothing is to be confirmed.
        answer_of(gateway, "GET", "/admin/v1/status")
        typer.confirm(f"Permanently delete all usage records of {tenant!r}?", abort=True)
    params = {"tenant": tenant}
    # Millions of records take minutes.
    answer = answer_of(gateway, "DELETE", "/admin/v1/usage", params=params, timeout=None)
    output.print(f"{answer['num_records']} records deleted")


def _refuse_options(context: typer.Context, command: str) -> None:
    """Raise `StartupError` for an option before a subcommand, which would not see it."""
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if source is not None and source.name == "COMMANDLINE":
            option = parameter.opts[0]
            raise StartupError(f"{option} before {command}: options of {command} come after it")


def _start_of(option: str, day: str) -> int:
    """The Unix time at which a day begins in UTC. Raises `StartupError`."""
    try:
        begun = datetime.combine(date.fromisoformat(day), time(), UTC)
    except ValueError:
        raise StartupError(f"{option}: {day} is not a date such as 2026-12-31") from None
    return int(begun.timestamp())


def _end_of(option: str, day: str) -> int:
    """The Unix time at which a day ends in UTC. Raises `StartupError`."""
    return min(_start_of(option, day) + 24 * 3600, _LAST_TIME)


def _table(report: dict[str, Any]) -> FittedTable:
    rows = report["data"]
    start, end = (datetime.fromtimestamp(report[name], UTC) for name in ("start_time", "end_time"))
    title = f"Requests that ended from {start:%Y-%m-%d %H:%M} until {end:%Y-%m-%d %H:%M} UTC"
    names = [name for name in _NAMES if any(row[name] is not None for row in rows)]
    currency = report["currency"]
    costs = [] if currency is None else [Column(f"cost in {currency}", is_number=True, rank=2)]
    columns = [*(Column(name.replace("_", " ")) for name in names), *_NUMBERS, *costs]
    return FittedTable(title, columns, [_row(row, names, has_cost=bool(costs)) for row in rows])


def _row(row: dict[str, Any], names: list[str], *, has_cost: bool) -> list[str]:
    cost = "-" if row["cost"] is None else f"{row['cost']:.6f}"
    return [
        *(row[name] or "-" for name in names),
        *(f"{row[name]:,}" for name in _COUNTS),
        *(f"{row[name]:,.1f}" for name in _SECONDS),
        *([cost] if has_cost else []),
    ]
