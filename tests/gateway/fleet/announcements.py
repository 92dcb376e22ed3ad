"""Announcements of workers that a gateway hears."""

from typing import Any

from shared.messages import Announcement


def announcement(name: str = "a", **fields: Any) -> Announcement:
    """That of a worker with eight slots for the model ``m``, unless ``fields`` change that."""
    defaults: dict[str, Any] = {
        "model": "m",
        "vocab_size": 1,
        "max_seq_len": 1,
        "fingerprint": "",
        "max_num_seqs": 8,
    }
    return Announcement(worker=f"worker.{name}", **{**defaults, **fields})
