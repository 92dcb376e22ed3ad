"""Threads for long texts, so that tokenizing them holds up neither the event loop nor the engine.

They work on one text of a tenant at a time: megabytes of one tenant do not hold up the prompts of
another.
"""

from shared.turns import TenantThreads

_NUM_THREADS = 4


class TextThreads(TenantThreads):
    """The threads of a model."""

    def __init__(self) -> None:
        super().__init__(_NUM_THREADS, "texts")
