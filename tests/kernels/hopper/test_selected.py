"""Selected blocks by key block: the Hopper kernels on the simulator under many orders of events, and seeded faults.

Whole calls of selected_attention: the plan and the kernels of triton/merge_selected.py run as well.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs Triton")

from triton.language import core
from triton.runtime import interpreter

from blocksparse_flash import dispatch, ops, plan_format, selected_attention_with_lse
from blocksparse_flash.plan import selected_builder
from blocksparse_flash.plan_format import BY_KEY_BLOCK, tile_of
from tests.support import plain
from tests.support.closeness import assert_as_accurate, buried_inputs
from tests.support.gluon_machine import ProtocolError
from tests.support.gluon_simulator import Change, Simulation
from tests.test_selection import dense_mask, drawn_indices, in_documents

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="needs Triton's interpreter: a GPU runs the kernels")

NAMES = ("out", "lse", "dq", "dk", "dv")


class Case(NamedTuple):
    """A call of selected_attention, and limits that cut its plan into rounds and work items.

    group            query heads per KV head
    n_selections     heads of the indices: one for each query head, KV head, or for all
    shared           whether batches share the indices
    documents        boundaries of each batch
    round_rows, item_rows  rows of a round and of a work item, None: as they are
    """

    kv_heads: int = 1
    group: int = 8
    query_block: int = 1
    block: int = 64
    q_len: int = 20
    kv_len: int = 150
    k: int = 2
    dims: tuple[int, int] = (64, 64)
    batch: int = 1
    causal: bool = True
    dtype: torch.dtype = torch.float16
    scale: float | None = None
    n_selections: int | None = None
    shared: bool = False
    documents: tuple[tuple[int, ...], ...] | None = None
    round_rows: int | None = None
    item_rows: int | None = None

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def indices(self) -> Tensor:
        """Random blocks; the second query block selects none, the third its last block twice."""
        batch, heads = 1 if self.shared else self.batch, self.n_selections or self.kv_heads
        return drawn_indices(batch, heads, -(-self.q_len // self.query_block), self.k, -(-self.kv_len // self.block))

    def tensors(self) -> list[Tensor]:
        """q, k, v, dout and dlse."""
        generator = torch.Generator().manual_seed(self.q_len * 1000 + self.kv_len)
        (dim, v_dim), (q_heads, kv_heads) = self.dims, (self.heads, self.kv_heads)
        shapes = [(q_heads, self.q_len, dim), (kv_heads, self.kv_len, dim), (kv_heads, self.kv_len, v_dim)]
        shapes += [(q_heads, self.q_len, v_dim), (q_heads, self.q_len)]
        return [torch.randn(self.batch, *shape, generator=generator).to(self.dtype) for shape in shapes]

    def mask(self) -> Tensor:
        """The pairs that attend."""
        indices = self.indices.expand(self.batch, -1, -1, -1)
        sizes = (self.heads, self.q_len, self.kv_len, self.block, self.query_block)
        mask = dense_mask(indices, *sizes, self.causal)
        return mask if self.documents is None else in_documents(mask, [list(each) for each in self.documents])


@functools.lru_cache(maxsize=64)
def expected(case: Case) -> list[tuple[list[Tensor], Tensor]]:
    """For each result: plain PyTorch in the dtype of the case, lse in float32, and in float64."""
    plains, truths = (of(*case.tensors(), case.mask(), scale=case.scale) for of in (plain.results, plain.truths))
    return list(zip(plains, truths, strict=True))


@pytest.fixture
def run(monkeypatch):
    """Results of a case on the simulated kernels; memory around the inputs is NaN."""

    def run(simulation: Simulation, case: Case, *, backward: bool = True) -> list[Tensor]:
        tiles: set[int] = set()

        def kernels(backend: str, deterministic: bool, tile: int) -> Any:
            tiles.add(tile)
            if tile == BY_KEY_BLOCK:
                return simulation.selected_forward.forward, simulation.selected_backward.backward
            return simulation.fine_forward.forward, simulation.fine_backward.backward

        with monkeypatch.context() as patched:
            patched.setattr(ops, "_kernels", kernels)
            patched.setattr(dispatch, "choose", lambda *_: "hopper")
            patched.setattr(selected_builder, "is_faster", lambda *_: True)
            if case.round_rows is not None:
                patched.setattr(selected_builder, "ROUND_ROWS", case.round_rows)
            if case.item_rows is not None:
                patched.setattr(plan_format, "MAX_ITEM_ROWS", case.item_rows)
            *tensors, dlse = case.tensors()
            q, k, v, dout = buried_inputs(dict(zip(("q", "k", "v", "dout"), tensors, strict=True))).values()
            leaves = [tensor.requires_grad_(backward) for tensor in (q, k, v)]
            bounds = None if case.documents is None else torch.tensor(case.documents)
            options: dict[str, Any] = {"block_size": case.block, "query_block_size": case.query_block}
            options |= {"causal": case.causal, "scale": case.scale, "cu_seqlens": bounds}
            out, lse = selected_attention_with_lse(*leaves, case.indices, **options, backend="hopper")
            found = [out.detach(), lse.detach()]
            if backward:
                found += torch.autograd.grad((out, lse), leaves, (dout, dlse.to(lse.dtype)))
        assert tiles == {BY_KEY_BLOCK} or case.n_selections == 1 or case.shared
        return found

    return run


@pytest.fixture
def check(run):
    """Raises unless the results of a case are as accurate as those of plain PyTorch."""

    def check(simulation: Simulation, case: Case, *, backward: bool = True) -> None:
        found = run(simulation, case, backward=backward)
        for name, result, references in zip(NAMES, found, expected(case), strict=False):
            assert_as_accurate(result, *references, name=name)

    return check


@pytest.fixture
def rounded_bfloat16(monkeypatch):
    """Lets Triton's interpreter round to bfloat16 as a GPU does; it truncates."""
    convert = interpreter._convert_float

    def rounded(values: Any, input_dtype: Any, output_dtype: Any, rounding_mode: Any) -> Any:
        if (input_dtype, output_dtype) == (core.float32, core.bfloat16):
            bits = values.view(np.uint32)
            return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
        return convert(values, input_dtype, output_dtype, rounding_mode)

    monkeypatch.setattr(interpreter, "_convert_float", rounded)


