"""Small cases, inputs and a plain attention for the tests of the attention benchmarks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from benchmarks.run import attention as benchmark
from benchmarks.run import patterns, sweeps
from blocksparse_flash import reference

N, HEADS, DIM = 512, 2, 16
CASES = list(sweeps.grid(N))


def inputs(length: int = N, batch: int = 1, *, tokens_first: bool = False) -> list[torch.Tensor]:
    """q, k, v in float32."""
    run = benchmark.Run(batch, HEADS * DIM, DIM, Path(), device="cpu")
    return [x.detach().float() for x in benchmark.inputs(run, length, tokens_first=tokens_first)[0]]


def mask_of(pattern: patterns.Pattern) -> torch.Tensor:
    """bool (length, length), pair by pair from the blocks."""
    blocks = np.kron(pattern.blocks, np.ones((pattern.block_size,) * 2, dtype=bool))
    mask = torch.from_numpy(blocks)
    return mask & torch.ones_like(mask).tril() if pattern.causal else mask


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Attention by its definition, for tensors (..., length, head_dim); mask (queries, keys), True attends."""
    wide = (x.reshape(1, -1, *x.shape[-2:]) for x in (q, k, v))
    return reference.attention(*wide, mask)[0].reshape(*q.shape[:-1], v.shape[-1])
