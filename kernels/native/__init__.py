"""The CPU kernels in C++, compiled on first use and called through a C interface.

`library` loads them, `build` compiles them for the processor, and `decoder.PackedDecoder` runs a
whole step of a model whose matrices `packed.pack` has packed. `huge_pages` allocates its caches.
The modules named like an operation are reached through `kernels.providers.load_ops`.
"""