# ---- accuracy ----


CASES = {
    "8 rows": Case(q_len=40),
    "8 rows of 2 tokens": Case(kv_heads=2, group=4, query_block=2, block=128, q_len=37, kv_len=300),
    "8 rows of 8 tokens": Case(kv_heads=2, group=1, query_block=8, q_len=90, kv_len=70, batch=2),
    "16 rows": Case(kv_heads=2, group=16, q_len=14, block=256, kv_len=600),
    "16 rows of 4 tokens": Case(group=4, query_block=4, q_len=33, block=128, dims=(24, 40), batch=2),
    "16 rows of 16 tokens": Case(kv_heads=2, group=1, query_block=16, q_len=100, kv_len=100, k=3),
    "32 rows": Case(group=32, q_len=12, block=384, kv_len=500, k=1),
    "32 rows of 8 tokens": Case(kv_heads=2, group=4, query_block=8, q_len=70, kv_len=200, causal=False),
    "32 rows of 32 tokens": Case(kv_heads=1, group=1, query_block=32, q_len=130, kv_len=300, dims=(128, 128)),
    # padded groups
    "groups of 3": Case(kv_heads=2, group=3, query_block=2, q_len=25, kv_len=90),
    "groups of 5": Case(group=5, q_len=20, kv_len=100, causal=False, block=128),
    "groups of 9": Case(kv_heads=2, group=9, q_len=9),
    "groups of 20": Case(group=20, q_len=9, dims=(64, 128)),
    # query heads of a group with selections of their own, and one selection for all
    "by head": Case(kv_heads=2, group=3, query_block=8, q_len=50, n_selections=6, batch=2),
    "by head of many": Case(group=4, query_block=32, q_len=70, n_selections=4, block=128, kv_len=200),
    "for all heads": Case(kv_heads=2, group=8, q_len=12, n_selections=1),
    "for all batches": Case(kv_heads=2, group=8, q_len=12, batch=2, shared=True),
    # head dimensions
    "80 columns": Case(q_len=16, dims=(80, 80)),
    "80 and 24 columns": Case(q_len=16, dims=(80, 24), block=128),
    "64 and 128 columns": Case(q_len=16, dims=(64, 128), causal=False),
    "128 and 64 columns": Case(group=16, q_len=10, dims=(128, 64)),
    "128 columns": Case(q_len=16, dims=(128, 128), block=128, kv_len=260),
    # rows that TMA cannot load
    "100 and 3 columns": Case(q_len=16, dims=(100, 3)),
    # scale
    "negative scale": Case(q_len=16, scale=-0.3),
    "scale 0": Case(q_len=16, scale=0.0),
    "large scores": Case(q_len=16, scale=3.0, k=3),
    # query heads of a token, of several KV heads and batches
    "many blocks of heads": Case(kv_heads=2, group=8, q_len=9, kv_len=1000, k=11, dims=(64, 40), batch=2),
    # rounds: of a few query blocks, of several heads, of one; the last one is ragged
    "rounds": Case(kv_heads=2, q_len=24, round_rows=8 * 2 * 5),
    "rounds of subblocks": Case(kv_heads=2, q_len=11, block=256, kv_len=600, round_rows=8 * 4 * 7),
    "rounds of heads": Case(kv_heads=3, q_len=6, batch=2, round_rows=8 * 2 * 16),
    "rounds of one": Case(group=32, q_len=5, round_rows=1),
    "rounds by head": Case(kv_heads=1, group=3, query_block=8, q_len=50, n_selections=3, round_rows=8 * 2 * 5),
    "many items": Case(q_len=40, k=3, item_rows=64),
    "many items of rounds": Case(kv_heads=2, q_len=40, k=3, item_rows=32, round_rows=8 * 3 * 30),
    # fewer entries than key blocks, and rounds with more key blocks than entries
    "many keys": Case(q_len=1, kv_len=64 * 60),
    "rounds of many keys": Case(q_len=5, kv_len=64 * 60, round_rows=8 * 2 * 2),
    # the first queries precede all keys
    "more queries": Case(group=8, q_len=60, kv_len=40),
    "more queries of a block": Case(group=4, query_block=4, q_len=60, kv_len=40),
    "one key": Case(q_len=10, kv_len=1, k=1),
    "documents": Case(q_len=60, kv_len=60, batch=2, documents=((0, 7, 30, 30, 50), (0, 0, 33, 60, 60))),
    "documents of a block": Case(
        kv_heads=2, group=2, query_block=8, q_len=70, kv_len=70, batch=2, documents=((0, 5, 40), (0, 30, 70))
    ),
    "documents, not causal": Case(
        group=4, query_block=8, block=128, q_len=140, kv_len=140, causal=False, documents=((0, 50, 130, 135),)
    ),
    "documents of shared selections": Case(
        q_len=30, kv_len=30, batch=2, shared=True, k=1, documents=((0, 10, 30), (0, 20, 25))
    ),
}


