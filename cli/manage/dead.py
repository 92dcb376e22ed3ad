"""The command ``warren dead``: inspect, retry and drop dead letters."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Any

import msgspec
import typer

from cli.options import EPILOG, takes_settings
from cli.runtime import broker_of, user_name
from cli.terminal import notices, output
from shared import settings
from shared.bus.base import MAX_PREFETCH, Bus
from shared.bus.retry import CONNECT_TIMEOUT_S, connected_within
from shared.dead_letters import DeadLetter, find, opened
from shared.errors import InvalidRequest
from shared.messages import JSON
from shared.printable import printable
from shared.settings import CommonSettings
from shared.telemetry import audit

MAX_LETTERS = MAX_PREFETCH
"""All listed letters are held unacknowledged at the same time."""
_SETTINGS = ("broker", "trusted_users", "audit_file")
_BUS_LOGGERS = ("aio_pika", "aiormq", Bus.__module__.rpartition(".")[0])
_EVERY = "all"
_NONE = "No dead letters."

Act = Callable[[Bus, list[DeadLetter]], Awaitable[None]]

app = typer.Typer(help="Inspect, retry or drop dead-lettered jobs.", no_args_is_help=True)
Id = Annotated[str, typer.Argument(metavar="ID", help="Id, as shown by `list`.")]
Ids = Annotated[
    list[str], typer.Argument(metavar="ID...", help=f"Ids, as shown by `list`, or `{_EVERY}`.")
]


@app.command("list", epilog=EPILOG)
@takes_settings(CommonSettings, only=_SETTINGS)
def list_(
    limit: Annotated[
        int,
        typer.Option(
            min=1, max=MAX_LETTERS, help="Maximum number of dead letters to show, oldest first."
        ),
    ] = 100,
    **options: Any,
) -> None:
    """List the dead letters: their id, reason, queue, tenant and age, and whether `retry` can
    return them.

    The id is the request id of the job. A message without a job has its message id, or a hash.

    warren dead list --broker file:gateway.url
    """

    _at_letters(_print_list, options, limit)


@app.command(epilog=EPILOG)
@takes_settings(CommonSettings, only=_SETTINGS)
def show(
    request_id: Id,
    body: Annotated[
        bool, typer.Option("--body", help="Include the job's body, with its prompts.")
    ] = False,
    **options: Any,
) -> None:
    """Show one dead letter."""

    async def act(_: Bus, letters: list[DeadLetter]) -> None:
        _print_letter(find(letters, request_id), with_body=body)

    _at_letters(act, options)


@app.command(epilog=EPILOG)
@takes_settings(CommonSettings, only=_SETTINGS)
def retry(request_ids: Ids, **options: Any) -> None:
    """Return jobs to the queues they were dead-lettered from, without their deadlines.

    Answers go to the original reply queue. If a job's client is no longer waiting, the worker that
    takes the job drops it.
    """

    async def act(bus: Bus, letters: list[DeadLetter]) -> None:
        await _retry(bus, letters, request_ids)

    _at_letters(act, options)


@app.command(epilog=EPILOG)
@takes_settings(CommonSettings, only=_SETTINGS)
def drop(
    request_ids: Ids,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help=f"Do not ask before `{_EVERY}` are dropped.")
    ] = False,
    **options: Any,
) -> None:
    """Remove dead letters permanently."""
    if request_ids == [_EVERY] and not yes:
        typer.confirm("Drop all dead letters permanently?", abort=True)

    async def act(bus: Bus, letters: list[DeadLetter]) -> None:
        for letter in _chosen(letters, request_ids):
            await letter.drop()
            _record("dead letters dropped", letter, bus)
            _print(f"{letter.request_id} was dropped")

    _at_letters(act, options)


async def _retry(bus: Bus, letters: list[DeadLetter], request_ids: list[str]) -> None:
    """Raises `InvalidRequest` for a letter that can only be dropped, or if all of them can."""
    chosen = _chosen(letters, request_ids)
    if request_ids == [_EVERY]:
        chosen = [letter for letter in letters if letter.can_retry]
    for letter in chosen:
        queue = await letter.retry(bus)
        _record("dead letters requeued", letter, bus)
        _print(f"{letter.request_id} was returned to {queue}")
    if request_ids != [_EVERY]:
        return
    num_left = len(letters) - len(chosen)
    summary = f"{len(chosen)} returned, {num_left} can only be dropped"
    if num_left and not chosen:
        raise InvalidRequest(summary)
    _print(summary if letters else _NONE)


async def _print_list(_: Bus, letters: list[DeadLetter]) -> None:
    rows: list[tuple[str, ...]] = (
        [("id", "reason", "queue", "tenant", "retry", "age")] if letters else [(_NONE,)]
    )
    rows += [tuple(map(printable, _row(one))) for one in letters]
    # Not a table, which would truncate ids to the terminal's width.
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        _print(line.rstrip())


def _row(letter: DeadLetter) -> tuple[str, ...]:
    can_retry = "yes" if letter.can_retry else "no"
    cells = (letter.request_id, letter.reason, letter.queue, _tenant(letter))
    return (*cells, can_retry, _age(letter))


def _print_letter(letter: DeadLetter, *, with_body: bool) -> None:
    fields = {
        "id": letter.request_id,
        "reason": letter.reason,
        "queue": letter.queue,
        "model": letter.model,
        "age": _age(letter),
        "mode": letter.job.mode if letter.job else "unknown",
        "tenant": _tenant(letter),
        "user": letter.message.user_id or "unknown",
        "reply to": letter.message.reply_to,
        "retry": f"no: {letter.obstacle}" if letter.obstacle else "yes",
        "bytes": len(letter.message.body),
    }
    for name, value in fields.items():
        _print(f"{name:9}{value}")
    if with_body:
        for line in _body(letter).split("\n"):
            _print(line)


def _print(line: str) -> None:
    """Print a line, in which a publisher's text cannot control the terminal."""
    output.print(printable(line), markup=False, soft_wrap=True)


