"""The portable Triton kernels: sm80 and later, every option."""
