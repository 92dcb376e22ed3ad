"""The model that a worker serves: its name, tokenizer, parsers and engine."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from shared.control_groups import usable_cpus
from shared.errors import StartupError
from shared.messages import ReasoningSwitch
from shared.settings import ModelSettings, WorkerSettings
from worker.decode.constraints import Constraints
from worker.engine.driver import EngineThread
from worker.engine.engine import Engine
from worker.engine.interface import ModelRunner, TokenEngine
from worker.text import (
    TextThreads,
    Tokenizer,
    reasoning_parser,
    reasoning_switches,
    with_known_calls,
)

if TYPE_CHECKING:
    from worker.model.embedder import Embedder

BLOCK_SIZE = 16
"""Tokens in one block of the KV cache."""
_MAX_DRAFT_TOKENS = 15
"""Tokens of a sequence that one step drafts and checks on the CPU, if they save time."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    name: str
    tokenizer: Tokenizer
    engine: TokenEngine
    max_seq_len: int
    """Maximum length of prompt and output together, in tokens: limited by the model's context and
    the KV cache."""
    fingerprint: str
    numerics: str = ""
    """See `worker.model.numerics`."""
    tokenizer_sha256: str = ""
    weight_format: str = "auto"
    is_exact: bool = False
    """Whether a token's logits have the same bits whatever else is in their step, and on every
    machine with these numerics."""
    runner: ModelRunner | None = None
    """The model runner of the engine; None if the engine is not in this process."""
    tool_parser: str | None = None
    """The format in which the model writes tool calls; None if it does not support tools."""
    reasoning_parser: str | None = None
    """The format in which the model writes its reasoning; None if it does not."""
    reasoning_switches: tuple[ReasoningSwitch, ...] = ()
    """The variables of the chat template that change this format."""
    embedder: "Embedder | None" = None
    """None: the model does not support embeddings."""
    engine_version: str = ""
    """The kind and version of an engine over HTTP; empty for Warren's own."""
    unsupported: tuple[str, ...] = ()
    """The sampling parameters that the engine lacks, by their names in `SamplingParams`."""
    engine_constraints: tuple[str, ...] = ()
    """The kinds of constraints that an engine over HTTP takes in its own form."""
    max_num_seqs: int | None = None
    """The slots of an engine over HTTP; None: as many as the settings say."""
    facts: Mapping[str, str | int] = field(default_factory=dict)
    """How the model runs, for the log and for metrics: device, data type, numerics, threads, and
    the size of the KV cache."""
    constraints: Constraints = field(init=False)
    texts: TextThreads = field(default_factory=TextThreads)
    """For long prompts, and for texts that are only tokenized."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "constraints", Constraints(self.tokenizer))


def name_of(settings: ModelSettings) -> str:
    """The model name that clients use."""
    from worker.checkpoints import store

    return settings.served_name or store.served_name(settings.model)


def load_for_worker(settings: WorkerSettings) -> ServedModel:
    """Load model and tokenizer, or find the engine that has the model. Takes seconds; raises
    `StartupError`."""
    if settings.engine == "own" and (settings.engine_url or settings.engine_command):
        raise StartupError("--engine-url and --engine-command need --engine")
    if settings.engine == "own":
        return load(settings, has_grammars=True)
    model = _load_remote(settings)
    model.constraints.prepare()
    return model


def _load_remote(settings: WorkerSettings) -> ServedModel:
    from worker.checkpoints import store
    from worker.engines.start_up import EngineOptions, open_engine

    key = settings.engine_key
    options = EngineOptions(
        engine=settings.engine,
        names=(name_of(settings), settings.model),
        url=settings.engine_url,
        command=settings.engine_command,
        api_key=None if key is None else key.get_secret_value(),
        max_num_seqs=settings.max_num_seqs,
        max_seq_len=settings.max_seq_len,
        stall_timeout_s=settings.stall_timeout_s,
        tenant_weights=settings.tenant_weights,
    )
    directory = store.resolve_tokenizer(settings.model)
    opened = open_engine(options, directory)
    tokenizer, tool_parser = with_known_calls(opened.tokenizer, settings.tool_parser)
    return ServedModel(
        name=name_of(settings),
        tokenizer=tokenizer,
        engine=opened.engine,
        max_seq_len=opened.max_seq_len,
        fingerprint=opened.fingerprint,
        numerics=opened.numerics,
        tokenizer_sha256=store.tokenizer_sha256(directory),
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser(tokenizer, settings.reasoning_parser),
        reasoning_switches=reasoning_switches(tokenizer, settings.reasoning_parser),
        engine_version=f"{settings.engine} {opened.version}",
        unsupported=opened.adapter.traits.unsupported,
        engine_constraints=tuple(sorted(opened.adapter.traits.constraints)),
        max_num_seqs=opened.max_num_seqs,
        facts={"device": settings.engine, "numerics": opened.numerics},
    )


def load(settings: ModelSettings, *, has_grammars: bool = False) -> ServedModel:
    """Load model and tokenizer, each in its own thread. Takes seconds; raises `StartupError`.

    With ``has_grammars``, what all grammars share is built, too: see `Constraints.prepare`.
    """
    # Imported here, in the loading thread, because importing torch alone takes a second.
    from worker.model.numerics import limit_cpu_isa, numerics_of

    limit_cpu_isa()

    from worker.checkpoints import store
    from worker.engine.scheduler import SchedulerLimits
    from worker.model import embedder, loading
    from worker.model.start import RunnerLimits, can_check_drafts

    directory = store.resolve(settings.model)
    num_threads = settings.compute_threads or usable_cpus()
    read_text = partial(_read_text, settings, directory, has_grammars=has_grammars)
    with ThreadPoolExecutor(1, "tokenizer") as beside:
        reading = beside.submit(read_text)
        runner = loading.load_runner(
            directory,
            RunnerLimits(
                block_size=BLOCK_SIZE,
                max_num_seqs=settings.max_num_seqs,
                max_num_batched_tokens=settings.max_num_batched_tokens,
                max_seq_len=settings.max_seq_len,
                kv_cache_bytes=settings.kv_cache_bytes,
                gpu_memory_share=settings.gpu_memory_share,
            ),
            dtype=settings.dtype,
            weight_format=settings.weight_format,
            kv_dtype=settings.kv_dtype,
            kernels=embedder.kernels_for(directory, settings.kernels, settings.device),
            is_batch_invariant=settings.batch_invariant,
            device=settings.device,
            compute_threads=num_threads,
        )
        try:
            tokenizer, tool_parser = reading.result()
            is_known = tokenizer.vocab_size == runner.vocab_size
        except StartupError:  # perhaps because config.json says another size
            is_known = False
    if not is_known:
        # The tokenizer checks the token ids of requests, which kernels use as indices.
        tokenizer, tool_parser = read_text(runner.vocab_size)
    traits = runner.decoder.traits
    limits = SchedulerLimits(
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        batch_reserve=settings.batch_reserve,
        max_step_s=settings.max_step_ms / 1000,
        tenant_weights=settings.tenant_weights,
        max_draft_tokens=_MAX_DRAFT_TOKENS if can_check_drafts(runner.decoder) else 0,
        prediction_cost=traits.prediction_cost,
    )
    numerics = numerics_of(runner.decoder, is_batch_invariant=settings.batch_invariant)
    return ServedModel(
        name=name_of(settings),
        tokenizer=tokenizer,
        engine=EngineThread(Engine(runner, limits)),
        max_seq_len=min(runner.max_seq_len, runner.num_blocks * runner.block_size),
        fingerprint=loading.fingerprint(directory, settings.weight_format),
        numerics=numerics,
        tokenizer_sha256=store.tokenizer_sha256(directory),
        weight_format=settings.weight_format,
        is_exact=traits.is_row_exact,
        runner=runner,
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser(tokenizer, settings.reasoning_parser),
        reasoning_switches=reasoning_switches(tokenizer, settings.reasoning_parser),
        embedder=embedder.start_embedder(
            directory, runner, max_num_batched_tokens=settings.max_num_batched_tokens
        ),
        facts={**runner.facts(), "numerics": numerics, "threads": num_threads},
    )


def _read_text(
    settings: ModelSettings, directory: Path, vocab_size: int | None = None, *, has_grammars: bool
) -> tuple[Tokenizer, str | None]:
    """The tokenizer and the format of tool calls. ``vocab_size`` is by default what config.json
    says."""
    loaded = Tokenizer.load(directory, vocab_size=vocab_size)
    tokenizer, tool_parser = with_known_calls(loaded, settings.tool_parser)
    if has_grammars:
        Constraints(tokenizer).prepare()
    return tokenizer, tool_parser
