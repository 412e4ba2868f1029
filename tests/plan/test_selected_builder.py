"""Plans by key block list each selected block once, with the keys of each token, pair by pair."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="needs Triton")

from blocksparse_flash import plan_format
from blocksparse_flash.blocks.block_list import Frame
from blocksparse_flash.kernels.selected_shapes import sizes_of
from blocksparse_flash.kernels.triton import selected_plan
from blocksparse_flash.plan import block_selection, selected_builder
from blocksparse_flash.plan_format import BY_KEY_BLOCK, MAX_ITEM_ROWS, PARTIAL, SelectedPlan, tile_of
from tests.plan.test_block_selection import Operations


class Case(NamedTuple):
    """A selection. Blocks have rows_per_token * query_block rows and `keys` keys.

    documents  boundaries of one sequence or of several, None: one document
    """

    axes: tuple[int, int] = (1, 1)
    n_tokens: int = 20
    kv_len: int = 300
    rows_per_token: int = 8
    query_block: int = 1
    keys: int = 64
    k: int = 3
    causal: bool = True
    documents: tuple[tuple[int, ...], ...] | None = None
    seed: int = 0

    @property
    def frame(self) -> Frame:
        return Frame(
            *self.axes, self.n_tokens * self.rows_per_token, self.kv_len,
            (self.rows_per_token * self.query_block, self.keys),
        )  # fmt: skip

    def indices(self) -> Tensor:
        """Random blocks with duplicates and -1. Of three or more rows the second selects none, the third one block."""
        frame = self.frame
        generator = torch.Generator().manual_seed(self.seed)
        found = torch.randint(-1, frame.n_cols, (*self.axes, frame.n_rows, self.k), generator=generator)
        found[:, :, 1:2] = -1
        found[:, :, 2:3] = frame.n_cols - 1
        return found

    def selection(self, indices: Tensor) -> block_selection.Selection:
        selection = block_selection.by_indices(indices, self.frame)._replace(rows_per_token=self.rows_per_token)
        if self.documents is None:
            return selection
        documents = block_selection.document_of_tokens(torch.tensor(self.documents), self.n_tokens)
        return selection._replace(documents=documents, n_documents=len(self.documents[0]) - 1)

    def keys_of_tokens(self) -> Tensor:
        """Which keys a token may attend to if it selects them, bool (batch, n_tokens, kv_len)."""
        token, key = torch.arange(self.n_tokens)[:, None], torch.arange(self.kv_len)
        attends = torch.ones(self.axes[0], self.n_tokens, self.kv_len, dtype=torch.bool)
        if self.causal:
            attends &= key <= token + self.kv_len - self.n_tokens
        if self.documents is not None:
            within = torch.zeros(len(self.documents), self.n_tokens, self.kv_len, dtype=torch.bool)
            for batch, boundaries in enumerate(self.documents):
                for first, stop in itertools.pairwise(boundaries):
                    within[batch, first:stop, first:stop] = True
            attends &= within
        return attends

    def blocks(self, indices: Tensor, keys: int) -> dict[tuple[int, int], tuple[bool, bool]]:
        """Of each selected (query block, block of `keys` keys): whether some pair attends, and whether all do."""
        (_, heads), n_subblocks = self.axes, self.keys // keys
        allowed = torch.nn.functional.pad(self.keys_of_tokens(), (0, -self.kv_len % keys)).unflatten(2, (-1, keys))
        found = {}
        for query_block, chosen in enumerate(indices.flatten(0, 2).tolist()):
            batch_head, block = divmod(query_block, indices.shape[2])
            tokens = slice(block * self.query_block, (block + 1) * self.query_block)
            for selected, i_sub in itertools.product(set(chosen) - {-1}, range(n_subblocks)):
                key_block = selected * n_subblocks + i_sub
                if key_block < allowed.shape[2]:
                    pairs = allowed[batch_head // heads, tokens, key_block]
                    found[query_block, key_block] = bool(pairs.any()), bool(pairs.all())
        return found


@pytest.fixture(params=["operations", "kernels"])
def by(request: pytest.FixtureRequest) -> str:
    """What makes a plan: PyTorch operations, or kernels, which run in Triton's interpreter without a GPU."""
    made_by: str = request.param
    return made_by


