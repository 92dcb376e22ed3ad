"""The command ``warren batch``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.options import takes_settings
from cli.runtime import INTERRUPTED, broker_of, configure, needs, run
from cli.terminal import counted, notices
from shared import settings
from shared.bus.base import MAX_PREFETCH
from shared.errors import StartupError
from shared.settings import CommonSettings

if TYPE_CHECKING:
    from cli.batch.progress import BatchProgress, BatchSummary
    from shared.bus.base import Bus


@takes_settings(CommonSettings)
def batch(
    input: Annotated[Path, typer.Argument(help="Input in OpenAI's batch format, JSONL.")],  # noqa: A002
    results: Annotated[Path, typer.Argument(help="Output file; keeps the order of the input.")],
    window: Annotated[
        int,
        typer.Option(
            min=1, max=MAX_PREFETCH, help="Maximum number of jobs in the queue at a time."
        ),
    ] = 256,
    **options: Any,
) -> None:
    """Answer a file of requests through the batch queue.

    After Ctrl-C, run the same command again to continue.

    [dim]warren batch IN.jsonl OUT.jsonl --broker-file publisher.url[/]
    """
    chosen_settings = settings.load(CommonSettings, **options)
    configure(chosen_settings, "warren-batch")
    try:
        summary = run(_batch(input, results, broker_of(chosen_settings), window))
    except OSError as error:
        raise StartupError(f"{error.filename or results}: {error.strerror}") from error
    except KeyboardInterrupt:
        notices.print("Stopped. Finished lines are kept; run the same command to continue.")
        raise typer.Exit(INTERRUPTED) from None
    notices.print(
        f"{summary.num_lines} lines in {results}, {summary.num_failed} failed, "
        f"{summary.num_tokens} tokens in {summary.elapsed_s:.1f} s",
        soft_wrap=True,
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
