"""The weights of a `Predictor`, which only some checkpoints of a family have."""

from dataclasses import dataclass, replace

from worker.model.spec import ModelSpec, Predictor
from worker.model.weights.derived import OF_A_MATRIX
from worker.model.weights.layers import LayerWeights, NormWeights, WeightReader
from worker.model.weights.sources import TensorSource
from worker.model.weights.weight import Linear


@dataclass(frozen=True, slots=True)
class PredictorWeights:
    """``projection`` is [hidden_size, 2 * hidden_size]: see `Predictor.is_hidden_first`."""

    embedding_norm: NormWeights
    hidden_norm: NormWeights
    projection: Linear
    layer: LayerWeights
    norm: NormWeights


def with_stored_predictor(spec: ModelSpec, source: TensorSource) -> ModelSpec:
    """The model without its predictor, if the checkpoint has none."""
    if spec.predictor is None:
        return spec
    stem = f"{_prefix(spec, spec.predictor, source)}{spec.predictor.projection}"
    is_stored = any(source.has(f"{stem}.{kind}") for kind in OF_A_MATRIX)
    return spec if is_stored else replace(spec, predictor=None)


def read_predictor(reader: WeightReader, spec: ModelSpec, predictor: Predictor) -> PredictorWeights:
    """Read the predictor of a model whose weights this reader reads. Raises `StartupError` as the
    reader does."""
    prefix = _prefix(spec, predictor, reader.source)
    names = replace(
        spec.names, prefixes=(prefix,), layer=predictor.parent, first_layer=predictor.number
    )
    alone = replace(spec, layers=(predictor.layer,), names=names, predictor=None)
    part, size = reader.of_part(alone), spec.hidden_size
    (layer,) = part.layers()
    return PredictorWeights(
        embedding_norm=part.named_norm(f"{prefix}{predictor.embedding_norm}", predictor.norm),
        hidden_norm=part.named_norm(f"{prefix}{predictor.hidden_norm}", predictor.norm),
        projection=part.linear([f"{prefix}{predictor.projection}"], (size, 2 * size)),
        layer=layer,
        norm=part.named_norm(f"{prefix}{predictor.final_norm}", predictor.norm),
    )


def _prefix(spec: ModelSpec, predictor: Predictor, source: TensorSource) -> str:
    return spec.names.prefix_in(source.has) if predictor.prefix is None else predictor.prefix
