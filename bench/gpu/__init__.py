"""Measures kernels, steps, the engine and peers on a GPU."""
