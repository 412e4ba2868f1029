"""Hopper forward in Gluon (sm90): out = softmax(scale q k^T on the layout) v, and lse.

One program a SM takes tile rows from a queue until none is left. A warp moves data: it fetches the next
row, tells the others, and loads q, then k and v of each step of the row, into a ring, running ahead over the end of
a row.
Two warpgroups compute, 64 of the 128 queries of a row each, out in registers; at head dimension 64, where neither a
layout nor
lengths forbid it and enough rows are there, three, of rows of 192. With `overlap`:

    issue q k^T of step i | issue p v of step i - 1 | wait for the first | softmax of step i while the second runs

While one warpgroup issues, the others are kept from it (named barriers 9 to 11): they compute exponentials while it
multiplies. Partial tiles come first, those with a bitmask and those made of whole quarters in loops of their own, so
that full
ones pay for no mask. Of the latter, tiles of which only 64 keys attend are a step together, two and two. A row
without keys writes
out 0, lse -inf. Scores and the running maximum are in base 2, `lse` in memory is natural.

A row that would be waited for is split (splitting.py): each part is work of its own, whose out and lse go to a
workspace, in
float32, and a launch merges them (parts.py). Where nothing is split, the kernel is compiled without.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

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

from ...plan_format import has_subtiles_of
from ...runtime.launch import Launch, Memory, allocator, cache_key_of, contiguous, num_sms
from ...runtime.tensor_spec import TensorSpecs
from ..arguments import TILE as TILE_SIDE
from ..arguments import PlanSpecs, plan_specs_of, scale_log2, sign, strides_of_records, tile_lists
from ..schedule import Split, padded_dim, split_of
from ..triton.combine_splits import merge_rows
from ..triton.tile import LN_2, TILE
from .barriers import allocate_mbarriers, ping_pong_finish, ping_pong_next, ping_pong_start, ping_pong_wait
from .bitmask import mask_subtiles
from .forward_producer import (
    K_EMPTY,
    K_FULL,
    Q_EMPTY,
    Q_FULL,
    V_EMPTY,
    V_FULL,
    key_start,
    move,
    query_place,
    read_row_work_tile,
    row_ints,
)
from .registers import BEFORE_TRITON_3_9, WARPGROUP_ROWS, accumulator, clamped_kv_len, pin, store_split, zero_tail
from .softmax import (
    MINUS_INFINITY,
    mask_quarters,
    mask_scores,
    mask_words,
    no_words,
    online_softmax,
    rescale,
    row_parts,
)
from .tma import DescriptorFactory, tma_loadable, tma_store


@dataclass(frozen=True)
class Config:
    """One launch configuration.

    block_kv   keys of a step
    stages     steps of k and v in flight
    overlap    p v of a step runs during the softmax of the next one
    ping_pong  the warpgroups issue in turn
    pin        keep ptxas from ending the overlap early, see hopper.pin
    warpgroups that compute; 3 want neither a layout, whose rows have 128 queries, nor lengths: zero_tail is for 2
    queries    sets of them in flight, one a row
    slack      by how much, in base 2, a maximum may grow before out is rescaled
    out_in_q   out takes the place of q in shared memory
    early_words  those of a partial step's bitmask are loaded before its keys are waited for, not behind its product
    registers, mover_registers  of a computing thread, of the moving warp
    """

    block_kv: int = 128
    stages: int = 2
    overlap: bool = True
    ping_pong: bool = True
    pin: bool = False
    warpgroups: int = 2
    queries: int = 1
    slack: float = 0.0
    out_in_q: bool = False
    early_words: bool = True
    registers: int = 240
    mover_registers: int = 24


@functools.cache
def config(dim: int, has_layout: bool, has_lengths: bool, is_wide: bool) -> Config:
    """The launch table: dim is the larger padded head dimension, is_wide says that rows of 192 queries are possible
    and pay.

    TFLOP/s of stored tiles, H200, 16,384 tokens, opaque size 2048, bf16, one run. Rows of 192 queries have no layout.

                                                   dense causal  local butterfly random bigbird
        64   3 warpgroups                            545    490                                   without a layout
        64   2 sets of queries                       473    463    437    424    450    420       with one
        64   2 sets, slack 8                         447    433    420    416    435    422
        64   1 set                                                 410    400    432    417
        64   1 set, a row's sum whole in each step   460    438    407    406    432    363
        64   3 warpgroups, no turns                  531    481
        64   3 warpgroups, no turns, slack 8         530    497
        64   3 warpgroups, no overlap                516    473
        64   3 warpgroups, 64 keys a step, pin       453    434
        64   4 warpgroups, 64 keys a step            490    449
        64   the same, no turns, slack 8             517    492
        64   cuDNN                                   463    449
        128  2 sets, slack 8                         600    626    562    561    607    567       with a layout
        128  2 sets                                  662    622    550    546    604    557       without one
        128  1 set, a row's sum whole in each step   665    615    548    548    603    559
        128  3 warpgroups, 64 keys a step            627    582
        128  cuDNN                                   642    570

    In another run, of 1 set: at 64, two programs a SM with slack 8 had 466 443 426 416 432 415 where the row's sum
    whole had 430 436 403 393 421 399; an eighth of the exponentials as polynomials 437 425 403 393 418 394, a
    quarter 422 417
    380 382 401 383. At 128, slack 8 and two steps a round 636 615 561 559 584 540 where the sum whole had 664 597
    533 537 579 540.

    Ahead of time only: `pin` spills with Triton 3.9 (84 bytes), as queries in registers did beside it (128: 36 to
    204), and 3
    warpgroups with lengths (264) or with Triton 3.9 (692), and early words at 128 with Triton 3.9 (32). With Triton
    3.6 a partial
    step of a layout has 566 instructions at 64, 613 at 128, a full one 451 and 502; of them 64 select, 32 move bits
    to predicates. One
    of a tile made of whole quarters has 466 and 525, and 32 more for 64 keys that do not attend.

    Tiles made of whole quarters: of blocks of 64 with 80 % stored, rate of stored blocks beside that of blocks of
    128, all stored, local
    and butterfly, single calls: forward 128 79, 78 %, 64 76, 77, by bitmasks 71, 71 and 69, 70; backward 128 79, 78,
    64 76, 76, by
    bitmasks 71, 71 and 62, 62. That one kernel has loops for them and others without is for the full tiles of the
    others, with which
    one for all had, at 64, local and butterfly, 429, 425 TFLOP/s forward for 442, 435 and 453, 442 backward for 478,
    465. The words of a
    row's first step, loaded before its keys are waited for: butterfly in blocks of 16, 80 % stored, 128 418 for 408,
    64 299 for 294.
    Where halves of tiles come two and two, microseconds for those before: blocks of 64 at random, 10 % of them, 128
    616 for 1075, 64 936
    for 1608; local, 80 % of them stored, where few tiles are half, 128 302 for 306, 64 444 for 428. Keys and values
    then come 64 rows and 64
    columns at a time, full tiles too.

    What binds (Nsight Compute, single launches at 1.65 to 1.8 GHz, of the cycles): tensor cores, shared memory,
    exponentials, issue:
    128 dense 82, 53, 42, 40 %, butterfly 65, 44, 34, 32, random 75, 49, 39, 34; 64 dense 61, 41, 63, 50, butterfly
    47, 33, 49, 45,
    random 50, 35, 52, 47: at 64 tensor cores and exponentials wait for each other. Over and over, as
    benchmarks.run.attention calls it, power
    limits the clock (700 W; 668 to 727 are drawn), TFLOP/s of single calls and over and over: 128 dense 728, 660,
    random 670, 624,
    butterfly 593, 573; 64 dense 589, 533, butterfly 436, 433.

    Tried: places given back by an arrival of each thread (cp.async.mbarrier.arrive), without the meetings of a
    warpgroup around an
    mbarrier's: 64 local 365 microseconds for 345, 128 local 257 for 258, dense 3,100 for 2,996; by hardware barriers
    128 local 254 for
    256, dense 3,070 for 3,007.
    """
    if dim == 256:
        # out takes 128 registers, and there is no room for it beside q
        return Config(block_kv=64, out_in_q=True, early_words=BEFORE_TRITON_3_9)
    if dim == 64 and is_wide and BEFORE_TRITON_3_9:
        return Config(stages=4, warpgroups=3, registers=160, mover_registers=32)
    slack = 8.0 if dim == 128 and has_layout and not has_lengths else 0.0
    return Config(
        stages=2 if dim == 128 else 4,
        queries=2,
        slack=slack,
        pin=BEFORE_TRITON_3_9,
        early_words=BEFORE_TRITON_3_9 or dim == 64,
    )


def wide_pays(q_len: int, n_batch_heads: int, n_programs: int) -> bool:
    """Whether rows of 192 queries are done no later than rows of 128: few of them leave SMs idle.

    One takes 1.30 (dense) to 1.42 (causal) times as long, by the table of `config`.
    """
    wide, narrow = (-(-(-(-q_len // side) * n_batch_heads) // n_programs) for side in (192, 128))
    return 4 * wide <= 3 * narrow


# ---- the warpgroups that compute ----


@gluon.jit
def clear_values(rings, barriers, ptrs, row, n_now, i_step, limit, WARPGROUP: gl.constexpr, STAGES: gl.constexpr):
    """Makes the values of a step finite. The warpgroups meet in it: never while one holds the turn that the other
    waits for."""
    _, indices_ptr, _, _, kv_lengths_ptr, _, _, _ = ptrs
    if kv_lengths_ptr is not None:
        v_tile = wait_for_values(rings, barriers, n_now, STAGES)
        zero_tail(v_tile, key_start(indices_ptr, row, i_step, v_tile.shape[0]), limit, WARPGROUP)


@gluon.jit
def wait_for_values(rings, barriers, n_now, STAGES: gl.constexpr):
    """The values of a step: [BLOCK_KV, DIM_V]."""
    _, _, v_ring, _, _ = rings
    stage = n_now % STAGES
    mbarrier.wait(barriers[V_FULL].index(stage), (n_now // STAGES) & 1)
    return v_ring.index(stage).reshape([v_ring.shape[3], v_ring.shape[4]])


@gluon.jit
def attend(
    state, q_tile, rings, barriers, ptrs, sizes, row, n_done, i_step, limit, WARPGROUP: gl.constexpr, MASKED: gl.constexpr,
    IS_SUBTILED: gl.constexpr, SIGN: gl.constexpr, CAUSAL: gl.constexpr, STAGES: gl.constexpr, FIRST: gl.constexpr, OVERLAP: gl.constexpr,
    PIN: gl.constexpr, PING_PONG: gl.constexpr, WARPGROUPS: gl.constexpr, SLACK: gl.constexpr, EARLY_WORDS: gl.constexpr,
):  # fmt: skip
    """The scores of step i_step and, where it is not the FIRST with OVERLAP, meanwhile the output of the step before.

    Without OVERLAP the output of the same step follows. state is out, maximum, sum, and p of the step before.
    """
    b_out, b_max, b_sum, b_p = state
    _, k_ring, v_ring, _, _ = rings
    BLOCK_KV: gl.constexpr = k_ring.shape[3]
    score_layout: gl.constexpr = accumulator(BLOCK_KV)
    out_layout: gl.constexpr = accumulator(v_ring.shape[4])
    BEFORE: gl.constexpr = OVERLAP and not FIRST
    n_now = n_done + i_step
    stage = n_now % STAGES
    v_stage = (n_now - 1) % STAGES
    words = None
    quarters = None
    # these come while this warpgroup waits for keys, its turn and the product
    if EARLY_WORDS and MASKED and ptrs[1] is not None:
        words = mask_words(ptrs, row, i_step, WARPGROUP, BLOCK_KV)
    if EARLY_WORDS and FIRST and ptrs[1] is not None:
        words = no_words(BLOCK_KV)
        # not of a full tile, which would wait for two loads, one after the other: 1 to 2 % of its rate
        if row[5] > 0:
            words = mask_words(ptrs, row, i_step, WARPGROUP, BLOCK_KV)
    if IS_SUBTILED:
        quarters = mask_quarters(ptrs, row, i_step, WARPGROUP, BLOCK_KV)
    mbarrier.wait(barriers[K_FULL].index(stage), (n_now // STAGES) & 1)
    if BEFORE:
        clear_values(rings, barriers, ptrs, row, n_now - 1, i_step - 1, limit, WARPGROUP, STAGES)
    ping_pong_wait(WARPGROUP, PING_PONG, WARPGROUPS)
    b_zero = gl.zeros([WARPGROUP_ROWS, BLOCK_KV], gl.float32, score_layout)
    k_tile = k_ring.index(stage).reshape([BLOCK_KV, k_ring.shape[4]]).permute((1, 0))
    # [WARPGROUP_ROWS, BLOCK_KV]
    scores_token = warpgroup_mma(q_tile, k_tile, b_zero, use_acc=False, is_async=True)
    if BEFORE:
        v_tile = wait_for_values(rings, barriers, n_now - 1, STAGES)
        # [WARPGROUP_ROWS, DIM_V]
        out_token = warpgroup_mma(b_p, v_tile, b_out, is_async=True)
    ping_pong_next(WARPGROUP, PING_PONG, WARPGROUPS)
    b_scores = warpgroup_mma_wait(1 if BEFORE else 0, deps=(scores_token,))
    mbarrier.arrive(barriers[K_EMPTY].index(stage), count=1)
    if SIGN != 1:
        b_scores = b_scores * SIGN
    if FIRST:
        # partial or not, it is the one step that is looked at
        if row[5] > 0:
            b_scores = mask_scores(b_scores, words, ptrs, sizes, row, i_step, limit, WARPGROUP, True, CAUSAL, BLOCK_KV)
        elif ptrs[4] is not None:
            b_scores = mask_scores(b_scores, None, ptrs, sizes, row, i_step, limit, WARPGROUP, False, CAUSAL, BLOCK_KV)
    else:
        b_scores = mask_scores(b_scores, words, ptrs, sizes, row, i_step, limit, WARPGROUP, MASKED, CAUSAL, BLOCK_KV)
    if IS_SUBTILED:
        b_scores = mask_subtiles(b_scores, quarters, 1, MINUS_INFINITY)
    b_p32, b_decay, b_max, b_sum = online_softmax(b_scores, b_max, b_sum, sizes[5], SLACK)
    if BEFORE:
        # with lengths to look at it would spill more
        if PIN and ptrs[4] is None:
            b_sum = pin(b_sum)
        b_out = warpgroup_mma_wait(0, deps=(out_token,))
        mbarrier.arrive(barriers[V_EMPTY].index(v_stage), count=1)
    if not (OVERLAP and FIRST):
        b_decay = gl.expand_dims(gl.convert_layout(b_decay, gl.SliceLayout(1, out_layout)), 1)
        if SLACK > 0 and not MASKED:  # noqa: SIM108
            b_out = rescale(b_out, b_decay)
        else:
            b_out = b_out * b_decay
    b_p = gl.convert_layout(b_p32.to(k_ring.dtype), gl.DotOperandLayout(0, out_layout, 2))
    if not OVERLAP:
        b_out = add_values(b_out, b_p, rings, barriers, ptrs, row, n_now, i_step, limit, WARPGROUP, STAGES)
    return b_out, b_max, b_sum, b_p


@gluon.jit
def add_values(
    b_out, b_p, rings, barriers, ptrs, row, n_now, i_step, limit, WARPGROUP: gl.constexpr, STAGES: gl.constexpr
):
    """out + p v of one step: [WARPGROUP_ROWS, DIM_V]."""
    clear_values(rings, barriers, ptrs, row, n_now, i_step, limit, WARPGROUP, STAGES)
    v_tile = wait_for_values(rings, barriers, n_now, STAGES)
    out_token = warpgroup_mma(b_p, v_tile, b_out, is_async=True)
    b_out = warpgroup_mma_wait(0, deps=(out_token,))
    mbarrier.arrive(barriers[V_EMPTY].index(n_now % STAGES), count=1)
    return b_out


@gluon.jit
def epilogue(
    b_out, b_lse, descriptors, rings, ptrs, sizes, row, i_query, WARPGROUP: gl.constexpr, OUT_IN_Q: gl.constexpr
):
    """Writes out and lse, which comes in base 2, of a whole row."""
    _, _, _, out_desc = descriptors
    _, k_ring, _, out_ring, _ = rings
    n_heads, _, _, q_len, _, _, _, _ = sizes
    batch_head, q_start, _, _, _, _, _ = row
    o_q = (
        q_start
        + WARPGROUP * WARPGROUP_ROWS
        + gl.arange(0, WARPGROUP_ROWS, layout=gl.SliceLayout(1, accumulator(k_ring.shape[3])))
    )
    # unsigned: else the sign of q_len is kept from the kernel's beginning on, and spilled
    p_lse = ptrs[5] + batch_head.to(gl.uint32).to(gl.uint64) * gl.cast(q_len, gl.uint32) + o_q
    gl.store(p_lse, b_lse * LN_2, mask=o_q < q_len)
    if not OUT_IN_Q:
        # the row before has left the buffer
        tma.store_wait(0)
    out_tile = out_ring.index(i_query if OUT_IN_Q else WARPGROUP)
    out_tile.reshape([WARPGROUP_ROWS, b_out.shape[1]]).store(b_out.to(out_ring.dtype))
    fence_async_shared()
    tma_store(
        out_desc, [batch_head // n_heads, batch_head % n_heads, q_start + WARPGROUP * WARPGROUP_ROWS, 0], out_tile
    )
    if OUT_IN_Q:
        tma.store_wait(0)


@gluon.jit
def compute(
    descriptors, rings, barriers, ptrs, sizes, WARPGROUP: gl.constexpr, SIGN: gl.constexpr, CAUSAL: gl.constexpr,
    STAGES: gl.constexpr, OVERLAP: gl.constexpr, PIN: gl.constexpr, PING_PONG: gl.constexpr,
    OUT_IN_Q: gl.constexpr, WARPGROUPS: gl.constexpr, SLACK: gl.constexpr, EARLY_WORDS: gl.constexpr, HAS_SUBTILES: gl.constexpr,
):  # fmt: skip
    q_ring, k_ring, v_ring, _, row_ring = rings
    _, _, _, _, kv_lengths_ptr, _, _, splits_ptr = ptrs
    n_heads, n_batch_heads, _, _, kv_len, _, _, _ = sizes
    BLOCK_KV: gl.constexpr = k_ring.shape[3]
    DIM: gl.constexpr = q_ring.shape[4]
    DIM_V: gl.constexpr = v_ring.shape[4]
    score_layout: gl.constexpr = accumulator(BLOCK_KV)
    out_layout: gl.constexpr = accumulator(DIM_V)
    query_layout: gl.constexpr = gl.SliceLayout(1, score_layout)
    dtype: gl.constexpr = q_ring.dtype
    i_row = 0
    n_done = 0
    ping_pong_start(WARPGROUP, PING_PONG, WARPGROUPS)
    row = read_row_work_tile(row_ring, barriers, i_row, HAS_SUBTILES)
    while row[0] >= 0:
        batch_head, _, _, n_steps, n_partial, n_bitmask, _ = row
        if splits_ptr is not None:
            batch_head = batch_head % n_batch_heads
        limit = clamped_kv_len(kv_lengths_ptr, batch_head // n_heads, kv_len)
        b_zero = gl.zeros([WARPGROUP_ROWS, BLOCK_KV], gl.float32, score_layout)
        b_p = gl.convert_layout(b_zero.to(dtype), gl.DotOperandLayout(0, out_layout, 2))
        # a row which has met no key yet: finite, since -inf - (-inf) = nan, and below every score
        b_max = gl.full([WARPGROUP_ROWS], -3.0e38, gl.float32, query_layout)
        b_sum = gl.full([WARPGROUP_ROWS, 4], 0.0, gl.float32, row_parts())
        state = (gl.zeros([WARPGROUP_ROWS, DIM_V], gl.float32, out_layout), b_max, b_sum, b_p)
        i_query, phase = query_place(i_row, WARPGROUP, q_ring, WARPGROUPS)
        mbarrier.wait(barriers[Q_FULL].index(i_query), phase)
        # [WARPGROUP_ROWS, DIM]
        q_tile = q_ring.index(i_query).reshape([WARPGROUP_ROWS, DIM])
        # one is known when compiling, the other is not
        if OVERLAP:  # noqa: SIM102
            if n_steps > 0:
                state = attend(
                    state, q_tile, rings, barriers, ptrs, sizes, row, n_done, 0, limit, WARPGROUP, False, HAS_SUBTILES, SIGN, CAUSAL, STAGES,
                    True, OVERLAP, PIN, PING_PONG, WARPGROUPS, SLACK, EARLY_WORDS,
                )  # fmt: skip
        for i_step in range(1 if OVERLAP else 0, n_bitmask):
            state = attend(
                state, q_tile, rings, barriers, ptrs, sizes, row, n_done, i_step, limit, WARPGROUP, True, False, SIGN, CAUSAL, STAGES,
                False, OVERLAP, PIN, PING_PONG, WARPGROUPS, SLACK, EARLY_WORDS,
            )  # fmt: skip
        if HAS_SUBTILES:
            for i_step in range(gl.maximum(n_bitmask, 1) if OVERLAP else n_bitmask, n_partial):
                state = attend(
                    state, q_tile, rings, barriers, ptrs, sizes, row, n_done, i_step, limit, WARPGROUP, False, True, SIGN, CAUSAL,
                    STAGES, False, OVERLAP, PIN, PING_PONG, WARPGROUPS, SLACK, EARLY_WORDS,
                )  # fmt: skip
        for i_step in range(gl.maximum(n_partial, 1) if OVERLAP else n_partial, n_steps):
            state = attend(
                state, q_tile, rings, barriers, ptrs, sizes, row, n_done, i_step, limit, WARPGROUP, False, False, SIGN, CAUSAL, STAGES,
                False, OVERLAP, PIN, PING_PONG, WARPGROUPS, SLACK, EARLY_WORDS,
            )  # fmt: skip
        b_out, b_max, b_sum, b_p = state
        n_done += n_steps
        if not OUT_IN_Q:
            # nothing reads the queries any more
            mbarrier.arrive(barriers[Q_EMPTY].index(i_query), count=1)
        if OVERLAP:  # noqa: SIM102
            if n_steps > 0:
                # the output of the last step
                b_out = add_values(
                    b_out, b_p, rings, barriers, ptrs, row, n_done - 1, n_steps - 1, limit, WARPGROUP, STAGES
                )
        b_sum = gl.convert_layout(gl.sum(b_sum, 1), query_layout, assert_trivial=True)
        m_empty = b_sum == 0.0
        b_sum = gl.where(m_empty, 1.0, b_sum)
        b_lse = gl.where(m_empty, float("-inf"), b_max + gl.log2(b_sum))
        b_out = b_out * gl.expand_dims(gl.convert_layout(1.0 / b_sum, gl.SliceLayout(1, out_layout)), 1)
        # one is known when compiling, the other is not
        if splits_ptr is None:  # noqa: SIM114
            epilogue(b_out, b_lse, descriptors, rings, ptrs, sizes, row, i_query, WARPGROUP, OUT_IN_Q)
        elif row[0] < n_batch_heads:
            epilogue(b_out, b_lse, descriptors, rings, ptrs, sizes, row, i_query, WARPGROUP, OUT_IN_Q)
        else:
            p_part = splits_ptr + (row[0] - n_batch_heads).to(gl.int64) * (TILE * (DIM_V + 1))
            store_split(p_part, b_out, WARPGROUP)
            gl.store(
                p_part + TILE * DIM_V + WARPGROUP * WARPGROUP_ROWS + gl.arange(0, WARPGROUP_ROWS, layout=query_layout),
                b_lse,
            )
        if OUT_IN_Q:
            mbarrier.arrive(barriers[Q_EMPTY].index(i_query), count=1)
        i_row += 1
        row = read_row_work_tile(row_ring, barriers, i_row, HAS_SUBTILES)
    ping_pong_finish(WARPGROUP, PING_PONG, WARPGROUPS)
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=["n_heads", "n_batch_heads", "n_lines", "q_len", "kv_len", "group", "n_split_lines", "num_splits"]
)
def hopper_forward_kernel(
    # inputs; a queue, None: there is a program for each row
    q_desc, k_desc, v_desc, records_ptr, indices_ptr, ids_ptr, words_ptr, kv_lengths_ptr, tile_counter_ptr,
    # outputs; what parts of rows write, None: there are none
    out_desc, lse_ptr, splits_ptr,
    # strides in elements: (batch, head)
    record_strides,
    # sizes: n_batch_heads = batch * heads, n_lines = tile rows, group = query heads of a key head; the first n_split_lines lines of
    # each
    # head have num_splits programs each
    n_heads, n_batch_heads, n_lines, q_len, kv_len, group, n_split_lines, num_splits, scale_log2,
    # compile time; HAS_SUBTILES: tiles made of whole quarters are listed
    BLOCK_KV: gl.constexpr, SIGN: gl.constexpr, CAUSAL: gl.constexpr, STAGES: gl.constexpr, OVERLAP: gl.constexpr, PIN: gl.constexpr,
    PING_PONG: gl.constexpr, OUT_IN_Q: gl.constexpr, REGISTERS: gl.constexpr,
    MOVER_REGISTERS: gl.constexpr, WARPGROUPS: gl.constexpr, QUERIES: gl.constexpr, SLACK: gl.constexpr, EARLY_WORDS: gl.constexpr,
    HAS_SUBTILES: gl.constexpr,
):  # fmt: skip
    DIM: gl.constexpr = q_desc.block_type.shape[3]
    DIM_V: gl.constexpr = out_desc.block_type.shape[3]
    q_ring = gl.allocate_shared_memory(q_desc.dtype, [QUERIES * WARPGROUPS, 1, 1, WARPGROUP_ROWS, DIM], q_desc.layout)
    # of a block of the descriptor, which may be smaller, they have the layout too
    k_ring = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, 1, BLOCK_KV, DIM], k_desc.layout)
    v_ring = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, 1, BLOCK_KV, DIM_V], v_desc.layout)
    if OUT_IN_Q:
        out_ring = q_ring
    else:
        out_ring = gl.allocate_shared_memory(out_desc.dtype, [WARPGROUPS, 1, 1, WARPGROUP_ROWS, DIM_V], out_desc.layout)
    row_ring = gl.allocate_shared_memory(
        gl.int32, [2 * row_ints(HAS_SUBTILES), 1], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    barriers = (
        allocate_mbarriers(2, 1), allocate_mbarriers(2, WARPGROUPS),
        allocate_mbarriers(QUERIES * WARPGROUPS, 1), allocate_mbarriers(QUERIES * WARPGROUPS, 1),
        allocate_mbarriers(STAGES, 1), allocate_mbarriers(STAGES, WARPGROUPS), allocate_mbarriers(STAGES, 1), allocate_mbarriers(STAGES, WARPGROUPS),
    )  # fmt: skip
    fence_async_shared()
    descriptors = (q_desc, k_desc, v_desc, out_desc)
    rings = (q_ring, k_ring, v_ring, out_ring, row_ring)
    ptrs = (records_ptr, indices_ptr, ids_ptr, words_ptr, kv_lengths_ptr, lse_ptr, tile_counter_ptr, splits_ptr)
    sizes = (n_heads, n_batch_heads, n_lines, q_len, kv_len, scale_log2, n_split_lines, num_splits)
    gl.warp_specialize(
        [
            (compute, (descriptors, rings, barriers, ptrs, sizes, who, SIGN, CAUSAL, STAGES, OVERLAP, PIN, PING_PONG,
                       OUT_IN_Q, WARPGROUPS, SLACK, EARLY_WORDS, HAS_SUBTILES))
            if who < WARPGROUPS else
            (move, (descriptors, rings, barriers, ptrs, record_strides, sizes, group, CAUSAL, BLOCK_KV, STAGES, WARPGROUPS, HAS_SUBTILES))
            for who in ((0, 1, 2) if WARPGROUPS == 2 else (0, 1, 2, 3))
        ],
        [4, 1] if WARPGROUPS == 2 else [4, 4, 1],
        [REGISTERS, MOVER_REGISTERS] if WARPGROUPS == 2 else [REGISTERS, REGISTERS, MOVER_REGISTERS],
    )  # fmt: skip


# ---- the launch ----


class Prepared(NamedTuple):
    """The memory of the results, the launch, and of split rows the one that merges their parts and how many float32
    they are.

    is_queued  whether there are more rows than programs, which take them from a queue
    """

    out: Memory
    lse: Memory
    launch: Launch
    merge: Launch | None
    n_floats: int
    is_queued: bool


@functools.lru_cache(maxsize=1024)
def prepare(
    specs: TensorSpecs,
    lists: PlanSpecs,
    lengths: tuple[torch.dtype, bool] | None,
    split: Split,
    has_subtiles: bool,
    scale: float,
    causal: bool,
    index: int | None,
) -> Prepared:
    """How a call on such tensors is launched.

    kind     of q, k and v
    lengths  what is written of kv_lengths
    has_subtiles  whether tiles made of whole quarters are listed
    index    of the device
    """
    q, k, v = specs.tensors
    (batch, heads, q_len, head_dim), (_, kv_heads, kv_len, v_dim) = q.shape, v.shape
    items, _ = lists
    dim, dim_v = padded_dim("hopper", head_dim), padded_dim("hopper", v_dim)
    n_sms = num_sms(index)
    has_layout, has_lengths = items is not None, lengths is not None
    # a row that is split has 128 queries
    is_wide = not (has_layout or has_lengths or split.parts > 1) and wide_pays(q_len, batch * heads, n_sms)
    chosen = config(max(dim, dim_v), has_layout, has_lengths, is_wide)
    assert is_wide or chosen.warpgroups == 2, "a row of a layout has 128 queries, and two warpgroups clear values"
    if chosen.out_in_q:
        dim = dim_v = max(dim, dim_v)
    half = WARPGROUP_ROWS.value
    n_lines = -(-q_len // (half * chosen.warpgroups))
    rest = {
        "record_strides": strides_of_records(items),
        "n_heads": heads,
        "n_batch_heads": batch * heads,
        "n_lines": n_lines,
        "q_len": q_len,
        "kv_len": kv_len,
        "group": heads // kv_heads,
        "n_split_lines": split.n_lines,
        "num_splits": split.parts,
        "scale_log2": scale_log2(scale),
        "SIGN": sign(scale),
        "BLOCK_KV": chosen.block_kv,
        "CAUSAL": causal,
        "STAGES": chosen.stages,
        "OVERLAP": chosen.overlap,
        "PIN": chosen.pin,
        "PING_PONG": chosen.ping_pong,
        "OUT_IN_Q": chosen.out_in_q,
        "REGISTERS": chosen.registers,
        "MOVER_REGISTERS": chosen.mover_registers,
        "WARPGROUPS": chosen.warpgroups,
        "QUERIES": chosen.queries,
        "SLACK": chosen.slack,
        "EARLY_WORDS": chosen.early_words,
        "HAS_SUBTILES": has_subtiles and BEFORE_TRITON_3_9,
        "num_warps": 4,
    }
    # 64 keys and columns at a time, since a step may be of halves of two tiles
    by_halves = has_subtiles and BEFORE_TRITON_3_9 and chosen.block_kv == TILE_SIDE
    # rows padded so that TMA can write them
    out = contiguous(q.dtype, batch, heads, q_len, v_dim, row=-(-v_dim // 8) * 8)
    descriptor_factories = {
        "q_desc": DescriptorFactory(q, (1, 1, half, dim)),
        "k_desc": DescriptorFactory(k, (1, 1, chosen.block_kv, dim) if not by_halves else (1, 1, half, half)),
        "v_desc": DescriptorFactory(v, (1, 1, chosen.block_kv, dim_v) if not by_halves else (1, 1, half, half)),
        "out_desc": DescriptorFactory(out.spec, (1, 1, half, dim_v)),
    }
    n_programs = min(split.n_programs(n_lines, batch * heads), n_sms)
    return Prepared(
        out,
        contiguous(torch.float32, batch, heads, q_len),
        Launch(hopper_forward_kernel, (n_programs,), rest, descriptor_factories),
        merge_rows(split, items, out.spec, rest, dim_v),
        split.floats(dim_v + 1, batch * heads),
        # by rows of 128, which is what `explain` knows: rows of 192 may have a queue that they could do without
        split.n_programs(-(-q_len // TILE_SIDE), batch * heads) > n_sms,
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
    specs: TensorSpecs | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out (batch, heads, q_len, v_head_dim) in q's type and lse (batch, heads, q_len) float32, both contiguous.

    kind  that of q, k and v, where it is known already
    """
    assert seed is None and dropout_p == 0.0, "the choice of the backend refuses dropout"
    if q.numel() == 0:
        return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(*q.shape[:3], dtype=torch.float32)
    if specs is None or not specs.is_tma_loadable:
        (q, k, v), specs = tma_loadable(q, k, v)
    q_seen, k_seen, _ = specs.tensors
    device, lists, empty = q.device, tile_lists(plan, 0), allocator(q)
    index = device.index
    split = split_of(plan, 0, q_seen.shape, k_seen.shape, causal, num_sms(index))
    has_subtiles = bool(plan) and has_subtiles_of(plan[1].shape[0], plan[2].shape[0])
    ready = prepare(specs, plan_specs_of(lists), cache_key_of(kv_lengths), split, has_subtiles, scale, causal, index)
    out, lse = empty(*ready.out), empty(*ready.lse)
    # cleared at each call: one kept for later calls would live on in the memory of a CUDA graph
    queue = torch.zeros(1, dtype=torch.int32, device=device) if ready.is_queued else None
    parts = None if ready.merge is None else lse.new_empty(ready.n_floats)
    ready.launch(q, k, v, *lists, kv_lengths, queue, out, lse, parts)
    if ready.merge is not None:
        ready.merge(parts, lists[0], out, lse)
    return out.contiguous(), lse
