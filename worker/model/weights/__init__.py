"""The weights of a decoder, read from a checkpoint into the layout of its kernels.

`layers` reads them; `matrices`, `awq` and `gguf` are the formats.
"""
