"""Merging partial results of selected blocks: the kernels alone, on plans of several rounds."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs Triton")

from blocksparse_flash.kernels.selected_shapes import sizes_of
from blocksparse_flash.kernels.triton import merge_selected
from blocksparse_flash.plan import selected_builder
from blocksparse_flash.plan_format import Round, SelectedPlan, SelectedSizes
from blocksparse_flash.runtime.tensor_spec import specs_of
from tests.plan.test_selected_builder import Case, limited

# query heads of q, each with a selection
HEADS, GROUP = 4, 2
CASES = {
    "one round": (Case(axes=(2, HEADS), n_tokens=13, kv_len=150), None),
    "rounds": (Case(axes=(1, HEADS), n_tokens=13, kv_len=150, rows_per_token=16), 16 * 3 * 5),
    "rounds of heads": (Case(axes=(2, HEADS), n_tokens=5, kv_len=300, keys=256), 8 * 6 * 12),
    "rounds of one": (Case(axes=(1, HEADS), n_tokens=50, kv_len=50, query_block=32, rows_per_token=1), 1),
    # entries of which no pair attends
    "documents": (
        Case(
            axes=(1, HEADS), n_tokens=70, kv_len=70, query_block=8, rows_per_token=1, documents=((0, 30, 40, 60),)
        ),
        8 * 3 * 9,
    ),
    "more queries": (Case(axes=(1, HEADS), n_tokens=30, kv_len=20, keys=128), None),
}  # fmt: skip
DIMS, PADDED = (24, 40), (64, 128)


@pytest.fixture(params=CASES)
def plan(request: pytest.FixtureRequest, device: torch.device) -> Iterator[tuple[SelectedPlan, SelectedSizes, Case]]:
    """A plan with its sizes and its case, whose lists have several work items."""
    case, round_rows = CASES[request.param]
    with limited(round_rows=round_rows, item_rows=32):
        made = selected_builder.build(case.selection(case.indices()), **case.frame.sizes, causal=case.causal)
        sizes = sizes_of(list(made), case.kv_len)
        assert (len(sizes.rounds) > 1) == (round_rows is not None)
        yield SelectedPlan(*(tensor.to(device) for tensor in made)), sizes, case


def entries_of(plan: SelectedPlan, sizes: SelectedSizes, this: Round) -> Iterator[tuple[int, list[int]]]:
    """Each query block of a round, with the slots of its entries that are used."""
    indptr, key_blocks = plan.indptr.cpu(), plan.key_blocks.tolist()
    first = None
    end_query_block = min(this.first_query_block + sizes.query_blocks_per_round, sizes.total_query_blocks)
    for query_block in range(this.first_query_block, end_query_block):
        batch_head, block = divmod(query_block, sizes.n_query_blocks)
        begin, end = indptr[batch_head, block : block + 2].tolist()
        first = begin if first is None else first
        yield query_block, [position - first for position in range(begin, end) if key_blocks[position] >= 0]


def rows_of(whole: Tensor, query_block: int, sizes: SelectedSizes) -> Tensor:
    """The rows of a query block in a tensor (heads of all batches, q_len, ...)."""
    head, block = divmod(query_block, sizes.n_query_blocks)
    return whole[head, block * sizes.query_rows : (block + 1) * sizes.query_rows]


def result(batch: int, heads: int, length: int, dim: int, device: torch.device, *, by_token: bool) -> Tensor:
    """NaN (batch, heads, length, dim); by_token: (batch, length, heads, dim) in memory."""
    if by_token:
        return torch.full((batch, length, heads, dim), torch.nan, device=device).transpose(1, 2)
    return torch.full((batch, heads, length, dim), torch.nan, device=device)


@pytest.mark.parametrize("by_token", [False, True])
def test_rows_are_merged_by_weight(
    by_token: bool, plan: tuple[SelectedPlan, SelectedSizes, Case], device: torch.device
) -> None:
    """Rows without keys in some partial results or in all; lse so far apart that only the largest counts."""
    selected, sizes, case = plan
    q_len, n_rows, rows = case.frame.q_len, sizes.max_slots * sizes.query_rows, sizes.query_rows
    out = result(case.axes[0], HEADS, q_len, DIMS[1], device, by_token=by_token)
    launch = merge_selected.combine_out(sizes, specs_of(out).tensors[0], PADDED[1])
    lse = torch.full((sizes.n_batch_heads, q_len), torch.nan, device=device)
    generator = torch.Generator().manual_seed(0)
    for this in sizes.rounds:
        lses = 3 * torch.randn(sizes.max_slots, rows, generator=generator)
        lses[::2, 1::3], lses[:, 2], lses[-1:, 3] = -torch.inf, -torch.inf, 10_000.0
        outs = torch.randn(sizes.max_slots, rows, PADDED[1], generator=generator)
        outs[lses.isneginf()] = 0.0
        expected = {}
        is_used = torch.zeros(sizes.max_slots, dtype=torch.bool)
        for query_block, slots in entries_of(selected, sizes, this):
            logs = lses[slots].double() * math.log(2)
            weights = logs.softmax(0).nan_to_num(0.0)
            expected[query_block] = (weights[..., None] * outs[slots]).sum(0)[:, : DIMS[1]], logs.logsumexp(0)
            is_used[slots] = True
        # kernels write nothing for unused entries
        outs[~is_used], lses[~is_used] = torch.nan, torch.nan
        launch(
            selected.indptr, selected.key_blocks, outs.view(n_rows, -1).to(device), lses.view(-1).to(device), out, lse,
            this.first_query_block,
        )  # fmt: skip
        for query_block, (wanted, wanted_lse) in expected.items():
            for found, truth in ((out.flatten(0, 1), wanted), (lse, wanted_lse)):
                part = rows_of(found, query_block, sizes).cpu().double()
                torch.testing.assert_close(part, truth[: len(part)], rtol=1e-5, atol=1e-6)
    assert not out.isnan().any() and not lse.isnan().any()


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("key_splits", [1, 2])
def test_dq_is_added_over_entries_and_splits(
    key_splits: int, by_token: bool, plan: tuple[SelectedPlan, SelectedSizes, Case], device: torch.device
) -> None:
    selected, sizes, case = plan
    q_len, rows = case.frame.q_len, sizes.query_rows
    dq = result(case.axes[0], HEADS, q_len, DIMS[0], device, by_token=by_token)
    launch = merge_selected.reduce_dq(sizes, key_splits, specs_of(dq).tensors[0], PADDED[0])
    for this in sizes.rounds:
        partial = torch.randn(sizes.max_slots, key_splits, rows, PADDED[0])
        entries = dict(entries_of(selected, sizes, this))
        is_used = torch.zeros(sizes.max_slots, dtype=torch.bool)
        for slots in entries.values():
            is_used[slots] = True
        partial[~is_used] = torch.nan
        launch(selected.indptr, selected.key_blocks, partial.view(-1, PADDED[0]).to(device), dq, this.first_query_block)
        for query_block, slots in entries.items():
            part = rows_of(dq.flatten(0, 1), query_block, sizes).cpu()
            expected = partial[slots].sum((0, 1))[: len(part), : DIMS[0]]
            torch.testing.assert_close(part, expected, rtol=1e-5, atol=1e-5)
    assert not dq.isnan().any()


@pytest.mark.parametrize("by_token", [False, True])
def test_dk_and_dv_are_added_over_work_items_heads_and_rounds(
    by_token: bool, plan: tuple[SelectedPlan, SelectedSizes, Case], device: torch.device
) -> None:
    selected, sizes, case = plan
    batch, scale, keys = case.axes[0], -0.3, sizes.keys
    adds = len(sizes.rounds) > 1
    # dk by head, so that the orders differ
    orders = (False, by_token)
    found = [
        result(batch, HEADS // GROUP, case.kv_len, dim, device, by_token=order)
        for dim, order in zip(DIMS, orders, strict=True)
    ]
    launch = merge_selected.reduce_dkdv(sizes, GROUP, *specs_of(*found).tensors, PADDED, scale, adds=adds)
    # added to what is there, or written
    if adds:
        for tensor in found:
            tensor.zero_()
    n_heads = batch * HEADS // GROUP
    padded = -(-case.kv_len // keys) * keys
    expected = [torch.zeros(n_heads, padded, columns) for columns in PADDED]
    for this in sizes.rounds:
        first, end = (int(selected.work_item_offsets[i]) for i in (this.first_list, this.end_list))
        sums = torch.full((sizes.max_work_items, keys * sum(PADDED)), torch.nan)
        sums[: end - first] = torch.randn(end - first, keys * sum(PADDED))
        for (head, key_block, *_), total in zip(selected.work_items[first:end].tolist(), sums, strict=False):
            of_dk, of_dv = total.split([keys * columns for columns in PADDED])
            expected[0][head // GROUP, key_block * keys : (key_block + 1) * keys] += scale * of_dk.view(keys, -1)
            expected[1][head // GROUP, key_block * keys : (key_block + 1) * keys] += of_dv.view(keys, -1)
        launch(selected.work_item_offsets, sums.flatten().to(device), *found, *this[1:])
    for tensor, wanted in zip(found, expected, strict=True):
        assert wanted.any()
        torch.testing.assert_close(
            tensor.flatten(0, 1).cpu(), wanted[:, : case.kv_len, : tensor.shape[3]].contiguous(), rtol=1e-5, atol=1e-5
        )
