"""Layouts selected on a device, and their plans, equal those built on the host."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from blocksparse_flash import BlockLayout, attention
from blocksparse_flash.plan import block_selection
from blocksparse_flash.plan_format import FINE_TILE, PARTIAL, TILE, Plan

SIDES = (16, 32, 64, 128, 256)


def selected(
    seed: int, axes: tuple[int, int], q_len: int, kv_len: int, block_size: tuple[int, int], k: int
) -> tuple[Tensor, BlockLayout]:
    """Random indices with duplicates and -1, and the layout that from_block_mask makes of them."""
    n_rows, n_cols = -(-q_len // block_size[0]), -(-kv_len // block_size[1])
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randint(-1, n_cols, (*axes, n_rows, k), generator=generator)
    # -1 goes to an extra col
    mask = torch.zeros(*axes, n_rows, n_cols + 1, dtype=torch.bool).scatter_(3, indices % (n_cols + 1), True)
    return indices, BlockLayout.from_block_mask(mask[..., :n_cols], q_len, kv_len, block_size=block_size)


def pairs(plan: Plan, side: str, axes: int, q_len: int, kv_len: int) -> Tensor:
    """The pairs that one direction of a plan lists, bool (axes, q_len, kv_len); checks the order of its entries."""
    items, indices, ids = (getattr(plan, f"{side}_{name}") for name in ("records", "indices", "bitmask_ids"))
    side_of_tile = plan.tile
    n_rows, n_cols = -(-q_len // side_of_tile), -(-kv_len // side_of_tile)
    mask = torch.zeros(axes, n_rows * side_of_tile, n_cols * side_of_tile, dtype=torch.bool)
    bits = (plan.bitmasks[..., None] >> torch.arange(32) & 1).bool().reshape(-1, side_of_tile, side_of_tile)
    for axis, records in enumerate(items.reshape(axes, -1, items.shape[-1]).tolist()):
        assert [record[2] for record in records] == sorted((record[2] for record in records), reverse=True)
        for major, record in enumerate(records[record[4]] for record in records):
            assert record[0] == major
            entries = [(ids[at].item(), indices[at].item()) for at in range(record[1], record[1] + record[2])]
            partial = [(minor + PARTIAL, bits[i_bitmask]) for i_bitmask, minor in entries if minor < 0]
            full = [(minor, torch.ones_like(bits[0])) for _, minor in entries if minor >= 0]
            assert len(partial) == record[3] and all(minor < 0 for _, minor in entries[: len(partial)])
            for minors in (partial, full):
                assert [minor for minor, _ in minors] == sorted({minor for minor, _ in minors})
            for minor, tile in (*partial, *full):
                row, col = (major, minor) if side == "row" else (minor, major)
                assert tile.any()
                queries, keys = (slice(at * side_of_tile, (at + 1) * side_of_tile) for at in (row, col))
                mask[axis, queries, keys] = tile
    # no pair past the end
    assert not mask[:, q_len:].any() and not mask[:, :, kv_len:].any()
    return mask[:, :q_len, :kv_len]


@given(
    seed=st.integers(0, 2**31),
    axes=st.sampled_from([(1, 1), (1, 3), (2, 1), (2, 2)]),
    q_len=st.sampled_from([0, 1, 100, 128, 300, 513]),
    kv_len=st.sampled_from([1, 64, 128, 300, 600]),
    block_size=st.tuples(st.sampled_from(SIDES), st.sampled_from(SIDES)),
    k=st.sampled_from([0, 1, 2, 5]),
    causal=st.booleans(),
    tile=st.sampled_from([TILE, FINE_TILE]),
)
def test_layout_and_plan_equal_those_of_the_host(
    seed: int,
    axes: tuple[int, int],
    q_len: int,
    kv_len: int,
    block_size: tuple[int, int],
    k: int,
    causal: bool,
    tile: int,
) -> None:
    indices, expected = selected(seed, axes, q_len, kv_len, block_size, k)
    layout = BlockLayout.from_topk(indices, q_len, kv_len, block_size=block_size)
    assert layout == expected and hash(layout) == hash(expected) and layout.nnz == expected.nnz
    assert layout.capacity == indices.numel()
    mask = expected.to_dense()
    if causal:
        mask &= torch.arange(kv_len) <= torch.arange(q_len)[:, None] + kv_len - q_len
    plan, on_host = (each.plan("cpu", causal=causal, tile=tile) for each in (layout, expected))
    assert plan.tile == tile
    for side in ("row", "col"):
        assert torch.equal(pairs(plan, side, axes[0] * axes[1], q_len, kv_len).reshape(mask.shape), mask)
        assert torch.equal(getattr(plan, f"{side}_records"), getattr(on_host, f"{side}_records"))


@pytest.mark.sweep
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("block_size", [(16, 64), (128, 128), (256, 32)])
@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_attention_and_gradients_equal_those_of_the_host_layout(
    backend: str, block_size: tuple[int, int], causal: bool, device: torch.device
) -> None:
    q_len, kv_len = 300, 261
    indices, expected = selected(7, (1, 2), q_len, kv_len, block_size, 2)
    layout = BlockLayout.from_topk(indices.to(device), q_len, kv_len, block_size=block_size)
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (
        torch.randn(1, heads, length, 16, generator=generator).to(device)
        for heads, length in ((2, q_len), (1, kv_len), (1, kv_len), (2, q_len))
    )

    def step(layout: BlockLayout) -> list[Tensor]:
        inputs = [t.clone().requires_grad_() for t in (q, k, v)]
        out = attention(*inputs, layout, causal=causal, backend=backend, deterministic=True)
        return [out, *torch.autograd.grad(out, inputs, dout)]

    for actual, wanted in zip(step(layout), step(expected), strict=True):
        assert torch.equal(actual, wanted)


class Operations(TorchDispatchMode):
    """Records the operations that launch kernels on a GPU: all but views and allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and not func.name().startswith(("aten::empty", "aten::new_empty", "aten::lift_fresh")):
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("block_size", "causal", "tile", "most"),
    [
        (128, False, TILE, 62),
        (128, True, TILE, 86),
        (64, False, TILE, 91),
        (64, True, TILE, 115),
        (64, True, FINE_TILE, 86),
        (128, True, FINE_TILE, 101),
    ],
)
def test_a_selection_takes_few_operations(block_size: int, causal: bool, tile: int, most: int) -> None:
    """Each operation takes the host some 10 microseconds: 258 to 279 operations took 3.7 ms of a step."""
    n = 4096 // block_size
    scores = torch.rand(1, 1, n, n, generator=torch.Generator().manual_seed(0))
    with Operations() as counted:
        BlockLayout.from_scores(scores, 4096, 4096, k=4, causal=causal, block_size=block_size).plan(
            "cpu", causal=causal, tile=tile
        )
    assert 20 < len(counted.names) <= most, counted.names


