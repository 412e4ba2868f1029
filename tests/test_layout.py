"""Algebra, conversions and plans of BlockLayout, compared with boolean arithmetic on dense masks."""

from __future__ import annotations

import copy
import dataclasses
import operator
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

from blocksparse_flash import BlockLayout
from blocksparse_flash.blocks.stored_blocks import number_of, numbered
from tests.support import cases
from tests.support.dense_masks import Problem, problems
from tests.support.meaning import TENSORS, assert_means, assert_valid

_ROOT = Path(__file__).parents[1]


# ---- algebra


@pytest.mark.parametrize("op", [operator.or_, operator.and_, operator.sub], ids=lambda op: op.__name__)
@given(problem=problems(n_masks=2, axes_differ=True))
def test_operators_are_set_operations_on_pairs(op: Any, problem: Problem) -> None:
    block_size, (a, b) = problem.block_size, problem.masks
    expected = a & ~b if op is operator.sub else op(a, b)
    one, other = (BlockLayout.from_dense(mask, block_size=block_size) for mask in (a, b))
    found = op(one, other)
    assert_means(found, expected)
    direct = BlockLayout.from_dense(expected, block_size=block_size)
    assert found == direct and hash(found) == hash(direct)
    for layout, mask in ((one, a), (other, b)):
        assert_means(layout, mask)


@given(problems())
def test_complement_and_transpose_equal_those_of_the_mask(problem: Problem) -> None:
    block_size, mask = problem.block_size, problem.mask
    layout = BlockLayout.from_dense(mask, block_size=block_size)
    assert_means(~layout, ~mask)
    assert_means(layout.T, mask.swapaxes(2, 3))
    assert layout.T.block_size == block_size[::-1]
    assert ~~layout == layout.T.T == layout


@given(problems(n_masks=2, axes_differ=True))
def test_equal_means_equal_masks_over_equal_axes(problem: Problem) -> None:
    block_size, (a, b) = problem.block_size, problem.masks
    one, other = (BlockLayout.from_dense(mask, block_size=block_size) for mask in (a, b))
    assert (one == other) == np.array_equal(a, b)
    assert (one != other) == (not np.array_equal(a, b))
    if a.shape == b.shape:
        assert one == (one | other) & one == one - (other - one) == ~~one
        assert hash(one) == hash((one | other) & one)


def test_layouts_differ_if_axes_lengths_block_size_or_pairs_differ() -> None:
    mask = torch.ones(2, 2, 48, 48, dtype=torch.bool)
    layouts = [
        BlockLayout.from_dense(mask, block_size=16),
        BlockLayout.from_dense(mask[:1], block_size=16),
        BlockLayout.from_dense(mask[:, :1], block_size=16),
        BlockLayout.from_dense(mask[:1, :1], block_size=16),
        BlockLayout.from_dense(mask[0, 0], block_size=48),
        # one full block, with as many words per row of a bitmask as the one before
        BlockLayout.from_dense(mask[0, 0], block_size=(48, 64)),
        BlockLayout.from_dense(mask[0, 0], block_size=(16, 48)),
        BlockLayout.from_dense(mask[0, 0, :47], block_size=16),
        BlockLayout.from_dense(mask[0, 0, :, :47], block_size=16),
        BlockLayout.from_dense(mask[0, 0].triu(), block_size=16),
        BlockLayout.from_dense(mask[0, 0].tril(), block_size=16),
        BlockLayout.from_dense(mask[0, 0] & False, block_size=16),
    ]
    for i, one in enumerate(layouts):
        for j, other in enumerate(layouts):
            assert (one == other) == (i == j)
    assert len(set(layouts)) == len({hash(layout) for layout in layouts}) == len(layouts)
    assert layouts[0] != "a layout" and layouts[0] is not None


