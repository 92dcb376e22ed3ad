"""The commands ``warren webhooks``: the operator's endpoints of webhooks at a gateway."""

from typing import Annotated, Any

import typer

from cli.gateway_client import answer_of
from cli.options import GatewayAccess, takes_gateway
from cli.terminal import notices, output, print_json

app = typer.Typer(help="Manage the webhooks of a gateway.", no_args_is_help=True)

_PATH = "/admin/v1/webhooks"
WebhookId = Annotated[str, typer.Argument(metavar="ID", help="Id of the webhook.")]


@app.command("list")
@takes_gateway
def list_webhooks(
    gateway: GatewayAccess,
    tenant: Annotated[str | None, typer.Option(help="Those of one tenant only.")] = None,
) -> None:
    """List the webhooks.

    warren webhooks list --url http://127.0.0.1:8000
    """
    wanted = {} if tenant is None else {"tenant": tenant}
    webhooks = answer_of(gateway, "GET", _PATH, params=wanted)["data"]
    if not webhooks:
        notices.print("No webhooks.")
    for webhook in webhooks:
        types = ",".join(webhook["event_types"])
        _print(webhook["id"], webhook["tenant"] or "-", webhook["url"], types)


@app.command()
@takes_gateway
def add(
    endpoint: Annotated[str, typer.Argument(metavar="ENDPOINT", help="URL of the endpoint.")],
    gateway: GatewayAccess,
    tenant: Annotated[
        str, typer.Option(help="Whose events are sent. Left out: those without an API key.")
    ] = "",
    name: Annotated[str, typer.Option(help="A name for people.")] = "",
    event: Annotated[
        list[str] | None, typer.Option(help="A type of event; may be repeated. Left out: all.")
    ] = None,
) -> None:
    """Send the events of a tenant to an endpoint, and show the secret that signs them.

    warren webhooks add https://example.com/hook --tenant acme --event batch.completed
    """
    body: dict[str, Any] = {"url": endpoint, "tenant": tenant, "name": name}
    print_json(answer_of(gateway, "POST", _PATH, json={**body, "event_types": event or []}))


@app.command()
@takes_gateway
def rotate(
    webhook_id: WebhookId,
    gateway: GatewayAccess,
    keep: Annotated[
        bool, typer.Option("--keep", help="Sign with the old secret, too, for 24 hours.")
    ] = False,
) -> None:
    """Replace the secret of a webhook, and show the new secret."""
    body = {"keep_old_secret_active_for_24_hours": keep}
    print_json(answer_of(gateway, "POST", f"{_PATH}/{webhook_id}/rotate_secret", json=body))


@app.command()
@takes_gateway
def remove(gateway: GatewayAccess, webhook_id: WebhookId) -> None:
    """Remove a webhook and its undelivered events."""
    print_json(answer_of(gateway, "DELETE", f"{_PATH}/{webhook_id}"))


@app.command("test")
@takes_gateway
def send_test(
    webhook_id: WebhookId,
    gateway: GatewayAccess,
    event: Annotated[str, typer.Option(help="The type of the event.")] = "batch.completed",
) -> None:
    """Send a sample event, and show the status of the endpoint's answer."""
    body = {"event_type": event}
    print_json(answer_of(gateway, "POST", f"{_PATH}/{webhook_id}/test", json=body))


@app.command()
@takes_gateway
def dead(gateway: GatewayAccess) -> None:
    """List the oldest deliveries that have failed too often."""
    for one in answer_of(gateway, "GET", f"{_PATH}/dead")["data"]:
        tries = f"{one['num_tries']} tries, {one['reason']}"
        _print(one["id"], one["type"], one["object_id"], one["url"], tries)


@app.command()
@takes_gateway
def retry(
    delivery_id: Annotated[
        str, typer.Argument(metavar="ID", help="Id of the delivery, as shown by `dead`.")
    ],
    gateway: GatewayAccess,
) -> None:
    """Try a dead delivery again, as often as a new delivery."""
    print_json(answer_of(gateway, "POST", f"{_PATH}/dead/{delivery_id}/retry"))


def _print(*cells: str) -> None:
    output.print("  ".join(cells), soft_wrap=True, markup=False)
