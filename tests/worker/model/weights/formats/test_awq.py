"""AutoAWQ's checkpoints, compared with a direct reading of their layout."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kernels.native.library import library
from kernels.native.packed import pack
from kernels.providers import load_ops
from shared.errors import StartupError
from tests.kernels.native.test_linear import linear, rows, tolerance
from tests.support.models.batches import batch, share
from tests.support.models.numerics import assert_close
from tests.support.models.tiny import native_spec, reference_logits, write_tiny_model
from worker.checkpoints.checkpoint import Checkpoint
from worker.model.config import read_json_config
from worker.model.decoders.stack import StackDecoder
from worker.model.forward import Decoder
from worker.model.inputs import build_inputs
from worker.model.kv_cache import BlockShape, KVCache
from worker.model.loading import load_decoder, rehearse, weight_room
from worker.model.weights.formats.awq import Awq
from worker.model.weights.formats.device_weights import AwqWeight
from worker.model.weights.formats.interface import Target
from worker.model.weights.layers import MlpWeights, WeightReader, read_weights

PROMPT = [(7 * i) % 131 for i in range(20)]
GROUP = 16
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "tie_word_embeddings": False,
}
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
CPU = torch.device("cpu")


def packed(values: Tensor) -> Tensor:
    """[rows, outputs] of 0 .. 15 as AutoAWQ packs them: word by word, nibble by nibble."""
    rows, outputs = values.shape
    words = torch.zeros(rows, outputs // 8, dtype=torch.int64)
    for nibble, output in enumerate(ORDER):
        words |= values[:, output::8].long() << (4 * nibble)
    return torch.where(words < 1 << 31, words, words - (1 << 32)).int()


def quantized(weight: Tensor, group: int) -> tuple[dict[str, Tensor], Tensor]:
    """A matrix [outputs, inputs] as AWQ's tensors, and its value after quantization."""
    outputs, inputs = weight.shape
    groups = weight.t().reshape(inputs // group, group, outputs)
    least, most = groups.aminmax(dim=1)
    scales = ((most - least) / 15).half()
    zeros = (-least / scales.float()).round().clamp(0, 15)
    nibbles = (groups / scales.float()[:, None] + zeros[:, None]).round().clamp(0, 15)
    left = ((nibbles - zeros[:, None]) * scales.float()[:, None]).reshape(inputs, outputs).t()
    tensors = {
        "qweight": packed(nibbles.reshape(inputs, outputs)),
        "qzeros": packed(zeros),
        "scales": scales,
    }
    return tensors, left


def write_awq_model(directory: Path, group: int = GROUP, **config: Any) -> Any:
    """A tiny model with packed layers; returns transformers' model with the quantized values."""
    model = write_tiny_model(directory, "qwen2", **SIZES)
    tensors = load_file(directory / "model.safetensors")
    for name, parameter in model.named_parameters():
        if name.endswith("_proj.weight"):
            parts, left = quantized(tensors.pop(name), group)
            tensors |= {f"{name.removesuffix('weight')}{kind}": t for kind, t in parts.items()}
            parameter.data.copy_(left)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    path = directory / "config.json"
    declared = {"quant_method": "awq", "bits": 4, "version": "gemm", "group_size": group, **config}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": declared}))
    return model


def shorten(directory: Path, tensor: str, num_rows: int = 1) -> None:
    """Remove the first rows of a tensor of the second layer."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    name = f"model.layers.1.{tensor}"
    save_file(tensors | {name: tensors[name][num_rows:].contiguous()}, path)


def logits_of(decoder: Decoder) -> Tensor:
    """The logits of the prompt's last token."""
    block = BlockShape(decoder.num_layers, 8, decoder.num_kv_heads, decoder.head_dim, decoder.dtype)
    inputs = build_inputs(batch(share(PROMPT, range(3))), 8, decoder.device).forward
    with torch.inference_mode():
        return decoder.forward(inputs, KVCache.allocate(block, 3, decoder.device))


@pytest.mark.parametrize("kernels", ["native", "reference"])
def test_the_cpu_computes_what_is_left_of_the_weights(tmp_path: Path, kernels: str) -> None:
    model = write_awq_model(tmp_path)
    logits = logits_of(load_decoder(tmp_path, device=CPU, kernels=kernels, dtype="float32"))
    assert_close(logits, reference_logits(model, PROMPT)[-1:], 1e-5)


@pytest.mark.parametrize("group", [32, 128])
def test_groups_of_whole_blocks_stay_packed_on_the_cpu(tmp_path: Path, group: int) -> None:
    model = write_awq_model(tmp_path, group)

    decoder = load_decoder(tmp_path, device=CPU, kernels="native-int16")

    # Each product rounds its inputs to 16 bits.
    assert_close(logits_of(decoder), reference_logits(model, PROMPT)[-1:], 1e-3)
    assert decoder.traits.numerics == "fused integers"
    config, target = native_spec(read_json_config(tmp_path)), Target(torch.float32, CPU, "native")
    layer = read_weights(WeightReader(Checkpoint(tmp_path), config, Awq(), target)).layers[1]
    assert isinstance(layer.feed_forward, MlpWeights)
    down = layer.feed_forward.down.weight
    assert [part.format for part in down.native_rows()] == ["q5_0"]
    values = model.model.layers[1].mlp.down_proj.weight.detach()
    assert torch.equal(down.dense(torch.float32), values)
    hidden = rows(9, 256)
    product = linear(library(), hidden, pack(library(), down.native_rows()))
    assert_close(product, hidden.double() @ values.double().T, tolerance("q5_0"))


def test_the_memory_is_that_of_the_blocks(tmp_path: Path) -> None:
    model = write_awq_model(tmp_path, 128)
    source, target = Checkpoint(tmp_path), Target(torch.float32, CPU, "native")
    names = [name for name in source.names if name.endswith(".scales")]
    num_scales = sum(source.get(name).numel() for name in names)
    sizes = {name: one.numel() for name, one in model.named_parameters()}
    num_packed = sum(size for name, size in sizes.items() if name.endswith("_proj.weight"))
    others = 4 * (sum(sizes.values()) - num_packed + num_scales)
    assert Awq().num_bytes(source, target) == others + num_packed * 22 / 32


@pytest.mark.parametrize("group_size", [32, -1])
def test_groups_of_another_size_than_declared_are_refused_by_name(
    tmp_path: Path, group_size: int
) -> None:
    write_awq_model(tmp_path, group_size=group_size)
    message = r"q_proj\.weight cannot be unpacked: 128 inputs in 8 groups, config\.json says"
    for load in (rehearse, partial(load_decoder, device=CPU)):
        with pytest.raises(StartupError, match=message):
            load(tmp_path)


@pytest.mark.parametrize("group", [16, 32])
def test_a_scale_that_is_not_finite_is_refused_by_name(tmp_path: Path, group: int) -> None:
    write_awq_model(tmp_path, group)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.down_proj.scales"][-1, -1] = torch.inf
    save_file(tensors, path)
    with pytest.raises(StartupError, match=r"down_proj\.weight cannot be unpacked: .* infinite"):
        load_decoder(tmp_path, device=CPU)


def test_dtype_auto_is_that_of_the_tensors_that_are_not_packed(tmp_path: Path) -> None:
    write_awq_model(tmp_path)
    assert load_decoder(tmp_path, device=CPU).dtype == torch.float32


@pytest.mark.parametrize(("dtype", "itemsize"), [("float32", 4), ("bfloat16", 2)])
def test_the_memory_that_is_checked_is_that_of_the_unpacked_weights(
    tmp_path: Path, dtype: str, itemsize: int
) -> None:
    model = write_awq_model(tmp_path)
    config, checkpoint = read_json_config(tmp_path), Checkpoint(tmp_path)
    weights = sum(parameter.numel() for parameter in model.parameters())
    scales = sum(
        checkpoint.get(name).numel() for name in checkpoint.unread if name.endswith(".scales")
    )

    on_cpu = weight_room(config, checkpoint, CPU, dtype=dtype).needed

    assert on_cpu == itemsize * (weights + scales)
    packed = Awq().num_bytes(checkpoint, Target(getattr(torch, dtype), CPU, "triton"))
    assert packed < on_cpu / 1.5


@pytest.mark.parametrize("odd", [{"bits": 8}, {"version": "gemv"}, {"zero_point": False}])
def test_a_layout_of_another_kind_is_refused_by_what_it_says(
    tmp_path: Path, odd: dict[str, Any]
) -> None:
    write_awq_model(tmp_path, **odd)
    ((key, value),) = odd.items()
    with pytest.raises(StartupError, match=rf"quantized with awq \({key} {value}\)"):
        load_decoder(tmp_path, device=CPU)


def test_weights_that_are_packed_are_not_packed_again(tmp_path: Path) -> None:
    write_awq_model(tmp_path)
    with pytest.raises(StartupError, match="q4_0: the checkpoint is packed as AWQ"):
        load_decoder(tmp_path, device=CPU, weight_format="q4_0")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("qweight", r"down_proj.qweight has shape \(255, 16\), config.json says \(256, 16\)"),
        ("qzeros", r"down_proj.weight cannot be unpacked: qzeros has shape"),
    ],
)
def test_a_tensor_of_another_shape_is_named(tmp_path: Path, kind: str, message: str) -> None:
    write_awq_model(tmp_path)
    assert rehearse(tmp_path) == "natively"
    shorten(tmp_path, f"mlp.down_proj.{kind}")
    for load in (rehearse, partial(load_decoder, device=CPU)):
        with pytest.raises(StartupError, match=message):
            load(tmp_path)


