"""The command ``warren replay``: what another model answers to the requests of the last time."""

import re
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.gateway_client import connect, request_json
from cli.options import GatewayAccess, takes_gateway
from cli.replay.comparison import parting
from cli.replay.kinds import KINDS, SpokenChoice
from cli.replay.report import Findings, tables, total
from cli.replay.sending import Reply, asked, is_greedy, is_repeatable, send_all
from cli.replay.stored_requests import SOURCES, Draw, StoredRequest
from cli.tables import print_tables
from cli.terminal import counted, notices, print_json
from shared.errors import InvalidRequest, StartupError, WarrenError
from shared.printable import printable

if TYPE_CHECKING:
    import httpx

_DURATION = re.compile(r"([1-9]\d{0,6})([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 24 * 3600}
_MAX_PARALLEL = 64
_MIN_PREFIX_LEN = 8
"""Characters of a fingerprint that are enough to name a model."""


@takes_gateway
def replay(
    gateway: GatewayAccess,
    to: Annotated[
        str,
        typer.Option(
            metavar="MODEL",
            help="The model that answers: the name or fingerprint of a model that a live worker "
            "serves, such as that of a new release, weight format or quantization.",
        ),
    ],
    share: Annotated[
        float, typer.Option(help="Share of the requests, above 0 and up to 1.")
    ] = 0.01,
    since: Annotated[
        str, typer.Option(metavar="DURATION", help="Age of the oldest requests: 90m, 24h or 7d.")
    ] = "24h",
    seed: Annotated[
        int, typer.Option(help="Seed of the draw. An equal seed draws the same requests.")
    ] = 0,
    parallel: Annotated[
        int, typer.Option(min=1, max=_MAX_PARALLEL, help="Number of requests at a time.")
    ] = 16,
    min_equal: Annotated[
        float, typer.Option(help="Share of equal answers below which the exit status is 1.")
    ] = 1.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, which names each difference.")
    ] = False,
) -> None:
    """Answer a share of the stored requests again with another model, in the batch class, and
    report how many answers are equal, where the others part, and how sure the model was there. The
    exit status is 1 if fewer answers are equal than --min-equal demands, if a request got no
    answer, or if there is nothing to compare.

    warren replay --share 0.01 --since 24h --to smollm2-q8
    """
    if not 0.0 < share <= 1.0:
        raise StartupError(f"--share: {share} is not a share above 0 and up to 1")
    if not 0.0 <= min_equal <= 1.0:
        raise StartupError(f"--min-equal: {min_equal} is not a share from 0 to 1")
    began_at = int(time.time()) - _seconds("--since", since)
    with connect(*gateway) as client:
        served = _served(client, to)
        model, with_logprobs = served["id"], "logprobs" not in served["unsupported_parameters"]
        draw = Draw(share, seed)
        drawn = [stored for source in SOURCES for stored in source(client, began_at, draw)]
        if not drawn:
            raise InvalidRequest(
                f"no request was drawn from what the API key's tenant has stored in {since}: raise "
                "--share or --since"
            )
        by_kind = _replayed(
            client, drawn, model, with_logprobs=with_logprobs, num_parallel=parallel
        )
        whole = total(by_kind.values())
        terms = {"model": model, "since": began_at, "share": share, "seed": seed}
        if as_json:
            kinds = {kind: found.described() for kind, found in by_kind.items()}
            print_json({**terms, "kinds": kinds, "total": whole.described()})
        else:
            print_tables(tables(f"Stored answers, and those of {model}", by_kind))
        fingerprint = served.get("fingerprint", "")
        _keep(client, {**terms, "fingerprint": fingerprint, **whole.numbers()})
    equal = whole.share_equal
    if equal is None or equal < min_equal or whole.failures:
        raise typer.Exit(1)