def values_of(name: str) -> set[Any]:
    """What a case adds to a sample."""
    case, default = CASES[name], Case()
    rows = (1 << (case.group - 1).bit_length()) * case.query_block
    changed = {field for field in Case._fields if getattr(case, field) != getattr(default, field)}
    few = {"scale": case.scale, "n_selections": case.n_selections, "dims": max(case.dims)}
    return {("rows", rows), ("block", case.block), *(changed - {"q_len", "kv_len", "k"}), *few.items()}


@pytest.mark.sweep(by=values_of)
@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_accurate(check, name):
    check(Simulation(seed=list(CASES).index(name)), CASES[name])


@pytest.mark.usefixtures("rounded_bfloat16")
@pytest.mark.parametrize("name", ["16 rows of 4 tokens", pytest.param("128 columns", marks=pytest.mark.thorough)])
def test_bfloat16_is_accurate(check, name):
    check(Simulation(seed=1), CASES[name]._replace(dtype=torch.bfloat16))


@pytest.mark.parametrize("name", ["many items of rounds", pytest.param("documents", marks=pytest.mark.thorough)])
def test_every_order_of_events_gives_the_same_bits(run, name):
    first, *others = (run(Simulation(seed=seed), CASES[name]) for seed in range(3))
    assert all(torch.equal(*pair) for other in others for pair in zip(first, other, strict=True))


def test_queries_that_select_nothing_have_zeros(run):
    """-1 alone, and blocks of keys that follow the query."""
    case = CASES["more queries"]
    out, lse, dq, *_ = run(Simulation(seed=3), case)
    is_empty = ~case.mask().any(-1)
    assert is_empty.any() and not is_empty.all()
    assert torch.equal(lse.isneginf(), is_empty) and not out[is_empty].any() and not dq[is_empty].any()


# ---- the choice of the plan ----


