"""The command line, and the only file that knows both sides: `serve` joins them in one process.

Each command imports its side when it runs, so that a gateway needs no torch, a worker no fastapi
and ``--help`` neither.
"""

import asyncio
import logging
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.markup import escape

from gateway.access import commands as key_commands
from shared import dead_commands, settings
from shared.bus.base import MAX_PREFETCH
from shared.errors import StartupError, WarrenError
from shared.options import EPILOG, chosen, takes_settings
from shared.settings import DEFAULT_MODEL, CommonSettings, GatewaySettings, WorkerSettings
from shared.terminal import counted, notices, output, stages

if TYPE_CHECKING:
    from gateway.batch.progress import BatchProgress, BatchSummary
    from shared.bus.base import Bus

DEFAULT_URL = "http://127.0.0.1:8000"
_INTERRUPTED = 130

_Result = TypeVar("_Result")

logger = logging.getLogger(__name__)

app = typer.Typer(
    help="An LLM service on a message broker: nothing that dies takes a request with it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # it shows local variables, and prompts are among them
    rich_markup_mode="rich",
)
app.add_typer(dead_commands.app, name="dead")
app.add_typer(key_commands.app, name="keys")


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


@app.command(epilog=EPILOG)
@takes_settings(GatewaySettings, WorkerSettings)
def serve(
    ask: Annotated[
        str | None, typer.Option(help="Ask this as soon as it serves, and show the answer.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="End after the answer to --ask.")] = False,
    **options: Any,
) -> None:
    """Serve a model, gateway and worker in one process.

    [dim]warren serve --model smollm2 --port 8000[/]
    """
    if once and ask is None:
        raise StartupError("--once needs --ask")
    gateway_settings = settings.load(GatewaySettings, **chosen(GatewaySettings, options))
    worker_settings = settings.load(WorkerSettings, **chosen(WorkerSettings, options))
    _configure(gateway_settings, "warren")
    _pull(worker_settings.model)
    _run(_serve(gateway_settings, worker_settings, ask, once))


@app.command(epilog=EPILOG)
@takes_settings(GatewaySettings)
def gateway(**options: Any) -> None:
    """Take HTTP requests and put them on a broker.

    [dim]warren gateway --broker amqp://gateway:PASSWORD@localhost/warren --port 8000[/]
    """
    chosen_settings = settings.load(GatewaySettings, **options)
    _configure(chosen_settings, "warren-gateway")
    _run(_relay(chosen_settings, _broker(chosen_settings)))


@app.command(epilog=EPILOG)
@takes_settings(WorkerSettings)
def worker(**options: Any) -> None:
    """Take requests from a broker and answer them with a model.

    [dim]warren worker --broker amqp://worker:PASSWORD@localhost/warren --model smollm2[/]
    """
    chosen_settings = settings.load(WorkerSettings, **options)
    _configure(chosen_settings, "warren-worker")
    bus = _broker(chosen_settings)
    _pull(chosen_settings.model)
    _run(_work(chosen_settings, bus))


@app.command()
def pull(
    model: Annotated[
        str, typer.Argument(help="A known name, a directory, a GGUF file or a hub id.")
    ] = DEFAULT_MODEL,
) -> None:
    """Fetch a model into the user's cache, ready to be loaded.

    [dim]warren pull smollm2[/]
    """
    output.print(f"{model} is ready in {_pull(model)}", soft_wrap=True)


@app.command()
def chat(
    url: Annotated[str, typer.Option(help="The server.")] = DEFAULT_URL,
    model: Annotated[
        str | None, typer.Option(help="Who answers; without it the server's first model.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="How freely it answers; 0 is greedy.")] = 0.7,
    api_key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", help="Where the server wants one.")
    ] = None,
) -> None:
    """Talk to a model in the terminal.

    [dim]warren chat --url http://127.0.0.1:8000[/]
    """
    with _needs("gateway"):
        from gateway.chat import Conversation, connect, converse, first_model

    with connect(url, api_key) as client:
        converse(Conversation(client, model or first_model(client), temperature), output)


@app.command(epilog=EPILOG)
@takes_settings(CommonSettings)
def batch(
    input: Annotated[Path, typer.Argument(help="OpenAI's batch lines.")],  # noqa: A002
    results: Annotated[Path, typer.Argument(help="Where the answers go, in the same order.")],
    window: Annotated[
        int, typer.Option(min=1, max=MAX_PREFETCH, help="Jobs in the queue at a time.")
    ] = 256,
    **options: Any,
) -> None:
    """Answer a file of requests through the queue.

    After Ctrl-C, the same command goes on where it was.

    [dim]warren batch IN.jsonl OUT.jsonl --broker amqp://publisher:PASSWORD@localhost/warren[/]
    """
    chosen_settings = settings.load(CommonSettings, **options)
    _configure(chosen_settings, "warren-batch")
    try:
        summary = _run(_batch(input, results, _broker(chosen_settings), window))
    except OSError as error:
        raise StartupError(f"{error.filename or results}: {error.strerror}") from error
    except KeyboardInterrupt:
        notices.print("Stopped. What is done is kept: the same command goes on from here.")
        raise typer.Exit(_INTERRUPTED) from None
    notices.print(
        f"{summary.num_lines} lines in {results}, {summary.num_failed} failed, "
        f"{summary.num_tokens} tokens in {summary.elapsed_s:.1f} s",
        soft_wrap=True,
    )


async def _serve(
    gateway_settings: GatewaySettings, worker_settings: WorkerSettings, ask: str | None, once: bool
) -> None:
    with _needs("gateway"):
        from gateway.app import create_app
        from gateway.server import listen, opened, url_of
    with _needs("worker"):
        from worker.model.store import served_name
        from worker.service import run_worker

    model = worker_settings.served_name or served_name(worker_settings.model)
    stop, ready = asyncio.Event(), asyncio.Event()
    _on_signals(_this_task().cancel)
    async with AsyncExitStack() as stack:
        listener = stack.enter_context(listen(gateway_settings))
        bus = await stack.enter_async_context(_bus(gateway_settings))
        app = create_app(gateway_settings, bus)
        server = await stack.enter_async_context(opened(app, gateway_settings))
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        tasks.create_task(run_worker(worker_settings, bus, stop=stop, ready=ready.set))
        with notices.status(f"Loading {model} ..."):
            await ready.wait()
        _on_signals(server.stop)
        serving = tasks.create_task(server.serve([listener]))
        if ask is not None:
            await asyncio.to_thread(_show_answer, url_of(listener), model, ask)
        if once:
            server.stop()
        else:
            _say_ready(model, url_of(listener))
        await serving  # streams end before their worker does
        stop.set()


async def _relay(gateway_settings: GatewaySettings, bus: "Bus") -> None:
    with _needs("gateway"):
        from gateway.app import create_app
        from gateway.server import listen, opened, url_of

    _on_signals(_this_task().cancel)
    async with AsyncExitStack() as stack:
        listener = stack.enter_context(listen(gateway_settings))
        await stack.enter_async_context(bus)
        app = create_app(gateway_settings, bus)
        server = await stack.enter_async_context(opened(app, gateway_settings))
        _on_signals(server.stop)
        _say_ready("gateway", url_of(listener))
        await server.serve([listener])


async def _work(worker_settings: WorkerSettings, bus: "Bus") -> None:
    with _needs("worker"):
        from worker.service import run_worker

    stop = asyncio.Event()
    _on_signals(_this_task().cancel)
    async with bus:
        await run_worker(worker_settings, bus, stop=stop, ready=lambda: _on_signals(stop.set))


async def _batch(requests: Path, results: Path, bus: "Bus", window: int) -> "BatchSummary":
    with _needs("gateway"):
        from gateway.batch.run import run_batch

    with counted(requests.name) as show:

        def on_progress(progress: "BatchProgress") -> None:
            remark = f"{progress.num_failed} failed, {progress.tokens_per_s:.0f} tok/s"
            show(progress.num_done, progress.num_lines, remark)

        async with bus:
            return await run_batch(requests, results, bus, window=window, on_progress=on_progress)


def _pull(model: str) -> Path:
    with _needs("worker"):
        from worker.model import store

    with stages() as show:
        return store.pull(model, show)


def _show_answer(url: str, model: str, question: str) -> None:
    from gateway.chat import Conversation, connect, show_answer

    output.print(f"[bold cyan]you[/]  {escape(question)}")
    output.print(f"[bold green]{model}[/]  ", end="")
    with connect(url) as client:
        show_answer(Conversation(client, model, temperature=0), question, output)


def _say_ready(what: str, url: str) -> None:
    logger.info("serving", extra={"url": url})
    if notices.is_terminal:
        notices.print(f"[bold green]{what}[/] serves at {url}, Ctrl-C stops it")


def _bus(common: CommonSettings) -> "Bus":
    if common.broker is not None:
        return _broker(common)
    from shared.bus.memory import MemoryBus

    return MemoryBus()


def _broker(common: CommonSettings) -> "Bus":
    if common.broker is None:
        raise StartupError("no broker: name one with --broker amqp://USER:PASSWORD@HOST/VHOST")
    from shared.bus.rabbit import RabbitBus

    return RabbitBus(common.broker.get_secret_value())


def _configure(common: CommonSettings, service: str) -> None:
    from shared import telemetry

    telemetry.configure(common, service)


@contextmanager
def _needs(extra: str) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise StartupError(
            f"{error.name} is not installed: run pip install 'warren[{extra}]'"
        ) from error


def _this_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


def _on_signals(stop: Callable[[], object]) -> None:
    """The first SIGINT or SIGTERM calls ``stop``; the second ends the process at once."""
    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM)

    def stop_once() -> None:
        for signum in signals:
            loop.remove_signal_handler(signum)
            signal.signal(signum, signal.SIG_DFL)
        stop()

    for signum in signals:
        loop.add_signal_handler(signum, stop_once)


def _run(main: Coroutine[Any, Any, _Result]) -> _Result:
    with asyncio.Runner(loop_factory=_new_event_loop) as runner:
        try:
            return runner.run(main)
        except asyncio.CancelledError:  # a signal came before there was anything to drain
            raise typer.Exit(_INTERRUPTED) from None


def _new_event_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


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


if __name__ == "__main__":
    main()
