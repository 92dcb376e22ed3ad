"""The entry point: all commands by name, and how their failures end the process."""

import sys
from collections.abc import Iterator
from importlib import metadata
from typing import Annotated

import typer
from rich.markup import escape

from cli import dead, keys
from cli.batch.command import batch
from cli.chat import chat
from cli.options import EPILOG
from cli.serve import gateway, pull, serve, worker
from cli.terminal import notices, output
from shared.errors import StartupError, WarrenError

app = typer.Typer(
    help="An LLM service on a message broker: nothing that dies takes a request with it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # it shows local variables, and prompts are among them
    rich_markup_mode="rich",
)

app.command(epilog=EPILOG)(serve)
app.command(epilog=EPILOG)(gateway)
app.command(epilog=EPILOG)(worker)
app.command()(pull)
app.command()(chat)
app.command(epilog=EPILOG)(batch)
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
            "--version", callback=_show_version, is_eager=True, help="Show the version and end."
        ),
    ] = False,
) -> None:
    """Take what stands before a command."""


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def main() -> None:
    """Run the command line. Errors of ours end it with one line each: 2 at the start, else 1."""
    failures: list[BaseException] = []
    try:
        app()
    except* WarrenError as group:
        failures = list(_leaves(group))
    for failure in failures:
        notices.print(f"[bold red]error:[/] {escape(str(failure))}", soft_wrap=True)
    if failures:
        sys.exit(2 if any(isinstance(f, StartupError) for f in failures) else 1)