def built(case: Case, by: str, indices: Tensor | None = None) -> SelectedPlan:
    """The plan of a case, on the GPU if there is one."""
    selection = case.selection(case.indices() if indices is None else indices)
    if torch.cuda.is_available():
        tensors = {name: value.cuda() for name, value in selection._asdict().items() if isinstance(value, Tensor)}
        selection = selection._replace(**tensors)
    with mock.patch.object(selected_builder, "is_on_gpu", lambda _: by == "kernels"):
        return selected_builder.build(selection, **case.frame.sizes, causal=case.causal)


def check(case: Case, by: str, indices: Tensor | None = None) -> SelectedPlan:
    """Raises unless the plan of a case is what SelectedPlan says. Returns it on the CPU."""
    indices = case.indices() if indices is None else indices
    plan = built(case, by, indices)
    for tensor in plan:
        assert tensor.dtype == torch.int32 and tensor.is_contiguous()
        # kernels are compiled for such addresses
        assert tensor.data_ptr() % 16 == 0 or not tensor.numel()
    assert tile_of(plan) == BY_KEY_BLOCK
    plan = SelectedPlan(*(tensor.cpu() for tensor in plan))
    n_heads, n_query_blocks = case.axes[0] * case.axes[1], case.frame.n_rows
    query_rows, rows_per_token, keys, query_blocks_per_round = plan.sizes.shape[1:]
    assert (query_rows, rows_per_token) == (case.frame.block_size[0], case.rows_per_token)
    assert keys == min(case.keys, 128)
    assert plan.indptr.shape == (n_heads, n_query_blocks + 1)
    assert len(plan.key_blocks) == indices.numel() * (case.keys // keys)
    check_ranges(plan, case)

    # by query block
    blocks = case.blocks(indices, keys)
    key_blocks, of_position = plan.key_blocks.tolist(), {}
    ends = plan.indptr.tolist()
    for query_block in range(n_heads * n_query_blocks):
        batch_head, block = divmod(query_block, n_query_blocks)
        begin, end = ends[batch_head][block : block + 2]
        assert begin == (ends[batch_head - 1][-1] if query_block and not block else begin if block else 0)
        of_position |= dict.fromkeys(range(begin, end), query_block)
    used = [(query_block, key_blocks[i]) for i, query_block in of_position.items() if key_blocks[i] >= 0]
    assert all(key_block == -1 for position, key_block in enumerate(key_blocks) if position not in of_position)
    assert len(used) == len(set(used))
    assert set(used) >= {each for each, (some, _) in blocks.items() if some}
    for query_block, key_block in used:
        # between two documents of a query block there may be keys of neither
        some, _ = blocks[query_block, key_block]
        assert some or (case.documents is not None and case.query_block > 1), (query_block, key_block)

    # by key block
    entries, items, work_item_offsets = plan.entries.tolist(), plan.work_items.tolist(), plan.work_item_offsets.tolist()
    assert work_item_offsets[0] == 0 and work_item_offsets == sorted(work_item_offsets)
    listed, lists = list[int](), list[tuple[int, int, int]]()
    for begin, end in itertools.pairwise(work_item_offsets):
        if begin == end:
            continue
        head, key_block, first, stop = list_of(items[begin:end], plan_format.MAX_ITEM_ROWS // query_rows)
        positions = [position for position, _ in entries[first:stop]]
        # stable, so that results do not depend on the order of events
        assert positions == sorted(positions)
        for position, block in entries[first:stop]:
            query_block = of_position[position]
            assert (head, key_block) == (query_block // n_query_blocks, key_blocks[position])
            assert block % PARTIAL == query_block % n_query_blocks
            _, every = blocks[query_block, key_blocks[position]]
            assert (block >= 0) == every, (query_block, key_blocks[position])
            listed.append(position)
        (i_round,) = {of_position[position] // query_blocks_per_round for position in positions}
        lists.append((i_round, head, key_block))
    assert sorted(listed) == [position for position, _ in sorted(of_position.items()) if key_blocks[position] >= 0]
    # by round, head and key block
    assert lists == sorted({*lists})
    # kernels read two steps past the end of a list
    assert all(end + 16 <= len(entries) for *_, end in items[: work_item_offsets[-1]])
    check_rounds(plan, case, of_position)
    return plan


def list_of(items: list[list[int]], max_item_blocks: int) -> tuple[int, int, int, int]:
    """(head, key block, first entry, one past the last) of the items of a list, which they partition."""
    assert len({(head, key_block) for head, key_block, _, _ in items}) == 1
    for (*_, begin, end), (*_, following, _) in itertools.pairwise(items):
        assert following == end == begin + max_item_blocks
    head, key_block, begin, end = items[-1]
    assert 0 < end - begin <= max_item_blocks
    return head, key_block, items[0][2], end


def check_ranges(plan: SelectedPlan, case: Case) -> None:
    """The keys of each token are consecutive, and their bounds never decrease from token to token."""
    n_documents = 1 if case.documents is None else len(case.documents)
    assert plan.ranges.shape == (n_documents, case.n_tokens, 2)
    key = torch.arange(case.kv_len)
    first, stop = plan.ranges[..., 0, None], plan.ranges[..., 1, None]
    assert torch.equal(((key >= first) & (key < stop)).expand(case.axes[0], -1, -1), case.keys_of_tokens())
    assert (plan.ranges.diff(dim=1) >= 0).all()


def check_rounds(plan: SelectedPlan, case: Case, of_position: dict[int, int]) -> None:
    """The launches have all query blocks and all lists, and memory for their partial results and work items."""
    sizes, work_item_offsets = sizes_of(list(plan), case.kv_len), plan.work_item_offsets.tolist()
    firsts = [each.first_query_block for each in sizes.rounds]
    assert firsts[0] == sizes.rounds[0].first_list == 0 and sizes.rounds[-1].end_list == len(work_item_offsets) - 1
    for i, (this, end) in enumerate(zip(sizes.rounds, [*firsts[1:], sizes.total_query_blocks], strict=True)):
        assert this.i_round == i and 0 < end - this.first_query_block <= sizes.query_blocks_per_round
        assert i == 0 or this.first_list == sizes.rounds[i - 1].end_list
        positions = {at for at, query_block in of_position.items() if this.first_query_block <= query_block < end}
        assert not positions or max(positions) - min(positions) < sizes.max_slots
        first_item, end_item = work_item_offsets[this.first_list], work_item_offsets[this.end_list]
        assert end_item - first_item <= sizes.max_work_items
        for *_, begin, stop in plan.work_items[first_item:end_item].tolist():
            assert positions >= {*plan.entries[begin:stop, 0].tolist()}


@contextlib.contextmanager
def limited(*, round_rows: int | None = None, item_rows: int | None = None) -> Iterator[None]:
    """Lowers the rows of a round and of a work item."""
    with contextlib.ExitStack() as stack:
        if round_rows is not None:
            stack.enter_context(mock.patch.object(selected_builder, "ROUND_ROWS", round_rows))
        if item_rows is not None:
            stack.enter_context(mock.patch.object(plan_format, "MAX_ITEM_ROWS", item_rows))
        # their sizes depend on the constants
        selected_plan.plan_launches.cache_clear()
        yield
    selected_plan.plan_launches.cache_clear()


SQUARE = {"n_tokens": 100, "kv_len": 100}
CASES = {
    "one query": Case(n_tokens=1, kv_len=500),
    "one key": Case(kv_len=1, k=1),
    "64 keys": Case(axes=(2, 3), kv_len=333),
    "128 keys": Case(axes=(2, 1), kv_len=300, keys=128),
    "256 keys": Case(axes=(1, 2), kv_len=700, keys=256),
    "384 keys": Case(axes=(1, 2), kv_len=1000, keys=384, k=2),
    "whole blocks": Case(n_tokens=256, kv_len=256),
    "16 rows": Case(axes=(1, 2), rows_per_token=16, keys=128),
    "32 rows": Case(rows_per_token=32),
    "two tokens": Case(n_tokens=37, query_block=2, rows_per_token=4),
    "tokens alone": Case(axes=(1, 3), n_tokens=70, query_block=16, rows_per_token=1),
    "32 tokens": Case(n_tokens=130, kv_len=190, query_block=32, rows_per_token=1, keys=128),
    "more queries": Case(n_tokens=200, kv_len=90, query_block=4, rows_per_token=2),
    "one block each": Case(k=1, n_tokens=50),
    "every block twice": Case(k=10),
    "documents": Case(axes=(1, 2), **SQUARE, documents=((0, 5, 37, 37, 61),)),
    "documents of each": Case(axes=(2, 2), **SQUARE, documents=((0, 0, 17, 70), (0, 33, 64, 64))),
    "shared documents": Case(axes=(2, 1), **SQUARE, documents=((0, 40, 100),)),
    "document by document": Case(**SQUARE, documents=((0, 64, 100),), causal=False),
    "documents in a block": Case(
        axes=(2, 1), n_tokens=300, kv_len=300, query_block=16, rows_per_token=2, documents=((0, 10, 140, 150),) * 2
    ),
    "no documents": Case(**SQUARE, documents=((0,),)),
    "many in a block": Case(
        n_tokens=150, kv_len=150, query_block=32, rows_per_token=1, keys=128, documents=((0, *range(3, 130, 7)),)
    ),
}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_a_plan_is_what_its_format_says(name: str, causal: bool, by: str) -> None:
    check(CASES[name]._replace(causal=causal), by)


@pytest.mark.parametrize("round_rows", [1, 64, 400, 1000])
@pytest.mark.parametrize("name", ["64 keys", "256 keys", "tokens alone", "documents of each", "one query"])
def test_rounds_have_their_own_lists(name: str, round_rows: int, by: str) -> None:
    """Of one query block, of a part of a head, and of several heads."""
    with limited(round_rows=round_rows):
        check(CASES[name], by)


@pytest.mark.parametrize("round_rows", [None, 500])
@pytest.mark.parametrize("item_rows", [32, 64])
@pytest.mark.parametrize("name", ["64 keys", "256 keys", "32 rows", "documents of each"])
def test_long_lists_have_several_work_items(name: str, item_rows: int, round_rows: int | None, by: str) -> None:
    with limited(item_rows=item_rows, round_rows=round_rows):
        plan = check(CASES[name]._replace(k=8), by)
    assert round_rows is not None or (plan.work_item_offsets.diff() > 1).any()


@pytest.mark.parametrize("query_block", [1, 4])
def test_work_items_have_at_most_the_rows_of_a_constant(query_block: int, by: str) -> None:
    """Every query block selects the first key block; lists of exactly one item, and of one entry more."""
    max_item_blocks = MAX_ITEM_ROWS // (8 * query_block)
    for total_query_blocks, expected in (
        (max_item_blocks, [max_item_blocks]),
        (max_item_blocks + 1, [max_item_blocks, 1]),
        (3 * max_item_blocks, [max_item_blocks] * 3),
    ):
        case = Case(n_tokens=total_query_blocks * query_block, kv_len=100, query_block=query_block, k=1, causal=False)
        plan = check(case, by, torch.zeros(1, 1, total_query_blocks, 1, dtype=torch.int64))
        assert plan.work_items[: plan.work_item_offsets[-1], 2:].diff().flatten().tolist() == expected


@pytest.mark.parametrize(
    ("case", "key_block", "n_listed"),
    [
        (Case(n_tokens=20, kv_len=300), -1, 0),
        # causal: the last block begins at key 256, the keys of the last token end before it, at it, and in it
        (Case(n_tokens=1, kv_len=256), 3, 1),
        (Case(n_tokens=20, kv_len=257), 4, 1),
        (Case(n_tokens=20, kv_len=276), 4, 20),
        # the first 30 tokens are before every key
        (Case(n_tokens=50, kv_len=20), 0, 20),
        # the last 30 tokens are in no document
        (Case(n_tokens=50, kv_len=50, documents=((0, 20),)), 0, 20),
        (Case(n_tokens=50, kv_len=50, causal=False, documents=((0, 20),)), 0, 20),
    ],
    ids=["none", "before", "at", "in", "fewer keys", "document", "document, not causal"],
)
def test_only_blocks_with_pairs_are_listed(case: Case, key_block: int, n_listed: int, by: str) -> None:
    plan = check(case, by, torch.full((1, 1, case.n_tokens, 3), key_block))
    assert plan.work_items[: plan.work_item_offsets[-1], 2:].diff().flatten().tolist() == [n_listed] * (n_listed > 0)


@given(
    axes=st.sampled_from([(1, 1), (1, 3), (2, 1), (2, 2)]),
    n_tokens=st.integers(1, 150),
    kv_len=st.integers(1, 700),
    sides=st.sampled_from([(1, 8), (1, 16), (1, 32), (2, 4), (4, 4), (8, 1), (16, 1), (32, 1), (16, 2)]),
    keys=st.sampled_from([64, 128, 256, 384]),
    k=st.integers(1, 6),
    causal=st.booleans(),
    n_documents=st.integers(0, 6),
    round_rows=st.sampled_from([None, 16, 100, 1000]),
    item_rows=st.sampled_from([None, 32, 128]),
    seed=st.integers(0, 2**31),
)
def test_random_plans_are_what_their_format_says(
    axes: tuple[int, int],
    n_tokens: int,
    kv_len: int,
    sides: tuple[int, int],
    keys: int,
    k: int,
    causal: bool,
    n_documents: int,
    round_rows: int | None,
    item_rows: int | None,
    seed: int,
) -> None:
    query_block, rows_per_token = sides
    documents = None
    if n_documents:
        kv_len = n_tokens
        generator = torch.Generator().manual_seed(seed)
        cuts = torch.randint(0, n_tokens + 1, (axes[0] if seed % 2 else 1, n_documents), generator=generator)
        documents = tuple((0, *row) for row in cuts.sort(1).values.tolist())
    case = Case(axes, n_tokens, kv_len, rows_per_token, query_block, keys, k, causal, documents, seed)
    with limited(round_rows=round_rows, item_rows=item_rows):
        for by in ("operations", "kernels"):
            check(case, by)


@pytest.mark.parametrize(
    ("block_size", "n_query_blocks", "k", "expected"),
    [
        *(((rows, 64), 100, 4, rows in (8, 16, 32)) for rows in (1, 2, 4, 8, 16, 32, 64, 128)),
        *(((16, keys), 100, 4, keys >= 64) for keys in (16, 32, 64, 128, 256, 384, 1024)),
        ((16, 192), 100, 4, False),
        ((16, 64), 100, 0, False),
        # marks of partial blocks are subtracted from the numbers of query blocks
        ((16, 64), PARTIAL - 1, 1, True),
        ((16, 64), PARTIAL, 1, False),
    ],
)
def test_small_query_blocks_and_large_key_blocks_are_suited(
    block_size: tuple[int, int], n_query_blocks: int, k: int, expected: bool
) -> None:
    assert selected_builder.can_build(block_size, n_query_blocks, k) == expected


@pytest.mark.parametrize(
    ("block_size", "length", "k", "expected"),
    [
        ((16, 64), 8192, 16, True),
        ((16, 128), 8192, 16, True),
        ((16, 256), 8192, 8, True),
        # more than a quarter of the blocks
        ((16, 128), 8064, 16, False),
        ((16, 128), 8192, 17, False),
        # too little work
        ((16, 64), 1024, 4, False),
        ((16, 64), 8192, 2, False),
        # as many entries as 32-bit offsets reach
        ((16, 64), 1 << 24, 15, True),
        ((16, 64), 1 << 24, 16, False),
        ((16, 256), 1 << 24, 8, False),
    ],
)
def test_it_pays_to_list_few_blocks_of_many_by_key_block(
    block_size: tuple[int, int], length: int, k: int, expected: bool
) -> None:
    """By token, 64 query heads on 4 KV heads."""
    assert selected_builder.is_faster(block_size, 4 * length, length, k) == expected


@pytest.mark.parametrize("round_rows", [None, 500])
@pytest.mark.parametrize("name", CASES)
def test_kernels_make_the_plan_of_the_operations(name: str, round_rows: int | None) -> None:
    """All values are equal up to the last entry and work item that are used."""
    with limited(round_rows=round_rows, item_rows=64):
        by_operations, by_kernels = (built(CASES[name], by) for by in ("operations", "kernels"))
    n_items = int(by_operations.work_item_offsets[-1])
    n_entries = int(by_operations.work_items[n_items - 1, 3]) if n_items else 0
    for field, wanted, found in zip(SelectedPlan._fields, by_operations, by_kernels, strict=True):
        assert found.shape == wanted.shape, field
        size = {"entries": n_entries, "work_items": n_items}.get(field, len(wanted))
        assert torch.equal(found[:size], wanted[:size]), field


def test_a_plan_takes_few_operations() -> None:
    """Each takes the host some 10 microseconds on a GPU."""
    for documents, most in ((None, 88), (((0, 40, 100),) * 2, 93)):
        case = Case(axes=(2, 2), **SQUARE, keys=256, documents=documents)
        selection = case.selection(case.indices())
        with Operations() as counted:
            selected_builder.build(selection, **case.frame.sizes, causal=True)
        assert 20 < len(counted.names) <= most, (len(counted.names), counted.names)
