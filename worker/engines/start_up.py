"""Starts or finds an engine, and checks that it serves the model of the tokenizer."""

import logging
import re
import shlex
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from shared.errors import EngineFailed, StartupError
from shared.messages import hash_text
from shared.settings import batch_reserve
from worker.engines.adapter import NONSENSE, UNKNOWN, Adapter, EngineFacts
from worker.engines.adapters import ADAPTERS
from worker.engines.answer import EngineAway, EngineBusy
from worker.engines.child import EngineProcess
from worker.engines.http_engine import HttpEngine
from worker.engines.server import EngineServer
from worker.text import Tokenizer, stated_vocab_size

logger = logging.getLogger(__name__)

_LOOK_INTERVAL_S = 0.5
_TELL_INTERVAL_S = 10.0
_TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "  def f(x):\n\treturn x ** 2  # 1234567890",
    "Zażółć gęślą jaźń — 你好，世界 🦔",
)
_WITHOUT_EFFECT = ("--host", "--port", "--api-key")
_MAX_SPECIAL = 16
"""Special tokens that a text has: a few models have a thousand, and errors show the text."""
_MAX_EXITS = 3
"""Exits of an engine's process before it has been ready once, after which the worker gives up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """The settings of an engine over HTTP; the names are those of `WorkerSettings`."""

    engine: str
    names: Collection[str] = ()
    """What the model may be called at the engine, if the engine has several."""
    url: str | None = None
    command: str | None = None
    api_key: str | None = None
    max_num_seqs: int = 64
    max_seq_len: int | None = None
    stall_timeout_s: float = 60.0
    tenant_weights: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OpenedEngine:
    """An engine that answers, and the facts that the worker announces about it."""

    engine: HttpEngine
    tokenizer: Tokenizer
    adapter: Adapter
    version: str
    max_seq_len: int
    max_num_seqs: int
    fingerprint: str
    numerics: str


def open_engine(options: EngineOptions, directory: Path) -> OpenedEngine:
    """Start the engine, if the options have a command, wait until it answers, and check it.

    ``directory`` has the tokenizer. Raises `StartupError`.
    """
    adapter = ADAPTERS[options.engine]
    url = _checked_url(options.url or f"http://127.0.0.1:{adapter.default_port}")
    process = _new_process(options)
    server = EngineServer(url, options.api_key, options.stall_timeout_s)
    with _starting(server, process):
        _wait_healthy(server, adapter, process)
        facts = _facts(server, adapter, options.names)
        _check_version(adapter, facts)
        _check_vocab_size(facts, directory)
        tokenizer = Tokenizer.load(directory, vocab_size=facts.vocab_size)
        _check_tokenizer(server, adapter, tokenizer)
        max_seq_len = _max_seq_len(options, facts)
        max_num_seqs = min(options.max_num_seqs, facts.num_slots or options.max_num_seqs)

    def recheck() -> None:
        now = _facts(server, adapter, options.names)
        if now != facts:
            raise StartupError(f"the engine was {facts}, and is {now}")
        _check_tokenizer(server, adapter, tokenizer)

    engine = HttpEngine(
        server,
        adapter,
        tokenizer,
        max_seq_len=max_seq_len,
        max_num_seqs=max_num_seqs,
        batch_reserve=batch_reserve(max_num_seqs),
        tenant_weights=options.tenant_weights,
        recheck=recheck,
        process=process,
    )
    # Workers of the same model may have it in different directories.
    served = hash_text((facts.model.rpartition("/")[2], "\n", tokenizer.source))
    numerics = f"{options.engine} {facts.version} {served[:8]}"
    if options.command is not None:
        numerics += f" {hash_text([_options_in(options.command)])[:8]}"
    return OpenedEngine(
        engine,
        tokenizer,
        adapter,
        version=facts.version,
        max_seq_len=max_seq_len,
        max_num_seqs=max_num_seqs,
        fingerprint=served[:32],
        numerics=numerics[-256:],
    )


def engine_of(numerics: str) -> str:
    """The engine over HTTP of a worker with numerics of this name; empty if the worker's engine is
    Warren's own."""
    name = numerics.partition(" ")[0]
    return name if name in ADAPTERS else ""


def _checked_url(url: str) -> str:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:  # its message may contain a part of the password
        raise StartupError("--engine-url is no URL") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise StartupError("--engine-url does not begin with http:// or https:// and a host")
    return url.rstrip("/")


def _new_process(options: EngineOptions) -> EngineProcess | None:
    if options.command is None:
        return None
    try:
        return EngineProcess(options.engine, options.command)
    except ValueError as error:
        raise StartupError(f"--engine-command cannot be read: {error}") from error


