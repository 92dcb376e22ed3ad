"""A server that speaks the protocols of the engines, with tokens that are a function of the
context. It fails as it is told.

As a program it is the engine of a worker: its model's name is the content of a file, it is healthy
once a file exists, and its streams wait in the middle while another file exists.
"""

import argparse
import json
import select
import shlex
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

from tests.support.deployment.processes import ROOT
from worker.engines.adapters import ADAPTERS
from worker.model.echo import next_token
from worker.text import Tokenizer

Fault = Literal[
    "break",
    "cut",
    "nonsense",
    "error",
    "unknown token",
    "out of order",
    "500",
    "429",
    "400",
    "hang",
]
_WORDS = range(1000, 2000)
_WITH_VERSION = ("vllm", "trtllm")
_END_SHARE = 40
_LOOK_INTERVAL_S = 0.02


class ScriptedEngine:
    """``faults`` happen to the next requests, in this order."""

    def __init__(self, protocol: str, tokenizer: Tokenizer, *, max_seq_len: int) -> None:
        self.protocol = protocol
        self.tokenizer = tokenizer
        self.max_seq_len = max_seq_len
        self.num_slots = 4
        self.model = "model"
        self.other_models: Sequence[str] = ()
        """The models that the server lists before it."""
        self.version = ADAPTERS[protocol].traits.versions[0]
        self.vocab_size = tokenizer.vocab_size
        self.keys: list[str | None] = []
        """The ``Authorization`` of each request."""
        self.words: Sequence[int] = _WORDS
        """The tokens that are drawn, unless others are allowed."""
        self.vocab_shift = 0
        self.has_priority = False
        self.is_low_first = False
        self.is_healthy = True
        self.is_asked_too_often = False
        """Questions are answered with 429; requests for tokens are not."""
        self.num_looks = 0
        self.closes_connections = False
        """After each question."""
        self.can_tokenize = True
        self.faults: list[Fault] = []
        self.broken_after = 3
        """Events before a fault in the middle of a stream."""
        self.ends_after: int | None = None
        """The events of the next stream after which the server is not healthy any more."""
        self.deadly_token: int | None = None
        """A prompt with this token is answered with an error, whenever it comes."""
        self.bodies: list[dict[str, Any]] = []
        self.num_closed = threading.Semaphore(0)
        """Released for each stream that the client closed before its end."""
        self.script: Sequence[int] = ()
        """The next tokens, whatever the context."""
        self.paused_after: int | None = None
        """The events of a stream after which it waits for ``may_continue``, or for its client to
        close it."""
        self.may_continue = threading.Event()
        self.url = ""

    def tokens(
        self,
        context: Sequence[int],
        max_tokens: int,
        *,
        allowed: Sequence[int] | None,
        banned: frozenset[int],
        ends: frozenset[int],
        min_tokens: int = 0,
        seed: int = 0,
    ) -> Iterator[int]:
        """The tokens after ``context``, up to an end token. Other seeds lead to other tokens."""
        if self.script:
            script, self.script = self.script, ()
            yield from script
            return
        known = [*context]
        for k in range(min(max_tokens, self.max_seq_len - len(context))):
            free = [one for one in allowed or self.words if one not in banned]
            token_id = free[next_token(known, seed, 0, 0, len(free))]
            open_ends = ends - banned if k >= min_tokens and allowed is None else frozenset()
            if open_ends and next_token(known, seed, 1, 0, _END_SHARE) == 0:
                token_id = min(open_ends)
            known.append(token_id)
            yield token_id
            if token_id in ends:
                return

    def next_fault(self, context: Sequence[int]) -> Fault | None:
        if self.deadly_token is not None and self.deadly_token in context:
            return "break"
        return self.faults.pop(0) if self.faults else None


