"""The operations of the model on tensors, each with a specification in plain torch.

`providers.load_ops` chooses their implementations, and `quantized` packs matrices.

transformers probes for a distribution of this name. The version below is lower than any that it
accepts, so that it does not mistake this package for that distribution. Nothing is imported here.
"""

__version__ = "0.0.0"
