"""`VideoAttention` on a GPU in bfloat16, with boundaries and masks there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import masks
from blocksparse_flash import reference
from blocksparse_flash.vllm_omni import VideoAttention, select_blocks
from tests.support.closeness import assert_as_accurate
from tests.support.no_waiting import no_waiting
from tests.support.vllm_omni_stand_in import AttentionMetadata, VideoTokenLayout

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

DEVICE = "cuda"
GRID, N_TEXT, LENGTH = (8, 16, 16), 77, 2200
USED = N_TEXT + 2048
ORDER = masks.tile_order(GRID, tile=(4, 4, 4))
SLIDING = masks.sliding_tile(GRID, kernel=(4, 8, 8), tile=(4, 4, 4), order=ORDER, block_size=64)
KEYS = torch.rand(1, LENGTH, generator=torch.Generator().manual_seed(0)) > 0.3
CU = torch.tensor([0, 700, 1500, LENGTH], dtype=torch.int32)
DOCUMENT = torch.bucketize(torch.arange(LENGTH), CU[1:], right=True)
VIDEO: dict[str, Any] = {"video_layout": VideoTokenLayout(N_TEXT, GRID)}


def among_others(pairs: torch.Tensor) -> torch.Tensor:
    """Pairs (..., 2048, 2048) in the order of ORDER as pairs of the sequence, whose text attends and is attended to."""
    mask = torch.zeros(*pairs.shape[:-2], LENGTH, LENGTH, dtype=torch.bool)
    mask[..., :USED, :USED] = True
    places = ORDER.argsort()
    mask[..., N_TEXT:USED, N_TEXT:USED] = pairs[..., places, :][..., places]
    return mask


def selected(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    order = torch.cat([ORDER + N_TEXT, torch.arange(N_TEXT)]).to(DEVICE)
    choose, _ = select_blocks(GRID, 0.5)
    return among_others(choose(q[:, :, order[:2048]], k[:, :, order]).to_dense()[..., :2048].cpu())


CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "dense": ({}, None),
    "keys": ({"attn_mask": KEYS}, KEYS[:, None, None]),
    "pairs": ({"attn_mask": KEYS[:, None, None]}, KEYS[:, None, None]),
    "packed": ({"extra": {"cu_seqlens_q": CU, "cu_seqlens_k": CU}}, DOCUMENT[:, None] == DOCUMENT),
    "sliding_tile": (VIDEO, among_others(SLIDING.to_dense()[0, 0])),
    "select_blocks": (VIDEO, selected),
}


@pytest.mark.parametrize("case", CASES)
def test_as_accurate_as_the_reference(case: str) -> None:
    fields, pairs = CASES[case]
    # one tensor for both, as models give it
    extra = dict.fromkeys(fields.get("extra", {}), CU.to(DEVICE))
    mask = fields["attn_mask"].to(DEVICE) if "attn_mask" in fields else None
    metadata = AttentionMetadata(**fields | {"extra": extra, "attn_mask": mask})
    pattern = select_blocks if case == "select_blocks" else lambda grid, sparsity: (SLIDING, ORDER)
    generator = torch.Generator(device=DEVICE).manual_seed(0)
    query, key, value = (
        torch.randn(1, LENGTH, heads, 128, device=DEVICE, dtype=torch.bfloat16, generator=generator)
        for heads in (4, 2, 2)
    )
    attend = VideoAttention(pattern, sparsity=0.5)
    out = attend(query, key, value, metadata)
    with no_waiting():
        attend(query, key, value, metadata)
    qkv = [tensor.transpose(1, 2) for tensor in (query, key, value)]
    pairs = pairs(*qkv[:2]) if callable(pairs) else pairs
    pairs = None if pairs is None else pairs.to(DEVICE)
    plain, truth = (reference.attention(*(each.to(d) for each in qkv), pairs)[0] for d in (out.dtype, torch.float64))
    assert_as_accurate(out.transpose(1, 2), plain, truth, name=case)