@contextmanager
def engine_server(
    protocol: str, tokenizer: Tokenizer, *, max_seq_len: int = 512, port: int = 0
) -> Iterator[ScriptedEngine]:
    script = ScriptedEngine(protocol, tokenizer, max_seq_len=max_seq_len)
    server = ThreadingHTTPServer(("127.0.0.1", port), partial(_Handler, script))
    server.daemon_threads = True
    script.url = f"http://127.0.0.1:{server.server_port}"
    serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    serving.start()
    try:
        yield script
    finally:
        script.may_continue.set()
        server.shutdown()
        server.server_close()
        serving.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, script: ScriptedEngine, *args: Any) -> None:
        self._script = script
        super().__init__(*args)

    def handle(self) -> None:
        with suppress(ConnectionError):  # the client's connections end when its worker does
            super().handle()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the base class's name)
        """Write no line for each request."""

    def do_GET(self) -> None:
        script = self._script
        script.keys.append(self.headers.get("Authorization"))
        answers: Mapping[str, object] = {
            "/health": {"status": "ok"},
            "/props": {
                "build_info": f"{script.version}-1f2e3d4",
                "model_path": script.model,
                "total_slots": script.num_slots,
                "default_generation_settings": {"n_ctx": script.max_seq_len},
            },
            "/v1/models": {"data": [*map(self._model, (*script.other_models, script.model))]},
            **self._version(),
            "/get_server_info": {
                "version": script.version,
                "max_running_requests": script.num_slots,
                "enable_priority_scheduling": script.has_priority,
                "schedule_low_priority_values_first": script.is_low_first,
            },
            "/get_model_info": {"model_path": script.model},
        }
        script.num_looks += self.path == "/health"
        self.close_connection = script.closes_connections
        if script.is_asked_too_often:
            self._answer(429, {"error": "too often"})
        elif script.is_healthy and self.path in answers:
            self._answer(200, answers[self.path])
        else:
            self._answer(503 if self.path in answers else 404, {"error": "no"})

    def _version(self) -> Mapping[str, object]:
        has_endpoint = self._script.protocol in _WITH_VERSION
        return {"/version": {"version": self._script.version}} if has_endpoint else {}

    def _model(self, name: str) -> dict[str, object]:
        script = self._script
        meta = {"n_vocab": script.vocab_size, "n_params": 1, "size": 1}
        return {"id": name, "max_model_len": script.max_seq_len, "meta": meta}

    def do_POST(self) -> None:
        script = self._script
        script.keys.append(self.headers.get("Authorization"))
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            token_ids = script.tokenizer.encode_text(body.get("content", body.get("prompt")))
            theirs = [one + script.vocab_shift for one in token_ids]
            self._answer(200, {"tokens": theirs} if script.can_tokenize else {})
            return
        if not script.is_healthy:
            self._answer(503, {"error": {"message": "loading"}})
            return
        if body.get("priority") and not script.has_priority:
            self._answer(400, {"error": {"message": "Priority scheduling is not enabled."}})
            return
        script.bodies.append(body)
        frames, stream = _FRAMES[script.protocol], body.get("stream", True)
        context = frames.context(body, script.tokenizer)
        fault = script.next_fault(context)
        if fault in ("500", "429", "400"):
            self._answer(int(fault), {"error": {"message": "told to"}})
        elif not stream:
            self._answer(200, list(frames.events(body, script))[-1])
        else:
            self._stream(frames.events(body, script), fault, frames)

    def _stream(self, events: Iterator[object], fault: Fault | None, frames: "_Frames") -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        earlier: object = None
        try:
            for k, event in enumerate(events):
                if k == self._script.ends_after:
                    self._script.ends_after, self._script.is_healthy = None, False
                if fault is not None and k == self._script.broken_after:
                    self._fail(fault, event, earlier, frames)
                    return
                if k == self._script.paused_after:
                    self._pause()
                self._chunk(event)
                earlier = event
            self._end()
        except OSError:
            self._script.num_closed.release()
            self.close_connection = True

    def _pause(self) -> None:
        """Raises `OSError` if the client closes the connection."""
        while not self._script.may_continue.wait(_LOOK_INTERVAL_S):
            is_readable = select.select([self.connection], [], [], 0)[0]
            if is_readable and not self.connection.recv(1, socket.MSG_PEEK):
                raise ConnectionAbortedError

    def _fail(self, fault: Fault, event: object, earlier: object, frames: "_Frames") -> None:
        match fault:
            case "break":
                self.close_connection = True
            case "cut":
                self._end()
            case "nonsense":
                self._write(b"data: {nonsense\n\n")
                self._end()
            case "error":
                self._chunk({"error": {"message": "told to"}})
                self._end()
            case "unknown token":
                self._chunk(frames.unknown_token(event))
                self._end()
            case "out of order":
                for one in (event, earlier):
                    self._chunk(one)
                self._end()
            case "hang":
                self.close_connection = True
                threading.Event().wait(5)

    def _chunk(self, event: object) -> None:
        self._write(f"data: {json.dumps(event)}\n\n".encode())

    def _write(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def _end(self) -> None:
        self.wfile.write(b"0\r\n\r\n")

    def _answer(self, status: int, content: object) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class _Frames:
    """The requests and events of a protocol."""

    def __init__(
        self,
        context: Callable[[dict[str, Any], Tokenizer], Sequence[int]],
        events: Callable[[dict[str, Any], ScriptedEngine], Iterator[Any]],
        unknown_token: Callable[[Any], Any],
    ) -> None:
        self.context = context
        self.events = events
        self.unknown_token = unknown_token


def _seed(body: Mapping[str, Any]) -> int:
    """Greedy requests do not depend on the seed."""
    return body["seed"] if body["temperature"] else 0


def _llama_events(body: dict[str, Any], script: ScriptedEngine) -> Iterator[Any]:
    """Each token has its own event. The tokens of an incomplete character are left out."""
    tokenizer = script.tokenizer
    banned = frozenset(token_id for token_id, bias in body["logit_bias"] if bias is False)
    is_limited = len(banned) > tokenizer.vocab_size // 2
    known = range(tokenizer.vocab_size)
    allowed = [one for one in known if one not in banned] if is_limited else None
    ends = frozenset() if body["ignore_eos"] else tokenizer.eos_ids
    text, token_ids, n = b"", [], 0
    is_ended = False
    for token_id in script.tokens(
        body["prompt"],
        body["n_predict"],
        allowed=allowed,
        banned=banned,
        ends=ends,
        seed=_seed(body),
    ):
        n += 1
        token_ids.append(token_id)
        is_ended = token_id in ends
        text += b"" if is_ended else tokenizer.token_bytes(token_id)
        try:
            content = text.decode()
        except UnicodeDecodeError:
            continue
        text = b""
        event: dict[str, Any] = {"stop": False, "tokens": [token_id], "content": content}
        if body["n_probs"]:
            tops = [{"id": token_id, "logprob": -0.5}, {"id": 7, "logprob": -1.0}]
            event["completion_probabilities"] = [
                {"id": token_id, "logprob": -0.5, "top_logprobs": tops[: body["n_probs"]]}
            ]
        yield {**event, "tokens_predicted": n}
    kept = [] if body["stream"] else token_ids
    stop_type = "eos" if is_ended else "limit"
    final = {"stop": True, "stop_type": stop_type, "tokens": kept, "content": ""}
    if body["n_probs"] and not body["stream"]:
        final["completion_probabilities"] = [
            {"id": one, "logprob": -0.5, "top_logprobs": []} for one in token_ids
        ]
    yield {**final, "tokens_predicted": n}


def _completion_events(body: dict[str, Any], script: ScriptedEngine) -> Iterator[Any]:
    """Tokens come in twos, with their ids."""
    ends = frozenset(body["stop_token_ids"])
    if not body["ignore_eos"]:
        ends |= script.tokenizer.eos_ids
    biases = body.get("logit_bias") or {}
    banned = frozenset(int(token_id) for token_id, bias in biases.items() if bias <= -100)
    is_limited = len(banned) > script.tokenizer.vocab_size // 2
    allowed = body.get("allowed_token_ids")
    if is_limited:
        allowed = [one for one in range(script.tokenizer.vocab_size) if one not in banned]
    token_ids = list(
        script.tokens(
            body["prompt"],
            body["max_tokens"],
            allowed=allowed,
            banned=banned,
            ends=ends,
            min_tokens=body["min_tokens"],
            seed=_seed(body),
        )
    )
    for start in range(0, len(token_ids), 2):
        new = token_ids[start : start + 2]
        choice: dict[str, Any] = {"index": 0, "text": "", "token_ids": new, "finish_reason": None}
        if body.get("logprobs") is not None:
            choice["logprobs"] = {
                "tokens": [f"token_id:{one}" for one in new],
                "token_logprobs": [-0.5] * len(new),
                "top_logprobs": [{f"token_id:{one}": -0.5, "token_id:7": -1.0} for one in new],
            }
        if body.get("prompt_logprobs") is not None:
            choice["prompt_logprobs"] = [None, *map(_prompt_score, body["prompt"][1:])]
        if start + 2 >= len(token_ids):
            choice["finish_reason"] = "stop" if token_ids[-1] in ends else "length"
        yield {"choices": [choice]}


def _trtllm_events(body: dict[str, Any], script: ScriptedEngine) -> Iterator[Any]:
    """A stop token is left out, unless the request wants it."""
    for event in _completion_events(body, script):
        (choice,) = event["choices"]
        if not body.get("include_stop_str_in_output") and choice["finish_reason"] == "stop":
            left_out = body["stop_token_ids"]
            choice["token_ids"] = [one for one in choice["token_ids"] if one not in left_out]
        yield event


def _prompt_score(token_id: int) -> dict[str, Any]:
    return {
        str(token_id): {"logprob": -0.5, "rank": 2, "decoded_token": None},
        "7": {"logprob": -0.25, "rank": 1, "decoded_token": None},
    }


def _sglang_events(body: dict[str, Any], script: ScriptedEngine) -> Iterator[Any]:
    """Each event has all tokens so far."""
    params = body["sampling_params"]
    asked = {
        **params,
        "prompt": body["input_ids"],
        "stop_token_ids": params["stop_token_ids"] or [],
        "max_tokens": params["max_new_tokens"],
        "min_tokens": params["min_new_tokens"],
        "logprobs": None,
        "seed": params["sampling_seed"],
    }
    token_ids: list[int] = []
    for event in _completion_events(asked, script):
        (choice,) = event["choices"]
        token_ids += choice["token_ids"]
        reason = choice["finish_reason"]
        facts: dict[str, Any] = {
            "completion_tokens": len(token_ids),
            "finish_reason": None if reason is None else {"type": reason},
        }
        if body["return_logprob"]:
            facts["output_token_logprobs"] = [[-0.5, one, None] for one in token_ids]
            facts["output_top_logprobs"] = [
                [[-0.5, one, None], [-1.0, 7, None]] for one in token_ids
            ]
        if body.get("logprob_start_len") == 0:
            scored = body["input_ids"][1:]
            facts["input_token_logprobs"] = [
                [None, 1, None],
                *([-0.5, one, None] for one in scored),
            ]
            facts["input_top_logprobs"] = [
                None,
                *([[-0.25, 7, None], [-0.5, one, None]] for one in scored),
            ]
        yield {"output_ids": [*token_ids], "meta_info": facts}


def _text_events(body: dict[str, Any], script: ScriptedEngine) -> Iterator[Any]:
    tokenizer = script.tokenizer
    context = tokenizer.encode_text(body["prompt"])
    reason = "length"
    for token_id in script.tokens(
        context,
        body["max_tokens"],
        allowed=None,
        banned=frozenset(),
        ends=tokenizer.eos_ids,
        seed=_seed(body),
    ):
        if token_id in tokenizer.eos_ids:
            reason = "stop"
        else:
            text = tokenizer.decode([token_id])
            yield {"choices": [{"index": 0, "text": text, "finish_reason": None}]}
    yield {"choices": [{"index": 0, "text": "", "finish_reason": reason}]}


def _with_unknown_id(event: dict[str, Any]) -> dict[str, Any]:
    choice = {**event["choices"][0], "token_ids": [1 << 30], "logprobs": None}
    return {"choices": [choice]}


_FRAMES: Mapping[str, _Frames] = {
    "llama-server": _Frames(
        lambda body, _: body["prompt"],
        _llama_events,
        lambda event: {**event, "tokens": [1 << 30]},
    ),
    "vllm": _Frames(lambda body, _: body["prompt"], _completion_events, _with_unknown_id),
    "trtllm": _Frames(lambda body, _: body["prompt"], _trtllm_events, _with_unknown_id),
    "sglang": _Frames(
        lambda body, _: body["input_ids"],
        _sglang_events,
        lambda event: {**event, "output_ids": [1 << 30] * len(event["output_ids"])},
    ),
    "openai": _Frames(
        lambda body, tokenizer: tokenizer.encode_text(body["prompt"]),
        _text_events,
        lambda event: {"choices": [{**event["choices"][0], "text": 7}]},
    ),
}


def events_of(protocol: str, body: dict[str, Any], tokenizer: Tokenizer) -> list[Any]:
    """The events with which the server answers a request."""
    script = ScriptedEngine(protocol, tokenizer, max_seq_len=512)
    return list(_FRAMES[protocol].events(body, script))


class EngineFiles:
    """The files that steer the program."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.model = directory / "model"
        self.ready = directory / "ready"
        self.pause = directory / "pause"
        self.model.write_text("model")
        self.ready.touch()

    def command(self, tokenizer: Path, port: int) -> str:
        """The command line of a llama-server that they steer."""
        module = ["env", "-C", str(ROOT), sys.executable, "-m", __name__]
        return shlex.join([*module, str(self._directory), str(tokenizer), str(port)])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("files", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("port", type=int)
    given = parser.parse_args()
    tokenizer = Tokenizer.load(given.tokenizer)
    with engine_server("llama-server", tokenizer, port=given.port) as script:
        script.model = (given.files / "model").read_text()
        script.is_healthy, script.paused_after = False, 10
        while True:
            script.is_healthy = (given.files / "ready").exists()
            if not (given.files / "pause").exists():
                script.may_continue.set()
            time.sleep(_LOOK_INTERVAL_S)


if __name__ == "__main__":
    main()
