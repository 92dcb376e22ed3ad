"""The operations on NVIDIA GPUs, in Triton; `kernels.reference` has the ops that it lacks.

Importing this package imports Triton. Attention, projections, grouped and AWQ products and logits
choose splits, tiles and cuBLAS's algorithm by the batch for speed, so the last bits of a row depend
on what else is in the batch. With ``is_batch_invariant`` they use the same tile and the same order
of summation for every batch. The other ops sum a row in an order that depends only on its width,
and recurrences compute a sequence token by token, wherever a step ends.
tests/kernels/triton compares rows alone and in batches bit by bit, compiled if there is a GPU,
otherwise in Triton's interpreter.
"""

from triton import knobs

# Triton 3.9 warns unless it is set explicitly whether a product and a sum may be fused.
knobs.language.default_fp_fusion = True