def _keep(client: "httpx.Client", report: Mapping[str, Any]) -> None:
    """Have the gateway keep a report for its operators. Its failure changes nothing else."""
    try:
        request_json(client, "POST", "/v1/replays", json=report)
    except WarrenError as error:  # a gateway of an earlier version keeps no reports
        text = f"The gateway's console does not show this replay: {printable(str(error))}"
        notices.print(text, markup=False, soft_wrap=True, style="dim")


def _replayed(
    client: "httpx.Client",
    drawn: Sequence[StoredRequest],
    model: str,
    *,
    with_logprobs: bool,
    num_parallel: int,
) -> dict[str, Findings]:
    """What is found about the drawn requests, by their endpoints."""
    by_kind: dict[str, Findings] = defaultdict(Findings)
    bodies: list[tuple[StoredRequest, dict[str, Any]]] = []
    for stored in drawn:
        if stored.endpoint not in KINDS:
            by_kind[stored.endpoint].incomparable["answers without a text"] += 1
        elif not is_repeatable(stored.body):
            by_kind[stored.endpoint].incomparable["neither greedy nor seeded"] += 1
        else:
            bodies.append((stored, asked(stored, model, with_logprobs=with_logprobs)))
    with counted("replay") as show:
        num_done = 0

        def take(stored: StoredRequest, outcome: Reply) -> None:
            nonlocal num_done
            num_done += 1
            _note(by_kind[stored.endpoint], stored, outcome)
            show(num_done, len(bodies), "")

        send_all(client, bodies, num_parallel=num_parallel, on_answer=take)
    return dict(by_kind)


def _note(findings: Findings, stored: StoredRequest, outcome: Reply) -> None:
    """Add the comparison of an answer to the findings."""
    if isinstance(outcome, WarrenError):
        findings.failures.append((stored.id, str(outcome)))
        return
    try:
        found = parting(_choices(stored, stored.answer), _choices(stored, outcome))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        findings.failures.append((stored.id, f"an answer has an unknown form: {error!r}"))
        return
    if found is None:
        findings.num_equal += 1
    elif not is_greedy(stored.body):
        # The seed has chosen both tokens, so that their margin does not say how sure the model was.
        findings.partings.append((stored.id, found._replace(margin=None, is_at_least=False)))
    else:
        findings.partings.append((stored.id, found))


def _choices(stored: StoredRequest, answer: Any) -> list[SpokenChoice]:
    return KINDS[stored.endpoint].read(answer)


def _served(client: "httpx.Client", to: str) -> dict[str, Any]:
    """The gateway's description of the model with the name ``to``, or else with the fingerprint
    ``to``. Raises `StartupError` if no live worker serves it, or if several models have it."""
    models: list[dict[str, Any]] = request_json(client, "GET", "/v1/models")["data"]
    named = [model for model in models if model["id"] == to]
    found = named or [model for model in models if _has_fingerprint(model, to)]
    if len(found) == 1:
        return found[0]
    if found:
        raise StartupError(f"--to: {to} is the fingerprint of several models: {_names(found)}")
    served = f"; these have one: {_names(models)}" if models else ""
    raise StartupError(
        f"--to: no live worker serves {to}, which is to be a name or at least {_MIN_PREFIX_LEN} "
        f"characters of a fingerprint{served}"
    )


def _has_fingerprint(model: dict[str, Any], beginning: str) -> bool:
    # A gateway of an earlier version does not state fingerprints.
    fingerprint: str = model.get("fingerprint", "")
    return len(beginning) >= _MIN_PREFIX_LEN and fingerprint.startswith(beginning)


def _names(models: Sequence[dict[str, Any]]) -> str:
    return ", ".join(model["id"] for model in models)


def _seconds(option: str, duration: str) -> int:
    """Raises `StartupError`."""
    match = _DURATION.fullmatch(duration)
    if match is None:
        raise StartupError(f"{option}: {duration} is not a duration such as 90m, 24h or 7d")
    return int(match[1]) * _SECONDS[match[2]]
