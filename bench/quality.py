"""The quality that a weight format costs: perplexity, and agreement with float32, on a fixed text.

    python -m bench.quality [--model NAME] [--format FORMAT]... [--gguf FILE]...

The text is `texts/alice.txt`, the beginning of Lewis Carroll's "Alice's Adventures in Wonderland"
(1865, in the public domain). Every format predicts each token from the true tokens before it.

A model that comes as a GGUF file is already quantized. In its own format it loses only what
rounding to float32 lost during the conversion; other formats lose what they add to that.

``--gguf`` measures files that llama-quantize has written of the model, such as Q4_K_M.gguf, under
their names without the ending. Q4_K to Q6_K and IQ4_XS have blocks of 256 inputs, so llama-quantize
writes the matrices of SmolLM2 with 576 inputs in other formats.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, get_args

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bench.agreement import Agreement, compare, perplexity
from bench.machine import describe
from bench.options import RESULTS, Out
from bench.report import write_json
from kernels.quantized import QuantFormat
from shared.messages import SamplingParams, TextPrompt
from worker.checkpoints import store
from worker.engine.interface import ScheduledBatch, ScheduledSequence, SequenceId
from worker.model.forward import Decoder
from worker.model.inputs import build_inputs
from worker.model.kv_cache import KVCache
from worker.model.loading import load_decoder
from worker.model.start import whole_cache
from worker.text import Tokenizer

TEXT = Path(__file__).parent / "texts" / "alice.txt"
_PACKED = get_args(QuantFormat)
FLOAT8, INT16 = "kv-float8", "int16"
"""What may follow the name of a format after a plus."""
FORMATS = (
    "bfloat16",
    f"bfloat16+{FLOAT8}",
    *_PACKED,
    *(f"{name}+{INT16}" for name in _PACKED),
)
_CPU = torch.device("cpu")
_BLOCK_SIZE = 16
_CHUNK = 256


@dataclass(frozen=True, kw_only=True)
class Quality:
    """The quality of a format on a text; ``agreement`` is the agreement with float32."""

    weights: str
    perplexity: float
    agreement: Agreement


def load(directory: Path, weights: str, kernels: str) -> Decoder:
    """Load a model as a worker loads it in `bench.systems`; ``auto`` are the weights of a GGUF
    file. A format with ``+kv-float8`` has a cache of 8 bits, and a format with ``+int16`` is
    multiplied by activations of 16 bits. Raises `StartupError`."""
    weights, *rounding = weights.split("+")
    is_packed = weights in _PACKED
    return load_decoder(
        directory,
        dtype="auto" if is_packed else weights,
        weight_format=weights if is_packed else "auto",
        kv_dtype="float8" if FLOAT8 in rounding else "auto",
        kernels="native-int16" if INT16 in rounding else kernels,
        device=_CPU,
        num_threads=torch.get_num_threads(),
    )


@torch.inference_mode()
def text_logits(decoder: Decoder, token_ids: Sequence[int]) -> Tensor:
    """The prediction after each of the tokens, [len(token_ids), vocab_size] float32."""
    num_blocks = -(-len(token_ids) // _BLOCK_SIZE)
    cache = whole_cache(decoder, _BLOCK_SIZE, num_blocks)
    chunks = [
        _forward(decoder, cache, token_ids[start : start + _CHUNK], start)
        for start in range(0, len(token_ids), _CHUNK)
    ]
    return torch.cat(chunks).float()


def _forward(decoder: Decoder, cache: KVCache, token_ids: Sequence[int], start: int) -> Tensor:
    sequence = ScheduledSequence(
        sequence_id=SequenceId("text", 0),
        start=start,
        token_ids=token_ids,
        block_tables=[range(cache.num_blocks)],
        is_sampled=True,
        sampling=SamplingParams(temperature=0.0),
        seed=0,
        position=0,
        previous_row=None,
    )
    inputs = build_inputs(ScheduledBatch((sequence,)), _BLOCK_SIZE, decoder.device).forward
    every_token = replace(inputs, sampled_rows=torch.arange(len(token_ids), device=decoder.device))
    return decoder.forward(every_token, cache).clone()


def fixed_text(directory: Path) -> list[int]:
    """`TEXT` as the tokens of the model in ``directory``."""
    return Tokenizer.load(directory).encode(TextPrompt(text=TEXT.read_text()))


def qualities(
    directory: Path,
    token_ids: Sequence[int],
    formats: Sequence[str],
    kernels: str = "auto",
    files: Mapping[str, Path] = MappingProxyType({}),
) -> list[Quality]:
    """Measure float32 with the reference ops first, then each of ``formats``, then the directories
    of GGUF ``files`` by their names, with activations of 8 and of 16 bits. Raises
    `StartupError`."""
    reference = text_logits(load(directory, "float32", "reference"), token_ids)
    rows = [_quality("float32", reference, reference, token_ids)]
    for name, where, weights in _measured(directory, formats, files):
        logits = text_logits(load(where, weights, kernels), token_ids)
        rows.append(_quality(name, reference, logits, token_ids))
    return rows


def _measured(
    directory: Path, formats: Sequence[str], files: Mapping[str, Path]
) -> Iterator[tuple[str, Path, str]]:
    """The name of each row, and what `load` takes."""
    yield from ((weights, directory, weights) for weights in formats)
    for name, described in files.items():
        for rounding in ("", f"+{INT16}"):
            yield f"{name}{rounding}", described, f"auto{rounding}"


def _quality(weights: str, reference: Tensor, logits: Tensor, token_ids: Sequence[int]) -> Quality:
    return Quality(
        weights=weights,
        perplexity=perplexity(logits, torch.tensor(token_ids)),
        agreement=compare(reference, logits),
    )


def _show(rows: Sequence[Quality], num_tokens: int) -> None:
    table = Table("weights", title=f"Quality on {num_tokens} tokens of {TEXT.name}")
    for heading in ("perplexity", "KL mean", "KL p99", "same best token"):
        table.add_column(heading, justify="right")
    for row in rows:
        found = row.agreement
        kls = (f"{found.kl_mean:.2e}", f"{found.kl_p99:.2e}")
        table.add_row(row.weights, f"{row.perplexity:.3f}", *kls, f"{found.top1:.2%}")
    Console(highlight=False).print(table)


def main(
    model: Annotated[str, typer.Option(help="As `warren worker` takes it.")] = "smollm2",
    formats: Annotated[
        list[str], typer.Option("--format", help="Beside float32. Repeatable.")
    ] = list(FORMATS),  # noqa: B006 (typer copies it)
    files: Annotated[
        list[Path], typer.Option("--gguf", help="A GGUF file of the model. Repeatable.")
    ] = [],  # noqa: B006
    kernels: Annotated[str, typer.Option(help="As `warren worker` takes it.")] = "auto",
    out: Out = RESULTS,
) -> None:
    directory = store.resolve(model)
    token_ids = fixed_text(directory)
    described = {file.stem: store.resolve(str(file)) for file in files}
    for name, other in described.items():
        if fixed_text(other) != token_ids:
            raise typer.BadParameter(f"{name}.gguf divides the text into other tokens than {model}")
    rows = qualities(directory, token_ids, formats, kernels, described)
    _show(rows, len(token_ids))
    content = {
        **describe([]),
        "model": store.served_name(model),
        "kernels": kernels,
        "text": TEXT.name,
        "num_tokens": len(token_ids),
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    write_json(out / "quality.json", content)


if __name__ == "__main__":
    typer.run(main)