@pytest.mark.parametrize(
    ("expected", "changes"),
    [
        (True, {}),
        (True, {"group": 32}),
        (True, {"group": 1, "query_block": 32}),
        (True, {"group": 5, "block": 256, "dims": (128, 24)}),
        (True, {"causal": False, "documents": ((0, 10, 20),), "kv_len": 20}),
        # query blocks of 4 and of 64 rows
        (False, {"group": 4}),
        (False, {"group": 16, "query_block": 4}),
        (False, {"block": 16}),
        (False, {"block": 32}),
        (False, {"dims": (136, 64)}),
        (False, {"dims": (64, 192)}),
        # one selection for two KV heads, or for two batches
        (False, {"kv_heads": 2, "n_selections": 1}),
        (False, {"batch": 2, "shared": True}),
    ],
    ids=str,
)
@pytest.mark.parametrize("backend", ["hopper", "triton"])
@pytest.mark.parametrize("is_faster", [True, False])
def test_calls_have_plans_by_key_block_where_the_kernels_take_them(monkeypatch, is_faster, backend, expected, changes):
    case, tiles = Case()._replace(**changes), []

    def forward(q: Tensor, k: Tensor, v: Tensor, plan: list[Tensor], *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        assert tile_of(plan) == tiles[-1]
        return q.new_zeros(*q.shape[:3], v.shape[3]), q.new_zeros(q.shape[:3], dtype=torch.float32)

    monkeypatch.setattr(ops, "_kernels", lambda _backend, _deterministic, tile: (tiles.append(tile) or forward, None))
    monkeypatch.setattr(dispatch, "choose", lambda *_: backend)
    if is_faster:
        # a small call
        monkeypatch.setattr(selected_builder, "is_faster", lambda *_: True)
    bounds = None if case.documents is None else torch.tensor(case.documents)
    options: dict[str, Any] = {"block_size": case.block, "query_block_size": case.query_block, "causal": case.causal}
    selected_attention_with_lse(*case.tensors()[:3], case.indices, **options, cu_seqlens=bounds, backend=backend)
    assert [tile == BY_KEY_BLOCK for tile in tiles] == [expected and is_faster and backend == "hopper"]


@pytest.mark.parametrize(
    ("is_packed", "changes"),
    [
        (False, {}),
        (False, {"group": 32}),
        (False, {"kv_heads": 2, "group": 16, "batch": 2}),
        (True, {"group": 5}),
        (True, {"group": 4, "query_block": 2}),
    ],
    ids=str,
)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("is_profiled", [False, True])
def test_heads_of_a_token_are_read_in_place(monkeypatch, is_packed, changes, autocast, is_profiled):
    """q reaches the kernels as it is, in the dtype of autocast, where all its heads that share a selection are rows.

    Under a profiler too, where calls go through the operator.
    """
    case, given = Case()._replace(**changes), []

    def forward(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        given.append((q, k, v))
        return q.new_zeros(*q.shape[:3], v.shape[3]), q.new_zeros(q.shape[:3], dtype=torch.float32)

    monkeypatch.setattr(ops, "_kernels", lambda *_: (forward, None))
    monkeypatch.setattr(dispatch, "choose", lambda *_: "hopper")
    monkeypatch.setattr(selected_builder, "is_faster", lambda *_: True)
    q, k, v = case.tensors()[:3]
    if autocast:
        q, k, v = q.float(), k.float(), v.float()
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        torch.profiler.profile() if is_profiled else contextlib.nullcontext(),
    ):
        out, lse = selected_attention_with_lse(
            q, k, v, case.indices, block_size=case.block, query_block_size=case.query_block, backend="hopper"
        )
    ((of_q, of_k, of_v),) = given
    assert of_q.dtype == of_k.dtype == of_v.dtype == out.dtype == (torch.bfloat16 if autocast else torch.float16)
    assert out.shape == (*q.shape[:3], v.shape[3]) and lse.shape == q.shape[:3]
    assert (of_q.shape != q.shape) == is_packed
    if not is_packed and not autocast:
        assert of_q.data_ptr() == q.data_ptr() and of_q.stride() == q.stride()


# ---- seeded faults ----


TILES, FORWARD, BACKWARD = (f"hopper.selected_{name}" for name in ("tiles", "forward", "backward"))
WORK_TILES = "hopper.work_tiles"
# faults of work items, loads and stores, which both directions share
TILE_FAULTS = {
    "work items of the first round": Change(
        TILES,
        "p_item = ptrs.work_items_ptr + (first_item + i_work",
        "p_item = ptrs.work_items_ptr + (0 * first_item + i_work",
    ),
    "work items past the end of the round": Change(
        TILES,
        "sizes.end_list) - first_item",
        "sizes.end_list) - first_item + 1",
    ),
    "last work item left out": Change(
        TILES,
        "sizes.end_list) - first_item",
        "sizes.end_list) - first_item - 1",
    ),
    "next work item after those of two launches": Change(WORK_TILES, ") + n_programs", ") + 2 * n_programs"),
    "work item released twice": Change(
        TILES,
        "    consumer_release(items, stage)\n",
        "    consumer_release(items, stage)\n    consumer_release(items, stage)\n",
    ),
    "work item released before it is read": Change(
        TILES, "    batch_head = load_int(", "    consumer_release(items, stage)\n    batch_head = load_int("
    ),
    "work item not waited for": Change(TILES, "    consumer_wait(items, stage, i_iter // WORK_TILE_STAGES)\n", ""),
    "keys loaded over those of the work item before": Change(TILES, "    producer_acquire(pipeline, 0, i_iter)\n", ""),
    "bytes of one query block expected": Change(
        TILES, "len(blocks) * (COLUMNS // SWIZZLE_COLS) * desc.block_type.nbytes", "desc.block_type.nbytes"
    ),
    "query blocks in the place of the first": Change(
        TILES,
        "view = buffer.slice(i_block * BLOCK_ROWS, BLOCK_ROWS, 2).slice(column, SWIZZLE_COLS, 3)\n            if",
        "view = buffer.slice(0, BLOCK_ROWS, 2).slice(column, SWIZZLE_COLS, 3)\n            if",
    ),
    "the first query block loaded for all": Change(TILES, "blocks[i_block] * BLOCK_ROWS", "blocks[0] * BLOCK_ROWS"),
    "the first token loaded for all": Change(
        TILES, "blocks[i_block], i_head * BLOCK_ROWS", "blocks[0], i_head * BLOCK_ROWS"
    ),
    "heads of the first KV head": Change(TILES, "i_head * BLOCK_ROWS, column", "0 * i_head, column"),
    "buffer acquired in the wrong phase": Change(
        TILES,
        "producer_acquire(pipeline, stage, i_load // STAGES)",
        "producer_acquire(pipeline, stage, i_load // STAGES + 1)",
    ),
    "queries loaded over those that are multiplied": Change(
        TILES, "    producer_acquire(pipeline, stage, i_load // STAGES)\n", ""
    ),
    "mask of the last query block dropped": Change(
        TILES,
        "for i_block in gl.static_range(BLOCKS_PER_STEP):\n        found = found |",
        "for i_block in gl.static_range(BLOCKS_PER_STEP - 1):\n        found = found |",
    ),
    "mask dropped": Change(TILES, "        found = found | (gl.load(", "        found = found & (gl.load("),
    "partial results of no query block stored over the first": Change(TILES, "sizes.n_slots),)", "0),)"),
    "partial results of the first round": Change(
        TILES,
        "sizes.first_query_block + sizes.first_query_block // sizes.n_query_blocks",
        "0 * sizes.first_query_block",
    ),
    "first query block counted without the heads before it": Change(
        TILES, "sizes.first_query_block + sizes.first_query_block // sizes.n_query_blocks", "sizes.first_query_block"
    ),
    "lse of the second query block for all that follow": Change(TILES, "o_block == i_block", "o_block >= 1"),
    "keys of the next token": Change(TILES, "// ROWS_PER_TOKEN, sizes", "// ROWS_PER_TOKEN + 1, sizes"),
    "keys of tokens past the last": Change(TILES, "sizes.n_tokens - 1)", "sizes.n_tokens)"),
    "keys of the tokens of the first batch": Change(TILES, "* sizes.range_batch_stride + o_token", "* 0 + o_token"),
    "rows counted as tokens": Change(TILES, "o_row % BLOCK_ROWS) // ROWS_PER_TOKEN", "o_row % BLOCK_ROWS) // 1"),
    "partial results of all query blocks in the place of the first": Change(
        TILES, "slots[i_block] * BLOCK_ROWS", "slots[0] * BLOCK_ROWS"
    ),
}
FORWARD_FAULTS = {
    "counter of the first round": Change(FORWARD, "ptrs.counters_ptr + sizes.i_round", "ptrs.counters_ptr"),
    "queries released before they are read": Change(
        FORWARD,
        "            b_scores = warpgroup_mma_wait(0, deps=(scores_token,))\n            consumer_release(q, stage)\n",
        "            consumer_release(q, stage)\n            b_scores = warpgroup_mma_wait(0, deps=(scores_token,))\n",
    ),
    "queries never released": Change(FORWARD, "            consumer_release(q, stage)\n", ""),
    "queries not waited for": Change(FORWARD, "            consumer_wait(q, stage, i_load // STAGES)\n", ""),
    "queries waited for in the wrong phase": Change(
        FORWARD, "consumer_wait(q, stage, i_load // STAGES)", "consumer_wait(q, stage, i_load // STAGES + 1)"
    ),
    "steps of each work item counted anew": Change(FORWARD, "        n_steps_done += n_steps\n", ""),
    "keys not waited for": Change(FORWARD, "        consumer_wait(pipelines.k, 0, i_iter)\n", ""),
    "values not waited for": Change(FORWARD, "        consumer_wait(pipelines.v, 0, i_iter)\n", ""),
    "keys released before the last step": Change(
        FORWARD,
        "        for i_step in range(n_steps):\n            i_load",
        "        consumer_release(pipelines.k, 0)\n        for i_step in range(n_steps):\n            i_load",
    ),
    "out overwritten while TMA stores it": Change(
        FORWARD,
        "            # wait until the stores of the step before have read the buffer\n            tma.store_wait(0)\n",
        "",
    ),
    "out in flight at the end": Change(FORWARD, "    tma.store_wait(0)\n\n\n# ---- kernel", "\n\n# ---- kernel"),
    "out stored without a fence": Change(
        FORWARD,
        "            fence_async_shared()\n            thread_barrier()\n            store_blocks",
        "            thread_barrier()\n            store_blocks",
    ),
    "out read while it is multiplied": Change(
        FORWARD, "warpgroup_mma_wait(0, deps=(out_token,))", "warpgroup_mma_wait(1, deps=(out_token,))"
    ),
    "last step left out": Change(
        FORWARD,
        "for i_step in range(n_steps):\n            i_load",
        "for i_step in range(n_steps - 1):\n            i_load",
    ),
    "queries of the first step for all": Change(
        FORWARD,
        "blocks = load_query_blocks_of_step(ptrs, item, i_step, BLOCKS_PER_STEP)",
        "blocks = load_query_blocks_of_step(ptrs, item, 0, BLOCKS_PER_STEP)",
    ),
    "keys of the query head": Change(
        FORWARD,
        "load_keys(k_desc, pipelines.k, i_iter, i_batch, i_head // sizes.group",
        "load_keys(k_desc, pipelines.k, i_iter, i_batch, i_head % 2",
    ),
    "negative scale ignored": Change(FORWARD, "b_scores = b_scores * SIGN", "b_scores = b_scores * 1"),
    "out not normalized": Change(
        FORWARD, "1.0 / gl.where(b_sum == 0.0, 1.0, b_sum)", "1.0 / gl.where(b_sum > 0.0, 1.0, b_sum)"
    ),
    "lse of the maximum": Change(FORWARD, "b_max + gl.log2(b_sum)", "b_max"),
    "key before the first": Change(
        FORWARD, "(o_key >= gl.expand_dims(b_first, 1))", "(o_key >= gl.expand_dims(b_first, 1) - 1)"
    ),
    "key after the last": Change(
        FORWARD, "(o_key < gl.expand_dims(b_stop, 1))", "(o_key <= gl.expand_dims(b_stop, 1))"
    ),
    "lse of rows past the last": Change(FORWARD, "mask=b_slot < sizes.n_slots", "mask=b_slot < 1 << 30"),
}
BACKWARD_FAULTS = {
    "counter of the first round": Change(BACKWARD, "ptrs.counters_ptr + sizes.i_round", "ptrs.counters_ptr"),
    "queries overwritten while TMA stores their dq": Change(
        BACKWARD,
        "so that the producer may overwrite it\n    tma.store_wait(0)\n",
        "so that the producer may overwrite it\n",
    ),
    "dq in flight at the end": Change(BACKWARD, "    tma.store_wait(0)\n\n\n# ---- kernel", "\n\n# ---- kernel"),
    "queries released before the first step": Change(BACKWARD, ", pred=i_load > 0)", ", pred=i_load >= 0)"),
    "queries released during their product": Change(
        BACKWARD,
        "    b_dv, b_dk = warpgroup_mma_wait(0, deps=(dv_token, dk_token))\n",
        "    consumer_release(q, stage)\n    b_dv, b_dk = warpgroup_mma_wait(0, deps=(dv_token, dk_token))\n",
    ),
    "dO released during its product": Change(
        BACKWARD,
        "    b_dv, b_dk = warpgroup_mma_wait(0, deps=(dv_token, dk_token))\n",
        "    consumer_release(dout, stage)\n    b_dv, b_dk = warpgroup_mma_wait(0, deps=(dv_token, dk_token))\n",
    ),
    "dO never released": Change(BACKWARD, "    consumer_release(dout, stage)\n", ""),
    "dO not waited for": Change(BACKWARD, "    consumer_wait(dout, stage, i_load // STAGES)\n", ""),
    "queries not waited for": Change(BACKWARD, "    consumer_wait(q, stage, i_load // STAGES)\n", ""),
    "steps of each work item counted anew": Change(BACKWARD, "        n_steps_done += n_steps\n", ""),
    "ds multiplied without a fence": Change(BACKWARD, "    fence_async_shared()\n    b_dv, b_dk", "    b_dv, b_dk"),
    "dq stored without a fence": Change(
        BACKWARD, "    fence_async_shared()\n    thread_barrier()\n    slots", "    thread_barrier()\n    slots"
    ),
    "ds multiplied before the other warpgroup has stored its half": Change(
        BACKWARD, '        named_barrier("sync", DS_BARRIER, WARPGROUPS)\n', "        thread_barrier()\n"
    ),
    "one buffer of ds": Change(BACKWARD, "buffers.ds.index(i_load % DS_STAGES)", "buffers.ds.index(0)"),
    "both warpgroups store the first half of ds": Change(
        BACKWARD,
        "ds.slice(WARPGROUP * WARPGROUP_KEYS, WARPGROUP_KEYS, 0).store(b_ds)",
        "ds.slice(0, WARPGROUP_KEYS, 0).store(b_ds)",
    ),
    "both warpgroups store the first columns of dq": Change(
        BACKWARD,
        "store_blocks(dq_desc, dq_tile, slots, WARPGROUP * DQ_COLUMNS)",
        "store_blocks(dq_desc, dq_tile, slots, 0)",
    ),
    "dq of the columns of the first warpgroup": Change(
        BACKWARD, "k_columns = k_tile.slice(WARPGROUP * DQ_COLUMNS", "k_columns = k_tile.slice(0 * DQ_COLUMNS"
    ),
    "keys of the first warpgroup": Change(
        BACKWARD,
        "kv_start = (item.i_key_block * KEY_SPLITS + i_split) * KEYS + WARPGROUP * WARPGROUP_KEYS",
        "kv_start = (item.i_key_block * KEY_SPLITS + i_split) * KEYS",
    ),
    "keys of the first split": Change(
        BACKWARD,
        "kv_start = (item.i_key_block * KEY_SPLITS + i_work % KEY_SPLITS) * KEYS",
        "kv_start = (item.i_key_block * KEY_SPLITS) * KEYS",
    ),
    "partial results of the first split": Change(
        TILES, "slots[i_block] * KEY_SPLITS + i_split,", "slots[i_block] * KEY_SPLITS,"
    ),
    "scores read while they are multiplied": Change(
        BACKWARD, "warpgroup_mma_wait(1, deps=(scores_token,))", "warpgroup_mma_wait(2, deps=(scores_token,))"
    ),
    "dp read while it is multiplied": Change(
        BACKWARD, "warpgroup_mma_wait(0, deps=(dp_token,))", "warpgroup_mma_wait(1, deps=(dp_token,))"
    ),
    "dq read while it is multiplied": Change(
        BACKWARD, "warpgroup_mma_wait(0, deps=(dq_token,))", "warpgroup_mma_wait(1, deps=(dq_token,))"
    ),
    "keys released before the steps": Change(
        BACKWARD,
        "        for i_step in range(n_steps):\n            b_dk",
        "        consumer_release(k, kv_stage)\n        for i_step in range(n_steps):\n            b_dk",
    ),
    "values not waited for": Change(BACKWARD, "        consumer_wait(v, kv_stage, i_iter)\n", ""),
    "lse of this step for the next": Change(
        BACKWARD,
        "load_lse_delta(ptrs, sizes, item, i_step + 1, BLOCKS_PER_STEP)",
        "load_lse_delta(ptrs, sizes, item, i_step, BLOCKS_PER_STEP)",
    ),
    "lse of the first head": Change(BACKWARD, "(item.batch_head % sizes.n_heads).to", "(0 * item.batch_head).to"),
    "lse of the first batch": Change(BACKWARD, "(item.batch_head // sizes.n_heads).to", "(0 * item.batch_head).to"),
    "lse of the first query block": Change(BACKWARD, "b_block * block_stride", "b_block * 0"),
    "lse of the first row": Change(BACKWARD, "o_row % BLOCK_ROWS * row_stride", "o_row % BLOCK_ROWS * 0"),
    "one buffer of lse": Change(
        BACKWARD, "next_lse_stage = WARPGROUP * 2 + (i_step + 1) % 2", "next_lse_stage = WARPGROUP * 2"
    ),
    "lse of the first warpgroup": Change(BACKWARD, "lse_stage = WARPGROUP * 2 + i_step % 2", "lse_stage = i_step % 2"),
    "key before the first": Change(BACKWARD, ">= gl.expand_dims(b_first, 0)", ">= gl.expand_dims(b_first, 0) - 1"),
    "key after the last": Change(BACKWARD, "< gl.expand_dims(b_stop, 0)", "<= gl.expand_dims(b_stop, 0)"),
    "dq without the scale": Change(BACKWARD, "(b_dq * scale)", "(b_dq * 1.0)"),
    "dv in the place of dk": Change(
        BACKWARD, "p_partial + (KEYS * KEY_SPLITS * DIM + o_first * DIM_V)", "p_partial + o_first * DIM_V"
    ),
    "sums of the first work item": Change(
        BACKWARD, "(item.i_work // KEY_SPLITS).to(gl.int64)", "(item.i_work * 0).to(gl.int64)"
    ),
    "sums of the first split": Change(
        BACKWARD, "o_first = i_split * KEYS + WARPGROUP * WARPGROUP_KEYS", "o_first = WARPGROUP * WARPGROUP_KEYS"
    ),
    "dk and dv of all work items of a program": Change(
        BACKWARD,
        "[WARPGROUP_KEYS, DIM], gl.float32, accumulator(DIM))\n        b_dv",
        "[WARPGROUP_KEYS, DIM], gl.float32, accumulator(DIM)) if i_iter == 0 else b_dk\n        b_dv",
    ),
}


class Run(NamedTuple):
    """A case on few SMs, under an order of events."""

    case: Case
    seed: int
    n_sms: int = 1


# work items of one step and of more steps than there are buffers
LONG = Case(group=32, q_len=14, kv_len=150, k=3)
# two warpgroups share a key block, and the diagonal crosses the keys of the second one
WIDE = LONG._replace(dims=(128, 128), block=128, kv_len=248)
BY_HEAD = Case(kv_heads=2, group=4, query_block=8, q_len=45, kv_len=150, batch=2, n_selections=8)
RUNS = [
    Run(LONG, 0),
    *(Run(WIDE, seed, n_sms) for seed, n_sms in ((1, 1), (2, 1), (13, 2), (18, 2))),
    Run(LONG._replace(block=128), 5),
    Run(Case(group=16, q_len=12, round_rows=16 * 2 * 5, item_rows=32), 6),
    Run(BY_HEAD._replace(round_rows=8 * 2 * 20), 7, n_sms=2),
    Run(CASES["documents of a block"]._replace(scale=-0.3), 8),
    Run(CASES["16 rows of 16 tokens"]._replace(causal=False), 9),
    Run(CASES["many blocks of heads"], 11),
    # of the four query blocks that select the first key block, the document ends in the last one
    Run(
        Case(group=1, query_block=32, q_len=180, kv_len=180, k=8, causal=False, documents=((0, 161),)), 10,
    ),
]  # fmt: skip
FAULTS = {
    **{("tiles", name): change for name, change in TILE_FAULTS.items()},
    **{("forward", name): change for name, change in FORWARD_FAULTS.items()},
    **{("backward", name): change for name, change in BACKWARD_FAULTS.items()},
}


@pytest.mark.thorough
@pytest.mark.parametrize("index", range(len(RUNS)))
def test_runs_without_a_fault_are_accurate(check, index):
    case, seed, n_sms = RUNS[index]
    check(Simulation(seed=seed, n_sms=n_sms), case)


@pytest.mark.sweep(by=lambda group, fault: {(group, [*FAULTS].index((group, fault)) % 12)})
@pytest.mark.parametrize(("group", "fault"), FAULTS)
def test_seeded_faults_are_detected(check, group, fault):
    change = FAULTS[group, fault]
    with pytest.raises((ProtocolError, AssertionError)):
        for case, seed, n_sms in RUNS:
            simulation = Simulation(seed=seed, changes=[change], n_sms=n_sms)
            # faults of the forward are detected without the backward, which takes longer
            check(simulation, case, backward=group != "forward")
