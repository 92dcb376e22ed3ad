"""``warren gateway`` with a tuning: ``python -m tests.support.tuning.gateway``."""

from typing import Annotated, Any

import msgspec
import typer

from cli.options import takes_settings
from cli.runtime import broker_of, run
from cli.serve import relay
from gateway.wiring import Tuning
from shared import settings
from shared.settings import GatewaySettings
from shared.telemetry.setup import configure


@takes_settings(GatewaySettings)
def main(
    tuning: Annotated[str, typer.Option(help="A JSON object of fields of `Tuning`.")],
    **options: Any,
) -> None:
    chosen = settings.load(GatewaySettings, **options)
    configure(chosen, "warren-gateway")
    run(relay(chosen, broker_of(chosen), msgspec.json.decode(tuning, type=Tuning)))


if __name__ == "__main__":
    typer.run(main)
