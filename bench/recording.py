"""Records a stream whose worker is killed while it answers, and draws the recording.

Starts RabbitMQ, a gateway and two workers with SmolLM2. The worker that answers a question is ended
with SIGKILL after `KILL_AFTER` tokens. The same question is then asked again without a disturbance,
and both answers must be equal.

    python -m bench.recording [--out docs/images]
"""

import json
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import httpx
import msgspec
import typer

from bench import machine, report
from tests.support.deployment import processes
from tests.support.deployment.broker import running_node
from tests.support.deployment.processes import NO_TLS, WarrenProcess

QUESTION = "Why is the sky blue?"
MAX_TOKENS = 80
KILL_AFTER = 30
_MODEL = ("--model=smollm2", "--dtype=float32", "--kv-cache-bytes=268435456")
_RUNNING = "warren_worker_sequences_running{"

_WIDTH, _LEFT, _CHARS, _LINE = 800, 24, 86, 20
_FIRST, _SECOND, _KILL = "#7cc4ff", "#ffb86b", "#ff5c6c"


class Token(msgspec.Struct, frozen=True):
    """A piece of the answer, as the client received it."""

    at_s: float
    text: str


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """A disturbed stream. Times are in seconds since the request."""

    question: str
    killed_at_s: float
    tokens: tuple[Token, ...]
    is_undisturbed_text: bool
    about: dict[str, Any]

    @property
    def num_before(self) -> int:
        """The number of tokens before the longest gap that ends after the kill: the first
        worker's."""
        after = [k for k in range(1, len(self.tokens)) if self.tokens[k].at_s > self.killed_at_s]
        return max(after, key=self.gap_s)

    def gap_s(self, k: int) -> float:
        return self.tokens[k].at_s - self.tokens[k - 1].at_s


def record() -> Recording:
    with ExitStack() as stack:
        directory = Path(stack.enter_context(TemporaryDirectory(prefix="warren-recording-")))
        url = stack.enter_context(running_node()).url
        workers = [
            stack.enter_context(processes.worker(url, directory / f"worker-{k}.log", *_MODEL))
            for k in range(2)
        ]
        gateway = stack.enter_context(processes.gateway(url, directory / "gateway.log"))
        client = stack.enter_context(httpx.Client(base_url=gateway.url, timeout=60, verify=NO_TLS))
        for _ in workers:  # each worker is faster from its second answer on
            list(_stream(client))
        undisturbed = "".join(_stream(client))
        tokens: list[Token] = []
        killed_at_s = 0.0
        start = time.perf_counter()
        for text in _stream(client):
            tokens.append(Token(round(time.perf_counter() - start, 4), text))
            if len(tokens) == KILL_AFTER:
                _busy(client, workers).kill()
                killed_at_s = round(time.perf_counter() - start, 4)
        text = "".join(token.text for token in tokens)
        return Recording(
            question=QUESTION,
            killed_at_s=killed_at_s,
            tokens=tuple(tokens),
            is_undisturbed_text=text == undisturbed,
            about=machine.describe([]),
        )


def draw(recording: Recording) -> str:
    """The recording as an SVG: the answer as a terminal shows it, and its tokens over time."""
    lines = list(_lines(recording))
    axis_top = 78 + _LINE * len(lines) + 34
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {axis_top + 104}"'
            ' font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"'
            ' font-size="14">',
            "<title>One stream whose worker is killed while it answers</title>",
            '<rect width="100%" height="100%" rx="8" fill="#16202c"/>',
            _text(_LEFT, 32, f"> {recording.question}", "#9fb3c8"),
            *(
                f'<text x="{_LEFT}" y="{62 + _LINE * k}" xml:space="preserve">{line}</text>'
                for k, line in enumerate(lines)
            ),
            *_timeline(recording, axis_top),
            "</svg>\n",
        ]
    )


def _stream(client: httpx.Client) -> Iterator[str]:
    """The pieces of an answer, as they arrive."""
    body = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        "stream": True,
    }
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            data = line.removeprefix("data: ")
            if data not in (line, "[DONE]"):
                (choice,) = json.loads(data)["choices"]
                if content := choice["delta"].get("content"):
                    yield content


def _busy(client: httpx.Client, workers: Sequence[WarrenProcess]) -> WarrenProcess:
    """The worker that runs the request."""
    for worker in workers:
        lines = client.get(f"{worker.url}/metrics").text.splitlines()
        if any(line.startswith(_RUNNING) and float(line.split()[-1]) > 0 for line in lines):
            return worker
    raise RuntimeError("no worker runs the request")


def _lines(recording: Recording) -> Iterator[str]:
    """The answer, wrapped, in the colours of its workers, with a mark at the kill."""
    texts = [token.text.replace("\n", " ") for token in recording.tokens]
    before = "".join(texts[: recording.num_before])
    whole = "".join(texts)
    start = 0
    for line in textwrap.wrap(whole, _CHARS):
        start = whole.index(line, start)
        split = min(max(len(before) - start, 0), len(line))
        spans = _span(line[:split], _FIRST)
        if 0 < split < len(line):
            spans += _span("✕", _KILL)
        yield spans + _span(line[split:], _SECOND)
        start += len(line)


def _timeline(recording: Recording, top: int) -> Iterator[str]:
    end_s = recording.tokens[-1].at_s

    def x(at_s: float) -> str:
        return f"{_LEFT + at_s / end_s * (_WIDTH - 2 * _LEFT):.1f}"

    for k, token in enumerate(recording.tokens):
        colour = _FIRST if k < recording.num_before else _SECOND
        yield f'<path d="M{x(token.at_s)} {top}v22" stroke="{colour}" stroke-width="2"/>'
    kill = x(recording.killed_at_s)
    yield f'<path d="M{kill} {top - 8}v38" stroke="{_KILL}" stroke-width="2"/>'
    yield _text(_LEFT, top - 14, "first worker", _FIRST)
    yield _text(kill, top - 14, "kill -9", _KILL, "middle")
    yield _text(_WIDTH - _LEFT, top - 14, "second worker", _SECOND, "end")
    gap_s = recording.gap_s(recording.num_before)
    yield _text(_LEFT, top + 44, "0 s", "#9fb3c8")
    yield _text(_WIDTH - _LEFT, top + 44, f"{end_s:.1f} s", "#9fb3c8", "end")
    same = "the text of the undisturbed run" if recording.is_undisturbed_text else "another text"
    yield _text(
        _LEFT,
        top + 78,
        f"{len(recording.tokens)} events; longest pause {gap_s:.2f} s; {same}",
        "#d7e1ec",
    )


def _span(text: str, colour: str) -> str:
    return f'<tspan fill="{colour}">{escape(text)}</tspan>' if text else ""


def _text(x: float | str, y: float, text: str, colour: str, anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" fill="{colour}" text-anchor="{anchor}">{escape(text)}</text>'


def main(
    out: Annotated[Path, typer.Option(help="Where kill.json and kill.svg go.")] = Path(
        "docs/images"
    ),
) -> None:
    recording = record()
    report.write_json(out / "kill.json", msgspec.to_builtins(recording))
    (out / "kill.svg").write_text(draw(recording), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
