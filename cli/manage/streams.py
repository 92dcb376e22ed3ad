"""The commands ``warren streams list`` and ``cancel``."""

from typing import Annotated

import typer

from cli.gateway_client import answer_of
from cli.options import GatewayAccess, takes_gateway
from cli.terminal import notices, output
from shared.printable import printable

app = typer.Typer(
    help="List the streams of all tenants, and cancel one, with a key of the scope operator.",
    no_args_is_help=True,
)


@app.command("list")
@takes_gateway
def list_(gateway: GatewayAccess) -> None:
    """List the oldest streams of a gateway.

    warren streams list --url http://127.0.0.1:8000
    """
    streams = answer_of(gateway, "GET", "/admin/v1/streams")["data"]
    if not streams:
        notices.print("No streams.")
    for one in streams:
        progress = f"{one['state']}  {one['num_tokens']} tokens"
        line = f"{one['id']}  {one['tenant'] or '-'}  {one['model']}  {progress}"
        output.print(printable(line), soft_wrap=True, markup=False)


@app.command()
@takes_gateway
def cancel(
    gateway: GatewayAccess,
    stream_id: Annotated[
        str, typer.Argument(metavar="ID", help="Id of a stream, response or detached request.")
    ],
) -> None:
    """Cancel a request of any tenant, at any gateway. Its stream ends with an error.

    warren streams cancel chatcmpl-5c1f2c7b0e9d4a3f8b6a7d8e9f0a1b2c
    """
    stopped = answer_of(gateway, "DELETE", f"/admin/v1/streams/{stream_id}")
    output.print(printable(f"{stopped['id']} was cancelled"), soft_wrap=True, markup=False)
