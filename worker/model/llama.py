"""What both decoders of the Llama family say of themselves."""

from worker.model.config import DecoderConfig
from worker.model.rope_table import rope_table


class LlamaFamily:
    """The sizes of a model whose configuration is known."""

    def __init__(self, config: DecoderConfig, max_seq_len: int) -> None:
        """Raises `StartupError` where the rotary scaling is not known.

        ``max_seq_len`` is the longest context that will ever be asked for.
        """
        self._config = config
        self._rope_table = rope_table(config.rope, config.head_dim, max_seq_len)

    @property
    def num_layers(self) -> int:
        return self._config.num_layers

    @property
    def num_kv_heads(self) -> int:
        return self._config.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self._config.head_dim

    @property
    def vocab_size(self) -> int:
        return self._config.vocab_size

    @property
    def max_seq_len(self) -> int:
        return self._rope_table.shape[0]
