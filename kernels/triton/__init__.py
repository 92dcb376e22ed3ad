"""The operations on NVIDIA GPUs, in Triton; ops that it lacks are those of `kernels.reference`.

Importing this imports Triton. Attention, projections, AWQ products and logits choose splits, tiles
and cuBLAS's algorithm by the batch, because that is faster: a row's last bits depend on what else
is in it. With ``is_batch_invariant`` they do not: one tile and one order of summation for every
batch. The other ops sum a row in an order that its width alone decides. tests/kernels/triton
compares rows alone and in company bit by bit, compiled if there is a GPU, else in Triton's
interpreter.
"""

from triton import knobs

# Triton 3.9 warns if nobody says whether a product and a sum may become one instruction.
knobs.language.default_fp_fusion = True
