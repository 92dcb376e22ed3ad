"""The specification of every operation, in plain torch.

Each module has an operation, and in some cases the check of its arguments, which the other
providers also call. Code outside `kernels` gets operations from `kernels.providers.load_ops`.
"""
