"""How a model directory becomes a served model."""

import json
from pathlib import Path

import pytest

from shared.errors import InvalidRequest
from shared.messages import TokenPrompt
from shared.settings import WorkerSettings
from tests.support.models.tiny import VOCAB_SIZE, write_tiny_model
from tests.support.text.tokenizers import byte_level_tokenizer, save_tokenizer
from worker.decode.served_model import load


def test_token_ids_beyond_the_embedding_are_refused_whatever_else_the_files_say(
    tmp_path: Path,
) -> None:
    write_tiny_model(tmp_path, "llama")
    save_tokenizer(byte_level_tokenizer(), tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"text_config": {"vocab_size": 999}}))

    served = load(WorkerSettings(model=str(tmp_path), device="cpu", kv_cache_bytes=1 << 20))
    served.engine.stop()

    assert served.tokenizer.num_entries > VOCAB_SIZE
    assert served.tokenizer.encode(TokenPrompt(token_ids=(VOCAB_SIZE - 1,))) == [VOCAB_SIZE - 1]
    with pytest.raises(InvalidRequest, match=f"the vocabulary of {VOCAB_SIZE}"):
        served.tokenizer.encode(TokenPrompt(token_ids=(VOCAB_SIZE,)))
