"""A model with random weights that reads and writes text."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.support.models.tiny import write_tiny_model

_VOCAB_SIZE = 2048
_MORE: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "conv", "full_attention"] * 4},
}
_DOCS = Path(__file__).parents[3] / "docs"


def write_text_model(directory: Path, model_type: str = "llama") -> None:
    """Write a model of 12 layers, with a tokenizer for the words of Warren's documentation."""
    write_tiny_model(
        directory,
        model_type,
        vocab_size=_VOCAB_SIZE,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        **_MORE.get(model_type, {}),
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB_SIZE,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train([str(page) for page in sorted(_DOCS.glob("*.md"))], trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
