"""The CPU kernels in C++, compiled on first use and called through a C interface."""
