"""The block-selection and plan-building kernels equal the PyTorch implementation exactly."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from blocksparse_flash import BlockLayout
from blocksparse_flash.blocks.block_list import Frame
from blocksparse_flash.plan import block_selection
from blocksparse_flash.plan_format import FINE_TILE, N_LONG, TILE, Plan

pytest.importorskip("triton", reason="needs Triton")

# with and without ragged ends, blocks of several tiles, tiles of several blocks, more keys than queries and fewer
FRAMES = [
    Frame(1, 1, 512, 512, (128, 128)),
    Frame(2, 3, 300, 700, (128, 128)),
    Frame(1, 2, 700, 260, (256, 128)),
    Frame(2, 1, 513, 1025, (64, 64)),
    Frame(1, 2, 448, 600, (64, 256)),
    Frame(2, 1, 600, 448, (128, 64)),
    Frame(1, 2, 640, 300, (32, 256)),
    Frame(1, 1, 100, 5000, (128, 32)),
    # the last query attends to one key of a tile, all but one, all
    Frame(1, 1, 383, 384, (128, 128)),
    Frame(1, 1, 130, 256, (128, 128)),
    Frame(1, 1, 129, 256, (128, 128)),
    # the same for a block of 64 x 64
    Frame(1, 2, 768, 897, (64, 64)),
    Frame(1, 2, 512, 703, (64, 64)),
]
# tiles of 64 x 64, with blocks that kernels handle: as large, several tiles, and parts, also of half a word
FINE_FRAMES = [
    Frame(1, 1, 512, 512, (64, 64)),
    Frame(2, 3, 300, 700, (128, 128)),
    Frame(1, 2, 700, 260, (256, 128)),
    Frame(2, 1, 200, 333, (32, 32)),
    Frame(1, 2, 448, 600, (64, 16)),
    Frame(1, 2, 200, 600, (16, 256)),
    Frame(1, 1, 100, 500, (128, 32)),
    # the last query attends to one key of a tile, all but one, all
    Frame(1, 1, 191, 192, (64, 64)),
    Frame(1, 1, 66, 128, (64, 64)),
    Frame(1, 1, 65, 128, (64, 64)),
]


@pytest.fixture
def in_small_pieces(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Shrinks the blocks of the kernels, so that programs need many iterations instead of one."""
    from blocksparse_flash.kernels.triton import block_selection, plan_builder

    caches = (
        block_selection._mark_indices,
        block_selection._mark_scores,
        block_selection._list_rows,
        plan_builder.plan_launches,
    )
    for module, name, value in (
        *((module, name, 2) for module in (block_selection, plan_builder) for name in ("LINES", "MINORS")),
        *((module, "CHUNK", 4) for module in (block_selection, plan_builder)),
        (block_selection, "ELEMENTS", 16),
        (plan_builder, "HEADS", 2),
    ):
        monkeypatch.setattr(module, name, value)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def random_indices(frame: Frame, k: int, device: torch.device, *, dtype: torch.dtype = torch.int64) -> Tensor:
    """Random cols with duplicates and -1."""
    shape = (frame.batch, frame.heads, frame.n_rows, k)
    return torch.randint(-1, frame.n_cols, shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)


def random_scores(frame: Frame, device: torch.device) -> Tensor:
    """Distinct random scores, some of them NaN or infinite."""
    generator = torch.Generator().manual_seed(1)
    shape = (frame.batch, frame.heads, frame.n_rows, frame.n_cols)
    scores = torch.randn(shape, generator=generator)
    kind = torch.rand(shape, generator=generator)
    scores[kind < 0.1], scores[kind > 0.8] = torch.nan, -torch.inf
    scores[:, :, ::3, 0] = torch.inf
    return scores.to(device)


def assert_same_plan(actual: Plan, expected: Plan) -> None:
    """All values are equal, except that the kernels write zeros after the last tile."""
    n_tiles = int(expected.row_records[..., 2].sum())
    for name, values, wanted in zip(Plan._fields, actual, expected, strict=True):
        assert values.shape == wanted.shape and values.dtype == wanted.dtype == torch.int32 and values.is_contiguous()
        if name.endswith(("indices", "ids")):
            assert torch.equal(values[:n_tiles], wanted[:n_tiles]) and not values[n_tiles:].any(), name
        else:
            assert torch.equal(values, wanted), name


