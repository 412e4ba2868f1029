"""interop/kv_lists.py, flex_attention.py and flash_attention_4.py, against FlexAttention and loops over lists."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask, flex_attention

import masks
from blocksparse_flash import BlockLayout, reference
from blocksparse_flash.interop import (
    BlockSparseTensors,
    from_flash_attention_4,
    from_flex_attention,
    to_flash_attention_4,
    to_flex_attention,
)
from blocksparse_flash.interop.kv_lists import mask_mod_of
from tests.support import cases
from tests.support.dense_masks import Problem, problems

MaskMod = Callable[..., torch.Tensor]


def mask_of_lists(tensors: Any, attends: Callable[[int, int, int, int], bool], q_len: int, kv_len: int) -> np.ndarray:
    """bool (batch, heads, q_len, kv_len): the mask of a kernel that iterates over FlashAttention-4's lists."""
    batch, heads, n_rows = tensors.mask_block_cnt.shape
    mask = np.zeros((batch, heads, q_len, kv_len), np.bool_)
    block_q, block_kv = tensors.block_size
    for b, h, row in np.ndindex(batch, heads, n_rows):
        lists = [
            (tensors.mask_block_cnt, tensors.mask_block_idx, True),
            (tensors.full_block_cnt, tensors.full_block_idx, False),
        ]
        for count, cols, is_partial in lists:
            for i in range(int(count[b, h, row])):
                col = int(cols[b, h, row, i])
                for q in range(row * block_q, min((row + 1) * block_q, q_len)):
                    for kv in range(col * block_kv, min((col + 1) * block_kv, kv_len)):
                        assert not mask[b, h, q, kv], "a pair is visited twice"
                        mask[b, h, q, kv] = attends(b, h, q, kv) if is_partial else True
    return mask


def as_flash_attention_4(block_mask: BlockMask) -> BlockSparseTensors:
    """The same lists with FlashAttention-4's field names."""
    return BlockSparseTensors(
        block_mask.kv_num_blocks,
        block_mask.kv_indices,
        block_mask.full_kv_num_blocks,
        block_mask.full_kv_indices,
        block_size=block_mask.BLOCK_SIZE,
    )


# --------------------------------------------------------------------------------------------------- FlexAttention


@given(problems())
def test_flex_attention_and_back(problem: Problem) -> None:
    assume(problem.q_len > 0 and problem.kv_len > 0)
    layout = BlockLayout.from_dense(problem.mask, block_size=problem.block_size)
    block_mask = to_flex_attention(layout)
    assert block_mask.BLOCK_SIZE == layout.block_size
    assert block_mask.seq_lengths == layout.shape[2:]
    assert from_flex_attention(block_mask) == layout
    # without torch.compile FlexAttention evaluates mask_mod for every pair
    every_pair = create_mask(block_mask.mask_mod, *layout.shape, device="cpu")
    torch.testing.assert_close(every_pair, torch.from_numpy(problem.mask))


@given(problems())
def test_a_block_mask_has_the_lists_that_create_block_mask_makes(problem: Problem) -> None:
    assume(problem.q_len > 0 and problem.kv_len > 0)
    layout = BlockLayout.from_dense(problem.mask, block_size=problem.block_size)
    ours = to_flex_attention(layout)
    theirs = create_block_mask(mask_mod_of(layout), *layout.shape, device="cpu", BLOCK_SIZE=layout.block_size)
    for name in ("kv", "full_kv", "q", "full_q"):
        counts, cols = (getattr(ours, f"{name}{end}") for end in ("_num_blocks", "_indices"))
        torch.testing.assert_close(counts, getattr(theirs, f"{name}_num_blocks"))
        meant = torch.arange(cols.shape[-1]) < counts[..., None]
        torch.testing.assert_close(cols[meant], getattr(theirs, f"{name}_indices")[meant])


