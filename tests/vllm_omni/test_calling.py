"""`VideoAttention` against the reference in float64, with the metadata that models of vLLM-Omni pass."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import masks
from blocksparse_flash import BlockLayout, reference
from blocksparse_flash.diffusers import top_blocks, top_p
from blocksparse_flash.vllm_omni import VideoAttention, calling, select_blocks
from tests.support.closeness import assert_as_accurate
from tests.support.vllm_omni_stand_in import AttentionMetadata, VideoTokenLayout, VideoTokenSpan

BATCH, LENGTH, HEADS, HEAD_DIM = 2, 150, 4, 16
GRID, TILE = (4, 4, 6), (2, 2, 3)
N_VIDEO = math.prod(GRID)
ORDER = masks.tile_order(GRID, tile=TILE)
SLIDING = masks.sliding_tile(GRID, kernel=(2, 4, 3), tile=TILE, order=ORDER, block_size=16)
NO_KEYS = {"attn_mask": torch.zeros(BATCH, LENGTH, dtype=torch.bool)}


def sliding(grid: tuple[int, int, int], sparsity: float) -> tuple[BlockLayout, Tensor]:
    assert grid == GRID and sparsity == 0.8
    return SLIDING, ORDER


def tensors(batch: int = BATCH, kv_len: int = LENGTH, kv_heads: int = HEADS // 2) -> list[Tensor]:
    """Query, key and value (batch, tokens, heads, head_dim), with grouped heads."""
    generator = torch.Generator().manual_seed(kv_len)
    shapes = (LENGTH, HEADS), (kv_len, kv_heads), (kv_len, kv_heads)
    return [torch.randn(batch, *shape, HEAD_DIM, generator=generator) for shape in shapes]


def with_gradients(function: Any, qkv: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Output and gradients (batch, heads, tokens, head_dim) of a function of such tensors."""
    own = [tensor.to(dtype).transpose(1, 2).requires_grad_() for tensor in qkv]
    out = function(*own)
    return [out, *torch.autograd.grad(out, own, torch.linspace(-1, 1, out.numel(), dtype=dtype).view(out.shape))]


def assert_attends(attend: VideoAttention, metadata: Any, qkv: list[Tensor], pairs: Any = None, **options: Any) -> None:
    """`attend` is attention of these pairs, a mask or a function of q and k; options as those of the reference."""
    mask = pairs(*(tensor.transpose(1, 2) for tensor in qkv[:2])) if callable(pairs) else pairs

    def ours(*heads_first: Tensor) -> Tensor:
        return attend(*(tensor.transpose(1, 2) for tensor in heads_first), metadata).transpose(1, 2)

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return reference.attention(q, k, v, mask, scale=attend.scale, **options)[0]

    results = (with_gradients(ours, qkv, torch.float32), *(with_gradients(plain, qkv, d) for d in DTYPES))
    for name, *each in zip(("out", "dq", "dk", "dv"), *results, strict=True):
        assert_as_accurate(*each, name=name)


