"""Hopper kernel for dQ alone, in Gluon (sm90), warp-specialized.

    producer warp              two consumer warpgroups, 64 queries of a tile row each, dq in registers
    TMA loads of q, dO; k, v -> s = q k^T, p = exp2(s - lse), dp = dO v^T, ds = p * (dp - delta), dq += ds k

The producer and its work tiles are those of the forward (forward_producer.py), with dO beside q. This kernel runs where
summing dQ over tile columns (backward.py) is slower, not possible (beyond head_dim 128: wide_backward.py), or not
allowed because its last bits vary (deterministic calls). For the gradient of block_bias it also stores sums of ds, as
the main kernel does where that one computes dQ.

Long tile rows are split among programs: see schedule.py and combine_splits.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...plan_format import TILE as TILE_SIDE
from ...runtime.launch import Launch, Memory, contiguous, num_sms
from ...runtime.tensor_spec import TensorSpecs
from ...score_mods import Scores
from ..arguments import Options, PlanSpecs, TileLists, strides_of_records
from ..schedule import Split, interleaved_heads, needs_tile_counter
from ..triton.combine_splits import sum_splits
from ..triton.tile import TILE, clamped_kv_len, head_base
from .barriers import allocate_pipeline, consumer_release, consumer_wait
from .forward_producer import (
    WORK_TILE_STRIDE,
    Pipelines,
    Sizes,
    kv_start_of,
    load,
    q_buffer_and_phase,
    read_work_tile,
)
from .registers import (
    CONSUMER_WARPS,
    WARP_ROWS,
    WARPGROUP_ROWS,
    accumulator,
    add_product,
    opaque,
    store_split,
    store_warp_sums,
    tile_at,
    wait_for_products,
    zero_keys_from,
)
from .score_mods import ModSpecs, ScoreMods, apply_score_mods, load_slope
from .softmax import mask_scores
from .tma import DescriptorFactory, allocate_rows, allocate_tail, block_columns, has_tail, store_rows, tma_padded_memory
from .work_tiles import END, WORK_TILE_STAGES


class Config(NamedTuple):
    """One launch configuration; forward_producer.py reads the fields that it shares with forward.Config.

    block_kv    keys per step
    stages      buffers of k, which a step holds until ds k is done
    v_stages    buffers of v, which are free as soon as dp is done
    q_stages    buffers of q and dO for each warpgroup
    warpgroups  consumer warpgroups
    """

    block_kv: int
    stages: int = 2
    v_stages: int = 2
    q_stages: int = 1
    warpgroups: int = 2


def dq_config(columns: int, *, has_sums_and_mods: bool = False) -> Config:
    """The launch table; TUNING.md has its figures.

    columns            the larger number of columns of q and v
    has_sums_and_mods  whether ds is summed for the gradient of a bias, with a softcap or slopes

    Up to 128 columns only steps of 128 keys were timed.
    """
    if columns > 192:
        # shared memory has no room for a second buffer of v
        return Config(block_kv=64, v_stages=1)
    if columns > 128:
        return Config(block_kv=64, stages=3)
    if has_sums_and_mods:
        # steps of 128 keys would spill up to 860 bytes
        return Config(block_kv=64, stages=3, q_stages=2 if columns == 64 else 1)
    return Config(block_kv=128, q_stages=2 if columns == 64 else 1)


# registers per thread of the second consumer and of the producer warp; Triton gives the first consumer, the default
# partition, those that are left
REGISTERS = gl.constexpr(240)
PRODUCER_REGISTERS = gl.constexpr(32)


class Pointers(NamedTuple):
    """Global memory. None for what a call does not have.

    records_ptr, indices_ptr, bitmask_ids_ptr, bitmasks_ptr  the plan by tile row; None without a layout
    kv_lengths_ptr    number of keys of each batch element; None: kv_len
    slopes_ptr, bias_ptr  see score_mods.ScoreMods
    bias_sums_ptr     (batch | 1, heads | 1, listed tiles + 1, CONSUMER_WARPS, TILE / block_kv) float32 sums of ds,
                      for the gradient of the bias; None: not wanted
    lse_ptr, delta_ptr  (batch * heads, n_padded) float32, lse in base 2
    tile_counter_ptr  counter of the tile scheduler; None: one program per work tile
    splits_ptr        float32 workspace of split tile rows; None: no tile row is split
    """

    records_ptr: Any
    indices_ptr: Any
    bitmask_ids_ptr: Any
    bitmasks_ptr: Any
    kv_lengths_ptr: Any
    slopes_ptr: Any
    bias_ptr: Any
    bias_sums_ptr: Any
    lse_ptr: Any
    delta_ptr: Any
    tile_counter_ptr: Any
    splits_ptr: Any


# ---- consumer warpgroups ----


@gluon.jit
def add_dq(
    b_dq, b_dq_tail, b_lse, b_delta, i_buffer, pipelines, ptrs, sizes, mods, slope, p_bias, p_sums, work_tile, i_step,
    i_load, kv_limit, MASKED: gl.constexpr, WARPGROUP: gl.constexpr, CAUSAL: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """dq plus ds k of one step, and its tail or 0.

    b_lse, b_delta    of this warpgroup's queries, [64]
    i_buffer  index of the buffers of q and dO
    slope   see score_mods.load_slope
    p_bias, p_sums  bias and sums of ds of each listed tile of this head; None without
    i_load  steps of this program so far: they choose the stage
    """
    q, k, v, dout = pipelines.q, pipelines.k, pipelines.v, pipelines.dout
    BLOCK_KV: gl.constexpr = CONFIG.block_kv
    STAGES: gl.constexpr = CONFIG.stages
    V_STAGES: gl.constexpr = CONFIG.v_stages
    # products with v: one more for the tail
    DP_PRODUCTS: gl.constexpr = 1 if pipelines.v_tails is None else 2
    dtype: gl.constexpr = k.buffers.dtype
    score_layout: gl.constexpr = accumulator(BLOCK_KV)
    # opaque, v_stage too: otherwise wgmma descriptors derived from constant addresses stay in registers and spill
    i_buffer = opaque(i_buffer)
    stage = i_load % STAGES
    v_stage = opaque(i_load % V_STAGES)
    k_tile, v_tile = tile_at(k.buffers, stage), tile_at(v.buffers, v_stage)
    b_zero = gl.zeros([WARPGROUP_ROWS, BLOCK_KV], gl.float32, score_layout)
    consumer_wait(k, stage, i_load // STAGES)
    if ptrs.kv_lengths_ptr is not None:
        # early, since both warpgroups meet in zero_keys_from
        consumer_wait(v, v_stage, i_load // V_STAGES)
        kv_start = kv_start_of(ptrs.indices_ptr, work_tile, i_step, BLOCK_KV)
        zero_keys_from(k_tile, kv_start, kv_limit, WARPGROUP)
        zero_keys_from(v_tile, kv_start, kv_limit, WARPGROUP)
        if pipelines.k_tails is not None:
            zero_keys_from(tile_at(pipelines.k_tails, stage), kv_start, kv_limit, WARPGROUP)
        if pipelines.v_tails is not None:
            zero_keys_from(tile_at(pipelines.v_tails, v_stage), kv_start, kv_limit, WARPGROUP)
    # [WARPGROUP_ROWS, BLOCK_KV]
    scores_token = warpgroup_mma(
        tile_at(q.buffers, i_buffer), k_tile.permute((1, 0)), b_zero, use_acc=False, is_async=True
    )
    if pipelines.k_tails is not None:
        q_tail, k_tail = tile_at(pipelines.q_tails, i_buffer), tile_at(pipelines.k_tails, stage)
        scores_token = warpgroup_mma(q_tail, k_tail.permute((1, 0)), scores_token, is_async=True)
    if ptrs.kv_lengths_ptr is None:
        consumer_wait(v, v_stage, i_load // V_STAGES)
    # [WARPGROUP_ROWS, BLOCK_KV]
    dp_token = warpgroup_mma(
        tile_at(dout.buffers, i_buffer), v_tile.permute((1, 0)), b_zero, use_acc=False, is_async=True
    )
    if pipelines.v_tails is not None:
        dout_tail, v_tail = tile_at(pipelines.dout_tails, i_buffer), tile_at(pipelines.v_tails, v_stage)
        dp_token = warpgroup_mma(dout_tail, v_tail.permute((1, 0)), dp_token, is_async=True)
    b_scores = warpgroup_mma_wait(DP_PRODUCTS, deps=(scores_token,))
    o_q = gl.arange(0, WARPGROUP_ROWS, layout=gl.SliceLayout(1, score_layout))
    o_kv = gl.arange(0, BLOCK_KV, layout=gl.SliceLayout(0, score_layout))
    if mods.slopes_ptr is not None:
        q_start = work_tile.q_start + WARPGROUP * WARPGROUP_ROWS + (sizes.kv_len - sizes.q_len)
        o_q = q_start - kv_start_of(ptrs.indices_ptr, work_tile, i_step, BLOCK_KV) + o_q
    b_scores, b_tanh = apply_score_mods(b_scores, mods, slope, o_q, o_kv)
    b_scores = mask_scores(
        b_scores, None, ptrs, sizes, work_tile, i_step, kv_limit,
        WARPGROUP=WARPGROUP, MASKED=MASKED, CAUSAL=CAUSAL, BLOCK_KV=BLOCK_KV,
    )  # fmt: skip
    i_entry = work_tile.begin + i_step // (TILE // BLOCK_KV)
    if p_bias is not None:
        b_lse = b_lse - gl.load(p_bias + i_entry)
    b_p = gl.exp2(b_scores - gl.expand_dims(b_lse, 1))
    b_dp = warpgroup_mma_wait(0, deps=(dp_token,))
    consumer_release(v, v_stage)
    b_ds = b_p * (b_dp - gl.expand_dims(b_delta, 1))
    if p_sums is not None:
        # before the derivative of the softcap, which precedes the bias
        PARTS: gl.constexpr = TILE // BLOCK_KV
        p_sum = p_sums + i_entry.to(gl.int64) * (CONSUMER_WARPS * PARTS) + i_step % PARTS
        store_warp_sums(p_sum + 4 * WARPGROUP * PARTS, b_ds, STRIDE=PARTS)
    if mods.cap is not None:
        b_ds = b_ds * (1.0 - b_tanh * b_tanh)
    b_ds = b_ds.to(dtype)
    # [WARPGROUP_ROWS, DIM]
    dq_token, tail_token = add_product(b_ds, k_tile, b_dq), None
    if pipelines.k_tails is not None:
        tail_token = add_product(b_ds, tile_at(pipelines.k_tails, stage), b_dq_tail)
    b_dq, b_dq_tail = wait_for_products(0, dq_token, tail_token)
    consumer_release(k, stage)
    return b_dq, b_dq_tail


@gluon.jit
def compute_dq(
    dq_desc, pipelines, ptrs, sizes, mods, n_padded, scale,
    WARPGROUP: gl.constexpr, CAUSAL: gl.constexpr, CONFIG: gl.constexpr, COLS: gl.constexpr,
):  # fmt: skip
    """Entry point of consumer warpgroup WARPGROUP."""
    q, q_tails, dout = pipelines.q, pipelines.q_tails, pipelines.dout
    DIM: gl.constexpr = q.buffers.shape[4]
    query_layout: gl.constexpr = gl.SliceLayout(1, accumulator(CONFIG.block_kv))
    # work tiles and steps so far
    i_tile = 0
    n_done = 0
    work_tile = read_work_tile(pipelines.work_tiles, i_tile)
    while work_tile.target > END:
        batch_head = work_tile.target
        if ptrs.splits_ptr is not None:
            # the batch_head of a split is its workspace block modulo n_batch_heads, see split_index
            batch_head = batch_head % sizes.n_batch_heads
        i_batch, i_head = batch_head // sizes.n_heads, batch_head % sizes.n_heads
        kv_limit = clamped_kv_len(ptrs.kv_lengths_ptr, i_batch, sizes.kv_len)
        slope, p_bias, p_sums = load_slope(mods, i_head), None, None
        if mods.bias_ptr is not None:
            p_bias = head_base(mods.bias_ptr, mods.bias_strides, i_batch, i_head)
        if ptrs.bias_sums_ptr is not None:
            p_sums = head_base(ptrs.bias_sums_ptr, mods.bias_strides[2:], i_batch, i_head)
        first = work_tile.q_start + WARPGROUP * WARPGROUP_ROWS
        o_line = batch_head.to(gl.int64) * n_padded + first + gl.arange(0, WARPGROUP_ROWS, layout=query_layout)
        b_lse, b_delta = gl.load(ptrs.lse_ptr + o_line), gl.load(ptrs.delta_ptr + o_line)
        b_dq, b_dq_tail = gl.zeros([WARPGROUP_ROWS, DIM], gl.float32, accumulator(DIM)), 0
        if q_tails is not None:
            TAIL: gl.constexpr = q_tails.shape[4]
            b_dq_tail = gl.zeros([WARPGROUP_ROWS, TAIL], gl.float32, accumulator(TAIL))
        i_buffer, phase = q_buffer_and_phase(i_tile, WARPGROUP, CONFIG)
        consumer_wait(q, i_buffer, phase)
        consumer_wait(dout, i_buffer, phase)
        # partial steps, then full ones: two loops, so that full steps pay for no mask
        n_steps, n_partial = work_tile.n_steps, work_tile.n_partial
        for FULL in gl.static_range(2):
            for i_step in range(n_partial if FULL else 0, n_steps if FULL else n_partial):
                b_dq, b_dq_tail = add_dq(
                    b_dq, b_dq_tail, b_lse, b_delta, i_buffer, pipelines, ptrs, sizes, mods, slope, p_bias, p_sums,
                    work_tile, i_step, n_done + i_step, kv_limit, MASKED=not FULL, WARPGROUP=WARPGROUP, CAUSAL=CAUSAL,
                    CONFIG=CONFIG,
                )  # fmt: skip
        n_done += n_steps
        consumer_release(dout, i_buffer)
        if ptrs.splits_ptr is None:  # noqa: SIM114 - the first condition is known at compile time
            store_dq(b_dq, b_dq_tail, scale, dq_desc, q.buffers, q_tails, i_buffer, sizes, batch_head, first)
        elif work_tile.target < sizes.n_batch_heads:
            store_dq(b_dq, b_dq_tail, scale, dq_desc, q.buffers, q_tails, i_buffer, sizes, batch_head, first)
        else:
            i_block = work_tile.target - sizes.n_batch_heads
            p_split = ptrs.splits_ptr + i_block.to(gl.int64) * (TILE * COLS)
            store_split(p_split, b_dq, WARPGROUP, COLS)
            if q_tails is not None:
                store_split(p_split + DIM, b_dq_tail, WARPGROUP, COLS)
        consumer_release(q, i_buffer)
        i_tile += 1
        work_tile = read_work_tile(pipelines.work_tiles, i_tile)


@gluon.jit
def store_dq(b_dq, b_dq_tail, scale, dq_desc, buffers, tails, i_buffer, sizes, batch_head, q_start):
    """Stores a warpgroup's dq with TMA, staged in the buffer of its queries."""
    tile_at(buffers, i_buffer).store((b_dq * scale).to(buffers.dtype))
    tail = None
    if tails is not None:
        tile_at(tails, i_buffer).store((b_dq_tail * scale).to(tails.dtype))
        tail = tails.index(i_buffer)
    fence_async_shared()
    store_rows(dq_desc, buffers.index(i_buffer), tail, batch_head // sizes.n_heads, batch_head % sizes.n_heads, q_start)
    tma.store_wait(0)


# ---- kernel ----


@gluon.jit(
    do_not_specialize=[
        "n_heads", "n_batch_heads", "n_lines", "q_len", "kv_len", "n_padded", "group", "n_split_lines", "num_splits",
        "n_interleaved",
    ]
)  # fmt: skip
def hopper_dq_kernel(
    # TMA descriptors; Pointers
    q_desc, k_desc, v_desc, dout_desc, dq_desc, ptrs,
    # (batch, head) strides of the records, in elements
    record_strides,
    # forward_producer.Sizes, one by one, since Triton would specialize the integers of a tuple; n_padded: queries per
    # head in lse and delta
    n_heads, n_batch_heads, n_lines, q_len, kv_len, n_padded, n_split_lines, num_splits, n_interleaved, group,
    scale_log2, scale,
    # softcap and strides of the bias, see score_mods.ScoreMods
    cap, bias_strides,
    # compile time; COLS, COLS_V: columns of q and k, of v and dO
    CAUSAL: gl.constexpr, CONFIG: gl.constexpr, COLS: gl.constexpr, COLS_V: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = CONFIG.stages
    V_STAGES: gl.constexpr = CONFIG.v_stages
    WARPGROUPS: gl.constexpr = CONFIG.warpgroups
    Q_BUFFERS: gl.constexpr = CONFIG.q_stages * CONFIG.warpgroups
    q_buffers, dout_buffers = allocate_rows(q_desc, Q_BUFFERS, COLS), allocate_rows(dout_desc, Q_BUFFERS, COLS_V)
    k_buffers, v_buffers = allocate_rows(k_desc, STAGES, COLS), allocate_rows(v_desc, V_STAGES, COLS_V)
    q_tails, k_tails, dout_tails, v_tails = None, None, None, None
    if has_tail(q_desc, COLS):
        q_tails, k_tails = allocate_tail(q_desc, Q_BUFFERS), allocate_tail(k_desc, STAGES)
    if has_tail(v_desc, COLS_V):
        dout_tails, v_tails = allocate_tail(dout_desc, Q_BUFFERS), allocate_tail(v_desc, V_STAGES)
    work_tile_buffers = gl.allocate_shared_memory(
        gl.int32, [WORK_TILE_STAGES * WORK_TILE_STRIDE, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    pipelines = Pipelines(
        work_tiles=allocate_pipeline(work_tile_buffers, WORK_TILE_STAGES, CONSUMERS=WARPGROUPS),
        q=allocate_pipeline(q_buffers, Q_BUFFERS, CONSUMERS=1),
        q_tails=q_tails,
        k=allocate_pipeline(k_buffers, STAGES, CONSUMERS=WARPGROUPS),
        k_tails=k_tails,
        v=allocate_pipeline(v_buffers, V_STAGES, CONSUMERS=WARPGROUPS),
        v_tails=v_tails,
        dout=allocate_pipeline(dout_buffers, Q_BUFFERS, CONSUMERS=1),
        dout_tails=dout_tails,
    )
    fence_async_shared()
    sizes = Sizes(
        n_heads=n_heads, n_batch_heads=n_batch_heads, n_lines=n_lines, q_len=q_len, kv_len=kv_len,
        n_split_lines=n_split_lines, num_splits=num_splits, n_interleaved=n_interleaved, group=group,
    )  # fmt: skip
    mods = ScoreMods(
        factor=scale_log2, cap=cap, sinks_ptr=None, slopes_ptr=ptrs.slopes_ptr, bias_ptr=ptrs.bias_ptr,
        bias_strides=bias_strides,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (
                compute_dq,
                (dq_desc, pipelines, ptrs, sizes, mods, n_padded, scale, 0, CAUSAL, CONFIG, COLS),
            ),
            (
                compute_dq,
                (dq_desc, pipelines, ptrs, sizes, mods, n_padded, scale, 1, CAUSAL, CONFIG, COLS),
            ),
            (load, (q_desc, k_desc, v_desc, dout_desc, pipelines, ptrs, record_strides, sizes, CAUSAL, CONFIG)),
        ],
        [4, 1],
        [REGISTERS, PRODUCER_REGISTERS],
    )


# ---- launches ----


class DqLaunches(NamedTuple):
    """The launches for dq and their memory; None for what they do not need.

    dq        output, its rows padded so that TMA can write them
    sum_rows  sums the splits of tile rows
    bias_sums  shape of the sums for the gradient of the bias
    """

    dq: Memory
    kernel: Launch
    sum_rows: Launch | None
    tile_counter: Memory | None
    splits: Memory | None
    bias_sums: tuple[int, ...] | None

    def run(
        self,
        tensors: tuple[torch.Tensor, ...],
        lse: torch.Tensor,
        delta: torch.Tensor,
        lists: TileLists,
        kv_lengths: torch.Tensor | None,
        scores: Scores | None,
        bias: torch.Tensor | None,
        empty: Callable[..., torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """dq, and the sums for the gradient of the bias.

        tensors     q, k, v and dout
        lse, delta  of the preprocess launch
        lists       the plan's tile rows
        bias        of each of their tiles
        """
        dq = empty(*self.dq)
        tile_counter, splits = [memory and empty(*memory) for memory in (self.tile_counter, self.splits)]
        if tile_counter is not None:
            tile_counter.zero_()
        slopes = None if scores is None else scores.alibi_slopes
        bias_sums = None if scores is None or self.bias_sums is None else scores.new_sums(self.bias_sums)
        pointers = Pointers(
            *lists, kv_lengths_ptr=kv_lengths, slopes_ptr=slopes, bias_ptr=bias, bias_sums_ptr=bias_sums, lse_ptr=lse,
            delta_ptr=delta, tile_counter_ptr=tile_counter, splits_ptr=splits,
        )  # fmt: skip
        self.kernel(*tensors, dq, pointers)
        if self.sum_rows is not None:
            self.sum_rows(splits, lists[0], dq, None)
        return dq, bias_sums


def dq_launches(
    specs: TensorSpecs,
    columns: tuple[int, int],
    lists: PlanSpecs,
    split: Split,
    options: Options,
    mods: ModSpecs,
    *,
    is_uneven: bool,
) -> DqLaunches:
    """Prepares the launches for dq.

    specs    of q, k, v and dout
    columns  of q and k, and of v and dout, padded
    lists, split  of the plan's tile rows
    is_uneven  see schedule.are_uneven
    """
    q, k, v, dout = specs.tensors
    (batch, heads, q_len, _), (_, kv_heads, kv_len, _) = q.shape, k.shape
    n_rows, n_batch_heads, n_sms, (cols, cols_v) = (
        -(-q_len // TILE_SIDE),
        batch * heads,
        num_sms(options.device),
        columns,
    )
    chosen = dq_config(max(columns), has_sums_and_mods=mods.has_bias_gradient and mods.modifies_scores)
    rows, causal = WARPGROUP_ROWS.value, options.causal
    dq = tma_padded_memory(q)
    # the memory has padded rows; the descriptor sees the first head_dim columns
    dq_spec = dq.spec._replace(shape=q.shape)
    width, width_v = block_columns(cols), block_columns(cols_v)
    descriptor_factories = {
        "q_desc": DescriptorFactory(q, (1, 1, rows, width)),
        "k_desc": DescriptorFactory(k, (1, 1, chosen.block_kv, width)),
        "v_desc": DescriptorFactory(v, (1, 1, chosen.block_kv, width_v)),
        "dout_desc": DescriptorFactory(dout, (1, 1, rows, width_v)),
        "dq_desc": DescriptorFactory(dq_spec, (1, 1, rows, width)),
    }
    bias_sums = None
    if mods.has_bias_gradient:
        bias_sums = mods.sums_shape(0, (batch, heads), lists, (WARP_ROWS.value, chosen.block_kv))
    arguments = {
        "record_strides": strides_of_records(lists[0]),
        "n_heads": heads,
        "n_batch_heads": n_batch_heads,
        "n_lines": n_rows,
        "q_len": q_len,
        "kv_len": kv_len,
        "n_padded": n_rows * TILE_SIDE,
        "n_split_lines": split.n_split_lines,
        "num_splits": split.num_splits,
        "n_interleaved": interleaved_heads(n_rows, n_batch_heads, n_sms, q_len, kv_len, is_uneven=is_uneven),
        "group": heads // kv_heads,
        **mods.arguments(options.scale, is_forward=False),
        "bias_strides": mods.bias_strides(0, bias_sums),
        "scale": options.scale,
        "CAUSAL": causal,
        "CONFIG": chosen,
        "COLS": cols,
        "COLS_V": cols_v,
        "num_warps": 4,
    }
    n_work, n_floats = split.n_programs(n_rows, n_batch_heads), split.floats(cols, n_batch_heads)
    # sum_splits_kernel sums tile columns: dq is passed as dk, queries as keys, in groups of one head
    summed = {**arguments, "kv_len": q_len, "GROUP": 1}
    return DqLaunches(
        dq=dq,
        kernel=Launch(hopper_dq_kernel, (min(n_work, n_sms),), arguments, descriptor_factories),
        sum_rows=sum_splits(split, lists[0], dq_spec, None, summed, (cols, 16)),
        tile_counter=contiguous(torch.int32, 1) if needs_tile_counter(n_work, n_sms) else None,
        splits=contiguous(torch.float32, n_floats) if n_floats else None,
        bias_sums=bias_sums,
    )
