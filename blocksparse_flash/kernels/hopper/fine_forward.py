"""Hopper forward in steps of 64 x 64 in Gluon (sm90): out = softmax(scale q k^T) v over a layout's pairs, and lse.

For layouts whose blocks are too small for the tiles of 128 x 128 of forward.py. Shapes as there; head_dim up to 128.

A program computes 64 queries of a head with one warpgroup, without warp specialization. Several programs share an SM:
while one waits for memory or computes exponentials, the others multiply. Each step has 64 keys:

    wait for k | s = q k^T | load the next k | mask, online softmax | wait for v | out += p v | load the next v

In a gathered plan a step has four tiles of 16 keys each, which TMA loads into their places in the buffers.

Partial tiles come first and have a loop of their own, so that full tiles pay for no mask. Long tile rows are split, as
in forward.py. Rows without keys get out 0 and lse -inf. Scores and the running maximum are in base 2, `lse` in memory
is natural.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...plan_format import ROW_LISTS, loads_per_step
from ...runtime.launch import Launch, cache_key_of, contiguous, memory_in_order_of, num_sms
from ...runtime.tensor_spec import TensorSpecs
from ...score_mods import Scores
from ..arguments import PlanSpecs, plan_specs_of, strides_of_records, tile_lists
from ..schedule import PROGRAMS_PER_SM, Split, padded_dim, split_of
from ..triton.combine_splits import combine_rows
from ..triton.tile import LN_2, NUMBER, clamped_kv_len
from .barriers import allocate_mbarriers, thread_barrier
from .bitmask import mask_columns
from .fine_tiles import (
    SIDE,
    Lines,
    block_of_step,
    find_work_tile,
    load_step,
    load_step_words,
    positions,
    starts_of,
    tiles_of,
    zero_rows_from,
)
from .forward import ForwardLaunches
from .registers import accumulator, store_split
from .score_mods import (
    PLAIN,
    ModSpecs,
    ScoreMods,
    apply_one_sided_mods,
    apply_score_mods,
    finish_rows,
    load_slope,
    mod_specs_of,
)
from .softmax import online_softmax, rescale, row_sum_layout
from .tma import DescriptorFactory, tma_store, to_tma_loadable

# ---- configuration ----


class Config(NamedTuple):
    """One launch configuration.

    registers  per thread; they bound the programs that share an SM
    rescale_threshold  as in forward.Config
    """

    registers: int
    rescale_threshold: float = 0.0


# by padded head dimension: four programs per SM, and five
CONFIGS = {128: Config(registers=128), 64: Config(registers=96, rescale_threshold=8.0)}
# for gathered plans and for score mods, which take more registers: three programs per SM, and four
LARGE_CONFIGS = {128: Config(registers=168, rescale_threshold=8.0), 64: Config(registers=128, rescale_threshold=8.0)}


def config(dim: int, *, is_gathered: bool, modifies_scores: bool) -> Config:
    """The launch table. dim: the larger padded head dimension; modifies_scores: see ModSpecs.modifies_scores."""
    return (LARGE_CONFIGS if is_gathered or modifies_scores else CONFIGS)[dim]


# ---- one step ----


class Buffers(NamedTuple):
    """Shared memory: q, k [1, 1, 64, DIM], v [1, 1, 64, DIM_V], and the mbarriers of their loads."""

    q: Any
    k: Any
    v: Any
    q_full: Any
    k_full: Any
    v_full: Any


class RowState(NamedTuple):
    """Online softmax of 64 queries: out [64, DIM_V] and sum [64, 4] as in forward_consumer.RowState, max [64]."""

    out: Any
    max: Any
    sum: Any


@gluon.jit
def step(
    state, k_desc, v_desc, buffers, ptrs, mods, slope, q_start, i_batch, i_kv_head, starts, next_starts, i_entry,
    i_step, n_steps, kv_limit,
    MASKED: gl.constexpr, GATHERED: gl.constexpr, SIGN: gl.constexpr, ONE_SIDED: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """One step of 64 keys; starts the loads of the next one, if there is one. Returns the new RowState.

    slope    see score_mods.load_slope
    q_start  position of the first query, counted so that the last query and the last key have the same
    starts   first keys of the tiles of this step, see starts_of; next_starts of the next one
    i_entry  this step in the tile lists
    MASKED   whether a tile is partial
    """
    DIM: gl.constexpr = buffers.q.shape[3]
    DIM_V: gl.constexpr = buffers.v.shape[3]
    dtype: gl.constexpr = buffers.q.dtype
    score_layout: gl.constexpr = accumulator(SIDE)
    out_layout: gl.constexpr = accumulator(DIM_V)
    has_next = i_step + 1 < n_steps
    o_kv = gl.arange(0, SIDE, layout=gl.SliceLayout(0, score_layout))
    if MASKED:
        # loaded early: it arrives during the product
        o_q = gl.arange(0, SIDE, layout=gl.SliceLayout(1, score_layout))
        bitmask = load_step_words(ptrs.bitmask_ids_ptr, ptrs.bitmasks_ptr, i_entry, o_q, GATHERED)
    q_tile = buffers.q.reshape([SIDE, DIM])
    k_tile = buffers.k.reshape([SIDE, DIM]).permute((1, 0))
    v_tile = buffers.v.reshape([SIDE, DIM_V])
    b_zero = gl.zeros([SIDE, SIDE], gl.float32, score_layout)
    mbarrier.wait(buffers.k_full, i_step & 1)
    scores_token = warpgroup_mma(q_tile, k_tile, b_zero, use_acc=False, is_async=True)
    b_scores = warpgroup_mma_wait(0, deps=(scores_token,))
    load_step(k_desc, buffers.k, buffers.k_full, i_batch, i_kv_head, next_starts, has_next)
    if SIGN != 1:
        b_scores = b_scores * SIGN
    factor, b_shift = mods.factor, None
    if mods.cap is not None or mods.slopes_ptr is not None:
        o_query = q_start - starts[0] + gl.arange(0, SIDE, layout=gl.SliceLayout(1, score_layout))
        o_key = positions(starts, o_kv) - starts[0]
        if ONE_SIDED and not MASKED:
            LAST: gl.constexpr = SIDE - 1
            b_scores, b_shift = apply_one_sided_mods(b_scores, mods, slope, o_query - LAST, o_key - LAST)
        else:
            b_scores, _ = apply_score_mods(b_scores, mods, slope, o_query, o_key)
        factor = 1.0
    if MASKED:
        b_scores = mask_columns(b_scores, bitmask, o_kv)
    if ptrs.kv_lengths_ptr is not None:
        b_scores = gl.where(gl.expand_dims(positions(starts, o_kv) < kv_limit, 0), b_scores, float("-inf"))
    b_p32, b_decay, b_max, b_sum = online_softmax(
        b_scores, state.max, state.sum, factor, b_shift, CONFIG.rescale_threshold
    )
    b_decay = gl.expand_dims(gl.convert_layout(b_decay, gl.SliceLayout(1, out_layout)), 1)
    if CONFIG.rescale_threshold > 0:  # noqa: SIM108
        b_out = rescale(state.out, b_decay)
    else:
        b_out = state.out * b_decay
    b_p = gl.convert_layout(b_p32.to(dtype), gl.DotOperandLayout(0, out_layout, 2))
    mbarrier.wait(buffers.v_full, i_step & 1)
    if ptrs.kv_lengths_ptr is not None:
        zero_rows_from(v_tile, starts, kv_limit)
    out_token = warpgroup_mma(b_p, v_tile, b_out, is_async=True)
    b_out = warpgroup_mma_wait(0, deps=(out_token,))
    load_step(v_desc, buffers.v, buffers.v_full, i_batch, i_kv_head, next_starts, has_next)
    return RowState(out=b_out, max=b_max, sum=b_sum)


# ---- kernel ----


@gluon.jit(
    do_not_specialize=[
        "n_lines", "n_heads", "n_batch_heads", "n_split_lines", "num_splits", "q_len", "kv_len", "group",
    ]
)  # fmt: skip
def fine_forward_kernel(
    # TMA descriptors; forward_producer.Pointers
    q_desc, k_desc, v_desc, out_desc, ptrs,
    # strides in elements: (batch, head)
    record_strides,
    # sizes, see Lines; group: query heads per KV head
    n_lines, n_heads, n_batch_heads, n_split_lines, num_splits, q_len, kv_len, group, scale_log2,
    # softcap, see score_mods.ScoreMods
    cap,
    # compile time; GATHERED: whether the plan is; SIGN of the scale; ONE_SIDED: see ModSpecs
    GATHERED: gl.constexpr, SIGN: gl.constexpr, ONE_SIDED: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    DIM: gl.constexpr = q_desc.block_type.shape[3]
    DIM_V: gl.constexpr = out_desc.block_type.shape[3]
    # loads per step
    LOADS: gl.constexpr = SIDE // k_desc.block_type.shape[2]
    dtype: gl.constexpr = q_desc.dtype
    score_layout: gl.constexpr = accumulator(SIDE)
    out_layout: gl.constexpr = accumulator(DIM_V)
    query_layout: gl.constexpr = gl.SliceLayout(1, score_layout)
    buffers = Buffers(
        q=gl.allocate_shared_memory(dtype, q_desc.block_type.shape, q_desc.layout),
        k=gl.allocate_shared_memory(dtype, [1, 1, SIDE, DIM], k_desc.layout),
        v=gl.allocate_shared_memory(dtype, [1, 1, SIDE, DIM_V], v_desc.layout),
        q_full=allocate_mbarriers(1, 1).index(0),
        k_full=allocate_mbarriers(1, 1).index(0),
        v_full=allocate_mbarriers(1, 1).index(0),
    )
    fence_async_shared()
    lines = Lines(
        n_lines=n_lines, n_heads=n_heads, n_batch_heads=n_batch_heads, n_split_lines=n_split_lines,
        num_splits=num_splits,
    )  # fmt: skip
    mods = ScoreMods(
        factor=scale_log2, cap=cap, sinks_ptr=ptrs.sinks_ptr, slopes_ptr=ptrs.slopes_ptr, bias_ptr=None,
        bias_strides=None,
    )  # fmt: skip
    work_tile = find_work_tile(ptrs, record_strides, lines, GROUP=1)
    batch_head, p_record = work_tile.batch_head, work_tile.p_record
    i_batch, i_head = batch_head // n_heads, batch_head % n_heads
    i_kv_head = i_head // group
    slope = load_slope(mods, i_head)
    q_start = gl.load(p_record + NUMBER) * SIDE
    q_position = q_start + (kv_len - q_len)
    begin, n_steps, n_partial = tiles_of(ptrs, lines, p_record, work_tile.i_split)
    kv_limit = clamped_kv_len(ptrs.kv_lengths_ptr, i_batch, kv_len)
    has_steps = n_steps > 0
    starts = starts_of(ptrs.indices_ptr, begin, LOADS)
    load_step(q_desc, buffers.q, buffers.q_full, i_batch, i_head, (q_start,), has_steps)
    load_step(k_desc, buffers.k, buffers.k_full, i_batch, i_kv_head, starts, has_steps)
    load_step(v_desc, buffers.v, buffers.v_full, i_batch, i_kv_head, starts, has_steps)
    state = RowState(
        out=gl.zeros([SIDE, DIM_V], gl.float32, out_layout),
        # finite, since -inf - (-inf) = nan, and below every score
        max=gl.full([SIDE], -3.0e38, gl.float32, query_layout),
        sum=gl.full([SIDE, 4], 0.0, gl.float32, row_sum_layout()),
    )
    mbarrier.wait(buffers.q_full, 0, pred=has_steps)
    # partial steps, then full ones: two loops, so that full steps pay for no mask
    for FULL in gl.static_range(2):
        for i_step in range(n_partial if FULL else 0, n_steps if FULL else n_partial):
            # the lists are padded, so that one step past the end can be read
            next_starts = starts_of(ptrs.indices_ptr, begin + i_step + 1, LOADS)
            state = step(
                state, k_desc, v_desc, buffers, ptrs, mods, slope, q_position, i_batch, i_kv_head, starts, next_starts,
                begin + i_step, i_step, n_steps, kv_limit,
                MASKED=not FULL, GATHERED=GATHERED, SIGN=SIGN, ONE_SIDED=ONE_SIDED, CONFIG=CONFIG,
            )  # fmt: skip
            starts = next_starts
    b_sum = gl.convert_layout(gl.sum(state.sum, 1), query_layout, assert_trivial=True)
    # only the first split of a row has the sink
    b_lse, b_factor = finish_rows(state.max, b_sum, mods, i_head, work_tile.i_split <= 0)
    b_out = state.out * gl.expand_dims(gl.convert_layout(b_factor, gl.SliceLayout(1, out_layout)), 1)
    o_q = gl.arange(0, SIDE, layout=query_layout)
    if work_tile.i_split < 0:
        p_lse = ptrs.lse_ptr + batch_head.to(gl.int64) * q_len + q_start
        gl.store(p_lse + o_q, b_lse * LN_2, mask=q_start + o_q < q_len)
        # wait until every warp has read the values
        thread_barrier()
        buffers.v.reshape([SIDE, DIM_V]).store(b_out.to(dtype))
        fence_async_shared()
        tma_store(out_desc, [i_batch, i_head, q_start, 0], buffers.v)
        tma.store_wait(0)
    elif ptrs.splits_ptr is not None:
        p_split = ptrs.splits_ptr + work_tile.i_block.to(gl.int64) * (SIDE * (DIM_V + 1))
        store_split(p_split, b_out, 0)
        gl.store(p_split + SIDE * DIM_V + o_q, b_lse)


# ---- launch ----


@functools.lru_cache(maxsize=1024)
def forward_launches(
    specs: TensorSpecs,
    lists: PlanSpecs,
    split: Split,
    lengths: tuple[torch.dtype, bool] | None,  # noqa: ARG001 - kernels are compiled for aligned pointers
    scale: float,
    loads: int,
    mods: ModSpecs = PLAIN,
) -> ForwardLaunches:
    """The launches for all calls with these cache keys.

    specs    of q, k and v
    lists    cache key of the plan's tile rows
    lengths  cache key of kv_lengths
    loads    of the plan's tile rows, see plan_format.loads_per_step
    mods     score mods
    """
    q, k, v = specs.tensors
    (batch, heads, q_len, head_dim), (_, kv_heads, kv_len, v_dim) = q.shape, v.shape
    dim, dim_v = padded_dim("hopper", head_dim), padded_dim("hopper", v_dim)
    chosen = config(max(dim, dim_v), is_gathered=loads > 0, modifies_scores=mods.modifies_scores)
    n_tile_rows = -(-q_len // SIDE.value)
    arguments = {
        "record_strides": strides_of_records(lists[0]),
        "n_heads": heads,
        "n_batch_heads": batch * heads,
        "n_lines": n_tile_rows,
        "n_split_lines": split.n_split_lines,
        "num_splits": split.num_splits,
        "q_len": q_len,
        "kv_len": kv_len,
        "group": heads // kv_heads,
        "GATHERED": loads > 0,
        **mods.arguments(scale, is_forward=True),
        "CONFIG": chosen,
        "num_warps": 4,
        "maxnreg": chosen.registers,
    }
    if loads > 0:
        # keys of a step may be far apart: a term of the key, relative to another key, would round away the small
        # distances
        arguments["ONE_SIDED"] = False
    out = memory_in_order_of(q, v_dim, row=-(-v_dim // 8) * 8)
    descriptor_factories = {
        "q_desc": DescriptorFactory(q, (1, 1, SIDE.value, dim)),
        "k_desc": DescriptorFactory(k, block_of_step(dim, loads)),
        "v_desc": DescriptorFactory(v, block_of_step(dim_v, loads)),
        "out_desc": DescriptorFactory(out.spec, (1, 1, SIDE.value, dim_v)),
    }
    n_programs = split.n_programs(n_tile_rows, batch * heads)
    return ForwardLaunches(
        out=out,
        lse=contiguous(torch.float32, batch, heads, q_len),
        kernel=Launch(fine_forward_kernel, (n_programs,), arguments, descriptor_factories),
        combine=combine_rows(split, lists[0], out.spec, arguments, dim_v),
        n_split_floats=split.floats(dim_v + 1, batch * heads),
        has_tile_counter=False,
    )


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: list[torch.Tensor],
    kv_lengths: torch.Tensor | None,
    seed: torch.Tensor | None,
    scale: float,
    causal: bool,
    dropout_p: float,
    scores: Scores | None = None,
    specs: TensorSpecs | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out (batch, heads, q_len, v_head_dim) in q's dtype and memory order, and lse (batch, heads, q_len) float32.

    plan   the tensors of a Plan of 64 x 64 tiles, or of a gathered one
    specs  of q, k and v, if the caller has them already
    """
    assert seed is None and dropout_p == 0.0, "dispatch refuses dropout on this backend"
    assert not causal, "the plan contains the causal mask"
    if specs is None or not specs.is_tma_loadable:
        (q, k, v), specs = to_tma_loadable(q, k, v)
    lists, n_at_once = tile_lists(plan, ROW_LISTS), PROGRAMS_PER_SM * num_sms(q.device.index)
    split = split_of(plan, ROW_LISTS, q.shape, k.shape, False, n_at_once)
    lengths, mods = cache_key_of(kv_lengths), mod_specs_of(scores)
    launches = forward_launches(specs, plan_specs_of(lists), split, lengths, scale, loads_per_step(plan)[0], mods)
    return launches.run(q, k, v, lists, kv_lengths, scores)
