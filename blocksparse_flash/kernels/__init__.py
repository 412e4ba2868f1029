"""Attention kernels, one folder per backend; they take tensors and the tensors of a plan."""