def assert_same(
    made: BlockLayout,
    expected: block_selection.Selection,
    frame: Frame,
    causals: tuple[bool, ...],
    tiles: tuple[int, ...] = (TILE,),
) -> None:
    """Compares a layout made by kernels and its plans with a selection made by PyTorch operations and its plans."""
    for name in ("indptr", "indices", "bitmask_ids"):
        assert torch.equal(getattr(made, name), getattr(expected, name)), name
    for causal, tile in itertools.product(causals, tiles):
        # directly, since operations raise in block_selection
        plan = PLAN_BY_OPERATIONS(expected, **frame.sizes, causal=causal, tile=tile)
        assert_same_plan(made.plan(made.device, causal=causal, tile=tile), plan)


SORTED_ROWS, PLAN_BY_OPERATIONS = block_selection.sorted_rows, block_selection._plan_by_operations


@pytest.mark.usefixtures("by_kernels")
@pytest.mark.parametrize("frame", FRAMES, ids=str)
def test_selection_by_index_equals_pytorch(frame: Frame, device: torch.device) -> None:
    indices = random_indices(frame, 5, device)
    expected = block_selection.Selection(
        *SORTED_ROWS(block_selection.clamp_unknown_cols(indices, frame.n_cols), frame.n_cols), None
    )
    assert_same(BlockLayout.from_topk(indices, **frame.sizes), expected, frame, (False, True))


@pytest.mark.usefixtures("by_kernels")
@pytest.mark.parametrize("frame", FINE_FRAMES, ids=str)
def test_fine_plans_equal_pytorch(frame: Frame, device: torch.device) -> None:
    indices = random_indices(frame, 5, device)
    expected = block_selection.Selection(
        *SORTED_ROWS(block_selection.clamp_unknown_cols(indices, frame.n_cols), frame.n_cols), None
    )
    assert_same(BlockLayout.from_topk(indices, **frame.sizes), expected, frame, (False, True), (FINE_TILE,))


@pytest.mark.usefixtures("by_kernels")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("frame", FRAMES, ids=str)
def test_selection_by_score_equals_pytorch(frame: Frame, causal: bool, device: torch.device) -> None:
    scores, k = random_scores(frame, device), min(3, frame.n_cols)
    scores[:, :, ::3, 0] = 50
    highest = block_selection.top_k_cols(scores, frame, k, causal=causal)
    expected = block_selection.Selection(*SORTED_ROWS(highest, frame.n_cols), None)
    assert_same(BlockLayout.from_scores(scores, **frame.sizes, k=k, causal=causal), expected, frame, (causal,))


@pytest.mark.usefixtures("by_kernels", "in_small_pieces")
@pytest.mark.parametrize(("block_size", "has_one_batch"), [((128, 128), True), ((64, 64), False)], ids=str)
def test_programs_with_many_iterations_equal_pytorch(
    block_size: tuple[int, int], has_one_batch: bool, device: torch.device
) -> None:
    frame = Frame(3, 1, 300, 400, block_size)
    indices = random_indices(frame, 20, device)
    indices[:, :, 1] = -1
    if has_one_batch:
        # all long lines belong to the heads of the first iteration
        indices[0, :, 1:] = indices[1:] = -1
    expected = block_selection.Selection(
        *SORTED_ROWS(block_selection.clamp_unknown_cols(indices, frame.n_cols), frame.n_cols), None
    )
    layout = BlockLayout.from_topk(indices, **frame.sizes)
    assert_same(layout, expected, frame, (not has_one_batch,), (TILE, FINE_TILE))


@pytest.mark.usefixtures("by_kernels")
def test_one_line_of_a_head_is_never_counted_as_long(device: torch.device) -> None:
    """Even if all lines of a head are long: kernels divide by the number of other lines."""
    frame = Frame(3, 1, 250, 100, (128, 128))
    indices = torch.full((3, 1, 2, 1), -1, device=device)
    indices[0] = 0
    expected = block_selection.Selection(
        *SORTED_ROWS(block_selection.clamp_unknown_cols(indices, frame.n_cols), frame.n_cols), None
    )
    layout = BlockLayout.from_topk(indices, **frame.sizes)
    assert_same(layout, expected, frame, (False,))
    plan = layout.plan(device)
    for records, n_long in ((plan.row_records, 1), (plan.col_records, 0)):
        assert records[..., N_LONG].unique().tolist() == [n_long]