@given(
    axes=st.sampled_from([(1, 1), (2, 3)]),
    q_len=st.sampled_from([0, 1, 300, 512]),
    kv_len=st.sampled_from([0, 1, 300, 640]),
    block_size=st.tuples(st.sampled_from(SIDES), st.sampled_from(SIDES)),
    causal=st.booleans(),
    tile=st.sampled_from([TILE, FINE_TILE]),
)
def test_plans_are_aligned_and_have_valid_padding(
    axes: tuple[int, int], q_len: int, kv_len: int, block_size: tuple[int, int], causal: bool, tile: int
) -> None:
    """Kernels read one index ahead, and are compiled for pointers that are multiples of 16 bytes."""
    n_rows, n_cols = -(-q_len // block_size[0]), -(-kv_len // block_size[1])
    indices = torch.randint(-1, max(1, n_cols), (*axes, n_rows, 3), generator=torch.Generator().manual_seed(0))
    layout = BlockLayout.from_topk(indices.clamp(max=n_cols - 1), q_len, kv_len, block_size=block_size)
    plan = layout.plan("cpu", causal=causal, tile=tile)
    for tensor in plan:
        assert tensor.dtype == torch.int32 and tensor.is_contiguous()
        assert tensor.data_ptr() % 16 == 0 or not tensor.numel()
    for indices, length in ((plan.row_indices, kv_len), (plan.col_indices, q_len)):
        minor = indices & (PARTIAL - 1)
        assert (minor >= 0).all() and (minor <= max(0, length - 1) // tile).all()


@given(
    q_len=st.integers(1, 300),
    kv_len=st.integers(1, 300),
    case=st.sampled_from(
        [
            *((TILE, size) for size in [(128, 128), (256, 64), (64, 64), (128, 32), (64, 256), (32, 256)]),
            *((FINE_TILE, size) for size in [(128, 256), (64, 64), (32, 32), (16, 128), (64, 16), (256, 32)]),
        ]
    ),
    rows_per_token=st.sampled_from([1, 1, 2, 16, 128]),
)
def test_bitmasks_made_in_advance_equal_those_made_one_by_one(
    q_len: int, kv_len: int, case: tuple[int, tuple[int, int]], rows_per_token: int
) -> None:
    tile, block_size = case
    q_len *= rows_per_token
    bitmasks = block_selection._Bitmasks(block_size, q_len, kv_len, tile, torch.device("cpu"), rows_per_token)
    assert bitmasks.blocks_in_tile <= block_selection.MAX_TABLED_BLOCKS
    n_diagonals = min(tile, rows_per_token) + 1
    code = torch.arange((1 + n_diagonals) * 4 * 2**bitmasks.blocks_in_tile)
    one_by_one = bitmasks.words(
        code % 2**bitmasks.blocks_in_tile, code >> bitmasks.blocks_in_tile & 3, code >> (bitmasks.blocks_in_tile + 2)
    )
    assert torch.equal(bitmasks.every(n_diagonals=n_diagonals), one_by_one)
    assert torch.equal(bitmasks.every(n_diagonals=0), one_by_one[: 4 * 2**bitmasks.blocks_in_tile])


def test_plans_of_too_many_tiles_are_refused() -> None:
    """Offsets are 32-bit, and a block of 256 x 256 has 16 tiles of 64 x 64."""
    assert block_selection._lengths(2**31, 1, (1 << 15, (1 << 16) - 1))[0] < 2**31
    with pytest.raises(ValueError, match=r"fewer than 2\*\*31 tiles, but this one may list 2147483648"):
        block_selection._lengths(2**31, 1, (1 << 16, 1 << 16))


def test_the_highest_scores_are_selected() -> None:
    scores = torch.tensor([[0.1, 0.9, 0.5], [torch.nan, -torch.inf, -7.0], [-torch.inf] * 3])[None, None]
    layout = BlockLayout.from_scores(scores, 300, 290, k=2, block_size=128)
    assert layout == BlockLayout.from_blocks([0, 0, 1], [1, 2, 2], 300, 290, block_size=128)
    every = BlockLayout.from_scores(scores.nan_to_num(), 300, 290, k=100, block_size=128)
    assert every.density == 1.0


@pytest.mark.parametrize(("q_len", "kv_len"), [(300, 300), (100, 400), (400, 100), (257, 256)])
def test_causal_scores_select_no_future_block(q_len: int, kv_len: int) -> None:
    n_rows, n_cols = -(-q_len // 64), -(-kv_len // 32)
    scores = torch.randn(2, 3, n_rows, n_cols, generator=torch.Generator().manual_seed(0))
    layout = BlockLayout.from_scores(scores, q_len, kv_len, k=n_cols, causal=True, block_size=(64, 32))
    is_visible = [
        [32 * col <= min(64 * row + 63, q_len - 1) + kv_len - q_len for col in range(n_cols)] for row in range(n_rows)
    ]
    expected = BlockLayout.from_block_mask(torch.tensor(is_visible), q_len, kv_len, block_size=(64, 32))
    for batch in range(2):
        for head in range(3):
            assert layout.batch(batch).head(head) == expected


def test_copies_have_the_plan_of_the_host_layout() -> None:
    indices, expected = selected(3, (1, 2), 300, 300, (64, 64), 3)
    layout = BlockLayout.from_topk(indices, 300, 300, block_size=64)
    for other in (pickle.loads(pickle.dumps(layout)), copy.deepcopy(layout), layout.to("cpu")):
        assert other == expected
        for tile in (TILE, FINE_TILE):
            records = (each.plan("cpu", tile=tile).row_records for each in (other, expected))
            assert torch.equal(*records)
    assert (layout | expected) == expected and (layout & ~expected).nnz == 0 and layout.T == expected.T


GOOD_INDICES: dict[str, Any] = {
    "indices": torch.zeros(1, 1, 2, 3, dtype=torch.int64), "q_len": 256, "kv_len": 256, "block_size": 128,
}  # fmt: skip
GOOD_SCORES: dict[str, Any] = {
    "scores": torch.zeros(1, 1, 2, 2),
    "q_len": 256,
    "kv_len": 256,
    "block_size": 128,
    "k": 1,
}
WRONG_CALLS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"indices": [[[[0]]]]}, TypeError, r"indices must be a torch.Tensor, got list"),
    ({"indices": torch.zeros(1, 1, 2, 3)}, ValueError, r"indices must be integers, got torch.float32"),
    ({"indices": torch.zeros(1, 1, 2, 3, dtype=torch.bool)}, ValueError, r"indices must be integers, got torch.bool"),
    ({"indices": torch.zeros(2, 3, dtype=torch.int32)}, ValueError, r"n_rows = 2, k\), got \(2, 3\)"),
    ({"indices": torch.zeros(1, 1, 3, 3, dtype=torch.int32)}, ValueError, r"n_rows = 2, k\), got \(1, 1, 3, 3\)"),
    ({"indices": torch.zeros(0, 1, 2, 3, dtype=torch.int32)}, ValueError, r"got \(0, 1, 2, 3\)"),
    ({"indices": torch.full((1, 1, 2, 3), 2)}, ValueError, r"in 0 .. n_cols - 1 = 1, got 2"),
    ({"indices": torch.full((1, 1, 2, 3), -2)}, ValueError, r"-1 \(none\) or in 0 .. n_cols - 1 = 1, got -2"),
    ({"indices": torch.zeros(1, 1, 6, 3, dtype=torch.int32), "block_size": 48}, ValueError, r"divide 128.*\(48, 48\)"),
    ({"block_size": 24}, ValueError, r"block_size must be a multiple of 16"),
    ({"q_len": -1}, ValueError, r"q_len must be in 0"),
    ({"scores": torch.zeros(1, 1, 2, 2, dtype=torch.int64)}, ValueError, r"scores must be floats, got torch.int64"),
    ({"scores": torch.zeros(1, 1, 2, 3)}, ValueError, r"n_rows = 2, n_cols = 2\), got \(1, 1, 2, 3\)"),
    ({"scores": None}, TypeError, r"scores must be a torch.Tensor, got NoneType"),
    ({"k": 0}, ValueError, r"k must be at least 1 col per row, got 0"),
    ({"k": 1.5}, TypeError, r"k must be an int, got 1.5"),
]


