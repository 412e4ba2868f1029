"""Tensors of other libraries that hold no data on the host are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from blocksparse_flash import BlockLayout, interop

# name of the argument -> a call with a tensor of this shape
READERS: dict[str, tuple[tuple[int, ...], Callable[[torch.Tensor], object]]] = {
    "startend_row_indices": ((1, 1, 9, 1), lambda it: interop.from_flashmask(it.int(), 9, causal=True)),
    "q_ranges": ((1, 2), lambda it: interop.from_magi(it.int(), [[0, 9]], [0], 9, 9)),
    "base_blockmask": ((1, 1, 1, 1), lambda it: interop.from_block_sparse_attention(it.bool(), [1], 9, 9)),
    "sparsity_layout": ((1, 2, 2), lambda it: interop.from_deepspeed(it, block=16)),
    "attention_mask": ((1, 1, 9, 9), interop.from_huggingface),
}


@pytest.mark.parametrize("name", READERS)
def test_tensors_on_the_meta_device_are_refused(name: str) -> None:
    """They ended in a NotImplementedError of PyTorch, "Cannot copy out of meta tensor"."""
    shape, read = READERS[name]
    assert isinstance(read(torch.zeros(shape)), BlockLayout)
    with pytest.raises(ValueError, match=f"{name} is on the meta device, which holds no data"):
        read(torch.zeros(shape, device="meta"))
