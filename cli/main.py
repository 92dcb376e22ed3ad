"""The entry point of the command line: the commands, and how errors end the process."""

import sys
from collections.abc import Iterator
from importlib import metadata
from typing import Annotated

import typer
from rich.markup import escape

from cli import batches, dead, keys
from cli.batch.command import batch
from cli.chat import chat
from cli.options import EPILOG
from cli.serve import gateway, pull, serve, worker
from cli.status import status, top
from cli.terminal import notices, output
from shared.errors import StartupError, WarrenError

app = typer.Typer(
    help="An asynchronous LLM service on RabbitMQ: requests survive the crash of any process.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # tracebacks would show local variables, and prompts among them
    rich_markup_mode="rich",
)

app.command(epilog=EPILOG)(serve)
app.command(epilog=EPILOG)(gateway)
app.command(epilog=EPILOG)(worker)
app.command()(pull)
app.command()(chat)
app.command(epilog=EPILOG)(batch)
app.command()(status)
app.command()(top)
app.add_typer(batches.app, name="batches")
app.add_typer(dead.app, name="dead")
app.add_typer(keys.app, name="keys")


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        try:
            version = metadata.version("warren")
        except metadata.PackageNotFoundError:
            version = "of unknown version: run from its sources, and not installed"
        output.print(f"warren {version}", highlight=False, soft_wrap=True)
        raise typer.Exit


@app.callback()
def takes_options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Handle the options that come before a command."""


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def main() -> None:
    """Run the command line.

    A `WarrenError` is printed as one line; the exit status is 2 for start-up errors and 1
    otherwise.
    """
    failures: list[BaseException] = []
    try:
        app()
    except* WarrenError as group:
        failures = list(_leaves(group))
    for failure in failures:
        notices.print(f"[bold red]error:[/] {escape(str(failure))}", soft_wrap=True)
    if failures:
        sys.exit(2 if any(isinstance(f, StartupError) for f in failures) else 1)