@pytest.mark.parametrize(("change", "exception", "message"), WRONG_CALLS)
def test_errors_name_the_wrong_argument(change: dict[str, Any], exception: type[Exception], message: str) -> None:
    by_scores = "scores" in change or "k" in change
    good, build = (GOOD_SCORES, BlockLayout.from_scores) if by_scores else (GOOD_INDICES, BlockLayout.from_topk)
    assert build(**good).nnz > 0
    with pytest.raises(exception, match=message):
        build(**good | change)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int64, torch.complex64])
def test_scores_of_types_without_comparison_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=r"scores must be floats, got .*scores.to\(torch.float32\)"):
        BlockLayout.from_scores(torch.zeros(1, 1, 2, 2).to(dtype), 256, 256, k=1, block_size=128)


@pytest.mark.parametrize("dtype", [torch.uint64, torch.bool, torch.float32])
def test_indices_of_types_without_sorting_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=r"indices must be integers, got .*indices.to\(torch.int64\)"):
        BlockLayout.from_topk(torch.zeros(1, 1, 2, 2).to(dtype), 256, 256, block_size=128)


def test_causal_must_be_a_bool() -> None:
    with pytest.raises(TypeError, match="causal must be True or False, got 'no'"):
        BlockLayout.from_scores(**GOOD_SCORES | {"causal": "no"})
