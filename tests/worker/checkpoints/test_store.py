"""Names, directories, GGUF files and hub ids become model directories, or a clear error."""

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from gguf import GGUFWriter

from shared.errors import StartupError
from tests.worker.checkpoints.gguf_files import FOREIGN, without_entries, write_tiny_gguf
from tests.worker.checkpoints.hub import COMMIT, serve_hub
from worker.checkpoints import convert, store
from worker.checkpoints.cache import link
from worker.checkpoints.catalogue import MODELS, REVISIONS
from worker.checkpoints.conversions import converted
from worker.checkpoints.gguf_file import gguf_files, write_file_list

FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"{ }",
    "model.safetensors": b"weights" * 1000,
    "chat_template.jinja": b"{{ messages }}",
}
PATIENCE = {"HF_HUB_ETAG_TIMEOUT": "240", "HF_HUB_DOWNLOAD_TIMEOUT": "240"}
PULL = """
import json, sys
from shared.errors import StartupError
from worker.checkpoints import store
steps = []
try:
    path = str(store.pull(sys.argv[1], lambda *step: steps.append(step)))
except StartupError as error:
    path = f"refused: {error}"
print(json.dumps([path, steps]))
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty user cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "warren"


def write_model(directory: Path, files: Mapping[str, bytes] = FILES) -> Path:
    directory.mkdir(parents=True)
    for name, content in files.items():
        (directory / name).write_bytes(content)
    return directory


def start_pull(model: str, **environment: str) -> subprocess.Popen[str]:
    """Pull in another process, which prints the path and the progress as JSON."""
    return subprocess.Popen(
        [sys.executable, "-c", PULL, model],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), **PATIENCE} | environment,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_pulled_model_has_all_files_and_its_gguf_file(smollm2: Path) -> None:
    names = {path.name for path in smollm2.iterdir()}

    assert names == {
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_pulling_again_does_nothing(smollm2: Path) -> None:
    steps: list[tuple[str, int, int]] = []

    directory = store.pull("smollm2", lambda *step: steps.append(step))

    assert (directory, steps) == (smollm2, [])


@pytest.mark.parametrize(
    ("architecture", "model_class"),
    [("llama", "LlamaForCausalLM"), (FOREIGN, "StableLmForCausalLM")],
)
def test_a_gguf_file_is_described_and_neither_copied_nor_converted(
    cache: Path, tmp_path: Path, architecture: str, model_class: str
) -> None:
    gguf = write_tiny_gguf(tmp_path / "tiny.gguf", architecture=architecture)

    directory = store.resolve(str(gguf))

    names = {path.name for path in directory.iterdir()}
    assert names == {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "gguf-files.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert gguf_files(directory) == [gguf]
    assert store.resolve(str(gguf)) == directory
    assert store.resolve_tokenizer(str(gguf)) == directory
    config = json.loads((directory / "config.json").read_text())
    assert config["architectures"] == [model_class]


def test_a_directory_with_a_tokenizer_needs_no_weights(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "model", {"tokenizer.json": b"{}"})

    assert store.resolve_tokenizer(str(directory)) == directory


def test_a_described_file_that_is_gone_is_named(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "model", {"config.json": b"{}", "tokenizer.json": b"{}"})
    write_file_list(directory, [tmp_path / "tiny.gguf"])

    with pytest.raises(StartupError, match=r"there is no file .*tiny\.gguf"):
        store.resolve(str(directory))


def test_a_part_of_a_model_is_refused_without_the_others(cache: Path, tmp_path: Path) -> None:
    def add_count(writer: GGUFWriter) -> None:
        writer.add_uint16("split.count", 2)

    odd = write_tiny_gguf(tmp_path / "odd.gguf", add=add_count)
    first = write_tiny_gguf(tmp_path / "m-00001-of-00002.gguf", add=add_count)

    with pytest.raises(StartupError, match="a part of 2, but is not named NAME-00001-of-00002"):
        store.resolve(str(odd))
    with pytest.raises(StartupError, match=r"incomplete without m-00002-of-00002\.gguf"):
        store.resolve(str(first))


def test_two_processes_that_pull_at_once_describe_once(cache: Path, tmp_path: Path) -> None:
    gguf = write_tiny_gguf(tmp_path / "tiny.gguf", architecture=FOREIGN)

    processes = [start_pull(str(gguf)) for _ in range(2)]
    results = [json.loads(process.communicate()[0]) for process in processes]

    (first, steps), (second, other_steps) = results
    assert first == second
    assert sorted([len(steps), len(other_steps)]) == [0, 5]
    assert store.resolve(str(gguf)) == Path(first)


def test_a_file_that_an_older_version_converted_is_converted_again_without_a_download(
    cache: Path, tmp_path: Path
) -> None:
    gguf = write_tiny_gguf(tmp_path / "tiny.gguf")
    sha256 = hashlib.sha256(gguf.read_bytes()).hexdigest()
    older = write_model(cache / "converted" / sha256, {"tiny.gguf": gguf.read_bytes()})

    def download(directory: Path) -> Path:
        raise AssertionError("the file is there")

    steps: list[tuple[str, int, int]] = []
    directory = converted(sha256, download, lambda *step: steps.append(step))

    num_steps = len(convert.STEPS)
    assert steps == [("convert", done, num_steps) for done in range(num_steps + 1)]
    assert directory != older
    assert (directory / "model.safetensors").exists()
    assert (directory / "tiny.gguf").samefile(older / "tiny.gguf")


def test_a_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "model")

    assert store.resolve(str(directory)) == directory


def test_a_hub_id_is_downloaded_once_and_then_needs_no_hub(tmp_path: Path) -> None:
    unwanted = {"pytorch_model.bin": b"", "onnx/model.safetensors": b"", "README.md": b""}
    home = {"HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}
    with serve_hub("org/tiny", FILES | unwanted | {"consolidated.safetensors": b""}) as endpoint:
        online = start_pull("org/tiny", HF_ENDPOINT=endpoint, HF_HUB_OFFLINE="0", **home)
        path, steps = json.loads(online.communicate()[0])

    offline = start_pull("org/tiny", HF_HUB_OFFLINE="1", **home)
    offline_path, _ = json.loads(offline.communicate()[0])

    assert {file.name: file.read_bytes() for file in Path(path).iterdir()} == FILES
    num_bytes = sum(map(len, FILES.values()))
    assert steps[-1] == ["download", num_bytes, num_bytes]
    assert offline_path == path


def test_of_subfolders_only_poolings_and_further_chat_templates_are_downloaded(
    tmp_path: Path,
) -> None:
    wanted = {"1_Pooling/config.json": b"{}", "additional_chat_templates/tool_use.jinja": b"{{ }}"}
    unwanted = dict.fromkeys(
        [
            *("onnx/config.json", "onnx/model.safetensors", "onnx/1_Pooling/config.json"),
            *("1_Pooling/model.safetensors", "results/scores.json"),
        ],
        b"",
    )
    environment = {"HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}
    with serve_hub("org/tiny", FILES | wanted | unwanted) as endpoint:
        pull = start_pull("org/tiny", HF_ENDPOINT=endpoint, **environment)
        path, _ = json.loads(pull.communicate()[0])

    files = [file for file in Path(path).rglob("*") if file.is_file()]
    assert {str(file.relative_to(path)) for file in files} == {*FILES, *wanted}


def test_a_revision_is_downloaded_and_no_other(tmp_path: Path) -> None:
    environment = {"HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}
    with serve_hub("org/tiny", FILES, revision="v1.0") as endpoint:
        pinned = start_pull("org/tiny@v1.0", HF_ENDPOINT=endpoint, **environment)
        path, _ = json.loads(pinned.communicate()[0])
        other = start_pull("org/tiny@v2.0", HF_ENDPOINT=endpoint, **environment)
        refused, _ = json.loads(other.communicate()[0])

    assert {file.name: file.read_bytes() for file in Path(path).iterdir()} == FILES
    assert refused == "refused: org/tiny has no revision v2.0 on the hub"


def test_a_known_name_is_fetched_from_the_hub_and_is_here_from_then_on(
    cache: Path, tmp_path: Path
) -> None:
    assert not store.is_here("lfm2-350m")
    with serve_hub("LiquidAI/LFM2-350M", FILES) as endpoint:
        environment = {"HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)}
        path, _ = json.loads(start_pull("lfm2-350m", **environment).communicate()[0])

    assert store.is_here("lfm2-350m")
    assert store.resolve("lfm2-350m") == Path(path).resolve()
    assert {file.name: file.read_bytes() for file in Path(path).iterdir()} == FILES


def test_the_owner_of_a_known_name_cannot_replace_what_was_pulled_first(
    cache: Path, tmp_path: Path
) -> None:
    def pulled(endpoint: str) -> str:
        environment = {"HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)}
        return start_pull("lfm2-350m", **environment).communicate()[0]

    with serve_hub("LiquidAI/LFM2-350M", FILES) as endpoint:
        first, _ = json.loads(pulled(endpoint))
    with serve_hub(
        "LiquidAI/LFM2-350M", FILES | {"config.json": b"{}"}, commit="f" * 40
    ) as endpoint:
        pulled(endpoint)

    record = cache / "commits" / "LiquidAI--LFM2-350M" / "commit"
    assert record.read_text() == COMMIT
    assert store.resolve("lfm2-350m") == Path(first).resolve()
    assert (Path(first) / "config.json").read_bytes() == FILES["config.json"]


def test_a_known_name_is_fetched_at_the_commit_of_the_catalogue(
    cache: Path, tmp_path: Path
) -> None:
    commit = MODELS["qwen3-0.6b"].revision
    assert commit is not None
    with serve_hub("Qwen/Qwen3-0.6B", FILES, revision="v2", commit=commit) as endpoint:
        environment = {"HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)}
        path, _ = json.loads(start_pull("qwen3-0.6b", **environment).communicate()[0])

    assert Path(path).name == commit
    assert {file.name: file.read_bytes() for file in Path(path).iterdir()} == FILES


def test_commits_are_those_of_repositories_of_known_models() -> None:
    repositories = {model.source for model in MODELS.values()}
    assert set(REVISIONS) <= repositories
    assert all(re.fullmatch(r"[0-9a-f]{40}", commit) for commit in REVISIONS.values())
    assert len(set(REVISIONS.values())) == len(REVISIONS)


def test_the_hubs_token_can_be_read_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("hf_token\n")
    environment = {"HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}
    with serve_hub("org/tiny", FILES, token="hf_token") as endpoint:
        without = start_pull(
            "org/tiny", HF_ENDPOINT=endpoint, HF_TOKEN_PATH=str(tmp_path / "none"), **environment
        )
        refused, _ = json.loads(without.communicate()[0])
        environment["HF_TOKEN_PATH"] = str(tmp_path / "token")
        path, _ = json.loads(
            start_pull("org/tiny", HF_ENDPOINT=endpoint, **environment).communicate()[0]
        )

    assert "it needs HF_TOKEN" in refused
    assert {file.name: file.read_bytes() for file in Path(path).iterdir()} == FILES


def test_what_the_hub_does_not_know_is_refused(tmp_path: Path) -> None:
    with serve_hub("org/tiny", FILES) as endpoint:
        environment = {"HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)}
        result, _ = json.loads(start_pull("org/other", **environment).communicate()[0])

    assert result.startswith("refused: there is no model org/other on the hub")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("smollm2", "smollm2 has not been downloaded: run `warren pull smollm2`"),
        ("gpt5", "unknown model gpt5: `warren pull --list` shows the known names"),
        ("mines", r"unknown model mines: did you mean mine\? `warren pull --list`"),
        ("qwen3-0.6b", r"qwen3-0\.6b has not been downloaded: run `warren pull qwen3-0\.6b`"),
        ("org/absent", "org/absent is not in the hub's cache, and the hub cannot be reached"),
        ("org/absent@v1", "org/absent@v1 is not in the hub's cache"),
        ("./absent", r"there is no directory \./absent"),
        ("absent.gguf", r"there is no file absent\.gguf"),
        ("two words", "there is no directory two words"),
    ],
)
def test_what_is_nowhere_is_refused(cache: Path, model: str, message: str) -> None:
    write_model(cache / "models" / "mine")

    with pytest.raises(StartupError, match=message):
        store.resolve(model)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"config.json": None}, r"has no config\.json"),
        ({"model.safetensors": None}, "contains no weights: safetensors are required"),
        (
            {"model.safetensors": None, "pytorch_model.bin": b""},
            "contains only pickle files, which can run code: safetensors are required",
        ),
        ({"tokenizer.json": None}, r"has no tokenizer\.json"),
        (
            {"model.safetensors.index.json": b'{"weight_map": {"a": "1.safetensors"}}'},
            r"is incomplete: it lacks 1\.safetensors",
        ),
        (
            {"model.safetensors.index.json": b"{"},
            r"model\.safetensors\.index\.json is not valid JSON.*download it again",
        ),
        (
            {"model.safetensors.index.json": b'{"weight_map": {"a": 1}}'},
            r"model\.safetensors\.index\.json has a value .* Expected `str`, got `int`",
        ),
    ],
)
def test_a_directory_that_no_worker_could_load_is_refused(
    tmp_path: Path, changes: dict[str, bytes | None], message: str
) -> None:
    files = {name: body for name, body in (FILES | changes).items() if body is not None}
    directory = write_model(tmp_path / "model", files)

    with pytest.raises(StartupError, match=message):
        store.resolve(str(directory))


def test_a_pulled_model_with_a_file_that_everyone_may_change_is_refused(
    cache: Path, tmp_path: Path
) -> None:
    directory = write_model(tmp_path / "model")
    (directory / "chat_template.jinja").chmod(0o666)
    link(cache / "models" / "mine", directory)

    with pytest.raises(StartupError, match=r"others may write into .*/chat_template\.jinja"):
        store.resolve("mine")

    assert store.resolve(str(directory)) == directory


@pytest.mark.parametrize(
    ("changed", "mode"), [("blobs/model.safetensors", 0o666), ("blobs", 0o777)]
)
def test_a_snapshot_of_the_hub_whose_blobs_everyone_may_change_is_refused(
    cache: Path, tmp_path: Path, changed: str, mode: int
) -> None:
    blobs = write_model(tmp_path / "models--org--tiny" / "blobs")
    snapshot = blobs.parent / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    for name in FILES:
        (snapshot / name).symlink_to(Path("../../blobs") / name)
    link(cache / "models" / "mine", snapshot)
    assert store.resolve("mine") == snapshot
    (blobs.parent / changed).chmod(mode)

    with pytest.raises(StartupError, match=r"others may write into .*/blobs"):
        store.resolve("mine")


def test_a_file_that_is_no_gguf_is_refused(cache: Path, tmp_path: Path) -> None:
    path = tmp_path / "weights.gguf"
    path.write_bytes(b"\x80pickle")

    with pytest.raises(StartupError, match="not a GGUF file"):
        store.resolve(str(path))


def test_an_architecture_that_nobody_reads_is_named_with_those_that_are_read(
    cache: Path, tmp_path: Path
) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", architecture="grok")

    with pytest.raises(
        StartupError, match=r"architecture grok, .* gpt-oss, .* modules may run those of .*bloom"
    ):
        store.resolve(str(path))


def test_a_file_that_cannot_be_read_is_refused_with_the_reason_and_leaves_nothing(
    cache: Path, tmp_path: Path
) -> None:
    path = without_entries("tokenizer.ggml.pre")(
        tmp_path / "tiny.gguf", add=lambda writer: writer.add_tokenizer_pre("superbpe")
    )

    with pytest.raises(StartupError) as refusal:
        store.resolve(str(path))

    reason = "its pre-tokenizer 'superbpe' is not supported"
    assert refusal.value.message == f"tiny.gguf cannot be read: {reason}"
    assert [file.suffix for file in (cache / "described").iterdir()] == [".lock"]


def test_a_cache_that_cannot_be_written_is_named(cache: Path, tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    cache.parent.mkdir(parents=True, exist_ok=True)
    cache.touch()  # as good as a full disk

    with pytest.raises(StartupError, match=f"the cache {cache} cannot be used: .*directory"):
        store.resolve(str(path))


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("smollm2", "smollm2"),
        ("org/Some-Model", "org/Some-Model"),
        ("org/Some-Model@refs/pr/1", "org/Some-Model"),
        ("/models/my-model/", "my-model"),
        ("./models/Tiny.Q4_1.gguf", "Tiny.Q4_1"),
        ("tests/support", "support"),
    ],
)
def test_clients_see_the_last_part_of_a_path_or_the_whole_hub_id(model: str, name: str) -> None:
    assert store.served_name(model) == name


def test_a_name_that_no_client_could_send_is_refused() -> None:
    with pytest.raises(StartupError, match=r"'my model' is not a valid model name.*--served-name"):
        store.served_name("/models/my model")