MASK_MODS: dict[str, MaskMod] = {
    "causal": lambda b, h, q, kv: q >= kv,
    "window": lambda b, h, q, kv: (q - kv).abs() <= 20,
    "by head and batch": lambda b, h, q, kv: (q - kv).abs() <= 10 * h + 40 * b,
    "everything": lambda b, h, q, kv: b.new_ones((), dtype=torch.bool),
    "nothing": lambda b, h, q, kv: (q < 0) & (kv < 0),
}


@pytest.mark.parametrize("name", MASK_MODS)
@pytest.mark.parametrize("separate", [True, False])
@pytest.mark.parametrize(("lengths", "block_size"), [((300, 203), 128), ((113, 96), 16), ((100, 130), (48, 64))])
def test_from_flex_attention_is_its_mask(name: str, separate: bool, lengths: Any, block_size: Any) -> None:
    made = create_block_mask(
        MASK_MODS[name], 2, 3, *lengths, device="cpu", BLOCK_SIZE=block_size, separate_full_blocks=separate
    )
    expected = create_mask(MASK_MODS[name], 2, 3, *lengths, device="cpu")
    assert from_flex_attention(made) == BlockLayout.from_dense(expected, block_size=block_size)


def test_a_mask_mod_may_index_tensors_of_the_exact_length() -> None:
    """mask_mod gets existing, single positions, so that table[b][h] indexes instead of gathering."""
    documents = torch.arange(203) // 50
    starts = torch.tensor([[0, 10, 20], [30, 40, 50]])

    def mask_mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (documents[q] == documents[kv]) & (kv >= starts[b][h])

    found = from_flex_attention(create_block_mask(mask_mod, 2, 3, 203, 203, device="cpu", BLOCK_SIZE=64))
    expected = create_mask(mask_mod, 2, 3, 203, 203, device="cpu")
    assert found == BlockLayout.from_dense(expected, block_size=64)


def test_from_flex_attention_works_in_inference_mode() -> None:
    ends = torch.arange(150) // 40

    def mask_mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (ends[q] == ends[kv]) & (q >= kv)

    made = create_block_mask(mask_mod, None, None, 150, 150, device="cpu")
    expected = from_flex_attention(made)
    with torch.inference_mode():
        layout = from_flex_attention(made)
    assert layout == expected and not layout.indices.is_inference()


def test_from_flex_attention_evaluates_partial_blocks_only() -> None:
    asked = []

    def mask_mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        asked.append(1)
        return q >= kv

    lists = to_flex_attention(cases._causal(256, 256, 64))
    made = BlockMask.from_kv_blocks(
        lists.kv_num_blocks, lists.kv_indices, lists.full_kv_num_blocks, lists.full_kv_indices, 64, mask_mod
    )
    assert from_flex_attention(made) == cases._causal(256, 256, 64)
    assert len(asked) == 1
    empty = torch.zeros_like(lists.kv_num_blocks)
    made = BlockMask.from_kv_blocks(
        empty, lists.kv_indices, lists.full_kv_num_blocks, lists.full_kv_indices, 64, mask_mod
    )
    assert from_flex_attention(made).nnz == 6
    assert len(asked) == 1