@pytest.mark.usefixtures("by_kernels")
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_out_of_range_indices_of_any_dtype_are_ignored(dtype: torch.dtype, device: torch.device) -> None:
    """Indices on a GPU are not checked; those that are not a col are ignored."""
    frame = FRAMES[0]
    indices = random_indices(frame, 4, device, dtype=dtype)
    layout = BlockLayout.from_topk(indices.mT.contiguous().mT.clamp(max=3), **frame.sizes)
    mask = torch.zeros(1, 1, 4, 4, dtype=torch.bool, device=device)
    for row, entry in itertools.product(range(4), range(4)):
        if 0 <= (col := int(indices[0, 0, row, entry].clamp(max=3))) < 4:
            mask[0, 0, row, col] = True
    assert layout == BlockLayout.from_block_mask(mask, **frame.sizes)
    for col in (frame.n_cols, 100):
        beyond = block_selection.by_indices(torch.full((1, 1, 4, 2), col, dtype=dtype, device=device), frame)
        assert not beyond.indptr.any() and not beyond.indices.any()


@pytest.mark.usefixtures("by_kernels")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_scores_may_have_any_float_dtype(dtype: torch.dtype, device: torch.device) -> None:
    scores = torch.tensor([[5, -1, 3, 0.5], [0, -0.5, -2, -7], [-torch.inf, 1, torch.nan, torch.inf], [1, 2, 3, 4]])
    layout = BlockLayout.from_scores(scores.to(device, dtype)[None, None], 512, 512, k=2, block_size=128)
    rows, cols = [0, 0, 1, 1, 2, 2, 3, 3], [0, 2, 0, 1, 1, 3, 2, 3]
    assert layout == BlockLayout.from_blocks(rows, cols, 512, 512, block_size=128)


@pytest.mark.usefixtures("by_kernels")
def test_the_first_of_equal_scores_are_selected(device: torch.device) -> None:
    """More cols than bits in a word; fewer finite scores than k in the last row."""
    scores = torch.zeros(1, 1, 3, 70)
    scores[0, 0, 1, 40:] = 1
    scores[0, 0, 2] = -torch.inf
    scores[0, 0, 2, 69] = 0
    layout = BlockLayout.from_scores(scores.to(device), 3 * 128, 70 * 128, k=35, block_size=128)
    cols = [*range(35), *range(5), *range(40, 70), 69]
    assert layout.indptr.flatten().tolist() == [0, 35, 70, 71] and layout.indices.tolist()[:71] == cols
    assert not layout.indices[71:].any() and layout.capacity == 105


def test_grids_too_large_for_a_bitmap_use_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_selection, "is_on_gpu", lambda _: True)
    tensor, frame = torch.zeros(1, dtype=torch.int64), Frame(1, 1, 1 << 20, 1 << 20, (128, 128))
    assert block_selection._has_kernels(tensor, frame, 100)
    # a bitmap that is large for the number of entries; too many rows or columns; none
    assert not block_selection._has_kernels(tensor, frame, 8)
    assert block_selection._has_kernels(tensor, Frame(1, 1, 1 << 18, 1 << 18, (128, 128)), 1)
    for q_len, kv_len in (((1 << 20) + 1, 128), (128, (1 << 20) + 1), (0, 128), (128, 0)):
        assert not block_selection._has_kernels(tensor, Frame(1, 1, q_len, kv_len, (128, 128)), 10_000)


def test_compilers_and_modes_see_pytorch_operations(device: torch.device) -> None:
    """Compiled functions and calls under a mode contain operations instead of kernel launches."""
    scores = random_scores(FRAMES[0], device)

    def indices(scores: Tensor) -> Tensor:
        return BlockLayout.from_scores(scores, **FRAMES[0].sizes, k=2).indices

    compiled = torch.compile(indices, backend="eager", fullgraph=True)
    assert torch.equal(compiled(scores), indices(scores))
    with torch.utils.flop_counter.FlopCounterMode(display=False):
        assert not block_selection.is_on_gpu(scores)
    assert block_selection.is_on_gpu(scores) == (device.type == "cuda")