def _chosen(letters: list[DeadLetter], request_ids: list[str]) -> list[DeadLetter]:
    if request_ids == [_EVERY]:
        return letters
    return [find(letters, request_id) for request_id in request_ids]


def _record(act: audit.Act, letter: DeadLetter, bus: Bus) -> None:
    fields = {"request_id": letter.request_id, "broker_user": bus.user, "by": user_name()}
    audit.record(act, tenant=letter.tenant, **fields)


def _at_letters(act: Act, options: dict[str, Any], limit: int = MAX_LETTERS) -> None:
    common = settings.load(CommonSettings, **options)
    if common.audit_file is not None:
        audit.write_to(common.audit_file)
    for name in _BUS_LOGGERS:  # what they report may contain bodies of messages
        logging.getLogger(name).setLevel(logging.CRITICAL)
    asyncio.run(_act(act, broker_of(common), limit, common.trusted_users))


async def _act(act: Act, bus: Bus, limit: int, trusted_users: tuple[str, ...]) -> None:
    async with _connected(bus), opened(bus, limit, trusted_users) as letters:
        await act(bus, letters)


@asynccontextmanager
async def _connected(bus: Bus, timeout_s: float = CONNECT_TIMEOUT_S) -> AsyncIterator[None]:
    """Raises `BusUnavailable` if the broker cannot be reached within ``timeout_s``."""
    async with bus:
        if not bus.is_connected:
            notices.print("Waiting for the broker ...")
        await connected_within(
            bus,
            timeout_s,
            otherwise=f"the broker could not be reached within {timeout_s:g} s; `warren doctor` "
            "finds out why",
        )
        yield


def _tenant(letter: DeadLetter) -> str:
    """The tenant of a job, or ``anonymous``; of any other message, the user of the broker who
    published it."""
    if letter.tenant or letter.job is not None:
        return letter.tenant or "anonymous"
    user = letter.message.user_id
    return f"user {user}" if user else "unknown"


def _age(letter: DeadLetter) -> str:
    if letter.age_s is None:
        return "unknown"
    minutes, seconds = divmod(round(letter.age_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"


def _body(letter: DeadLetter) -> str:
    if letter.job is None or letter.message.content_type == JSON:
        return letter.message.body.decode(errors="replace")
    return msgspec.json.format(msgspec.json.encode(letter.job)).decode()