@contextmanager
def _starting(server: EngineServer, process: EngineProcess | None) -> Iterator[None]:
    """Starts the process, and ends what is open if the start fails."""
    with ExitStack() as opened:
        opened.callback(server.close)
        if process is not None:
            opened.callback(process.stop)
            process.start()
        try:
            yield
        except (EngineAway, EngineBusy) as error:
            raise StartupError(f"{server.url} does not answer any more: {error}") from error
        opened.pop_all()


def _options_in(command: str) -> str:
    """What in an engine's command may change the numbers that it computes: not the directories of
    its files, and not where it listens."""
    kept: list[str] = []
    words = iter(shlex.split(command))
    for word in words:
        name, _, value = word.partition("=")
        if name not in _WITHOUT_EFFECT:
            kept.append(re.sub(r"[^=]*/", "", word))
        elif not value:
            next(words, None)
    return "\n".join(kept)


def _wait_healthy(server: EngineServer, adapter: Adapter, process: EngineProcess | None) -> None:
    told_at = 0.0
    while (look := server.look(adapter.health_path)).status != httpx.codes.OK:
        if look.is_refused:
            raise StartupError(f"{server.url}: {look.reason}")
        if process is not None and process.num_exits >= _MAX_EXITS:
            said = "; ".join(process.last_lines)
            raise StartupError(f"--engine-command ended {process.num_exits} times: {said}")
        if time.monotonic() - told_at > _TELL_INTERVAL_S:
            told_at = time.monotonic()
            facts = {"engine": adapter.traits.name, "url": server.url, "reason": look.reason}
            logger.info("waiting for the engine", extra=facts)
        time.sleep(_LOOK_INTERVAL_S)


def _facts(server: EngineServer, adapter: Adapter, names: Collection[str]) -> EngineFacts:
    """Raises `StartupError`, and `EngineAway` or `EngineBusy` if the server does not answer."""
    try:
        return adapter.facts(server, names)
    except (EngineFailed, *NONSENSE) as error:
        raise StartupError(
            f"{server.url} does not answer like {adapter.traits.name}: {error}"
        ) from error


def _check_version(adapter: Adapter, facts: EngineFacts) -> None:
    traits = adapter.traits
    if facts.version != UNKNOWN and not traits.knows(facts.version):
        tried = ", ".join(traits.versions)
        known = {"engine": traits.name, "version": facts.version, "tried": tried}
        logger.warning("the worker was not tried with this version of the engine", extra=known)


def _check_vocab_size(facts: EngineFacts, directory: Path) -> None:
    """Raises `StartupError` if the engine's vocabulary is not of the size that --model states."""
    ours, theirs = stated_vocab_size(directory), facts.vocab_size
    if ours is not None and theirs is not None and ours != theirs:
        raise StartupError(
            f"the engine's model is not that of --model: its vocabulary has {theirs} tokens, and "
            f"that of {directory.name} has {ours}. If one of them is padded, let --model name the "
            "file that the engine serves"
        )


def _check_tokenizer(server: EngineServer, adapter: Adapter, tokenizer: Tokenizer) -> None:
    """Compare the tokens of a few texts, of the tokens that end an answer, and of all special
    tokens. Raises `StartupError`, and `EngineAway` if the server does not answer."""
    special = tokenizer.special_entries
    groups = range(0, len(special), _MAX_SPECIAL)
    texts = ["".join(special[start : start + _MAX_SPECIAL]) for start in groups]
    for text in (*_TEXTS, *tokenizer.entries(sorted(tokenizer.eos_ids)), *texts):
        try:
            theirs = adapter.tokenize(server, text)
        except (EngineFailed, *NONSENSE) as error:
            raise StartupError(f"{server.url} does not tokenize: {error!r}") from error
        ours = tokenizer.encode_text(text)
        if theirs is not None and theirs != ours:
            raise StartupError(
                f"the engine's model is not that of --model: {text!r} is {theirs} there and "
                f"{ours} here"
            )
    logger.debug("tokenizers are equal", extra={"engine": adapter.traits.name})


def _max_seq_len(options: EngineOptions, facts: EngineFacts) -> int:
    wanted, has = options.max_seq_len, facts.max_seq_len
    if wanted is None and has is None:
        raise StartupError("the engine does not state its context length: set --max-seq-len")
    if wanted is not None and has is not None and wanted > has:
        raise StartupError(f"--max-seq-len is {wanted}, and the engine's context has {has} tokens")
    return wanted or has or 0
