"""The weights of a decoder, read from a checkpoint into the layout of its kernels.

`layers` reads them, matrix by matrix as a `weight.Weight`, from a `sources.TensorSource` in one of
the `formats`.
"""
