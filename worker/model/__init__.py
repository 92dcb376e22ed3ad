"""Computes: the only importer of kernels."""
