"""A GGUF file is mapped, and what was read of it does not stay in the process."""

import re
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from worker.model.weights import gguf as source_module
from worker.model.weights.gguf import GgufSource

NUM_TENSORS = 16
SHAPE = (512, 512)
TENSOR_BYTES = 1 << 20


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for k in range(NUM_TENSORS):
        writer.add_tensor(f"blk.{k}.attn_q.weight", np.full(SHAPE, k, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def resident_bytes(path: Path) -> int:
    """The bytes of a mapped file that are in this process."""
    found = re.findall(rf"{re.escape(str(path))}\n.*?\nRss: +(\d+) kB", smaps(), re.DOTALL)
    return 1024 * sum(map(int, found))


def smaps() -> str:
    return Path("/proc/self/smaps").read_text()


def test_tensors_that_were_read_leave_the_process_and_stay_valid(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_module, "_MAX_RESIDENT_BYTES", 3 * TENSOR_BYTES)
    source = GgufSource(file.parent, [file])

    tensors = [source.get(f"blk.{k}.attn_q.weight") for k in range(2)]
    seen = []
    for k in range(2, NUM_TENSORS):
        tensors.append(source.get(f"blk.{k}.attn_q.weight"))
        tensors[-1].sum()
        seen.append(resident_bytes(file))

    # The system maps pages around those that are read.
    assert TENSOR_BYTES <= max(seen) <= 8 * TENSOR_BYTES
    assert all(torch.equal(one, torch.full(SHAPE, float(k))) for k, one in enumerate(tensors))
