"""Hopper forward in Gluon (sm90): out = softmax(scale q k^T) v over the pairs of a layout, and lse.

Shapes: q, out (batch, heads, q_len, head_dim), k, v (batch, kv_heads, kv_len, head_dim), lse (batch, heads, q_len).
head_dim is padded to 64, 96, 128, 192 or 256 columns, and that of v and out too (schedule.forward_columns). Of 96 and
192 columns, the last third is a tensor of its own, the tail (tma.py); DIM and DIM_V are the columns without it. The
kernel is persistent: one program per SM, whose tile scheduler is dynamic, with an atomic counter, or static for a
few work tiles (work_tiles.next_work_index).

    producer warp                     consumer warpgroups, 64 queries of a work tile each, out in registers
    tile scheduler: next work tile -> q k^T, online softmax, p v, for each step of BLOCK_KV keys; epilogue
    TMA loads of q, k and v        ->

forward_producer.py has the producer and its pipelines to the consumers, forward_consumer.py the consumers. A work tile
has two warpgroups (128 queries), or three (192) before Triton 3.9, at head_dim 64, without layout, kv_lengths and
splits, if there are enough work tiles. Step i overlaps its softmax with p v of step i - 1:

    issue q k^T of step i | issue p v of step i - 1 | wait for q k^T | softmax of step i while p v runs | wait for p v

Warpgroups issue products in turn (ping-pong): one multiplies while the others compute exponentials.

Partial tiles come first and have a loop of their own, so that full tiles pay for no mask. Rows without keys get out 0
and lse -inf. Scores and the running maximum are in base 2, `lse` in memory is natural.

A tile row that would delay the others is split (schedule.py): each split is a work tile of its own, whose out and lse
go to a float32 workspace, and a second launch combines them (combine_splits.py). Without splits the kernel is compiled
without that code.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ...plan_format import ROW_LISTS
from ...plan_format import TILE as TILE_SIDE
from ...runtime.launch import Launch, Memory, allocator, cache_key_of, contiguous, memory_in_order_of, num_sms
from ...runtime.tensor_spec import TensorSpecs, in_order_of, new_in_order_of
from ...score_mods import Scores
from ..arguments import PlanSpecs, TileLists, plan_specs_of, strides_of_records, tile_lists
from ..schedule import (
    Split,
    are_causal_rows_similar,
    are_rows_sorted,
    are_uneven,
    forward_columns,
    interleaved_heads,
    needs_tile_counter,
    split_of,
)
from ..triton.combine_splits import combine_rows
from .barriers import allocate_pipeline
from .forward_consumer import mma
from .forward_producer import WORK_TILE_STRIDE, Pipelines, Pointers, Sizes, load
from .registers import BEFORE_TRITON_3_9, WARPGROUP_ROWS
from .score_mods import PLAIN, ModSpecs, ScoreMods, bias_table, mod_specs_of
from .tma import DescriptorFactory, allocate_rows, allocate_tail, block_columns, has_tail, to_tma_loadable
from .work_tiles import WORK_TILE_STAGES

# ---- configuration ----

# smallest q_len at which causal calls have tile rows of 192 queries. H200, 32 heads, head_dim 64, microseconds with
# rows of 128 / 192: 4,096 tokens 165 / 180; 8,192 tokens 568 / 549
MIN_CAUSAL_THREE_WARPGROUPS = 8192


class Config(NamedTuple):
    """One launch configuration, passed to the kernel as one compile-time argument.

    block_kv    keys per step
    stages      stages of the k and v pipelines
    q_stages    stages of the q pipeline, one per work tile
    warpgroups  consumer warpgroups. 3 need calls without a layout, whose tile rows have 128 queries, and without
                kv_lengths, since zero_keys_from is written for 2
    rescale_threshold   growth of the running maximum, in base 2, up to which out is not rescaled
    out_in_q            out is staged for TMA in the buffers of q; required with a tail of v, staged in that of q
    early_bitmask       the bitmask of a step is loaded before the wait for its keys, not after q k^T
    pin                 keeps ptxas from moving the wait for p v in front of the softmax, see registers.pin
    consumer_registers, producer_registers  registers per thread of the consumers but the first, and of the producer
                        warp; Triton gives the first consumer, the default partition, those that are left
    """

    block_kv: int = 128
    stages: int = 2
    q_stages: int = 1
    warpgroups: int = 2
    rescale_threshold: float = 0.0
    out_in_q: bool = False
    early_bitmask: bool = True
    pin: bool = False
    consumer_registers: int = 240
    producer_registers: int = 24


@functools.cache
def config(dims: tuple[int, int], has_layout: bool, has_lengths: bool, three_warpgroups: bool) -> Config:
    """The launch table; TUNING.md has the candidates that lost.

    dims  forward_columns
    three_warpgroups  whether tile rows of 192 queries, 64 of each warpgroup, are possible and faster

    Figures: TFLOP/s on an H200, bf16, 16,384 tokens. Options set to BEFORE_TRITON_3_9 are off from Triton 3.9 on, where
    they spill.
    """
    columns = max(dims)
    if columns == 256:
        # out takes 128 registers per thread, and shared memory has no room for it beside q. At 8,192 tokens dense 726,
        # without the threshold 677; causal 650 and 603
        return Config(block_kv=64, rescale_threshold=8.0, out_in_q=True, early_bitmask=BEFORE_TRITON_3_9)
    if columns == 64 and three_warpgroups and BEFORE_TRITON_3_9:
        # dense 545, 2 warpgroups 473
        return Config(stages=4, warpgroups=3, consumer_registers=160, producer_registers=32)
    if columns == 64:
        # butterfly 424, with 1 stage of q 400
        return Config(stages=4, q_stages=2, pin=BEFORE_TRITON_3_9)
    if columns == 96:
        # dense 553, padded to 128 columns 515; random 493 and 457. A rescale threshold and `pin` cost 1 to 3 % each
        return Config(q_stages=2, out_in_q=True)
    # time with the threshold divided by that without: with a layout 0.97 (butterfly), without one 0.98 (five dense and
    # causal calls) and with 192 columns of q and v 0.92; with 192 and 128 it changes nothing
    rescale_threshold = 8.0 if (has_layout or dims != (192, 128)) and not has_lengths else 0.0
    # with 192 columns, shared memory has no room for a second stage of q, nor for out beside q; with 192 of v too, it
    # has none for steps of 128 keys
    return Config(
        block_kv=64 if dims == (192, 192) else 128,
        stages=3 if dims == (192, 192) else 2,
        q_stages=1 if columns == 192 else 2,
        rescale_threshold=rescale_threshold,
        out_in_q=columns == 192,
        pin=BEFORE_TRITON_3_9,
        early_bitmask=BEFORE_TRITON_3_9,
    )


def three_warpgroups_pay(q_len: int, kv_len: int, n_batch_heads: int, n_programs: int, *, causal: bool) -> bool:
    """Whether tile rows of 192 queries finish no later than those of 128; few of them leave SMs idle.

    Compares waves times the time of a tile row: one of 192 queries counts as 4 / 3 of one of 128 (measured: 1.30 dense,
    1.42 causal; TUNING.md).
    """
    if causal and q_len < MIN_CAUSAL_THREE_WARPGROUPS and not are_causal_rows_similar(q_len, kv_len):
        # they also compute more of what the mask removes
        return False
    of_three, of_two = (-(-(-(-q_len // side) * n_batch_heads) // n_programs) for side in (192, 128))
    return 4 * of_three <= 3 * of_two


# ---- kernel ----


@gluon.jit(
    do_not_specialize=[
        "n_heads", "n_batch_heads", "n_lines", "q_len", "kv_len", "group", "n_split_lines", "num_splits",
        "n_interleaved",
    ]
)  # fmt: skip
def hopper_forward_kernel(
    # TMA descriptors; forward_producer.Pointers
    q_desc, k_desc, v_desc, out_desc, ptrs,
    # strides in elements: (batch, head)
    record_strides,
    # forward_producer.Sizes, one by one, since Triton would specialize the integers of a tuple
    n_heads, n_batch_heads, n_lines, q_len, kv_len, n_split_lines, num_splits, n_interleaved, group, scale_log2,
    # softcap and strides of the bias, see score_mods.ScoreMods
    cap, bias_strides,
    # compile time; SIGN of the scale, ONE_SIDED see ModSpecs, columns of q and of v from forward_columns
    SIGN: gl.constexpr, ONE_SIDED: gl.constexpr, CAUSAL: gl.constexpr, CONFIG: gl.constexpr, COLS: gl.constexpr,
    COLS_V: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = CONFIG.stages
    WARPGROUPS: gl.constexpr = CONFIG.warpgroups
    Q_BUFFERS: gl.constexpr = CONFIG.q_stages * CONFIG.warpgroups
    q_buffers = allocate_rows(q_desc, Q_BUFFERS, COLS)
    k_buffers = allocate_rows(k_desc, STAGES, COLS)
    v_buffers = allocate_rows(v_desc, STAGES, COLS_V)
    q_tails = allocate_tail(q_desc, Q_BUFFERS) if has_tail(q_desc, COLS) else None
    k_tails = allocate_tail(k_desc, STAGES) if has_tail(k_desc, COLS) else None
    v_tails = allocate_tail(v_desc, STAGES) if has_tail(v_desc, COLS_V) else None
    if CONFIG.out_in_q:
        out_buffers = q_buffers
    else:
        out_shape: gl.constexpr = [WARPGROUPS, 1, 1, WARPGROUP_ROWS, COLS_V]
        out_buffers = gl.allocate_shared_memory(out_desc.dtype, out_shape, out_desc.layout)
    work_tile_buffers = gl.allocate_shared_memory(
        gl.int32, [WORK_TILE_STAGES * WORK_TILE_STRIDE, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    pipelines = Pipelines(
        work_tiles=allocate_pipeline(work_tile_buffers, WORK_TILE_STAGES, CONSUMERS=WARPGROUPS),
        q=allocate_pipeline(q_buffers, Q_BUFFERS, CONSUMERS=1),
        q_tails=q_tails,
        k=allocate_pipeline(k_buffers, STAGES, CONSUMERS=WARPGROUPS),
        k_tails=k_tails,
        v=allocate_pipeline(v_buffers, STAGES, CONSUMERS=WARPGROUPS),
        v_tails=v_tails,
        dout=None,
        dout_tails=None,
    )
    fence_async_shared()
    sizes = Sizes(
        n_heads=n_heads, n_batch_heads=n_batch_heads, n_lines=n_lines, q_len=q_len, kv_len=kv_len,
        n_split_lines=n_split_lines, num_splits=num_splits, n_interleaved=n_interleaved, group=group,
    )  # fmt: skip
    mods = ScoreMods(
        factor=scale_log2, cap=cap, sinks_ptr=ptrs.sinks_ptr, slopes_ptr=ptrs.slopes_ptr, bias_ptr=ptrs.bias_ptr,
        bias_strides=bias_strides,
    )  # fmt: skip
    REGISTERS: gl.constexpr = CONFIG.consumer_registers
    PRODUCER_REGISTERS: gl.constexpr = CONFIG.producer_registers
    if WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (mma, (out_desc, out_buffers, pipelines, ptrs, sizes, mods, 0, SIGN, ONE_SIDED, CAUSAL, CONFIG)),
                (mma, (out_desc, out_buffers, pipelines, ptrs, sizes, mods, 1, SIGN, ONE_SIDED, CAUSAL, CONFIG)),
                (load, (q_desc, k_desc, v_desc, None, pipelines, ptrs, record_strides, sizes, CAUSAL, CONFIG)),
            ],
            [4, 1],
            [REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (mma, (out_desc, out_buffers, pipelines, ptrs, sizes, mods, 0, SIGN, ONE_SIDED, CAUSAL, CONFIG)),
                (mma, (out_desc, out_buffers, pipelines, ptrs, sizes, mods, 1, SIGN, ONE_SIDED, CAUSAL, CONFIG)),
                (mma, (out_desc, out_buffers, pipelines, ptrs, sizes, mods, 2, SIGN, ONE_SIDED, CAUSAL, CONFIG)),
                (load, (q_desc, k_desc, v_desc, None, pipelines, ptrs, record_strides, sizes, CAUSAL, CONFIG)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, PRODUCER_REGISTERS],
        )


# ---- launch ----


class ForwardLaunches(NamedTuple):
    """The launches of a forward, and the memory that they need.

    out, lse          outputs; rows of out are padded so that TMA can write them
    kernel            the launch of hopper_forward_kernel
    combine           the launch that combines the splits; None: no tile row is split
    n_split_floats    float32 values of the workspace of the splits
    has_tile_counter  see needs_tile_counter
    """

    out: Memory
    lse: Memory
    kernel: Launch
    combine: Launch | None
    n_split_floats: int
    has_tile_counter: bool

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        lists: TileLists,
        kv_lengths: torch.Tensor | None,
        scores: Scores | None,
        bias: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """out and lse. lists: the plan's tile rows; bias: of each of their tiles."""
        empty = allocator(q)
        out, lse = empty(*self.out), empty(*self.lse)
        # cleared at each call: one kept for later calls would live on in the memory of a CUDA graph
        tile_counter = torch.zeros(1, dtype=torch.int32, device=q.device) if self.has_tile_counter else None
        splits = None if self.combine is None else lse.new_empty(self.n_split_floats)
        sinks, slopes = (None, None) if scores is None else (scores.sinks, scores.alibi_slopes)
        pointers = Pointers(
            *lists, kv_lengths_ptr=kv_lengths, sinks_ptr=sinks, slopes_ptr=slopes, bias_ptr=bias, lse_ptr=lse,
            tile_counter_ptr=tile_counter, splits_ptr=splits,
        )  # fmt: skip
        self.kernel(q, k, v, out, pointers)
        if self.combine is not None:
            self.combine(splits, lists[0], out, lse)
        # without the padding of rows
        return out if out.shape[3] % 8 == 0 else in_order_of(out, out), lse


