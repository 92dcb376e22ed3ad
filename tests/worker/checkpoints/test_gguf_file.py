"""The header of a GGUF file, against the `gguf` package's reader."""

import os
from pathlib import Path

import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFWriter
from numpy import zeros

from shared.errors import StartupError
from tests.worker.checkpoints.gguf_files import HEADS, write_tiny_gguf
from worker.checkpoints.gguf_file import GgufTensor, end_of, read_header
from worker.model.weights.gguf import GgufSource


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return write_tiny_gguf(path, GGMLQuantizationType.Q4_1)


def as_gguf_reads(path: Path) -> dict[str, GgufTensor]:
    return {
        tensor.name: GgufTensor(
            tuple(reversed(tensor.shape.tolist())), int(tensor.tensor_type), tensor.data_offset
        )
        for tensor in GGUFReader(path).tensors
    }


def test_every_tensor_lies_where_the_gguf_package_finds_it(tiny: Path) -> None:
    header = read_header(tiny)
    assert header.architecture == "llama"
    assert header.tensors == as_gguf_reads(tiny)
    assert header.entries["llama.attention.head_count"] == HEADS
    assert header.start == min(tensor.start for tensor in header.tensors.values())


@pytest.mark.parametrize("kind", GGML_QUANT_SIZES)
def test_a_tensor_ends_where_the_gguf_package_says(kind: GGMLQuantizationType) -> None:
    num_weights, num_bytes = GGML_QUANT_SIZES[kind]
    assert end_of(GgufTensor((3, 2 * num_weights), int(kind), start=64)) == 64 + 6 * num_bytes


def test_the_files_own_alignment_counts(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "wide.gguf", "llama")
    writer.add_custom_alignment(1024)
    writer.add_array("bytes", [1.5, 2.5, 3.5])
    for name in ("a", "b"):
        writer.add_tensor(name, zeros((3, 5), "float32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensors = read_header(tmp_path / "wide.gguf").tensors
    assert tensors == as_gguf_reads(tmp_path / "wide.gguf")
    assert all(tensor.start % 1024 == 0 for tensor in tensors.values())


def test_an_alignment_of_zero_is_refused(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "flat.gguf", "llama")
    writer.add_string("general.alignment", "0")
    writer.add_tensor("a", zeros((3, 5), "float32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    with pytest.raises(StartupError, match="not a readable GGUF file"):
        read_header(tmp_path / "flat.gguf")


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.03, 0.5, 0.95])
def test_a_file_that_is_cut_off_is_refused(tiny: Path, tmp_path: Path, share: float) -> None:
    path = tmp_path / "short.gguf"
    path.write_bytes(tiny.read_bytes())
    os.truncate(path, int(share * path.stat().st_size))
    with pytest.raises(StartupError, match=r"short\.gguf is (truncated|not a readable GGUF file)"):
        GgufSource(tmp_path, [path])


@pytest.mark.parametrize(
    ("place", "content"),
    [(0, b"PK\3\4"), (4, b"\x01"), (8, b"\xff" * 8), (16, b"\xff" * 8), (24, b"\xff" * 8)],
)
def test_a_header_that_is_damaged_is_refused(
    tiny: Path, tmp_path: Path, place: int, content: bytes
) -> None:
    """Another magic or version, and excessive counts and lengths."""
    path = tmp_path / "broken.gguf"
    whole = tiny.read_bytes()
    path.write_bytes(whole[:place] + content + whole[place + len(content) :])
    with pytest.raises(StartupError, match=r"broken\.gguf is not a readable GGUF file: ."):
        read_header(path)