def test_shared_lists_with_a_mask_mod_by_head() -> None:
    """FlexAttention evaluates mask_mod for every head even if the lists are shared; `heads` does the same here."""
    made = create_block_mask(
        lambda b, h, q, kv: (q - kv).abs() <= 30, None, None, 130, 130, device="cpu", BLOCK_SIZE=64
    )
    made.mask_mod = lambda b, h, q, kv: (q - kv).abs() <= 10 * h + 5 * b
    found = from_flex_attention(made, batch=2, heads=4)
    distance = (torch.arange(130)[:, None] - torch.arange(130)).abs()
    widest = 10 * torch.arange(4)[None, :, None, None] + 5 * torch.arange(2)[:, None, None, None]
    within = create_mask(lambda b, h, q, kv: (q // 64 - kv // 64).abs() <= 1, 1, 1, 130, 130, device="cpu")
    assert found == BlockLayout.from_dense((distance <= widest) & within, block_size=64)


@pytest.mark.parametrize("block_size", [512, (128, 384), (272, 1 << 30)])
def test_large_blocks_are_taken_apart(block_size: Any) -> None:
    def mask_mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q // 600 == kv // 600) | (kv < 3)

    sides = block_size if isinstance(block_size, tuple) else (block_size, block_size)
    if sides[1] == 1 << 30:
        # create_block_mask would pad to it
        rows = -(-1000 // sides[0])
        ones, zeros = torch.ones(1, 1, rows, dtype=torch.int32), torch.zeros(1, 1, rows, 1, dtype=torch.int32)
        made = BlockMask.from_kv_blocks(ones, zeros, BLOCK_SIZE=sides, mask_mod=mask_mod, seq_lengths=(1000, 1300))
    else:
        made = create_block_mask(mask_mod, 1, 1, 1000, 1300, device="cpu", BLOCK_SIZE=block_size)
    found = from_flex_attention(made)
    assert all(side <= 256 and whole % side == 0 for side, whole in zip(found.block_size, sides, strict=True))
    expected = create_mask(mask_mod, 1, 1, 1000, 1300, device="cpu")
    assert found == BlockLayout.from_dense(expected, block_size=found.block_size)


@pytest.mark.sweep(by=lambda case: {case.name.partition("-")[0]})
@pytest.mark.parametrize("case", cases.LAYOUTS, ids=str)
def test_flex_attention_computes_with_it_what_the_reference_does(case: cases.Case) -> None:
    layout = case.build()
    batch, heads, q_len, kv_len = max(layout.shape[0], 2), max(layout.shape[1], 4), layout.q_len, layout.kv_len
    random = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(batch, heads, length, 16, generator=random, dtype=torch.float64)
        for length in (q_len, kv_len, kv_len)
    )
    with warnings.catch_warnings():
        # the warning that it is slow without torch.compile
        warnings.simplefilter("ignore")
        found = flex_attention(q, k, v, block_mask=to_flex_attention(layout))
    expected, _ = reference.attention(q, k, v, layout.to_dense())
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_compiled_flex_attention_computes_with_it_what_the_reference_does() -> None:
    """Compiled kernels iterate over the lists and evaluate mask_mod for partial blocks only."""
    random = torch.Generator().manual_seed(0)
    mask = torch.rand(2, 2, 203, 150, generator=random) < 0.3
    mask[..., :128, 64:128], mask[..., 128:, :64] = True, False
    q, k, v = (torch.randn(2, 2, length, 16, generator=random) for length in (203, 150, 150))
    # with dynamic shapes PyTorch 2.13 fails on a CPU for any mask_mod that reads a tensor
    compiled = torch.compile(flex_attention, dynamic=False)
    with torch.no_grad():
        found = compiled(q, k, v, block_mask=to_flex_attention(BlockLayout.from_dense(mask, block_size=64)))
    expected, _ = reference.attention(q, k, v, mask)
    torch.testing.assert_close(found, expected)


# -------------------------------------------------------------------------------------------------- FlashAttention-4


@given(problems())
def test_flash_attention_4_and_back(problem: Problem) -> None:
    layout = BlockLayout.from_dense(problem.mask, block_size=problem.block_size)
    mask = to_flash_attention_4(layout)
    dense = problem.mask
    tensors, backward = mask.block_sparse_tensors, mask.block_sparse_tensors_bwd
    walked = mask_of_lists(tensors, lambda b, h, q, kv: bool(dense[b, h, q, kv]), problem.q_len, problem.kv_len)
    np.testing.assert_array_equal(walked, dense)
    turned = mask_of_lists(backward, lambda b, h, kv, q: bool(dense[b, h, q, kv]), problem.kv_len, problem.q_len)
    np.testing.assert_array_equal(turned, dense.swapaxes(2, 3))
    mask_mod = None if mask.aux_tensors is None else mask_mod_of(layout)
    assert from_flash_attention_4(tensors, problem.q_len, problem.kv_len, mask_mod=mask_mod) == layout


@given(problems())
def test_aux_tensors_say_which_pairs_attend(problem: Problem) -> None:
    """The formula of to_flash_attention_4's docstring, for every pair of every block."""
    layout = BlockLayout.from_dense(problem.mask, block_size=problem.block_size)
    mask = to_flash_attention_4(layout)
    assume(mask.aux_tensors is not None)
    assert mask.aux_tensors is not None
    table, bitmasks = (tensor.numpy() for tensor in mask.aux_tensors)
    block_q, block_kv = layout.block_size
    b, h, q, kv = np.ogrid[tuple(map(slice, layout.shape))]
    index = table[b, h, q // block_q, kv // block_kv]
    bits = bitmasks[index, q % block_q, kv % block_kv // 32] >> (kv % block_kv % 32) & 1
    np.testing.assert_array_equal(bits == 1, problem.mask)


@pytest.mark.parametrize("name", ["causal", "by head and batch"])
def test_from_flash_attention_4_is_the_mask_of_the_same_lists(name: str) -> None:
    made = create_block_mask(MASK_MODS[name], 2, 3, 300, 203, device="cpu", BLOCK_SIZE=(64, 128))
    tensors = as_flash_attention_4(made)
    expected = from_flex_attention(made)
    assert from_flash_attention_4(tensors, 300, 203, mask_mod=MASK_MODS[name]) == expected
    # any object with the fields, here without a block size
    plain = SimpleNamespace(**{key: value for key, value in tensors._asdict().items() if key.endswith(("cnt", "idx"))})
    assert from_flash_attention_4(plain, 300, 203, mask_mod=MASK_MODS[name], block_size=(64, 128)) == expected


def test_whole_blocks_need_no_mask_mod_though_ragged() -> None:
    layout = BlockLayout.from_blocks([0, 1, 2], [0, 2, 1], 300, 290, block_size=128)
    mask = to_flash_attention_4(layout)
    assert mask.aux_tensors is None
    assert int(mask.block_sparse_tensors.mask_block_cnt.sum()) == 0
    assert from_flash_attention_4(mask.block_sparse_tensors, 300, 290) == layout
    # FlexAttention's own rule: a ragged block is partial
    assert to_flex_attention(layout).kv_num_blocks.tolist() == [[[0, 1, 1]]]


def test_the_lists_of_a_million_tokens_are_compact() -> None:
    n_blocks = 1 << 13
    rows = np.repeat(np.arange(n_blocks), 2)
    cols = np.stack([np.zeros(n_blocks, np.int64), np.arange(n_blocks)], axis=1)
    cols[0] = [0, 1]
    layout = BlockLayout.from_blocks(rows, cols.reshape(-1), 1 << 20, 1 << 20, block_size=128)
    tensors = to_flash_attention_4(layout).block_sparse_tensors
    assert tensors.full_block_idx is not None
    assert tensors.full_block_idx.shape == (1, 1, n_blocks, 2)
    assert from_flash_attention_4(tensors, 1 << 20, 1 << 20) == layout


# ---------------------------------------------------------------------------------------------------------- refusals


def lists(**changes: Any) -> dict[str, Any]:
    """Keyword arguments of a good BlockMask of 2 x 2 blocks of 64, with changes."""
    return {
        "kv_num_blocks": torch.tensor([[[1, 1]]], dtype=torch.int32),
        "kv_indices": torch.tensor([[[[0, 0], [1, 0]]]], dtype=torch.int32),
        "full_kv_num_blocks": torch.tensor([[[0, 1]]], dtype=torch.int32),
        "full_kv_indices": torch.tensor([[[[0, 0], [0, 0]]]], dtype=torch.int32),
        "BLOCK_SIZE": 64,
        "mask_mod": lambda b, h, q, kv: q >= kv,
        "compute_q_blocks": False,
    } | changes


def int32(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"BLOCK_SIZE": 100}, "block_size must be a multiple of 16 on each side, got"),
        ({"BLOCK_SIZE": (64, 8)}, "block_size must be a multiple of 16"),
        ({"seq_lengths": (300, 128)}, "kv_num_blocks, kv_indices must have 5 rows for 300 queries"),
        ({"kv_num_blocks": int32([[[3, 1]]])}, r"kv_num_blocks, kv_indices counts must be in 0 .. \(width \+ 1\) - 1"),
        (
            {"kv_indices": int32([[[[0, 0], [2, 0]]]])},
            "kv_num_blocks, kv_indices cols must be in 0 .. n_cols - 1 = 1, got 2",
        ),
        ({"kv_num_blocks": int32([[[2, 1]]])}, r"must list each block once, but block \(row 0, col 0\) is repeated"),
        (
            {"full_kv_num_blocks": int32([[[1, 1]]])},
            r"both name block \(row 0, col 0\): kernels would count its keys twice",
        ),
        ({"mask_mod": lambda b, h, q, kv: q - kv}, "mask_mod must return a bool tensor"),
        (
            {"kv_num_blocks": torch.tensor([[[1.0, 1.0]]])},
            "kv_num_blocks, kv_indices must be integers, got torch.float32",
        ),
    ],
)
def test_wrong_block_masks_are_refused(changes: dict[str, Any], message: str) -> None:
    assert from_flex_attention(BlockMask.from_kv_blocks(**lists())) == cases._causal(128, 128, 64)
    with pytest.raises(ValueError, match=message):
        from_flex_attention(BlockMask.from_kv_blocks(**lists(**changes)))


def test_wrong_calls_with_flex_attention_are_refused() -> None:
    made = create_block_mask(MASK_MODS["by head and batch"], 2, 3, 256, 256, device="cpu", BLOCK_SIZE=64)
    with pytest.raises(ValueError, match=r"lost its mask_mod: .* and block_mask\.seq_lengths to its"):
        from_flex_attention(made[:, :, 1:3])
    with pytest.raises(TypeError, match="block_mask must be a flex_attention BlockMask, got Tensor"):
        from_flex_attention(torch.ones(4, 4))
    with pytest.raises(ValueError, match="kv_num_blocks, kv_indices: batch and heads must be equal or 1"):
        from_flex_attention(made, heads=4)
    with pytest.raises(TypeError, match="layout must be a BlockLayout, got BlockMask"):
        to_flex_attention(made)
    with pytest.raises(ValueError, match="layout must have queries and keys for FlexAttention, got 0 x 5"):
        to_flex_attention(BlockLayout.from_dense(torch.ones(0, 5, dtype=torch.bool), block_size=16))


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, {}, "mask_mod must be given: mask_block_cnt, mask_block_idx names 2 blocks whose pairs it decides"),
        ({"cu_total_m_blocks": int32([0, 2])}, {}, r"of variable length \(cu_total_m_blocks\): convert each sequence"),
        ({"block_size": None}, {}, "block_size must be given, because tensors.block_size is None"),
        ({}, {"block_size": (64, 128)}, r"block_size must be that of the tensors, \(64, 64\), or None"),
        ({"full_block_idx": None}, {}, "both of full_block_cnt and full_block_idx, or neither"),
        (
            {"full_block_cnt": int32([[[0, 1]]] * 2), "full_block_idx": int32([[[[0], [0]]]] * 2)},
            {},
            r"must have the \(batch, heads\) of",
        ),
        ({"mask_block_cnt": int32([[1]])}, {}, "must have 2 rows|must be counts"),
        ({"mask_block_idx": int32([[[[0, 1]]]])}, {}, r"must be counts \(batch, heads, n_rows\) and cols"),
    ],
)
def test_wrong_flash_attention_4_tensors_are_refused(changes: Any, options: Any, message: str) -> None:
    made = BlockMask.from_kv_blocks(**lists())
    tensors = as_flash_attention_4(made)
    good = {"mask_mod": made.mask_mod}
    assert from_flash_attention_4(tensors, 128, 128, **good) == from_flex_attention(made)
    given_options = good | options if changes or options else {}
    with pytest.raises(ValueError, match=message):
        from_flash_attention_4(tensors._replace(**changes), 128, 128, **given_options)