@pytest.mark.parametrize(("q_len", "kv_len"), [(128, 1024), (1024, 128), (1024, 1024)])
def test_kernels_are_not_used_where_their_offsets_would_overflow(
    q_len: int, kv_len: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 2^21 programs, offsets in fill_tail passed 2^31 and wrapped around to a loop step of 0."""
    monkeypatch.setattr(block_selection, "is_on_gpu", lambda _: True)
    frame = Frame(1 << 10, 1 << 7, q_len, kv_len, (128, 128))
    assert block_selection._has_kernels(torch.empty(0), frame, 4)
    assert not block_selection._has_kernels(torch.empty(0), frame._replace(batch=1 << 18), 4)


def pairs_of(plan: Plan, q_len: int, kv_len: int, *, of_rows: bool) -> Tensor:
    """bool (axes, q_len, kv_len): the pairs of a plan, from its rows or from its columns."""
    tile = plan.tile
    records = (plan.row_records if of_rows else plan.col_records).flatten(0, 1)
    entries, ids = plan[1:3] if of_rows else plan[4:6]
    n_q, n_kv = -(-q_len // tile), -(-kv_len // tile)
    pairs = torch.zeros(len(records), n_q * tile, n_kv * tile, dtype=torch.bool)
    entries, ids, words, bit = entries.tolist(), ids.tolist(), plan.bitmasks.cpu(), torch.arange(32)
    for axis, of_axis in enumerate(records.tolist()):
        for number, begin, n_tiles, n_partial, *_ in of_axis:
            for place in range(begin, begin + n_tiles):
                other, is_partial = entries[place] & 0xFFFFFF, entries[place] < 0
                row, col = (number, other) if of_rows else (other, number)
                assert is_partial == (place < begin + n_partial)
                mask = torch.tensor(True)
                if is_partial:
                    mask = (words[ids[place]][..., None] >> bit & 1).reshape(tile, tile).bool()
                assert mask.any()
                pairs[axis, row * tile : (row + 1) * tile, col * tile : (col + 1) * tile] |= mask
    assert not pairs[:, q_len:].any() and not pairs[:, :, kv_len:].any()
    return pairs[:, :q_len, :kv_len]


# rows per token, tokens that select together, keys of a block, tokens, keys
BY_TOKEN = [
    (1, 1, 16, 33, 50),
    (1, 8, 128, 100, 300),
    (2, 1, 32, 50, 100),
    (4, 1, 64, 40, 200),
    (8, 1, 64, 20, 100),
    (8, 2, 128, 41, 200),
    (16, 1, 128, 20, 190),
    (32, 1, 16, 10, 50),
    (64, 1, 64, 5, 70),
    (128, 2, 64, 5, 70),
]


@pytest.mark.sweep(by=lambda case, shares_bitmasks: {shares_bitmasks, case[0] > 16, case[1] > 1, case[2]})
@pytest.mark.usefixtures("by_kernels")
@pytest.mark.parametrize("shares_bitmasks", [False, True])
@pytest.mark.parametrize("case", BY_TOKEN, ids=str)
def test_plans_of_selections_by_token_have_the_pairs_of_pytorch(
    case: tuple[int, ...], shares_bitmasks: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With bitmasks of every pattern and with one of each tile, and where PyTorch sums the counts of rows."""
    from blocksparse_flash.kernels.triton import block_selection as selection_kernels
    from blocksparse_flash.kernels.triton import plan_builder

    rows_per_token, together, keys, q_len, kv_len = case
    frame = Frame(2, 1, q_len * rows_per_token, kv_len, (rows_per_token * together, keys))
    if shares_bitmasks:
        monkeypatch.setattr(plan_builder.Grid, "n_tiles", 1 << 30)
        monkeypatch.setattr(selection_kernels, "MAX_SUMMED", 0)
        selection_kernels._list_rows.cache_clear()
    indices = random_indices(frame, 3, device)
    made = block_selection.by_indices(indices, frame)
    expected = SORTED_ROWS(block_selection.clamp_unknown_cols(indices, frame.n_cols), frame.n_cols)
    for values, wanted in zip(made[:3], expected, strict=True):
        assert torch.equal(values, wanted)
    plan_builder.plan_launches.cache_clear()
    for causal, tile in itertools.product((False, True), (TILE, FINE_TILE)):
        parts = math.prod(max(1, tile // side) for side in frame.block_size)
        if shares_bitmasks and parts > 8:
            # none are shared by more than 16 parts, and 2^16 take the interpreter too long
            continue
        sizes = {**frame.sizes, "causal": causal, "tile": tile}
        plan = block_selection.plan_of_selection(made._replace(rows_per_token=rows_per_token), **sizes)
        wanted = PLAN_BY_OPERATIONS(block_selection.Selection(*expected, None, rows_per_token), **sizes)
        truth = pairs_of(wanted, *frame[2:4], of_rows=True)
        for of_rows in (True, False):
            assert torch.equal(pairs_of(plan, *frame[2:4], of_rows=of_rows), truth)
        assert torch.equal(pairs_of(wanted, *frame[2:4], of_rows=False), truth)
        if parts <= 4:
            assert_same_plan(plan, wanted)
    selection_kernels._list_rows.cache_clear()
    plan_builder.plan_launches.cache_clear()


# rows per token, tokens that select together, keys of a block, tokens, boundaries of each sequence
IN_DOCUMENTS = [
    # each tile has a bitmask of its own
    (1, 1, 64, 150, [[0, 40, 40, 129]]),
    (2, 4, 128, 150, [[0, 100, 150], [0, 0, 7]]),
    # bitmasks that tiles share, and those of tiles that documents cut
    (1, 128, 64, 450, [[0, 5, 7, 130, 449]]),
    (1, 64, 64, 300, [[0, 128, 192, 192, 192], [0, 10, 20, 30, 300]]),
    (1, 128, 256, 600, [[0, 550]]),
    (4, 32, 32, 200, [[0, 1, 64, 190, 200]]),
    (8, 16, 64, 150, [[0, 150]]),
    (32, 1, 128, 20, [[0, 3, 9, 10, 18]]),
    (128, 1, 64, 40, [[0, 18, 33]]),
    # no document
    (1, 64, 64, 200, [[0]]),
]


@pytest.mark.sweep(by=lambda case, shares_bitmasks: {shares_bitmasks, case[0] > 16, case[1] > 1, len(case[4])})
@pytest.mark.usefixtures("by_kernels")
@pytest.mark.parametrize("shares_bitmasks", [False, True])
@pytest.mark.parametrize("case", IN_DOCUMENTS, ids=str)
def test_plans_in_packed_documents_have_the_pairs_of_one_document(
    case: tuple[Any, ...], shares_bitmasks: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans by kernels and by PyTorch, with more documents than tile rows and with fewer."""
    from blocksparse_flash.kernels.triton import plan_builder

    rows_per_token, together, keys, length, boundaries = case
    frame = Frame(2, 2, length * rows_per_token, length, (rows_per_token * together, keys))
    if shares_bitmasks:
        monkeypatch.setattr(plan_builder.Grid, "n_tiles", 1 << 30)
    indices = random_indices(frame, 5, device)
    bounds = torch.tensor(boundaries, device=device)
    made = block_selection.by_indices(indices, frame)._replace(
        rows_per_token=rows_per_token,
        documents=block_selection.document_of_tokens(bounds, length),
        n_documents=bounds.shape[1] - 1,
    )
    document = torch.full((len(boundaries), length), -1)
    for row, bounds_of_row in zip(document, boundaries, strict=True):
        for number, (first, stop) in enumerate(itertools.pairwise(bounds_of_row)):
            row[first:stop] = number
    is_one = (document[:, :, None] == document[:, None]) & (document >= 0)[:, None]
    is_one = is_one.repeat_interleave(rows_per_token, 1).repeat_interleave(4 // len(boundaries), 0)
    plan_builder.plan_launches.cache_clear()
    for causal, tile in itertools.product((False, True), (TILE, FINE_TILE)):
        sizes: dict[str, Any] = {**frame.sizes, "causal": causal, "tile": tile}
        if shares_bitmasks and math.prod(max(1, tile // side) for side in frame.block_size) > 8:
            continue
        whole = PLAN_BY_OPERATIONS(made._replace(documents=None), **sizes)
        truth = pairs_of(whole, *frame[2:4], of_rows=True) & is_one
        for plan in (block_selection.plan_of_selection(made, **sizes), PLAN_BY_OPERATIONS(made, **sizes)):
            for of_rows in (True, False):
                assert torch.equal(pairs_of(plan, *frame[2:4], of_rows=of_rows), truth)
    plan_builder.plan_launches.cache_clear()
