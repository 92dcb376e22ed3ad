"""The commands ``warren serve``, ``gateway``, ``worker`` and ``pull``.

`serve` runs gateway and worker in one process; no other module imports both.
"""

import asyncio
import logging
from contextlib import AbstractContextManager, AsyncExitStack, closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from cli.options import chosen, takes_settings
from cli.runtime import (
    broker_of,
    bus_of,
    configure,
    exclude_from_collections,
    needs,
    on_signals,
    run,
    this_task,
)
from cli.terminal import notices, output, stages
from shared import settings
from shared.errors import StartupError
from shared.settings import DEFAULT_MODEL, GatewaySettings, WorkerSettings

if TYPE_CHECKING:
    from gateway.wiring import Tuning
    from shared.bus.base import Bus

logger = logging.getLogger(__name__)


@takes_settings(GatewaySettings, WorkerSettings)
def serve(
    ask: Annotated[
        str | None,
        typer.Option(help="Ask this question once the model is ready, and print the answer."),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Exit after the answer to --ask.")] = False,
    **options: Any,
) -> None:
    """Serve a model with gateway and worker in one process.

    warren serve --model smollm2 --port 8000
    """
    if once and ask is None:
        raise StartupError("--once needs --ask")
    gateway_settings = settings.load(GatewaySettings, **chosen(GatewaySettings, options))
    worker_settings = settings.load(WorkerSettings, **chosen(WorkerSettings, options))
    configure(gateway_settings, "warren")
    _pull_for(worker_settings)
    run(_serve(gateway_settings, worker_settings, ask, once))


@takes_settings(GatewaySettings)
def gateway(**options: Any) -> None:
    """Run a gateway: accept HTTP requests and publish them as jobs.

    warren gateway --broker file:gateway.url --port 8000
    """
    chosen_settings = settings.load(GatewaySettings, **options)
    configure(chosen_settings, "warren-gateway")
    run(relay(chosen_settings, broker_of(chosen_settings)))


@takes_settings(WorkerSettings)
def worker(**options: Any) -> None:
    """Run a worker: consume jobs and answer them with a model.

    warren worker --broker file:worker.url --model smollm2
    """
    chosen_settings = settings.load(WorkerSettings, **options)
    configure(chosen_settings, "warren-worker")
    with needs("worker"):
        from worker.process.prepared_queues import WorkerBus
    bus = broker_of(chosen_settings, WorkerBus)
    _pull_for(chosen_settings)
    run(_work(chosen_settings, bus))


def pull(
    model: Annotated[
        str,
        typer.Argument(
            help="Known name, model directory, GGUF file or Hugging Face Hub id, with or "
            "without @REVISION."
        ),
    ] = DEFAULT_MODEL,
    is_list: Annotated[
        bool, typer.Option("--list", help="List the known names instead, and how each one runs.")
    ] = False,
) -> None:
    """Download a model to the cache and prepare it for loading.

    warren pull smollm2
    """
    if is_list:
        _list_models()
        return
    output.print(f"{model} is ready: {_pull(model)}", soft_wrap=True)


async def _serve(
    gateway_settings: GatewaySettings, worker_settings: WorkerSettings, ask: str | None, once: bool
) -> None:
    with needs("gateway"):
        from gateway.app import create_app
        from gateway.server import listen, opened, url_of
    with needs("worker"):
        from worker.checkpoints.store import served_name
        from worker.process.service import run_worker

    model = worker_settings.served_name or served_name(worker_settings.model)
    stop, ready = asyncio.Event(), asyncio.Event()
    on_signals(this_task().cancel)
    async with AsyncExitStack() as stack:
        listener = stack.enter_context(listen(gateway_settings))
        bus = await stack.enter_async_context(bus_of(gateway_settings))
        app = create_app(gateway_settings, bus)
        server = await stack.enter_async_context(opened(app, gateway_settings))
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        tasks.create_task(run_worker(worker_settings, bus, stop=stop, ready=ready.set))
        with _loading(model):
            await ready.wait()
        exclude_from_collections()
        on_signals(server.stop)
        serving = tasks.create_task(server.serve([listener]))
        if ask is not None:
            await asyncio.to_thread(_show_answer, url_of(listener), model, ask)
        if once:
            server.stop()
        else:
            _say_ready(model, url_of(listener))
        await serving  # streams end before their worker does
        stop.set()


async def relay(
    gateway_settings: GatewaySettings, bus: "Bus", tuning: "Tuning | None" = None
) -> None:
    """Run a gateway on ``bus`` until a signal stops it."""
    with needs("gateway"):
        from gateway.app import create_app
        from gateway.server import listen, opened, url_of
        from gateway.wiring import TUNING

    on_signals(this_task().cancel)
    async with AsyncExitStack() as stack:
        listener = stack.enter_context(listen(gateway_settings))
        await stack.enter_async_context(bus)
        app = create_app(gateway_settings, bus, tuning or TUNING)
        server = await stack.enter_async_context(opened(app, gateway_settings))
        on_signals(server.stop)
        _say_ready("gateway", url_of(listener))
        await server.serve([listener])


async def _work(worker_settings: WorkerSettings, bus: "Bus") -> None:
    with needs("worker"):
        from worker.process.service import run_worker

    stop = asyncio.Event()

    def on_ready() -> None:
        on_signals(stop.set)
        exclude_from_collections()

    on_signals(this_task().cancel)
    async with bus:
        await run_worker(worker_settings, bus, stop=stop, ready=on_ready)


def _list_models() -> None:
    with needs("worker"):
        from worker.checkpoints import store
        from worker.checkpoints.catalogue import MODELS
        from worker.model.families import FAMILIES

    rows = [("NAME", "SIZE", "LICENSE", "RUNS", "SOURCE")]
    for name, model in MODELS.items():
        runs = "natively" if model.family in FAMILIES else "transformers"
        source = model.source if isinstance(model.source, str) else model.source.requirement
        remarks = ["gated"] * model.is_gated + ["downloaded"] * store.is_here(name)
        source += f" ({', '.join(remarks)})" if remarks else ""
        rows.append((name, model.size, model.license, runs, source))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        output.print(line.rstrip(), markup=False, soft_wrap=True)


def _pull_for(worker_settings: WorkerSettings) -> None:
    """Pull the model. Of an engine's model, a directory with the tokenizer suffices."""
    path = Path(worker_settings.model).expanduser()
    if worker_settings.engine == "own" or not path.is_dir():
        _pull(worker_settings.model)


def _pull(model: str) -> Path:
    with needs("worker"):
        from worker.checkpoints import store

    with stages() as show:
        return store.pull(model, show)


def _show_answer(url: str, model: str, question: str) -> None:
    from cli.chat.conversation import Conversation, ModelServer, show_answer

    output.print(f"[bold cyan]you[/]  {escape(question)}")
    output.print(f"[bold green]{model}[/]  ", end="")
    with closing(ModelServer(url)) as server:
        show_answer(Conversation(server, model, temperature=0), question, output)


def _loading(model: str) -> AbstractContextManager[object]:
    """A spinner, unless there are log lines, which would break it and say the same."""
    if logger.isEnabledFor(logging.INFO):
        return nullcontext()
    return notices.status(f"Loading {model} ...")


def _say_ready(what: str, url: str) -> None:
    logger.info("serving", extra={"url": url})
    if notices.is_terminal and not logger.isEnabledFor(logging.INFO):
        notices.print(f"[bold green]{what}[/] is listening on {url}; press Ctrl-C to stop")
