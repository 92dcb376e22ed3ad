"""4-bit matrices of AWQ checkpoints (Lin et al., arXiv:2306.00978), repacked.

A checkpoint's word holds 8 outputs of an input. Here a word holds 8 inputs of an output, in the
order in which a matrix instruction takes them from a thread's registers. Inputs are grouped in
chunks of 128, and a chunk has 16 words for each output. Word 4 t + b holds the inputs
32 b + 8 j + 2 t + s, for j in 0..3 and s in 0..1, in nibble 4 s + j, counted from the lowest. A
thread reads the four words of a value of t at once.
"""

import torch
from torch import Tensor

from kernels.shapes import check_shape

NIBBLES = 8
CHUNK_INPUTS = 128
CHUNK_WORDS = CHUNK_INPUTS // NIBBLES
_CHECKPOINT_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output that each nibble of a checkpoint's word belongs to, from the lowest nibble."""


def repack_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Convert a checkpoint's tensors to the tensors of `kernels.reference.awq_linear`.

    ``qweight`` is [inputs, outputs / 8] int32, ``qzeros`` [num_groups, outputs / 8] int32,
    ``scales`` [num_groups, outputs]. Returns ``qweight`` [inputs / 128, outputs, 16] int32,
    ``scales`` unchanged and ``zeros`` [num_groups, outputs] uint8. Raises `ValueError` if shapes do
    not match or the number of inputs is not a multiple of 128.
    """
    check_stored(qweight, qzeros, scales)
    _check_groups(qweight.shape[0], scales.shape[0])
    return pack_awq(unpack_awq(qweight)), scales, unpack_awq(qzeros)


def pack_awq(codes: Tensor) -> Tensor:
    """The words of codes below 16, [inputs, outputs] uint8: [inputs / 128, outputs, 16] int32."""
    outputs = codes.shape[1]
    # Inputs as [chunks, b, j, t, s].
    chunks = codes.view(-1, 4, 4, 4, 2, outputs)
    words = torch.zeros(chunks.shape[0], outputs, 4, 4, dtype=torch.int32, device=codes.device)
    for place in range(NIBBLES):
        nibbles = chunks[:, :, place % 4, :, place // 4]
        words |= nibbles.permute(0, 3, 2, 1).int() << 4 * place
    return words.flatten(2)


def can_be_packed(inputs: int, num_groups: int) -> bool:
    """Whether a matrix with so many inputs in so many groups has a layout of words."""
    try:
        _check_groups(inputs, num_groups)
    except ValueError:
        return False
    return True


def check_stored(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> None:
    """Raise `ValueError` unless the shapes of a checkpoint's tensors match, and groups of inputs
    have equal sizes."""
    inputs, outputs, num_groups = qweight.shape[0], qweight.shape[1] * NIBBLES, scales.shape[0]
    check_shape("scales", scales, (None, outputs))
    check_shape("qzeros", qzeros, (num_groups, outputs // NIBBLES))
    _group_size(inputs, num_groups)


def dequantize_awq(qweight: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """Return [inputs, outputs] float32: (nibble - zero) * scale."""
    outputs = qweight.shape[1]
    shifts = torch.arange(0, 4 * NIBBLES, 4, dtype=torch.int32, device=qweight.device)
    # [chunks, outputs, t, b, s, j], then [chunks, b, j, t, s, outputs].
    nibbles = (qweight.unsqueeze(-1) >> shifts & 15).view(-1, outputs, 4, 4, 2, 4)
    inputs = nibbles.permute(0, 3, 5, 2, 4, 1)
    grouped = inputs.reshape(scales.shape[0], -1, outputs)
    weight = (grouped - zeros.unsqueeze(1)).float() * scales.unsqueeze(1).float()
    return weight.view(-1, outputs)


def check_awq(
    hidden: Tensor,
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor,
    bias: Tensor | None,
    group_size: int,
) -> None:
    """Raise `ValueError` if shapes do not match, or the inputs cannot be grouped like this."""
    inputs, outputs = hidden.shape[-1], qweight.shape[1]
    check_shape("qweight", qweight, (inputs // CHUNK_INPUTS, None, CHUNK_WORDS))
    check_shape("scales", scales, (inputs // group_size, outputs))
    check_shape("zeros", zeros, scales.shape)
    _check_groups(inputs, scales.shape[0])
    if bias is not None:
        check_shape("bias", bias, (outputs,))


def _check_groups(inputs: int, num_groups: int) -> None:
    """Check that a chunk consists of whole groups, or a group of whole chunks."""
    if inputs % CHUNK_INPUTS:
        raise ValueError(f"{inputs} inputs are not a multiple of {CHUNK_INPUTS}")
    size = _group_size(inputs, num_groups)
    if size % CHUNK_INPUTS and size not in (16, 32, 64):
        raise ValueError(f"{inputs} inputs cannot be in {num_groups} groups of equal size")


def _group_size(inputs: int, num_groups: int) -> int:
    if not num_groups or inputs % num_groups:
        raise ValueError(f"{inputs} inputs cannot be in {num_groups} groups of equal size")
    return inputs // num_groups


def unpack_awq(packed: Tensor) -> Tensor:
    """Unpack a checkpoint's words, [rows, words], to [rows, 8 * words] uint8."""
    unpacked = torch.empty(*packed.shape, NIBBLES, dtype=torch.uint8, device=packed.device)
    for place, output in enumerate(_CHECKPOINT_ORDER):
        unpacked[..., output] = packed >> 4 * place & 15
    return unpacked.flatten(1)