DTYPES = (torch.float32, torch.float64)
KEYS = torch.rand(BATCH, LENGTH, generator=torch.Generator().manual_seed(0)) > 0.3
PAIRS = torch.rand(BATCH, HEADS, LENGTH, LENGTH, generator=torch.Generator().manual_seed(1)) > 0.5
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
VALID = torch.arange(LENGTH) < 90
# rows beyond the last boundary have no keys
CU = torch.tensor([0, 40, 40, 100, 140], dtype=torch.int32)
DOCUMENT = torch.bucketize(torch.arange(LENGTH), CU[1:], right=True)
PACKED = (DOCUMENT[:, None] == DOCUMENT) & (DOCUMENT < 4)
CU_SEQLENS = {"cu_seqlens_q": CU, "cu_seqlens_k": CU, "max_seqlen_q": 60, "max_seqlen_k": 60}


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("fields", "pairs"),
    [
        ({}, torch.ones(LENGTH, LENGTH, dtype=torch.bool)),
        ({"attn_mask": KEYS}, KEYS[:, None, None]),
        ({"attn_mask": KEYS * 2}, KEYS[:, None, None]),
        (NO_KEYS, NO_KEYS["attn_mask"][:, None, None]),
        ({"attn_mask": KEYS[:, None, None]}, KEYS[:, None, None]),
        ({"attn_mask": PAIRS}, PAIRS),
        ({"attn_mask": PAIRS[..., :1]}, PAIRS[..., :1]),
        ({"attn_mask": PAIRS[:1, :1], "full_attn_spans": [[(0, 9)]] * BATCH}, PAIRS[:1, :1]),
        ({"extra": {"valid_kv_length": 90}}, VALID),
        ({"extra": {"valid_kv_length": 90}, "attn_mask": KEYS}, KEYS[:, None, None] & VALID),
        ({"extra": {"valid_kv_length": 90}, "attn_mask": PAIRS}, PAIRS & VALID),
        ({"extra": CU_SEQLENS}, PACKED),
        ({"extra": {**CU_SEQLENS, "valid_kv_length": 90}}, PACKED & VALID),
        ({"extra": CU_SEQLENS, "attn_mask": KEYS[:1]}, PACKED & KEYS[0]),
        ({"extra": {"laser_input_scale": 2.0, "kv_cache_dtype": "float"}}, torch.ones(1, LENGTH, dtype=torch.bool)),
    ],
    ids=[
        *("dense", "keys", "integers", "no keys", "keys of pairs", "pairs", "queries", "shared pairs", "valid"),
        *("valid keys", "valid pairs", "packed", "packed valid", "packed keys", "other extra"),
    ],
)  # fmt: skip
def test_attention_without_video(fields: dict[str, Any], pairs: Tensor, causal: bool) -> None:
    qkv = tensors(batch=1 if "cu_seqlens_q" in fields.get("extra", {}) else BATCH)
    pairs = pairs & CAUSAL if causal else pairs
    assert_attends(VideoAttention(causal=causal, scale=0.5), AttentionMetadata(**fields), qkv, pairs)


def test_a_float_mask_is_added_to_the_scores() -> None:
    bias = torch.randn(1, HEADS, LENGTH, LENGTH, generator=torch.Generator().manual_seed(2))
    bias = bias.masked_fill(~PAIRS[:1], -torch.inf)
    assert_attends(VideoAttention(), AttentionMetadata(attn_mask=bias), tensors(), pair_bias=bias)


def test_cross_attention_needs_no_metadata() -> None:
    assert_attends(VideoAttention(), None, tensors(kv_len=77))


def test_joint_tensors_are_joined_already() -> None:
    """Ulysses of vLLM-Omni joins them to query, key and value, and leaves them in the metadata."""
    parts = {f"joint_{name}": torch.full((BATCH, 5, 2, HEAD_DIM), torch.nan) for name in ("query", "key", "value")}
    metadata = AttentionMetadata(**parts, joint_attn_mask=KEYS[:, :5], attn_mask=KEYS, joint_strategy="rear")
    assert_attends(VideoAttention(), metadata, tensors(), KEYS[:, None, None])


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_packed_sequences_may_have_other_keys(causal: bool) -> None:
    cu_k = torch.tensor([0, 10, 30, 50, 77], dtype=torch.int32)
    document = torch.bucketize(torch.arange(77), cu_k[1:], right=True)
    pairs = DOCUMENT[:, None] == document
    if causal:
        before_end = F.pad(CU, (0, 1), value=LENGTH)[DOCUMENT + 1] - torch.arange(LENGTH)
        pairs &= cu_k[document + 1] - torch.arange(77) >= before_end[:, None]
    metadata = AttentionMetadata(extra={"cu_seqlens_q": CU, "cu_seqlens_k": cu_k})
    assert_attends(VideoAttention(causal=causal), metadata, tensors(batch=1, kv_len=77), pairs)


# ---- video ----


def video(begin: int = 13, used: int | None = None) -> VideoTokenLayout:
    return VideoTokenLayout(prefix_len=begin, latent_grid=GRID, used_len=used)


