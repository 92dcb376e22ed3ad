"""A file of requests in, a file of answers out, through the batch queue of a model."""

from gateway.batch.progress import BatchProgress, BatchSummary
from gateway.batch.run import DEFAULT_WINDOW, run_batch

__all__ = ["DEFAULT_WINDOW", "BatchProgress", "BatchSummary", "run_batch"]
