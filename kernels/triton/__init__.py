"""The operations on NVIDIA GPUs, in Triton; ops that it lacks are those of `kernels.reference`.

Importing this imports Triton. A row's result depends on that row alone, to the last bit: no op sums
in an order that depends on what else is in the batch.
"""

from triton import knobs

# Triton 3.9 warns where nobody says whether a product and a sum may become one instruction.
knobs.language.default_fp_fusion = True
