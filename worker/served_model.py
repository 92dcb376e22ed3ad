"""The model that a worker serves: its name, its text side and its engine."""

from dataclasses import dataclass

from shared.settings import WorkerSettings
from worker.engine.engine import Engine
from worker.text import Tokenizer


@dataclass(frozen=True, slots=True)
class ServedModel:
    name: str
    tokenizer: Tokenizer
    engine: Engine
    max_seq_len: int
    """Prompt and output together, in tokens: the model's context or what the cache holds."""
    fingerprint: str


def load(settings: WorkerSettings) -> ServedModel:
    """Load model and tokenizer. Takes seconds; raises `StartupError`."""
    # Imported here, in the loading thread: torch alone takes a second.
    from worker.engine.scheduler import SchedulerLimits
    from worker.model import loading, store

    directory = store.resolve(settings.model)
    runner = loading.load_runner(
        directory,
        dtype=settings.dtype,
        weight_format=settings.weight_format,
        kernels=settings.kernels,
        device=settings.device,
        block_size=settings.block_size,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_seq_len=settings.max_seq_len,
        kv_cache_bytes=settings.kv_cache_bytes,
        compute_threads=settings.compute_threads,
    )
    limits = SchedulerLimits(
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        batch_reserve=settings.batch_reserve,
        prefix_cache=settings.prefix_cache,
        max_step_s=settings.max_step_ms / 1000,
    )
    return ServedModel(
        name=settings.served_name or store.served_name(settings.model),
        tokenizer=Tokenizer.load(directory),
        engine=Engine(runner, limits),
        max_seq_len=min(runner.max_seq_len, runner.num_blocks * runner.block_size),
        fingerprint=loading.fingerprint(directory, settings.weight_format),
    )
