"""The commands ``warren batches list``, ``show`` and ``cancel``."""

from datetime import UTC, datetime
from typing import Annotated

import typer

from cli.batch.progress import unanswered
from cli.gateway_client import answer_of
from cli.options import GatewayAccess, takes_gateway
from cli.terminal import notices, output, print_json
from shared.printable import printable

app = typer.Typer(help="List, show and cancel the batches of a gateway.", no_args_is_help=True)

AllTenants = Annotated[
    bool,
    typer.Option("--all-tenants", help="Batches of any tenant, with a key of the scope operator."),
]
BatchId = Annotated[str, typer.Argument(help="Id of the batch.")]


@app.command("list")
@takes_gateway
def list_batches(
    gateway: GatewayAccess,
    limit: Annotated[int, typer.Option(min=1, max=100, help="Number of batches.")] = 20,
    all_tenants: AllTenants = False,
) -> None:
    """List the newest batches.

    warren batches list --url http://127.0.0.1:8000
    """
    path = "/admin/v1/batches" if all_tenants else "/v1/batches"
    listed = answer_of(gateway, "GET", path, params={"limit": limit})["data"]
    if not listed:
        notices.print("No batches.")
    for one in listed:
        batch, tenant = (one["batch"], f"  {one['tenant']}") if all_tenants else (one, "")
        counts, status = batch["request_counts"], batch["status"]
        completed, failed, total = counts["completed"], counts["failed"], counts["total"]
        has_rest = status in ("cancelled", "expired")
        num_unexecuted = total - completed - failed if has_rest else 0
        created = datetime.fromtimestamp(batch["created_at"], UTC).isoformat(timespec="seconds")
        done = f"{completed}/{total}, {unanswered(failed, num_unexecuted, status)}"
        line = f"{batch['id']}  {created}  {status:<11}  {done}{tenant}"
        output.print(printable(line), soft_wrap=True, markup=False)


@app.command()
@takes_gateway
def show(gateway: GatewayAccess, batch_id: BatchId) -> None:
    """Show a batch as JSON."""
    print_json(answer_of(gateway, "GET", f"/v1/batches/{batch_id}"))


@app.command()
@takes_gateway
def cancel(gateway: GatewayAccess, batch_id: BatchId, all_tenants: AllTenants = False) -> None:
    """Cancel a batch. Answers that have been computed are kept."""
    prefix = "/admin/v1" if all_tenants else "/v1"
    print_json(answer_of(gateway, "POST", f"{prefix}/batches/{batch_id}/cancel"))
