"""Starts or finds an engine, and checks that it serves the model of the tokenizer."""

import hashlib
import logging
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shared.errors import EngineFailed, StartupError
from shared.settings import batch_reserve
from worker.engines.adapter import UNKNOWN, Adapter, EngineFacts
from worker.engines.adapters import ADAPTERS
from worker.engines.answer import EngineAway
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
    url = options.url or f"http://127.0.0.1:{adapter.default_port}"
    server = EngineServer(url.rstrip("/"), options.api_key, options.stall_timeout_s)
    process = None if options.command is None else EngineProcess(options.engine, options.command)
    if process is not None:
        process.start()
    try:
        _wait_healthy(server, adapter, process)
        facts = _facts(server, adapter, options.names)
        _check_version(adapter, facts)
        _check_vocab_size(facts, directory)
        tokenizer = Tokenizer.load(directory, vocab_size=facts.vocab_size)
        _check_tokenizer(server, adapter, tokenizer)
        max_seq_len = _max_seq_len(options, facts)
        max_num_seqs = min(options.max_num_seqs, facts.num_slots or options.max_num_seqs)
    except BaseException:
        server.close()
        if process is not None:
            process.stop()
        raise

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
    served = hashlib.sha256(f"{facts.model}\n{tokenizer.source}".encode()).hexdigest()
    return OpenedEngine(
        engine,
        tokenizer,
        adapter,
        version=facts.version,
        max_seq_len=max_seq_len,
        max_num_seqs=max_num_seqs,
        fingerprint=served[:32],
        numerics=f"{options.engine} {facts.version} {served[:8]}"[:256],
    )


def _wait_healthy(server: EngineServer, adapter: Adapter, process: EngineProcess | None) -> None:
    told_at = 0.0
    while not server.is_healthy(adapter.health_path):
        if process is not None and process.num_exits >= _MAX_EXITS:
            said = "; ".join(process.last_lines)
            raise StartupError(f"--engine-command ended {process.num_exits} times: {said}")
        if time.monotonic() - told_at > _TELL_INTERVAL_S:
            told_at = time.monotonic()
            facts = {"engine": adapter.traits.name, "url": server.url}
            logger.info("waiting for the engine", extra=facts)
        time.sleep(_LOOK_INTERVAL_S)


def _facts(server: EngineServer, adapter: Adapter, names: Collection[str]) -> EngineFacts:
    try:
        return adapter.facts(server, names)
    except (EngineAway, EngineFailed, KeyError, IndexError, TypeError, ValueError) as error:
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
    tokens. Raises `StartupError`."""
    special = tokenizer.special_entries
    groups = range(0, len(special), _MAX_SPECIAL)
    texts = ["".join(special[start : start + _MAX_SPECIAL]) for start in groups]
    for text in (*_TEXTS, *tokenizer.entries(sorted(tokenizer.eos_ids)), *texts):
        try:
            theirs = adapter.tokenize(server, text)
        except (EngineAway, EngineFailed) as error:
            raise StartupError(f"{server.url} does not tokenize: {error}") from error
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