def among_others(pairs: Tensor, begin: int, used: int) -> Tensor:
    """Pairs of the video (..., tokens, tokens) in the order of ORDER, as pairs of the sequence; others are dense."""
    mask = torch.zeros(*pairs.shape[:-2], LENGTH, LENGTH, dtype=torch.bool)
    mask[..., :used, :used] = True
    places, own = ORDER.argsort(), slice(begin, begin + N_VIDEO)
    mask[..., own, own] = pairs[..., places, :][..., places]
    return mask


REFERENCE = VideoTokenSpan(2, (1, 2, 3), "reference")
LAYOUTS = {
    "prefix and padding": (video(), 13, 13 + N_VIDEO),
    "no prefix": (video(0), 0, N_VIDEO),
    "no padding": (video(LENGTH - N_VIDEO), LENGTH - N_VIDEO, LENGTH),
    "audio after the video": (video(13, 130), 13, 130),
    "spans": (
        VideoTokenLayout(used_len=140, video_spans=(REFERENCE, VideoTokenSpan(20, GRID, "target"))), 20, 140
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LAYOUTS)
def test_a_sliding_tile_with_text(case: str) -> None:
    layout, begin, used = LAYOUTS[case]
    mask = (torch.arange(LENGTH) < used).expand(BATCH, -1)
    metadata = AttentionMetadata(attn_mask=mask, video_layout=layout)
    pairs = among_others(SLIDING.to_dense()[0, 0], begin, used)
    assert_attends(VideoAttention(sliding, scale=0.5), metadata, tensors(), pairs)


@pytest.mark.parametrize("case", LAYOUTS)
def test_dense_attention_to_a_video_leaves_out_padding(case: str) -> None:
    layout, _, used = LAYOUTS[case]
    is_used = torch.arange(LENGTH) < used
    metadata = AttentionMetadata(video_layout=layout, extra={"valid_kv_length": used, "max_seqlen_q": used})
    assert_attends(VideoAttention(sliding, sparsity=0), metadata, tensors(), is_used[:, None] & is_used)


@pytest.mark.parametrize(
    "choice", [top_blocks(0.5, block_size=16), top_p(0.5, block_size=16)], ids=["top_blocks", "top_p"]
)
def test_blocks_are_selected_among_the_tokens_of_the_video(choice: Any) -> None:
    def selected(q: Tensor, k: Tensor) -> Tensor:
        # the video in the given order, then text, as the selection gets them
        order = torch.cat([13 + ORDER, torch.arange(13)])
        own = choice(q[:, :, order[:N_VIDEO]], k[:, :, order]).to_dense()[..., :N_VIDEO]
        assert 0.3 < own.float().mean() < 0.7
        return among_others(own, 13, 13 + N_VIDEO)

    attend = VideoAttention(lambda grid, sparsity: (choice, ORDER))
    assert_attends(attend, AttentionMetadata(video_layout=video()), tensors(), selected)


def test_select_blocks_keeps_the_rest_of_the_sparsity() -> None:
    choose, order = select_blocks((8, 8, 8), 0.75)
    assert torch.equal(order, masks.tile_order((8, 8, 8), tile=4))
    q, k = torch.randn(2, 1, 2, 512, 16)
    layout = choose(q, k)
    assert layout.density == 0.25 and layout.block_size == (64, 64)


def test_padding_may_hold_nan() -> None:
    qkv = tensors()
    for tensor in qkv:
        tensor[:, 13 + N_VIDEO :] = torch.nan
    out = VideoAttention(sliding)(*qkv, AttentionMetadata(video_layout=video()))
    assert out[:, : 13 + N_VIDEO].isfinite().all() and not out[:, 13 + N_VIDEO :].any()


def test_layers_share_the_layout_of_a_grid_and_prompt() -> None:
    calls = []

    def counted(grid: tuple[int, int, int], sparsity: float) -> tuple[BlockLayout, Tensor]:
        calls.append(grid)
        return SLIDING, ORDER

    for begin in (13, 13, 14):
        VideoAttention(counted)(*tensors(), AttentionMetadata(video_layout=video(begin)))
    # no more than the last prompts are kept
    assert len(calls) == 2 and calling._use_of.cache_info().maxsize == 8


# ---- refusals ----


PADDED = video().prefix_len + N_VIDEO
WRONG = [
    ({"full_attn_spans": [[(0, 9)]]}, {}, "full_attn_spans must be None"),
    ({"query_ranges": (), "attn_mask": KEYS}, {}, "query_ranges must be None"),
    ({"packed_padding": (), "attn_mask": PAIRS}, {}, "packed_padding must be None"),
    ({"joint_attn_mask": KEYS}, {}, "joint_attn_mask must be a part of attn_mask"),
    ({"extra": {"kv_cache_dtype": "fp8"}}, {}, "kv_cache_dtype.*got 'fp8'"),
    ({"extra": {"valid_kv_length": LENGTH + 1}}, {}, f"valid_kv_length.*from 1 to {LENGTH}, got {LENGTH + 1}"),
    ({"extra": {"valid_kv_length": torch.tensor(3)}}, {}, "valid_kv_length.*must be an int"),
    ({"extra": {"cu_seqlens_q": CU}}, {}, "cu_seqlens_q.*must both be given"),
    ({"extra": CU_SEQLENS}, {}, "in batch 1, got .* batch 2"),
    ({"attn_mask": KEYS[:, 1:]}, {}, r"attn_mask must be .*got torch.bool \(2, 149\)"),
    ({"attn_mask": KEYS.float()}, {}, "attn_mask must be .*got torch.float32"),
    ({"attn_mask": PAIRS[0]}, {}, r"attn_mask must be .*\(4, 150, 150\)"),
    ({"attn_mask": PAIRS[:, :2]}, {}, r"attn_mask must be .*\(2, 2, 150, 150\)"),
    ({"attn_mask": PAIRS.long()}, {}, "attn_mask must be .*got torch.int64"),
    ({"attn_mask": PAIRS, "video_layout": video()}, {}, "attn_mask with video_layout must be bool"),
    ({"video_layout": video()}, {"causal": True}, "causal with this video_layout must be False"),
    ({"video_layout": video(60)}, {}, "video_layout of 156 tokens must fit"),
    ({"video_layout": video(13, 80)}, {}, "within used_len=80"),
    ({"video_layout": VideoTokenLayout(used_len=9)}, {}, "video_layout must have prefix_len"),
    ({"video_layout": VideoTokenLayout(used_len=99, video_spans=(REFERENCE,))}, {}, "one span of role 'target'"),
    (
        {"video_layout": video(), "extra": {"valid_kv_length": PADDED + 1}},
        {},
        f"valid_kv_length.* must be {PADDED}, got {PADDED + 1}",
    ),
    ({"attn_mask": KEYS.float(), "video_layout": video()}, {}, "attn_mask with video_layout must be bool.*float32"),
    ({"video_layout": video(-1)}, {}, "from token -1"),
    ({"video_layout": video(), "extra": {"max_seqlen_k": 9}}, {}, f"max_seqlen_k.*must be {PADDED}, got 9"),
    ({"video_layout": video(), "extra": {"cu_seqlens_q": CU}}, {}, f"max_seqlen_q.*must be {PADDED}, got None"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "options", "message"), WRONG, ids=[message for *_, message in WRONG])
def test_what_it_lacks_is_refused_by_name(fields: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VideoAttention(sliding, **options)(*tensors(), AttentionMetadata(**fields))


@dataclasses.dataclass
class Unhashable:
    """A pattern with settings, without frozen=True."""

    def __call__(self, grid: tuple[int, int, int], sparsity: float) -> tuple[BlockLayout, Tensor]:
        return sliding(grid, sparsity)


def test_what_is_no_tensor_is_refused() -> None:
    key = torch.zeros(1, 8, 2, 16)
    with pytest.raises(TypeError, match=r"query must be a torch\.Tensor, got NoneType"):
        VideoAttention()(None, key, key)  # type: ignore[arg-type]


def test_wrong_shapes_are_refused() -> None:
    query, key, value = tensors(kv_len=77)
    with pytest.raises(ValueError, match=r"key must be \(batch, tokens, heads, head_dim\), got \(77, 2, 16\)"):
        VideoAttention()(query, key[0], value)
    with pytest.raises(ValueError, match="causal must be False for 150 queries and 77 keys"):
        VideoAttention(causal=True)(query, key, value)
    with pytest.raises(ValueError, match="got 150 queries and 77 keys"):
        VideoAttention(sliding)(query, key, value, AttentionMetadata(video_layout=VideoTokenLayout(0, (1, 2, 3))))


@pytest.mark.parametrize(
    ("error", "wrong", "message"),
    [
        (ValueError, {"pattern": SLIDING}, "pattern must be a function"),
        (ValueError, {"pattern": Unhashable()}, r"pattern must be hashable.*@dataclass\(frozen=True\)"),
        (ValueError, {"sparsity": 1.0}, "sparsity must be .*got 1.0"),
        (ValueError, {"sparsity": "0.8"}, "sparsity must be .*got '0.8'"),
        (ValueError, {"backend": "cudnn"}, "backend must be one of .*got 'cudnn'"),
        (ValueError, {"sparsity": False}, "sparsity must be a number .*got False"),
        (TypeError, {"causal": "no"}, "causal must be True or False, got 'no'"),
        (TypeError, {"scale": "x"}, "scale must be .*got 'x'"),
    ],
)
def test_wrong_options_are_refused(error: type[Exception], wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(error, match=message):
        VideoAttention(**wrong)


@pytest.mark.parametrize(
    ("result", "error", "message"),
    [
        ((SLIDING, None), ValueError, r"48 tokens of the grid \(2, 4, 6\), got 96"),
        # the rest of the video would be text
        ((masks.local(20, window=3), None), ValueError, r"48 tokens of the grid \(2, 4, 6\), got 20"),
        ((None, torch.arange(20)), ValueError, r"48 tokens of the grid \(2, 4, 6\), got 20"),
        (("sliding_tile", None), TypeError, "layout must be a BlockLayout.*got str"),
        (SLIDING, TypeError, "pattern must return a layout and an order.*got BlockLayout"),
        ((top_blocks(0.5), None), ValueError, "order is required"),
    ],
    ids=["larger grid", "smaller grid", "smaller order", "no layout", "no pair", "no order"],
)
def test_wrong_results_of_a_pattern_are_refused(result: Any, error: type[Exception], message: str) -> None:
    metadata = AttentionMetadata(video_layout=VideoTokenLayout(0, (2, 4, 6)))
    with pytest.raises(error, match=message):
        VideoAttention(lambda grid, sparsity: result)(*tensors(), metadata)


@pytest.mark.parametrize("fields", [{}, {"extra": CU_SEQLENS}, {"video_layout": video()}], ids=str)
@pytest.mark.parametrize("sparsity", [0, 0.8])
def test_a_backend_is_used_or_refused(fields: dict[str, Any], sparsity: float) -> None:
    with pytest.raises(ValueError, match='backend="hopper"'):
        VideoAttention(sliding, backend="hopper", sparsity=sparsity)(*tensors(1), AttentionMetadata(**fields))


def test_every_field_of_the_metadata_is_known() -> None:
    import blocksparse_flash.vllm_omni as package

    assert {field.name for field in dataclasses.fields(AttentionMetadata)} == package.FIELDS


@pytest.mark.parametrize(
    ("fields", "batch"),
    [({"video_layout": video()}, BATCH), ({"attn_mask": KEYS}, BATCH), ({"extra": CU_SEQLENS}, 1)],
    ids=["video", "keys", "packed"],
)
def test_compiled(fields: dict[str, Any], batch: int) -> None:
    attend, metadata = VideoAttention(sliding), AttentionMetadata(**fields)
    compiled = torch.compile(lambda *qkv: attend(*qkv, metadata) + 0.0, backend="eager")
    with torch.no_grad():
        assert torch.equal(compiled(*tensors(batch)), attend(*tensors(batch), metadata))