def test_incompatible_operands_are_refused() -> None:
    ones = torch.ones(2, 3, 48, 64, dtype=torch.bool)
    layout = BlockLayout.from_dense(ones, block_size=16)
    moved = BlockLayout._bare(*(getattr(layout, name).to("meta") for name in TENSORS), 48, 64, (16, 16))
    refused = [
        (
            BlockLayout.from_dense(ones[:, :, :47], block_size=16),
            r"lengths must be equal, got 48 x 64 and 47 x 64: .* \.crop\(\)",
        ),
        (BlockLayout.from_dense(ones[..., :63], block_size=16), "lengths must be equal, got 48 x 64 and 48 x 63"),
        (BlockLayout.from_dense(ones, block_size=32), "block_size must be equal"),
        (BlockLayout.from_dense(ones[:, :2], block_size=16), "batch and heads must be equal or 1"),
        (BlockLayout.from_dense(ones[:1].expand(3, 3, 48, 64), block_size=16), "batch and heads must be equal or 1"),
        (moved, "both must be on one device, got cpu and meta"),
    ]
    for op, symbol in ((operator.or_, r"\|"), (operator.and_, "&"), (operator.sub, "-")):
        for other, message in refused:
            with pytest.raises(ValueError, match=f"layout {symbol} other: {message}"):
                op(layout, other)
        for foreign in (ones, 1, None):
            with pytest.raises(TypeError):
                op(layout, foreign)


# ---- other forms


