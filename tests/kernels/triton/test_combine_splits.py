"""Combining splits: the kernels alone, and on a GPU whole calls with split tile rows and columns."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs Triton")

import masks
from blocksparse_flash import attention_with_lse
from blocksparse_flash.kernels.schedule import WHOLE, Split
from blocksparse_flash.kernels.triton import combine_splits
from blocksparse_flash.plan_format import FINE_TILE, GATHERED_TILE, side_of, tile_of
from blocksparse_flash.runtime.tensor_spec import spec_of
from tests import test_zoo as zoo
from tests.support.forced_tiles import force_tile

needs_hopper = pytest.mark.skipif(not zoo.HAS_HOPPER, reason="needs compute capability 9.0")


def forced(num_splits: int, n_lines: int) -> Any:
    """A stand-in for split_of: num_splits splits of n_lines lines per head with a layout, of all lines without."""

    def choose(plan: list[Tensor], first: int, q_shape: torch.Size, k_shape: torch.Size, *_: Any) -> Split:
        side = side_of(tile_of(plan))
        lines = -(-(k_shape if first else q_shape)[2] // side)
        return Split(min(n_lines, lines) if plan else lines, num_splits, side)

    return choose


# ---- the kernels ----


def records(batch: int, heads: int, n_lines: int, seed: int) -> Tensor:
    """Records of a plan, with the lines of each head in a random order."""
    generator = torch.Generator().manual_seed(seed)
    items = torch.zeros(batch, heads, n_lines, 8, dtype=torch.int32)
    for b, h in itertools.product(range(batch), range(heads)):
        items[b, h, :, 0] = torch.randperm(n_lines, generator=generator)
    return items


@pytest.mark.sweep(by=lambda kind: {"fine" if kind == "fine" else "whole"})
@pytest.mark.parametrize("kind", ["layout", "shared", "dense", "fine", "192 columns"])
def test_rows_are_merged_by_weight(kind: str, device: torch.device) -> None:
    """Empty splits, empty rows, lse so far apart that only the largest counts, and a ragged last tile."""
    TILE = FINE_TILE if kind == "fine" else 128
    batch, heads, q_len, split = 2, 2, 2 * TILE + 44, Split(2, 5, TILE)
    v_dim, dim_v = (136, 192) if kind == "192 columns" else (24, 64)
    n_lines, n_batch_heads = 3, batch * heads
    items = {"shared": records(1, 1, n_lines, 1), "dense": None}.get(kind, records(batch, heads, n_lines, 0))
    generator = torch.Generator().manual_seed(2)
    outs = torch.randn(split.num_splits, split.n_split_lines, n_batch_heads, TILE, dim_v, generator=generator)
    lses = 3 * torch.randn(split.num_splits, split.n_split_lines, n_batch_heads, TILE, generator=generator)
    lses[::2, :, :, 5::7] = -torch.inf
    lses[:, :, :, 3::11] = -torch.inf
    lses[-1, :, :, 4::13] = 10_000.0
    outs[lses.isneginf()] = 0.0
    blocks = torch.cat([outs.flatten(3), lses], dim=3)
    assert blocks.numel() == split.floats(dim_v + 1, n_batch_heads)
    # padded rows, as TMA requires
    out = torch.full((batch, heads, q_len, v_dim + 8), 7.0, device=device)[..., :v_dim]
    lse = torch.full((batch, heads, q_len), 7.0, device=device)
    rest = {"n_heads": heads, "n_batch_heads": n_batch_heads, "n_lines": n_lines, "q_len": q_len}
    rest |= {"n_split_lines": split.n_split_lines, "num_splits": split.num_splits}
    launch = combine_splits.combine_rows(split, items if items is None else items.shape, spec_of(out), rest, dim_v)
    assert launch is not None
    launch(blocks.to(device).flatten(), None if items is None else items.to(device), out, lse)
    out, lse = out.cpu(), lse.cpu()

    n_empty = 0
    for batch_head, i in itertools.product(range(n_batch_heads), range(n_lines)):
        b, h = divmod(batch_head, heads)
        # without a layout the last lines come first
        line = n_lines - 1 - i if items is None else int(items[b % items.shape[0], h % items.shape[1], i, 0])
        rows = slice(line * TILE, min((line + 1) * TILE, q_len))
        n = rows.stop - rows.start
        if i >= split.n_split_lines:
            assert (out[b, h, rows] == 7.0).all() and (lse[b, h, rows] == 7.0).all()
            continue
        logs = lses[:, i, batch_head, :n].double() * math.log(2)
        weights = logs.softmax(0).nan_to_num(0.0)
        expected = (weights[..., None] * outs[:, i, batch_head, :n, :v_dim]).sum(0)
        torch.testing.assert_close(out[b, h, rows].double(), expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(lse[b, h, rows].double(), logs.logsumexp(0), rtol=1e-6, atol=1e-6)
        n_empty += int((lse[b, h, rows].isneginf() & (out[b, h, rows] == 0).all(-1)).sum())
    assert n_empty


@pytest.mark.parametrize("kind", ["layout", "dense", "fine", "96 columns"])
def test_columns_are_added_over_splits(kind: str, device: torch.device) -> None:
    """4 query heads on 2 KV heads; the records of the first head of a group give the order of lines."""
    TILE = FINE_TILE if kind == "fine" else 128
    batch, heads, group, kv_len, split = 2, 4, 2, 2 * TILE + 44, Split(2, 3, TILE)
    n_lines, kv_heads, scale = 3, heads // group, 0.3
    dims, padded = ((80, 96), (96, 96)) if kind == "96 columns" else ((40, 24), (64, 128))
    n_batch_heads = batch * kv_heads
    items = None if kind == "dense" else records(batch, heads, n_lines, 3)
    blocks = torch.randn(split.num_splits, split.n_split_lines, n_batch_heads, TILE * sum(padded))
    assert blocks.numel() == split.floats(sum(padded), n_batch_heads)
    dk, dv = (torch.full((batch, kv_heads, kv_len, dim + 8), 7.0, device=device)[..., :dim] for dim in dims)
    rest = {"n_heads": kv_heads, "n_batch_heads": n_batch_heads, "kv_len": kv_len, "scale": scale, "GROUP": group}
    rest |= {"n_split_lines": split.n_split_lines, "num_splits": split.num_splits}
    launch = combine_splits.sum_splits(
        split, items if items is None else items.shape, spec_of(dk), spec_of(dv), rest, padded
    )
    assert launch is not None
    launch(blocks.to(device).flatten(), None if items is None else items.to(device), dk, dv)

    for batch_head, i in itertools.product(range(n_batch_heads), range(n_lines)):
        b, h = divmod(batch_head, kv_heads)
        line = i if items is None else int(items[b, h * group, i, 0])
        rows = slice(line * TILE, min((line + 1) * TILE, kv_len))
        if i >= split.n_split_lines:
            assert (dk[b, h, rows] == 7.0).all() and (dv[b, h, rows] == 7.0).all()
            continue
        both = blocks[:, i, batch_head].double().sum(0).split([TILE * padded[0], TILE * padded[1]])
        for found, summed, factor, dim in zip((dk, dv), both, (scale, 1.0), padded, strict=True):
            expected = factor * summed.view(TILE, dim)[: rows.stop - rows.start, : found.shape[3]]
            torch.testing.assert_close(found[b, h, rows].cpu().double(), expected, rtol=1e-5, atol=1e-6)


def test_dq_is_added_over_splits(device: torch.device) -> None:
    """As dk, without dv."""
    heads, q_len, dim, padded, split = 2, 100, 40, 64, Split(1, 3, FINE_TILE)
    items = records(1, heads, 2, 5)
    blocks = torch.randn(split.num_splits, heads, FINE_TILE, padded)
    dq = torch.full((1, heads, q_len, dim), 7.0, device=device)
    rest = {"n_heads": heads, "n_batch_heads": heads, "kv_len": q_len, "scale": -0.5, "GROUP": 1}
    rest |= {"n_split_lines": split.n_split_lines, "num_splits": split.num_splits}
    launch = combine_splits.sum_splits(split, items.shape, spec_of(dq), None, rest, (padded, 16))
    assert launch is not None
    launch(blocks.to(device).flatten(), items.to(device), dq, None)
    for head in range(heads):
        first = int(items[0, head, 0, 0]) * FINE_TILE
        is_split = torch.zeros(q_len, dtype=torch.bool)
        is_split[first : first + FINE_TILE] = True
        n = int(is_split.sum())
        expected = -0.5 * blocks[:, head, :n, :dim].sum(0)
        torch.testing.assert_close(dq[0, head].cpu()[is_split], expected, rtol=1e-5, atol=1e-6)
        assert (dq[0, head].cpu()[~is_split] == 7.0).all()


def test_unsplit_lines_need_no_launch() -> None:
    assert combine_splits.combine_rows(WHOLE, None, None, {}, 64) is None  # type: ignore[arg-type]
    assert combine_splits.sum_splits(WHOLE, None, None, None, {}, (64, 64)) is None  # type: ignore[arg-type]


# ---- attention on a GPU ----


@pytest.fixture
def split_lines(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Replaces split_of in the kernels of `hopper`."""
    from blocksparse_flash.kernels.hopper import backward, fine_backward, fine_forward, forward

    def split_lines(choose: Any) -> None:
        for module in (forward, backward, fine_forward, fine_backward):
            monkeypatch.setattr(module, "split_of", choose)

    return split_lines


