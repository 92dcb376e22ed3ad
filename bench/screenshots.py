"""Takes the screenshots of the console that the documentation shows, light and dark.

Starts RabbitMQ, a gateway and two workers with SmolLM2. The worker that answers a question is ended
with SIGKILL in the middle of the answer, as in `bench.recording`.

    python -m bench.screenshots [--out docs/images]
"""

import asyncio
import os
import shutil
import signal
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import httpx
import typer
from PIL import Image
from playwright.async_api import Page, async_playwright

from tests.support.console import TIMEOUT_MS, answered, ask, begun
from tests.support.deployment import processes
from tests.support.deployment.broker import running_node
from tests.support.deployment.processes import NO_TLS, WarrenProcess

QUESTION = "Write three sentences about rabbits that dig tunnels."
MAX_TOKENS = "90"
KILL_AFTER_S = 1.5
_SIZE, _PHONE = (1180, 740), (390, 760)
_MODEL = ("--model=smollm2", "--dtype=float32", "--kv-cache-bytes=268435456")
_NUM_COLORS = 128
_RUNNING = "warren_worker_sequences_running{"


async def take(url: str, workers: Sequence[WarrenProcess], out: Path) -> None:
    program = shutil.which("chromium")
    assert program is not None, "needs chromium"
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=program, args=["--no-sandbox", "--disable-gpu"]
        )
        page = await browser.new_page(viewport={"width": _SIZE[0], "height": _SIZE[1]})
        page.set_default_timeout(4 * TIMEOUT_MS)
        await page.goto(url)
        await page.get_by_label("Maximum tokens").fill(MAX_TOKENS)
        await page.get_by_label("Temperature").fill("0")
        await ask(page, QUESTION)
        await begun(page)
        await page.goto(f"{url}/#fleet")
        await asyncio.sleep(KILL_AFTER_S)
        await _shoot(page, out, "console-fleet")
        os.kill(_busy(workers).pid, signal.SIGKILL)
        await page.goto(f"{url}/#chat")
        await answered(page)
        await _shoot(page, out, "console-chat")
        await page.set_viewport_size({"width": _PHONE[0], "height": _PHONE[1]})
        await _shoot(page, out, "console-phone", schemes=("light",))
        await browser.close()


async def _shoot(
    page: Page, out: Path, name: str, schemes: Sequence[str] = ("light", "dark")
) -> None:
    for scheme in schemes:
        await page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
        path = out / f"{name}-{scheme}.png"
        await page.screenshot(path=path)
        with Image.open(path) as image:  # a page has few colours, and a PNG with few is small
            image.convert("RGB").quantize(_NUM_COLORS).save(path, optimize=True)
    await page.emulate_media(color_scheme="light")


def _busy(workers: Sequence[WarrenProcess]) -> WarrenProcess:
    """The worker that runs a request."""
    for worker in workers:
        lines = httpx.get(f"{worker.url}/metrics", verify=NO_TLS).text.splitlines()
        if any(line.startswith(_RUNNING) and float(line.split()[-1]) for line in lines):
            return worker
    raise AssertionError("the answer was too short")


def main(
    out: Annotated[Path, typer.Option(help="Directory for the images.")] = Path("docs/images"),
) -> None:
    with ExitStack() as stack:
        logs = Path(stack.enter_context(TemporaryDirectory(prefix="warren-screenshots-")))
        broker = stack.enter_context(running_node()).url
        workers = [processes.worker(broker, logs / f"worker{k}", *_MODEL) for k in range(2)]
        for worker in workers:
            stack.enter_context(worker)
        gateway = stack.enter_context(processes.gateway(broker, logs / "gateway"))
        asyncio.run(take(gateway.url, workers, out))


if __name__ == "__main__":
    typer.run(main)
