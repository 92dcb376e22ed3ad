"""The commands ``warren models list`` and ``remove``."""

import asyncio
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from cli.gateway_client import answer_of
from cli.options import EPILOG, GatewayAccess, takes_gateway, takes_settings
from cli.runtime import broker_of, user_name
from cli.terminal import notices, output
from shared import settings
from shared.bus.base import Bus
from shared.bus.retry import connected_within
from shared.printable import printable
from shared.retirement import remove_model, require_no_workers
from shared.settings import CommonSettings
from shared.telemetry import audit

_SETTINGS = ("broker", "audit_file")

app = typer.Typer(help="List the models of gateways, and remove one.", no_args_is_help=True)
Model = Annotated[str, typer.Argument(metavar="MODEL", help="Name of the model.")]


@app.command("list")
@takes_gateway
def list_(gateway: GatewayAccess) -> None:
    """List the models whose queues exist, with their live workers and waiting jobs, with a key of
    the scope operator.

    warren models list --url http://127.0.0.1:8000
    """
    models = answer_of(gateway, "GET", "/admin/v1/models")["data"]
    if not models:
        notices.print("No models.")
    for one in models:
        seen = datetime.fromtimestamp(one["seen_at"], UTC).isoformat(timespec="seconds")
        counts = f"{one['num_workers']} workers  {one['num_waiting']} waiting"
        line = printable(f"{one['model']}  {counts}  last seen {seen}")
        output.print(line, soft_wrap=True, markup=False)


@app.command(epilog=EPILOG)
@takes_settings(CommonSettings, only=_SETTINGS)
def remove(
    model: Model,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    **options: Any,
) -> None:
    """Remove a model that no worker serves: answer its waiting jobs with an error, and delete its
    queues. Gateways forget the model within seconds, and its alerts end.

    Use the account of an operator of the broker: gateways and workers may not do this. Drain the
    workers of the model first.

    warren models remove llama --broker file:operator.url
    """
    common = settings.load(CommonSettings, **options)
    if common.audit_file is not None:
        audit.write_to(common.audit_file)
    asyncio.run(_remove(broker_of(common), model, is_confirmed=yes))


async def _remove(bus: Bus, model: str, *, is_confirmed: bool) -> None:
    async with bus:
        await connected_within(bus, otherwise="the broker is unreachable")
        await require_no_workers(bus, model)
        if not is_confirmed:
            question = f"End the waiting jobs of {printable(model)} and delete its queues?"
            typer.confirm(question, abort=True)
        num_jobs = await remove_model(bus, model)
        audit.record("model removed", model=model, num_jobs=num_jobs, by=user_name())
        output.print(
            printable(f"{model} was removed, {num_jobs} waiting jobs were ended"), markup=False
        )
