"""Tensors in, tensors out: the operations of the model, each with a plain torch specification.

transformers probes for a distribution of this name; the version below every one it accepts keeps it
from taking this package for that one. Nothing is imported here.
"""

__version__ = "0.0.0"