@needs_hopper
@pytest.mark.parametrize("n_lines", [2, 99])
@pytest.mark.parametrize(("backend", "layout", "call"), [entry for entry in zoo.zoo("spread") if entry[0] == "hopper"])
def test_split_lines_are_as_accurate_as_the_reference(
    backend: str, layout: Any, call: zoo.Call, n_lines: int, split_lines: Any, device: torch.device
) -> None:
    split_lines(forced(3, n_lines))
    zoo.assert_backend_is_accurate(backend, layout, call, device)


@needs_hopper
@pytest.mark.parametrize("tile", [FINE_TILE, GATHERED_TILE])
@pytest.mark.parametrize("n_lines", [2, 99])
@pytest.mark.parametrize("index", range(len(zoo.cases.LAYOUTS)), ids=[str(layout) for layout in zoo.cases.LAYOUTS])
def test_split_lines_of_smaller_tiles_are_as_accurate(
    index: int, n_lines: int, tile: int, split_lines: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    force_tile(monkeypatch, tile)
    split_lines(forced(3, n_lines))
    calls = zoo.fine_calls("hopper", tile)
    call = calls[(7 * index + n_lines) % len(calls)]
    zoo.assert_backend_is_accurate("hopper", zoo.cases.LAYOUTS[index], call, device)


@needs_hopper
@pytest.mark.parametrize("tile", [128, FINE_TILE, GATHERED_TILE])
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize(("num_splits", "n_lines"), [(5, 2), (16, 99)])
def test_runs_with_splits_are_bitwise_equal(
    num_splits: int, n_lines: int, deterministic: bool, tile: int, split_lines: Any, device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Three runs; dq only with deterministic=True."""
    force_tile(monkeypatch, tile)
    length = 2000
    layout = masks.bigbird(length, seed=1) | masks.local(length, window=77)
    torch.manual_seed(0)
    q, dout = (torch.randn(2, 8, length, 128, device=device, dtype=torch.bfloat16) for _ in "qo")
    k, v = (torch.randn(2, 2, length, 128, device=device, dtype=torch.bfloat16) for _ in "kv")
    split_lines(forced(num_splits, n_lines))

    def run() -> list[Tensor]:
        inputs = [t.clone().requires_grad_() for t in (q, k, v)]
        out, lse = attention_with_lse(*inputs, layout, deterministic=deterministic, backend="hopper")
        dq, *rest = torch.autograd.grad((out * dout).sum() + lse.sum(), inputs)
        return [out, lse, *rest, *([dq] if deterministic else [])]

    first = run()
    for _ in range(2):
        assert all(map(torch.equal, first, run()))


@needs_hopper
@pytest.mark.parametrize("tile", [128, FINE_TILE, GATHERED_TILE])
@pytest.mark.parametrize("kv_heads", [4, 1])
def test_a_call_that_chooses_splits_equals_the_unsplit_call(kv_heads: int, tile: int, device: torch.device) -> None:
    """Splits are not forced: BigBird has global rows and columns of 8,192 tokens, and there are few heads."""
    from blocksparse_flash.kernels.hopper import backward, fine_backward, fine_forward, forward
    from blocksparse_flash.kernels.schedule import split_of

    length, chosen = 8192, list[Split]()
    layout = masks.bigbird(length, seed=1)
    torch.manual_seed(0)
    q, dout = (torch.randn(1, 4, length, 128, device=device, dtype=torch.float16) for _ in "qo")
    k, v = (torch.randn(1, kv_heads, length, 128, device=device, dtype=torch.float16) for _ in "kv")

    def run() -> list[Tensor]:
        inputs = [t.clone().requires_grad_() for t in (q, k, v)]
        out, lse = attention_with_lse(*inputs, layout, deterministic=False, backend="hopper")
        return [out, lse, *torch.autograd.grad((out * dout).sum() + lse.sum(), inputs)]

    modules = forward, backward, fine_forward, fine_backward
    with pytest.MonkeyPatch.context() as patched:
        force_tile(patched, tile)
        for module in modules:
            patched.setattr(module, "split_of", lambda *args: chosen.append(split_of(*args)) or chosen[-1])
        split = run()
        # one choice for tile rows, one for tile columns, and for 64 x 64 tiles one for dq
        assert all(one.num_splits > 1 for one in chosen) and len(chosen) == (2 if tile == 128 else 3)
        for module in modules:
            patched.setattr(module, "split_of", lambda *_: WHOLE)
        whole = run()
    for name, one, other in zip(zoo.NAMES, split, whole, strict=True):
        # one or two roundings of float16 at the largest magnitude
        assert (one - other).abs().max() <= 2**-9 * other.abs().max(), name
