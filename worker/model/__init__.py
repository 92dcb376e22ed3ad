"""Runs the model; the only package that imports kernels."""