def test_fused_matrices_in_different_numbers_of_groups_are_named(tmp_path: Path) -> None:
    write_awq_model(tmp_path)
    shorten(tmp_path, "self_attn.k_proj.qzeros")
    message = r"q_proj.qzeros and those .* shapes \(8, 16\), \(7, 8\), \(8, 8\)"
    with pytest.raises(StartupError, match=message):
        load_decoder(tmp_path, device=CPU)


def test_matrices_without_any_group_are_refused(tmp_path: Path) -> None:
    write_awq_model(tmp_path)
    for kind in ("qzeros", "scales"):
        shorten(tmp_path, f"mlp.down_proj.{kind}", num_rows=256 // GROUP)
    with pytest.raises(StartupError, match="256 inputs cannot be in 0 groups"):
        load_decoder(tmp_path, device=CPU)


def test_weights_that_stay_packed_give_the_same(tmp_path: Path) -> None:
    """As on a GPU, but with the reference op."""
    model = write_awq_model(tmp_path)
    config = native_spec(read_json_config(tmp_path))
    target = Target(torch.float32, CPU, "triton")
    weights = read_weights(WeightReader(Checkpoint(tmp_path), config, Awq(), target))

    logits = logits_of(StackDecoder(config, weights, load_ops(), 64))

    attention = weights.layers[0].attention
    assert attention is not None
    assert isinstance(attention.qkv.weight, AwqWeight)
    assert attention.qkv.weight.group_size == GROUP
    assert_close(logits, reference_logits(model, PROMPT)[-1:], 1e-5)


@pytest.mark.gpu
def test_a_gpu_gives_the_same(tmp_path: Path) -> None:
    model = write_awq_model(tmp_path)
    decoder = load_decoder(tmp_path, dtype="float16", device=torch.device("cuda"))
    assert_close(logits_of(decoder).cpu(), reference_logits(model, PROMPT)[-1:], 2e-2)
