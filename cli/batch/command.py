"""The command ``warren batch``."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.batch.journal import noted
from cli.batch.progress import unanswered
from cli.gateway_client import connect
from cli.options import ApiKeyFile, GatewayAccess, chosen_key, takes_settings
from cli.runtime import INTERRUPTED, broker_of, configure, needs, run
from cli.terminal import counted, notices
from shared import settings
from shared.bus.base import MAX_PREFETCH
from shared.errors import StartupError
from shared.settings import CommonSettings

if TYPE_CHECKING:
    from cli.batch.progress import BatchProgress, BatchSummary
    from shared.bus.base import Bus


@takes_settings(CommonSettings, only=("broker", "log_level", "log_format"))
def batch(
    input: Annotated[Path, typer.Argument(help="Input in OpenAI's batch format, JSONL.")],  # noqa: A002
    results: Annotated[Path, typer.Argument(help="Output file; keeps the order of the input.")],
    window: Annotated[
        int,
        typer.Option(
            min=1, max=MAX_PREFETCH, help="Maximum number of jobs in the queue at a time."
        ),
    ] = 256,
    url: Annotated[
        str | None,
        typer.Option(help="Base URL of a gateway, which runs the batch instead of this command."),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="OPENAI_API_KEY", help="API key for --url, if it requires one."),
    ] = None,
    api_key_file: ApiKeyFile = None,
    completion_window: Annotated[
        str, typer.Option(help="Time after which a batch of --url expires.")
    ] = "24h",
    **options: Any,
) -> None:
    """Answer a file of requests through the batch queue.

    Over the broker, the requests are chats and completions for one model. A gateway also answers
    embeddings and responses, and several models in a file.

    After Ctrl-C, run the same command again to continue. A gateway goes on with the batch
    meanwhile.

    warren batch IN.jsonl OUT.jsonl --broker file:publisher.url
    """
    chosen_settings = settings.load(CommonSettings, **options)
    configure(chosen_settings, "warren-batch")
    try:
        if url is None:
            summary = run(_batch(input, results, broker_of(chosen_settings), window))
        else:
            gateway = GatewayAccess(url, chosen_key(api_key, api_key_file))
            summary = _batch_over_http(input, results, gateway, completion_window)
    except OSError as error:
        raise StartupError(f"{error.filename or results}: {error.strerror}") from error
    except KeyboardInterrupt:
        notices.print(_stopped(results, url, api_key_file), soft_wrap=True, markup=False)
        raise typer.Exit(INTERRUPTED) from None
    tokens = "" if url is not None else f"{summary.num_tokens} tokens "
    lacking = unanswered(summary.num_failed, summary.num_unexecuted, summary.ending)
    notices.print(
        f"{summary.num_lines} lines in {results}, {lacking}, {tokens}in {summary.elapsed_s:.1f} s",
        soft_wrap=True,
    )
    if summary.ending != "completed":
        notices.print(f"The batch was {summary.ending} before all requests were executed.")
        raise typer.Exit(1)


def _stopped(results: Path, url: str | None, api_key_file: Path | None) -> str:
    """What Ctrl-C leaves behind."""
    if url is None:
        return (
            "Stopped. Finished lines are kept. Workers go on with the jobs that were queued, and "
            "their answers wait at the broker; run the same command to continue."
        )
    batch_id = noted(results).batch_id
    if not batch_id:
        return "Stopped. Run the same command to continue."
    access = ["--url", url, *(["--api-key-file", str(api_key_file)] if api_key_file else [])]
    return (
        f"Stopped. {batch_id} continues at the gateway; run the same command to wait for it, or "
        f"end it with: warren batches cancel {batch_id} {shlex.join(access)}"
    )


def _batch_over_http(
    requests: Path, results: Path, gateway: GatewayAccess, completion_window: str
) -> "BatchSummary":
    with needs("gateway"):
        from cli.batch.over_http import run_over_http

    with counted(requests.name) as show, connect(*gateway) as client:
        return run_over_http(
            requests,
            results,
            client,
            window=completion_window,
            on_progress=lambda now: show(
                now.num_done, now.num_lines, now.stage or f"{now.num_failed} failed"
            ),
        )


async def _batch(requests: Path, results: Path, bus: "Bus", window: int) -> "BatchSummary":
    with needs("gateway"):
        from cli.batch.pipeline import run_batch

    with counted(requests.name) as show:

        def on_progress(progress: "BatchProgress") -> None:
            remark = f"{progress.num_failed} failed, {progress.tokens_per_s:.0f} tok/s"
            show(progress.num_done, progress.num_lines, remark)

        async with bus:
            return await run_batch(requests, results, bus, window=window, on_progress=on_progress)
