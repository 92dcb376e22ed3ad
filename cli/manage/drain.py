"""The command ``warren drain``: takes a worker out of service."""

from typing import Annotated, Any

import typer

from cli.gateway_client import answer_of
from cli.options import GatewayAccess, takes_gateway
from cli.terminal import output
from shared.errors import InvalidRequest
from shared.printable import printable
from shared.settings import did_you_mean
from shared.topology import worker_id_of

_MIN_LENGTH = 4
"""The minimum length of a shortened id, so that a slip of the fingers drains no worker."""


@takes_gateway
def drain(
    worker: Annotated[
        str,
        typer.Argument(
            metavar="WORKER", help="Id of the worker, as `status` shows it, or its beginning."
        ),
    ],
    gateway: GatewayAccess,
    immediate: Annotated[
        bool, typer.Option("--immediate", help="Move running requests to other workers at once.")
    ] = False,
) -> None:
    """Make a worker finish its requests and exit, with a key of the scope operator.

    It takes no new jobs. Requests that are not finished within its WARREN_DRAIN_GRACE_S continue on
    other workers.

    warren drain 3f9c2a71 --url http://127.0.0.1:8000
    """
    worker_id = found(worker, answer_of(gateway, "GET", "/admin/v1/status")["workers"])
    params = {"immediate": immediate}
    answer_of(gateway, "POST", f"/admin/v1/workers/{worker_id}/drain", params=params)
    output.print(f"{worker_id} is draining", soft_wrap=True, markup=False)


def found(name: str, workers: list[dict[str, Any]]) -> str:
    """The id of the worker whose id is ``name``, or the only worker whose id begins with it.

    Raises `InvalidRequest`, which names the workers that there are.
    """
    models: dict[str, str] = {worker["id"]: worker["model"] for worker in workers}
    wanted = worker_id_of(name)  # log lines name a worker by its address
    if wanted in models:
        return wanted
    similar = [one for one in models if one.startswith(wanted)]
    if len(similar) == 1 and len(wanted) >= _MIN_LENGTH:
        return similar[0]
    if not models:
        which = f"worker {name}" if wanted else "worker"
        raise InvalidRequest(f"there is no {which}: the gateway has heard of none")
    if not wanted:
        problem = "the id of the worker is empty"
    elif similar:
        problem = f"{name} is too short to name one worker"
    else:
        hint = did_you_mean(wanted, {one[: len(wanted)] for one in models})
        problem = f"there is no worker {name}{hint}"
    known = [printable(f"{one}  {models[one]}") for one in similar or models]
    raise InvalidRequest("\n".join([problem, "The gateway knows these workers:", *known]))
