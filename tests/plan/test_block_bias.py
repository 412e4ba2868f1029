"""BiasIndex maps cells of tiles to blocks and blocks to cells; compared with loops over cells and blocks."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from blocksparse_flash import BlockLayout, attention
from blocksparse_flash.plan.block_bias import bias_cell_of, dense
from blocksparse_flash.plan_format import PARTIAL, TILE

SIZES: list[int | tuple[int, int]] = [16, 48, 64, 80, 128, 256, (32, 176)]


def random_layout(block_size: Any, heads: int = 2, q_len: int = 300, kv_len: int = 270) -> BlockLayout:
    """Random full and partial blocks, different for each head."""
    draw = torch.Generator().manual_seed(0)
    mask = torch.rand(1, heads, -(-q_len // 40), -(-kv_len // 40), generator=draw) < 0.3
    mask = mask.repeat_interleave(40, dim=2).repeat_interleave(40, dim=3)[:, :, :q_len, :kv_len]
    return BlockLayout.from_dense(mask, block_size=block_size)


def blocks_of(layout: BlockLayout) -> dict[tuple[int, int, int], int]:
    """(batch_head, row, col) -> index of the stored block."""
    found = {}
    for batch_head, pointers in enumerate(layout.indptr.reshape(-1, layout.n_rows + 1).tolist()):
        for row, (begin, end) in enumerate(itertools.pairwise(pointers)):
            found |= {(batch_head, row, int(layout.indices[entry])): entry for entry in range(begin, end)}
    return found


def tiles_of(items: Tensor, listed: Tensor) -> dict[int, tuple[int, int, int]]:
    """Entry of a plan's list -> (batch_head, major, minor)."""
    found = {}
    for batch_head, records in enumerate(items.reshape(-1, *items.shape[2:]).tolist()):
        for major, begin, n_tiles, *_ in records:
            for entry in range(begin, begin + n_tiles):
                found[entry] = (batch_head, major, int(listed[entry]) % PARTIAL)
    return found


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("block_size", SIZES, ids=str)
def test_cells_and_blocks_are_mapped_to_each_other(block_size: Any, causal: bool) -> None:
    layout = random_layout(block_size)
    plan, index = layout.plan("cpu", causal=causal), layout.bias_index("cpu", causal=causal)
    blocks, (block_q, block_kv) = blocks_of(layout), layout.block_size
    cell_q, cell_kv = bias_cell_of(layout.block_size)
    row_tiles = tiles_of(plan.row_records, plan.row_indices)
    col_tiles = {
        entry: (batch_head, row, col)
        for entry, (batch_head, col, row) in tiles_of(plan.col_records, plan.col_indices).items()
    }
    assert sorted(row_tiles.values()) == sorted(col_tiles.values()) and len(row_tiles) > 3
    for tiles, found, places in (
        (row_tiles, index.rows, index.row_places), (col_tiles, index.cols, index.col_places),
    ):  # fmt: skip
        cells_of: dict[int, set[int]] = {entry: set() for entry in blocks.values()}
        assert tuple(found.shape[1:]) == (TILE // cell_q, TILE // cell_kv)
        for entry, (batch_head, row, col) in tiles.items():
            for down, across in itertools.product(*map(range, found.shape[1:])):
                q_pos, kv_pos = row * TILE + down * cell_q, col * TILE + across * cell_kv
                block = blocks.get((batch_head, q_pos // block_q, kv_pos // block_kv), layout.nnz)
                if q_pos >= layout.q_len or kv_pos >= layout.kv_len:
                    block = layout.nnz
                assert found[entry, down, across] == block
                if block < layout.nnz:
                    cells_of[block].add((entry * found.shape[1] + down) * found.shape[2] + across)
        for block, of_block in cells_of.items():
            assert set(places[block].tolist()) - {found.numel()} == of_block


@pytest.mark.parametrize("block_size", SIZES, ids=str)
def test_every_pair_has_the_value_of_its_block(block_size: Any) -> None:
    layout = random_layout(block_size)
    blocks, (block_q, block_kv) = blocks_of(layout), layout.block_size
    values = torch.arange(1.0, layout.nnz + 1)
    sizes: dict[str, Any] = {"q_len": layout.q_len, "kv_len": layout.kv_len, "block_size": layout.block_size}
    found = dense(values[None, None], layout.indptr, layout.indices, **sizes)
    assert found.shape == layout.shape
    for head, q_pos, kv_pos in itertools.product(range(2), range(0, layout.q_len, 13), range(0, layout.kv_len, 13)):
        entry = blocks.get((head, q_pos // block_q, kv_pos // block_kv))
        assert found[0, head, q_pos, kv_pos] == (0.0 if entry is None else values[entry])


def test_the_index_is_cached_per_device_and_causal() -> None:
    layout = random_layout(64)
    assert layout.bias_index("cpu") is layout.bias_index(torch.device("cpu"))
    assert layout.bias_index("cpu", causal=True) is not layout.bias_index("cpu")


# ---- gather: scores of a grid of blocks -> one value per stored block ----


@pytest.mark.parametrize("batch_heads", [(1, 1), (1, 3), (2, 1), (2, 3)], ids=str)
@pytest.mark.parametrize("axes", [(1, 1), (1, 3), (2, 1), (2, 3)], ids=str)
def test_gathered_scores_are_those_of_the_stored_blocks(axes: tuple[int, int], batch_heads: tuple[int, int]) -> None:
    """Compared block by block. A layout shared by all heads keeps the batch and head axes of the scores."""
    draw = torch.Generator().manual_seed(0)
    layout = BlockLayout.from_dense(torch.rand(*axes, 300, 270, generator=draw) < 0.0005, block_size=(32, 64))
    scores = torch.randn(*batch_heads, layout.n_rows, layout.n_cols, generator=draw, requires_grad=True)
    if axes != (1, 1) and any(batch_head > size for batch_head, size in zip(batch_heads, axes, strict=True)):
        with pytest.raises(ValueError, match=r"block_scores must have shape .* each block of the grid"):
            layout.gather(scores)
        return
    found = layout.gather(scores)
    blocks = blocks_of(layout)
    assert 0 < len(blocks) == layout.nnz < layout.n_rows * layout.n_cols * axes[0] * axes[1]
    assert found.shape == ((*batch_heads, layout.nnz) if axes == (1, 1) else (layout.nnz,))
    counts = torch.zeros(scores.shape)
    for (batch_head, row, col), entry in blocks.items():
        if axes == (1, 1):
            assert torch.equal(found[..., entry], scores[..., row, col])
            counts[..., row, col] += 1
        else:
            batch, head = (batch_head // axes[1]) % batch_heads[0], batch_head % axes[1] % batch_heads[1]
            assert found[entry] == scores[batch, head, row, col]
            counts[batch, head, row, col] += 1
    found.sum().backward()
    assert scores.grad is not None and torch.equal(scores.grad, counts)
    # from the cache
    assert torch.equal(layout.gather(scores), found)


def test_a_layout_without_blocks_keeps_the_axes_of_the_scores() -> None:
    layout = BlockLayout.from_dense(torch.zeros(1, 1, 0, 64, dtype=torch.bool), block_size=64)
    scores = torch.randn(2, 3, layout.n_rows, layout.n_cols, requires_grad=True)
    found = layout.gather(scores)
    found.sum().backward()
    assert found.shape == (2, 3, 0) and scores.grad is not None


def test_unused_entries_of_a_selection_gather_zeros() -> None:
    chosen = torch.tensor([[[[2, -1], [-1, -1], [0, 0]], [[-1, -1], [1, 0], [2, 1]]]])
    layout = BlockLayout.from_topk(chosen, 48, 48, block_size=16)
    scores = torch.arange(1.0, 19.0).reshape(1, 2, 3, 3)
    # unused entries read the score of block 0, which may be NaN
    scores[0, 0, 0, 0] = torch.nan
    scores.requires_grad_()
    found = layout.gather(scores)
    # head 0: (0, 2), (2, 0); head 1: (1, 0), (1, 1), (2, 1), (2, 2)
    assert layout.capacity == 12 and found.tolist() == [3, 7, 13, 14, 17, 18, 0, 0, 0, 0, 0, 0]
    found.sum().backward()
    assert scores.grad is not None and scores.grad.flatten().nonzero().flatten().tolist() == [2, 6, 12, 13, 16, 17]


def test_a_gate_gets_gradients_through_the_blocks_it_selected() -> None:
    """The gradient of the scores is that of a dense attention with the same bias on the same blocks."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, 64, 16, generator=draw, dtype=torch.float64) for _ in range(3))
    scores = torch.randn(2, 2, 4, 4, generator=draw, dtype=torch.float64, requires_grad=True)
    layout = BlockLayout.from_scores(scores.detach(), 64, 64, k=2, block_size=16)
    attention(q, k, v, layout, block_bias=layout.gather(scores)).square().sum().backward()
    gradient, scores.grad = scores.grad, None
    bias = scores.repeat_interleave(16, dim=2).repeat_interleave(16, dim=3)
    weights = (q @ k.mT / 4 + bias).masked_fill(~layout.to_dense(), -torch.inf).softmax(dim=-1)
    (weights @ v).square().sum().backward()
    assert gradient is not None and scores.grad is not None
    torch.testing.assert_close(gradient, scores.grad)
    assert (gradient != 0).sum() == layout.nnz


def test_gather_works_under_vmap_and_compile() -> None:
    layout = random_layout(64)
    scores = torch.randn(3, 1, 2, layout.n_rows, layout.n_cols)
    expected = torch.stack([layout.gather(each) for each in scores])
    assert torch.equal(torch.func.vmap(layout.gather)(scores), expected)
    assert torch.equal(torch.compile(layout.gather, backend="eager", fullgraph=True)(scores[0]), expected[0])


def test_a_layout_without_data_gathers_nothing() -> None:
    layout = BlockLayout.from_dense(torch.eye(64, dtype=torch.bool), block_size=16).to("meta")
    with pytest.raises(ValueError, match="layout is on the meta device, which holds no data"):
        layout.gather(torch.zeros(1, 1, 4, 4))
    assert layout.gather(torch.zeros(1, 1, 4, 4, device="meta")).is_meta


def test_gathered_scores_of_an_empty_layout_are_empty() -> None:
    layout = BlockLayout.from_dense(torch.zeros(0, 5, dtype=torch.bool), block_size=16)
    assert layout.gather(torch.zeros(2, 1, 0, 1)).shape[-1] == 0


@pytest.mark.parametrize(
    ("scores", "error", "message"),
    [
        ([[0.0]], TypeError, "block_scores must be a torch.Tensor, got list"),
        (torch.zeros(5, 5), ValueError, r"\(1 or 1, 2 or 1, n_rows = 5, n_cols = 5\), got \(5, 5\)"),
        (torch.zeros(1, 2, 5, 4), ValueError, "got \\(1, 2, 5, 4\\)"),
        (torch.zeros(1, 3, 5, 5), ValueError, "got \\(1, 3, 5, 5\\)"),
        (torch.zeros(0, 2, 5, 5), ValueError, "got \\(0, 2, 5, 5\\)"),
    ],
)
def test_wrong_scores_are_refused(scores: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        random_layout(64).gather(scores)


def test_scores_of_no_blocks_keep_their_type_and_others_are_dense() -> None:
    assert BlockLayout.from_blocks([], [], 0, 0).gather(torch.zeros(1, 1, 0, 0, dtype=torch.int8)).dtype == torch.int8
    with pytest.raises(ValueError, match="block_scores is a sparse tensor"):
        BlockLayout.from_blocks([0, 1], [0, 1], 256, 256).gather(torch.ones(1, 1, 2, 2).to_sparse())