@functools.lru_cache(maxsize=1024)
def forward_launches(
    specs: TensorSpecs,
    lists: PlanSpecs,
    lengths: tuple[torch.dtype, bool] | None,
    split: Split,
    scale: float,
    causal: bool,
    index: int | None,
    mods: ModSpecs = PLAIN,
    *,
    is_uneven: bool,
) -> ForwardLaunches:
    """The launches for all calls with these cache keys.

    specs    of q, k and v
    lists    cache key of the plan's tile rows
    lengths  cache key of kv_lengths
    index    of the device
    mods     score mods
    is_uneven  see schedule.are_uneven
    """
    q, k, v = specs.tensors
    (batch, heads, q_len, head_dim), (_, kv_heads, kv_len, v_dim) = q.shape, v.shape
    records_shape, _ = lists
    columns, columns_v = forward_columns(head_dim, v_dim)
    n_batch_heads, n_sms = batch * heads, num_sms(index)
    has_layout, has_lengths = records_shape is not None, lengths is not None
    # those of a layout, and those that are split, have 128 queries
    is_plain = not (has_layout or has_lengths or split.num_splits > 1)
    three_warpgroups = is_plain and three_warpgroups_pay(q_len, kv_len, n_batch_heads, n_sms, causal=causal)
    chosen = config((columns, columns_v), has_layout, has_lengths, three_warpgroups)
    assert three_warpgroups or chosen.warpgroups == 2, (
        "tile rows of a layout have 128 queries, and zero_keys_from has two warpgroups"
    )
    rows = WARPGROUP_ROWS.value
    n_tile_rows = -(-q_len // (rows * chosen.warpgroups))
    arguments = {
        "record_strides": strides_of_records(records_shape),
        "n_heads": heads,
        "n_batch_heads": n_batch_heads,
        "n_lines": n_tile_rows,
        "q_len": q_len,
        "kv_len": kv_len,
        "group": heads // kv_heads,
        "n_split_lines": split.n_split_lines,
        "num_splits": split.num_splits,
        "n_interleaved": interleaved_heads(n_tile_rows, n_batch_heads, n_sms, q_len, kv_len, is_uneven=is_uneven),
        **mods.arguments(scale, is_forward=True),
        "bias_strides": mods.bias_strides(0),
        "CAUSAL": causal,
        "CONFIG": chosen,
        "COLS": columns,
        "COLS_V": columns_v,
        "num_warps": 4,
    }
    out = memory_in_order_of(q, v_dim, row=-(-v_dim // 8) * 8)
    width, out_width = block_columns(columns), block_columns(columns_v)
    if chosen.out_in_q:
        # the buffers of q are swizzled by the columns of its blocks
        out_width = min(width, out_width)
    descriptor_factories = {
        "q_desc": DescriptorFactory(q, (1, 1, rows, width)),
        "k_desc": DescriptorFactory(k, (1, 1, chosen.block_kv, width)),
        "v_desc": DescriptorFactory(v, (1, 1, chosen.block_kv, block_columns(columns_v))),
        "out_desc": DescriptorFactory(out.spec, (1, 1, rows, out_width)),
    }
    n_programs = min(split.n_programs(n_tile_rows, n_batch_heads), n_sms)
    is_sorted = is_plain and are_rows_sorted(q_len, kv_len, n_batch_heads, n_sms, causal=causal)
    # counted in tile rows of 128, as `explain` does: with those of 192 there may be a counter that is not needed
    n_work_tiles = split.n_programs(-(-q_len // TILE_SIDE), n_batch_heads)
    return ForwardLaunches(
        out=out,
        lse=contiguous(torch.float32, batch, heads, q_len),
        kernel=Launch(hopper_forward_kernel, (n_programs,), arguments, descriptor_factories),
        combine=combine_rows(split, records_shape, out.spec, arguments, columns_v),
        n_split_floats=split.floats(columns_v + 1, n_batch_heads),
        has_tile_counter=needs_tile_counter(n_work_tiles, n_sms, is_sorted=is_sorted),
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

    q           (batch, heads, q_len, head_dim)
    k, v        (batch, kv_heads, kv_len, head_dim) and (batch, kv_heads, kv_len, v_head_dim)
    plan        the tensors of a Plan; empty without a layout
    kv_lengths  (batch,) integers, clamped to 0 .. kv_len; None: kv_len
    causal      query i attends to keys 0 .. i + kv_len - q_len; only without a plan, which contains the mask
    specs       of q, k and v, if the caller has them already
    """
    assert seed is None and dropout_p == 0.0, "dispatch refuses dropout on this backend"
    if q.numel() == 0:
        return new_in_order_of(q, v.shape[3]), q.new_empty(*q.shape[:3], dtype=torch.float32)
    if specs is None or not specs.is_tma_loadable:
        (q, k, v), specs = to_tma_loadable(q, k, v)
    q_spec, k_spec, _ = specs.tensors
    lists, index = tile_lists(plan, ROW_LISTS), q.device.index
    split = split_of(plan, ROW_LISTS, q_spec.shape, k_spec.shape, causal, num_sms(index))
    bias = bias_table(scores, 0)
    lengths, mods = cache_key_of(kv_lengths), mod_specs_of(scores, bias)
    launches = forward_launches(
        specs, plan_specs_of(lists), lengths, split, scale, causal, index, mods, is_uneven=are_uneven(plan, causal)
    )
    return launches.run(q, k, v, lists, kv_lengths, scores, bias)