def _through_a_file(layout: BlockLayout, name: str) -> BlockLayout:
    """Saves and loads the state dict as documented; on disk, since safetensors reads only files there."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        if path.suffix == ".pt":
            torch.save(layout.state_dict(), path)
            return BlockLayout.from_state_dict(torch.load(path, weights_only=True))
        safetensors = pytest.importorskip("safetensors.torch", reason="needs safetensors")
        safetensors.save_file({key: torch.as_tensor(value) for key, value in layout.state_dict().items()}, path)
        return BlockLayout.from_state_dict(safetensors.load_file(path))


_COPIES: dict[str, Callable[[BlockLayout], BlockLayout]] = {
    "pickle": lambda layout: pickle.loads(pickle.dumps(layout)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "state-dict": lambda layout: BlockLayout.from_state_dict(layout.state_dict()),
    "torch-load": lambda layout: _through_a_file(layout, "layout.pt"),
    "safetensors": lambda layout: _through_a_file(layout, "layout.safetensors"),
    "module": lambda layout: copy.deepcopy(_Holder(layout)).layout,
    "replace": dataclasses.replace,
}


class _Holder(torch.nn.Module):
    def __init__(self, layout: BlockLayout) -> None:
        super().__init__()
        self.layout = layout


@pytest.mark.parametrize("way", _COPIES)
@pytest.mark.parametrize("case", cases.LAYOUTS, ids=str)
def test_copies_are_equal_and_hash_alike(case: cases.Case, way: str) -> None:
    layout = case.build()
    number = hash(layout)
    layout.plan("cpu")
    copied = _COPIES[way](layout)
    assert copied is not layout and copied == layout and hash(copied) == number
    assert_valid(copied)
    # caches stay behind
    assert copied._cache.keys() == {
        "plans",
        "bias_indices",
        "gather_indices",
        "orders",
        "calls",
        "axes",
        "rows",
        "number",
        "hash",
    }
    assert number_of(copied) != number_of(layout) and numbered(number_of(copied)) is copied
    assert not copied._cache["plans"] and not copied._cache["bias_indices"]
    assert (copied | layout) == layout


@pytest.mark.parametrize("case", cases.LAYOUTS, ids=str)
def test_zoo_layouts_survive_other_block_sizes(case: cases.Case) -> None:
    layout = case.build()
    for block_size in (128, 16, (48, 80)):
        other = layout.with_block_size(block_size)
        assert other == BlockLayout.from_dense(layout.to_dense(), block_size=block_size)
        assert other.with_block_size(layout.block_size) == layout


def test_hashes_are_the_same_in_another_process() -> None:
    program = (
        "from blocksparse_flash import BlockLayout; "
        "print(hash(BlockLayout.from_predicate(lambda q_pos, kv_pos: kv_pos <= q_pos, 40, 40, block_size=16)))"
    )
    other = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, cwd=_ROOT)
    layout = BlockLayout.from_predicate(lambda q_pos, kv_pos: kv_pos <= q_pos, 40, 40, block_size=16)
    assert int(other.stdout) == hash(layout)


def test_layouts_are_frozen() -> None:
    layout = BlockLayout.from_blocks([0], [0], 64, 64, block_size=64)
    for name in (*TENSORS, "q_len", "kv_len", "block_size", "anything"):
        with pytest.raises(AttributeError):
            setattr(layout, name, 1)
    with pytest.raises(AttributeError):
        del layout.indices


@given(problems())
def test_repr_has_counts_and_a_picture(problem: Problem) -> None:
    block_size, mask = problem.block_size, problem.mask
    layout = BlockLayout.from_dense(mask, block_size=block_size)
    lines = repr(layout).splitlines()
    assert f"{layout.q_len} x {layout.kv_len} tokens" in lines[0] and str(layout.block_size) in lines[0]
    assert f"nnz={layout.nnz}," in lines[1] and f" {len(layout.bitmasks)} distinct bitmasks" in lines[1]
    symbols = {0: ".", 1: "#", 2: "+"}
    rows = ["".join(symbols[value] for value in row) for row in layout.to_scipy().toarray().tolist()]
    assert lines[3:] == (rows if layout.n_cols else [])


def test_repr_of_a_large_layout_is_small() -> None:
    """4096 tokens in blocks of 16 are 256 x 256 blocks; a character stands for 8 x 8 of them."""
    rows = list(range(256))
    layout = BlockLayout.from_ranges(
        [0] * 256, [min(8 * (row // 8) + 9, 256) for row in rows], 4096, 4096, block_size=16
    )
    lines = repr(layout).splitlines()
    assert "a character is 8 x 8 blocks" in lines[2]
    assert lines[3:] == ["#" * (row + 1) + "+" * (row < 31) + "." * (30 - row) for row in range(32)]


# ---- plans and devices


@pytest.mark.parametrize("tile", [128, 64])
@pytest.mark.parametrize("case", cases.LAYOUTS, ids=str)
def test_the_causal_plan_equals_that_of_the_causal_mask(case: cases.Case, tile: int) -> None:
    layout = case.build()
    mask = layout.to_dense()
    mask &= torch.ones(mask.shape[2:], dtype=torch.bool).tril(layout.kv_len - layout.q_len)
    expected = BlockLayout.from_dense(mask, block_size=layout.block_size).plan("cpu", tile=tile)
    for one, other in zip(layout.plan("cpu", causal=True, tile=tile), expected, strict=True):
        assert torch.equal(one, other)
    again = copy.copy(layout).plan(torch.device("cpu"), tile=tile)
    for one, other in zip(layout.plan("cpu", tile=tile), again, strict=True):
        assert torch.equal(one, other)


def test_plans_are_cached() -> None:
    layout = cases.LAYOUTS[0].make()
    plan, causal = layout.plan("cpu"), layout.plan("cpu", causal=True)
    assert layout.plan(torch.device("cpu")) is plan and layout.plan("cpu", causal=True) is causal
    assert causal is not plan
    fine = layout.plan("cpu", tile=64)
    assert layout.plan(torch.device("cpu"), tile=64) is fine and layout.plan("cpu", tile=128) is plan
    assert (plan.tile, fine.tile) == (128, 64)
    # nothing is beyond the diagonal, so the causal plan is the plan
    diagonal = BlockLayout.from_predicate(lambda q_pos, kv_pos: kv_pos <= q_pos, 200, 200, block_size=64)
    assert diagonal.plan("cpu", causal=True) is diagonal.plan("cpu")
    assert diagonal.plan("cpu", causal=True, tile=64) is diagonal.plan("cpu", tile=64)


def test_moving_keeps_the_plans_of_every_tile(device: torch.device) -> None:
    layout = copy.copy(cases.LAYOUTS[-1].build())
    causal, fine = (layout.plan("meta", **options) for options in ({"causal": True}, {"tile": 64}))
    moved = layout.to("meta")
    for count in ("nnz", "density"):
        with pytest.raises(ValueError, match="layout is on the meta device, which holds no data"):
            getattr(moved, count)
    assert moved.plan("meta", causal=True) is causal and moved.plan("meta", tile=64) is fine and fine.tile == 64
    # a plan of the other tile is not taken for it
    assert layout.plan(device).tile == 128 and layout.plan(device, tile=64).tile == 64
    assert layout.plan(device, tile=64, causal=True).tile == 64


def test_torch_compile_needs_the_plan_of_its_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = BlockLayout.from_blocks([0, 0], [0, 1], 256, 256, block_size=128)
    layout.plan("cpu")
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    message = r"no plan with tile=64 for cpu and torch.compile cannot make one: call layout.plan\(q.device, tile=64"
    with pytest.raises(ValueError, match=message + r"\) before"):
        layout.plan("cpu", tile=64)
    with pytest.raises(ValueError, match=message + r", causal=True\) before"):
        layout.plan("cpu", tile=64, causal=True)
    with pytest.raises(ValueError, match=r"no plan for cpu and .*: call layout\.to\(q\.device, causal=True\) before"):
        layout.plan("cpu", causal=True)


def test_to_moves_tensors_and_plan(device: torch.device) -> None:
    layout = copy.copy(cases.LAYOUTS[-1].build())
    moved = layout.to(device)
    assert all(getattr(moved, name).device == moved.device == device for name in TENSORS)
    assert (device, False, 128) in moved._cache["plans"]
    assert all(tensor.device == device for tensor in moved.plan(device))
    assert moved == layout and hash(moved) == hash(layout)
    assert moved.to("cpu") == layout and layout.to("cpu") is layout
    assert (moved | moved).device == moved.T.device == (~moved).device == moved.to_dense().device == device
    assert BlockLayout.from_state_dict(moved.state_dict()).device == device


# ---- scale


def test_a_million_tokens_need_memory_only_for_their_blocks() -> None:
    """8192 block rows: butterfly, window and first tokens. N x N bits would be 128 GiB, so finishing is the test."""
    length = 1 << 20
    rows = np.arange(length // 128)
    partners = np.stack([rows, *(rows ^ (1 << factor) for factor in range(13))], axis=1)
    butterfly = BlockLayout.from_blocks(rows.repeat(14), partners.reshape(-1), length, length, block_size=128)
    band = BlockLayout.from_ranges(
        np.maximum(rows - 2, 0), np.minimum(rows + 3, len(rows)), length, length, block_size=128
    )
    local = BlockLayout.from_predicate(
        lambda q_pos, kv_pos: (q_pos - kv_pos).abs() <= 200,
        length,
        length,
        block_size=128,
        within=band,
        dedup_key=lambda row, col: row - col,
    )
    layout = butterfly | local | local.T
    assert butterfly.nnz == 14 * 8192 and layout.nnz > butterfly.nnz
    assert len(local.bitmasks) == 4
    assert layout - local == butterfly - local
    assert (layout & local) == local
    assert layout.T == layout
    assert len(repr(layout)) < 2000


def test_tiles_of_a_plan_are_ints_of_any_kind() -> None:
    layout = BlockLayout.from_blocks([0, 1], [0, 1], 256, 256)
    assert layout.plan("cpu", tile=np.int64(128)) is layout.plan("cpu", tile=128)
    for wrong in (128.0, 96, np.array([128, 64]), torch.tensor([128, 64]), "128"):
        with pytest.raises(ValueError, match="tile must be 128, 64 or 16 tokens, got"):
            layout.plan("cpu", tile=wrong)
