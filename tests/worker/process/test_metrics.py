"""The metrics of a worker's engine."""

from tests.support.metrics import total
from worker.engine.cache.block_pool import BlockCounts
from worker.engine.interface import EngineLoad
from worker.engine.step_times import StepTimes
from worker.jobs.metrics import JobMetrics
from worker.process.metrics import WorkerMetrics


def rendered(load: EngineLoad, **facts: object) -> str:
    metrics = WorkerMetrics(
        JobMetrics("tiny", 0),
        lambda: load,
        StepTimes(),
        stalled_s=lambda: 0.0,
        limits={"max_num_seqs": 1},
        facts=facts,
    )
    return metrics.render().decode()


def test_the_cache_is_shown_by_what_it_holds() -> None:
    counts = BlockCounts(tokens=1, states=2, cached_tokens=3, snapshots=4, empty=5)

    text = rendered(EngineLoad(1, 0, 15, 12, 0, block_counts=counts), sequence_state_bytes=4096)

    for content, count in counts._asdict().items():
        assert total(text, "warren_worker_kv_cache_blocks", content=content) == count
    assert total(text, "warren_worker_sequence_state_bytes") == 4096


def test_failures_of_an_engine_over_http_are_counted_by_kind() -> None:
    text = rendered(EngineLoad(1, 0, 4, 3, 0, num_failures={"away": 2, "busy": 5}))

    for kind, count in {"away": 2, "busy": 5}.items():
        assert total(text, "warren_worker_engine_failures_total", kind=kind) == count


def test_an_engine_over_http_shows_no_blocks() -> None:
    text = rendered(EngineLoad(1, 0, 4, 3, 0))

    assert "warren_worker_kv_cache_blocks{" not in text
    assert total(text, "warren_worker_sequence_state_bytes") == 0
