"""Model files that are damaged, unreadable or malformed: an error that names the file."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from shared.errors import StartupError
from tests.support.models.tiny import write_tiny_model
from tests.support.text.tokenizers import save_tokenizer, word_tokenizer
from worker.checkpoints import store
from worker.model.loading import load_runner
from worker.text import Tokenizer

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"
NOBODY = 65534
UNREADABLE = "cannot be read: Permission denied: give the user of this process access"
FILES = (
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("original")
    write_tiny_model(directory, "llama", tie_word_embeddings=False)
    save_tokenizer(word_tokenizer(), directory, tokenizer_config={"eos_token": "</s>"})
    return directory


@pytest.fixture
def model(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "model"))


def load(model: Path) -> None:
    """What a worker reads of a directory."""
    directory = store.resolve(str(model))
    load_runner(directory, device="cpu", kernels="reference").close()
    Tokenizer.load(directory)


def set_field(model: Path, name: str, field: str, value: object) -> None:
    path = model / name
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | {field: value}))


@pytest.mark.parametrize("name", FILES)
def test_a_pointer_of_git_lfs_is_named_with_its_remedy(model: Path, name: str) -> None:
    (model / name).write_bytes(POINTER)
    with pytest.raises(StartupError, match=rf"{name} is a pointer of Git LFS .*git lfs pull"):
        load(model)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", b"null", b"3", b"[" * 100_000])
@pytest.mark.parametrize("name", [name for name in FILES if name != "model.safetensors"])
def test_what_is_no_json_object_is_named(model: Path, name: str, content: bytes) -> None:
    (model / name).write_bytes(content)
    with pytest.raises(StartupError, match=name):
        load(model)


def test_half_of_the_weights_are_named_with_the_remedy(model: Path) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(StartupError, match=r"model\.safetensors cannot be read.*download it again"):
        load(model)


@contextmanager
def another_user() -> Iterator[None]:
    """Nobody's rights, because root may read every file."""
    own = os.geteuid()
    if own == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(own)


@pytest.mark.parametrize("name", [*FILES, "."])
def test_a_file_that_may_not_be_read_is_named(original: Path, name: str) -> None:
    # pytest's own folders are closed to other users.
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        model = Path(shutil.copytree(original, Path(folder, "model")))
        for path in (*model.iterdir(), model):
            path.chmod(0o755)
        (model / name).chmod(0)
        with another_user(), pytest.raises(StartupError, match=UNREADABLE):
            load(model)
        (model / name).chmod(0o755)


CONFIG_VALUES: list[tuple[str, Any]] = [
    ("rms_norm_eps", None),
    ("rms_norm_eps", "1e-5"),
    ("rope_scaling", "linear"),
    ("rope_scaling", {"type": "linear", "factor": "4.0"}),
    ("rope_scaling", {"type": "linear", "factor": [4.0]}),
    ("rope_scaling", {"type": 3}),
    ("rope_scaling", {"full_attention": {"rope_type": "linear", "factor": 2.0}}),
    ("rope_parameters", {"rope_type": "yarn"}),
    ("rope_theta", "10000"),
    ("quantization_config", "awq"),
    ("text_config", 3),
    ("model_type", 3),
    ("hidden_act", 3),
    ("tie_word_embeddings", "yes"),
    ("attention_bias", 2),
    ("head_dim", "16"),
    ("hidden_size", {}),
    ("num_hidden_layers", [3]),
    ("max_position_embeddings", 0),
    ("eos_token_id", "2"),
    ("eos_token_id", 2.5),
    ("eos_token_id", [[2]]),
]


@pytest.mark.parametrize(("field", "value"), CONFIG_VALUES)
def test_a_malformed_value_of_the_configuration_is_named(
    model: Path, field: str, value: object
) -> None:
    set_field(model, "config.json", field, value)
    with pytest.raises(StartupError, match=r"config\.json|rope scaling|model type|transformers"):
        load(model)


OTHER_VALUES: list[tuple[str, str, Any]] = [
    ("generation_config.json", "eos_token_id", "2"),
    ("generation_config.json", "eos_token_id", {"id": 2}),
    ("tokenizer_config.json", "chat_template", 3),
    ("tokenizer_config.json", "chat_template", [{"template": "x"}]),
    ("tokenizer_config.json", "chat_template", ["x"]),
    ("tokenizer_config.json", "extra_special_tokens", "x"),
    ("tokenizer_config.json", "added_tokens_decoder", []),
    ("tokenizer.json", "model", {"type": "unknown"}),
    ("model.safetensors.index.json", "weight_map", []),
    ("model.safetensors.index.json", "weight_map", {"a": 3}),
    ("model.safetensors.index.json", "weight_map", {}),
]


@pytest.mark.parametrize(("name", "field", "value"), OTHER_VALUES)
def test_a_malformed_value_of_another_file_is_named(
    model: Path, name: str, field: str, value: object
) -> None:
    set_field(model, name, field, value)
    with pytest.raises(StartupError, match=name.replace(".", r"\.")):
        load(model)


def test_a_template_that_is_no_text_is_named(model: Path) -> None:
    (model / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(StartupError, match=r"chat_template\.jinja is not UTF-8"):
        load(model)


def without_prefix(model: Path, *, keep_head: bool) -> None:
    path = model / "model.safetensors"
    tensors = {name.removeprefix("model."): tensor for name, tensor in load_file(path).items()}
    if not keep_head:
        del tensors["lm_head.weight"]
    save_file(tensors, path, metadata={"format": "pt"})


def test_a_head_beside_tensors_without_the_prefix_is_found(model: Path) -> None:
    without_prefix(model, keep_head=True)
    load(model)


def test_a_head_that_is_missing_is_named(model: Path) -> None:
    without_prefix(model, keep_head=False)
    with pytest.raises(StartupError, match=r"no tensor lm_head\.weight"):
        load(model)


GGUF_DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "half": (lambda content: content[: len(content) // 2], "is incomplete: download it again"),
    "a tenth of its header": (lambda content: content[:300], "is not a readable GGUF file"),
    "big-endian": (lambda content: content[:4] + b"\0\0\0\3" + content[8:], "big-endian machines"),
    "a pointer": (lambda content: POINTER, "git lfs pull"),
    "empty": (lambda content: b"", "is not a GGUF file"),
}


@pytest.mark.parametrize("damage", GGUF_DAMAGES)
def test_a_damaged_gguf_file_is_named_before_it_is_converted(tmp_path: Path, damage: str) -> None:
    from tests.worker.checkpoints.gguf_files import write_tiny_gguf

    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    change, message = GGUF_DAMAGES[damage]
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(StartupError, match=rf"tiny\.gguf .*{message}"):
        store.resolve(str(path))