def test_wrong_types_are_refused() -> None:
    with pytest.raises(TypeError, match="tensors must have mask_block_cnt and mask_block_idx, got int"):
        from_flash_attention_4(3, 128, 128)
    tensors = as_flash_attention_4(BlockMask.from_kv_blocks(**lists()))
    with pytest.raises(TypeError, match=r"mask_mod must be a function of \(batch, head, q_pos, kv_pos\), got 3"):
        from_flash_attention_4(tensors, 128, 128, mask_mod=3)
    with pytest.raises(
        ValueError, match=r"block_size must be that of the tensors, \(64, 64\), or None, got \(32, 32\)"
    ):
        from_flash_attention_4(tensors, 128, 128, mask_mod=lists()["mask_mod"], block_size=32)
    with pytest.raises(TypeError, match="must be torch tensors, got list"):
        from_flash_attention_4(BlockSparseTensors([[[0]]], [[[[0]]]], block_size=(64, 64)), 64, 64)
    with pytest.raises(ValueError, match=r"mask_mod must be given.*batch= and heads= only apply to mask_mod"):
        none = BlockSparseTensors(int32([[[0]]]), int32([[[[0]]]]), block_size=(64, 64))
        from_flash_attention_4(none, 64, 64, heads=2)


@pytest.mark.parametrize(
    ("mask_mod", "error", "message"),
    [
        (lambda q, kv: q >= kv, TypeError, r"^mask_mod must be a function of \(batch, head, q_pos, kv_pos\), got"),
        (
            lambda b, h, q, kv: (q >= kv) and kv > 5,
            ValueError,
            "^mask_mod must compute with tensors .* one truth value",
        ),
        (lambda b, h, q, kv: q.item() >= kv, ValueError, "^mask_mod must compute with tensors .* made one number"),
        (lambda b, h, q, kv: (q >= kv) * 1.0, ValueError, "^mask_mod must return a bool tensor"),
    ],
    ids=["two positions", "truth", "number", "float"],
)
def test_a_wrong_mask_mod_is_named(mask_mod: Any, error: type[Exception], message: str) -> None:
    tensors = to_flash_attention_4(masks.causal(100)).block_sparse_tensors
    with pytest.raises(error, match=message):
        from_flash_attention_4(tensors, 100, 100, mask_mod=mask_mod)


def test_a_slice_with_its_own_mask_mod_and_lengths_is_taken() -> None:
    made = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 512, 512, device="cpu")[:, :, 1:3]
    made.mask_mod, made.seq_lengths = (lambda b, h, q, kv: q + 128 >= kv), (256, 512)
    assert from_flex_attention(made) == masks.causal(512).crop(128, 384, 0, 512)


def test_tables_are_copies() -> None:
    layout = masks.local(100, window=5, block_size=32)
    for tensor in to_flash_attention_4(layout).aux_tensors:
        tensor.zero_()
    assert layout == masks.local(100, window=5, block_size=32)


def test_tables_too_large_are_refused_before_they_are_made() -> None:
    layout = BlockLayout.from_blocks([0], [0], 1 << 20, 1 << 20, block_size=16)
    with pytest.raises(ValueError, match=r"fewer than 2\*\*31 blocks, stored or not.*got 4294967296"):
        mask_mod_of(layout)
