"""Triton kernels for sm80 and later."""
