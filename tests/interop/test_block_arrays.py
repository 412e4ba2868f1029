"""Tensors of other libraries that hold no data on the host are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import masks
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


HUGE = np.array([2**64 - 5], np.uint64)
HIDDEN = np.ma.array(np.ones((2, 2)), mask=np.eye(2, dtype=bool))
INDEX, COUNTS = torch.tensor([[[[1, 0], [1, 0]]]]), torch.tensor([[[2, 1]]])
CAUSAL = interop.to_flash_attention_4(masks.causal(256)).block_sparse_tensors


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: BlockLayout.from_dense(HIDDEN.astype(bool)), "mask must be a plain array, got a masked one"),
        (lambda: BlockLayout.from_block_mask(HIDDEN.astype(bool), 256, 256), "mask must be a plain array"),
        (lambda: interop.from_deepspeed(HIDDEN[None], block=16), "sparsity_layout must be a plain array"),
        (lambda: interop.from_magi(HIDDEN.astype(int), [[0, 1]], None, 2, 2), "q_ranges must be a plain array"),
        (lambda: BlockLayout.from_blocks(HUGE, [0], 256, 256), r"rows must be at most 2\*\*63 - 1, got 184467"),
        (lambda: interop.from_magi(np.append(HUGE, HUGE)[None], [[0, 1]], None, 2, 2), r"q_ranges must be at most 2"),
        (
            lambda: interop.from_block_sparse_attention(None, HUGE, 512, 512, streaming_info=[1, 1], causal=True),
            "head_mask_type must be at most 2",
        ),
        (
            lambda: interop.from_cudnn(INDEX.to(torch.uint64), 256, 256, q2k_block_nums=COUNTS, block_size=128),
            "q2k_block_index must be integers of at most 63 bits",
        ),
        (
            lambda: interop.from_flash_attention_4(CAUSAL, 256, 256, mask_mod=lambda b, h, q, kv: True),
            "mask_mod must return a bool tensor of one element, got True",
        ),
        (
            lambda: interop.from_flash_attention_4(CAUSAL._replace(block_size=64), 256, 256, block_size=128),
            r"block_size must be that of the tensors, \(64, 64\), or None, got \(128, 128\)",
        ),
        (
            lambda: interop.from_cudnn(torch.tensor(0), 128, 128, q2k_block_nums=torch.tensor(0)),
            r"q2k_block_index must have shape \(batch, heads, rows, width\), got \(\)",
        ),
        (
            lambda: interop.from_cudnn(INDEX.to_sparse(), 256, 256, q2k_block_nums=COUNTS, block_size=128),
            "q2k_block_index is a sparse tensor",
        ),
        (
            lambda: interop.from_flashinfer([0, 1], [0], 16, 16, block_size=16, mask=torch.ones(1, 16, 16).to_sparse()),
            "mask is a sparse tensor",
        ),
        (
            lambda: BlockLayout.from_predicate(lambda q, kv: (q >= kv).to("meta"), 16, 16),
            "the result of fn is on the meta device",
        ),
        (lambda: interop.from_torch_sparse(torch.eye(1).to_sparse_csr(), q_len=True), "q_len must be an int, got True"),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
def test_values_that_would_be_dropped_or_changed_are_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        call()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.int32])
def test_counts_of_any_integer_type_are_read(dtype: torch.dtype) -> None:
    layout = interop.from_cudnn(INDEX, 256, 256, q2k_block_nums=COUNTS.to(dtype), block_size=128)
    assert layout == BlockLayout.from_blocks([0, 0, 1], [0, 1, 1], 256, 256, block_size=128)
