"""What a step of a model has to read, and a prompt to multiply."""

from bench.shapes.random_model import RandomReader
from worker.model.spec import DeltaNet, Experts, ModelSpec


def decode_bytes(spec: ModelSpec, weights: RandomReader, num_seqs: int, context: int) -> float:
    """The bytes of a decode step: the weights of the layers and of the head, of experts only if a
    token has chosen them, and the keys and values of all contexts, each read once, and the states,
    read and written. Routers are assumed to choose evenly, as they do with random weights."""
    held = weights.others.num_bytes + weights.head.num_bytes
    states = sum(layer.recurrence.state_size for layer in spec.layers if layer.recurrence)
    kept = sum(
        2 * min(context, one.window or context) * one.key_size * weights.dtype.itemsize
        for one in spec.attentions
    )
    active = weights.experts.num_bytes * active_share(spec, num_seqs)
    return held + active + num_seqs * (2 * 4 * states + kept)


def active_share(spec: ModelSpec, num_tokens: int) -> float:
    """The expected share of the experts that so many tokens choose."""
    parts = [layer.feed_forward for layer in spec.layers]
    mixtures = [part for part in parts if isinstance(part, Experts)]
    if not mixtures:
        return 0.0
    return 1.0 - (1.0 - mixtures[0].router.top_k / mixtures[0].count) ** num_tokens


def prompt_multiplications(spec: ModelSpec, weights: RandomReader, num_tokens: int) -> float:
    """The multiplications of a prompt: of each token with the weights of the layers, with keys and
    values and with the matrices of states, and of the last token with the head."""
    active = weights.experts.num_weights * active_share(spec, 1)
    pairs = sum(
        2 * one.num_heads * one.head_dim * _num_pairs(num_tokens, one.window)
        for one in spec.attentions
    )
    # A token is multiplied with what a matrix has for its key, with its correction, and with what
    # the matrix then has for its query; and the matrix fades.
    matrices = sum(
        4 * layer.recurrence.num_heads * layer.recurrence.key_dim * layer.recurrence.value_dim
        for layer in spec.layers
        if isinstance(layer.recurrence, DeltaNet)
    )
    layers = weights.others.num_weights + active + matrices
    return num_tokens * layers + pairs + weights.head.num_weights


def _num_pairs(num_tokens: int, window: int | None) -> int:
    """The pairs of a token and a token that it attends to."""
    return sum(min(k + 1, window or num_tokens) for k in range(num_tokens))
