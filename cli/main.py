"""The entry point of the command line: the commands, and how the process exits on an error."""

import inspect
import re
import sys
from collections.abc import Iterator
from itertools import takewhile
from typing import Annotated

import typer
from rich.markup import escape

from cli.batch.command import batch
from cli.chat.command import chat
from cli.doctor.command import doctor
from cli.manage import batches, dead, keys, models, sessions, streams, tenants, usage, webhooks
from cli.manage.drain import drain
from cli.manage.status import status, top
from cli.options import EPILOG, commands_with, is_of_others, removed
from cli.replay.command import replay
from cli.serve import gateway, pull, serve, worker
from cli.size.command import size
from cli.terminal import notices, output
from cli.verify.command import verify
from shared.errors import StartupError, WarrenError
from shared.printable import escape_controls
from shared.version import UNKNOWN, VERSION

app = typer.Typer(
    help="An asynchronous LLM service on RabbitMQ: requests survive the crash of any process.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # tracebacks would show local variables, and prompts among them
    rich_markup_mode=None,  # rich's tables cut off names of options at 80 columns
    context_settings={"max_content_width": 120},
)

app.command(epilog=EPILOG)(serve)
app.command(epilog=EPILOG)(gateway)
app.command(epilog=EPILOG)(worker)
app.command()(pull)
app.command()(chat)
app.command(epilog=EPILOG)(batch)
app.command()(status)
app.command()(top)
app.command()(drain)
app.command(epilog=EPILOG)(doctor)
app.command()(size)
app.command()(verify)
app.command()(replay)
app.add_typer(batches.app, name="batches")
app.add_typer(dead.app, name="dead")
app.add_typer(keys.app, name="keys")
app.add_typer(models.app, name="models")
app.add_typer(sessions.app, name="sessions")
app.add_typer(streams.app, name="streams")
app.add_typer(tenants.app, name="tenants")
app.add_typer(usage.app, name="usage")
app.add_typer(webhooks.app, name="webhooks")


def _keep_examples(group: typer.Typer) -> None:
    """Mark the examples of docstrings, so that help does not wrap them."""
    for command in group.registered_commands:
        docstring = inspect.getdoc(command.callback) or ""
        command.help = docstring.replace("\n\nwarren ", "\n\n\b\nwarren ")


for one in (app, *(group.typer_instance for group in app.registered_groups)):
    if one is not None:
        _keep_examples(one)


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        version = VERSION
        if version == UNKNOWN:
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

    An error is printed as one line on standard error. The exit status is 2 for errors of usage and
    of the start, and 1 otherwise.
    """
    try:
        _refuse_several_models(sys.argv[1:])
        sys.exit(app(standalone_mode=False) or 0)
    except typer.TyperException as error:
        if message := error.format_message():  # empty if the help was shown instead
            _complain(_usage_error(message))
        sys.exit(error.exit_code)
    except typer.Abort:
        _complain("aborted")
        sys.exit(1)
    except (WarrenError, BaseExceptionGroup) as error:
        failures = list(_leaves(error))
        if not all(isinstance(failure, WarrenError) for failure in failures):
            raise
    for failure in failures:
        _complain(str(failure))
    sys.exit(2 if any(isinstance(failure, StartupError) for failure in failures) else 1)


def _refuse_several_models(words: list[str]) -> None:
    """Raise `StartupError` if ``--model`` is given twice. Typer takes the last value of an option,
    and the user of two models would not learn that only one of them is served."""
    options = list(takewhile(lambda word: word != "--", words))
    values = [i for i, word in enumerate(options) if word.startswith("--model=")]
    values += [i for i, word in enumerate(options[:-1]) if word == "--model"]
    if len(values) > 1:
        raise StartupError(
            f"--model is given {len(values)} times: a process serves one model, so start one "
            "worker for each"
        )


def _usage_error(message: str) -> str:
    """A message of typer's in the form of our own errors."""
    unknown = re.match(r"No such option: (--[\w-]+)", message)
    if unknown is not None and is_of_others(unknown[1]):
        return f"{unknown[1]}: not available; see docs/migrating.md"
    if unknown is not None and (reason := removed(unknown[1])) is not None:
        return f"{unknown[1]} was removed: {reason}"
    if unknown is not None and (commands := commands_with(unknown[1])):
        return f"{unknown[1]} is an option of {', '.join(commands[:-1])} and {commands[-1]}"
    message = message.rstrip(".")
    message = message[:1].lower() + message[1:]
    # typer suggests commands in a sentence of its own, and options not as a question.
    message = message.replace(". Did you mean", ": did you mean")
    message, _, options = message.partition(" (Possible options: ")
    if options:
        message += f": did you mean {options.removesuffix(')').replace(', ', ' or ')}?"
    return message


def _complain(message: str) -> None:
    notices.print(f"[bold red]error:[/] {escape(escape_controls(message))}", soft_wrap=True)
