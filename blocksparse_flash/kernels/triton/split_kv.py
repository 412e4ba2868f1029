"""Split-KV forward for few queries and many keys (decoding); sm80 and later.

One program owns one split of the tiles of a tile row, for all query heads that share its keys (a group of grouped
heads, if all heads have one layout). Its rows are their queries, head after head, so keys and values are loaded once
for all of them. With s the base-2 scores of split c,

    max_c = max_j s_j     sum_c = sum_j 2^(s_j - max_c)     part_c = sum_j 2^(s_j - max_c) v_j     0 and 0 without keys
    out = sum_c 2^max_c part_c / sum_c 2^max_c sum_c        lse = ln sum_c 2^max_c sum_c

A second kernel computes the last line, in the order of the splits. Score mods are compiled in where a call has them; a
sink is where the sum over c starts. The number of splits depends only on shapes and the GPU, and their bounds on the
plan's records: results are bitwise reproducible, and no call synchronizes with the host.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ...plan_format import ROW_LISTS, TILE
from ...runtime.launch import Config, Launch, num_sms
from ...runtime.tensor_spec import TensorSpecs, in_order_of, specs_of
from ...score_mods import Scores
from ..arguments import (
    Options,
    PlanSpecs,
    columns_of_values,
    constants,
    options_of,
    plan_specs_of,
    scale_log2,
    score_specs_of,
    sign,
    softcap_arguments,
    strides_of,
    tile_lists,
)
from .combine_splits import combine_end, combine_step
from .score_mods import apply_row_score_mods, load_slope
from .tile import (
    LN_2,
    add_product,
    begin_step,
    clamped_kv_len,
    head_base,
    kv_steps,
    load_tile,
    product,
    query_pairs,
    softmax_step,
    split_range,
    store_tile,
    tile_start,
    with_sign,
    with_sink,
)

# most queries per head; they lie in one tile row
MAX_QUERIES = 64
# fewest keys per query
KEYS_PER_QUERY = 16
# programs per SM; 87 % of the bandwidth of a copy (H200), 2 to 12 give 80 to 88 %, see TUNING.md
PROGRAMS_PER_SM = 3
# bounds the work of combining the splits of a row
MAX_SPLITS = 256


def config(
    n_rows: int, dim: int, element_size: int, *, shared_memory: int, major: int = 0, modifies_scores: bool = False
) -> Config:
    """Launch configuration for n_rows queries that share their keys; dim is the larger padded head dimension.

    Its block_q counts the queries of all heads of a program. Chosen for bytes in flight, see TUNING.md. Timed on an
    H200 only; elsewhere the configurations avoid spills.
    """
    small = shared_memory < 160 * 1024
    block_q = max(16, min(128, triton.next_power_of_2(n_rows)))
    is_narrow = block_q <= 32
    if element_size == 4:
        warps = 4 if block_q == 16 and dim <= 128 else 8
        return Config(min(block_q, 32), 32, warps, 1 if dim > 128 and small else 2)
    if dim > 128:
        return Config(block_q, 32, 4, 2 if small else 3) if is_narrow else Config(64, 32 if small else 64, 8, 2)
    if block_q == 128:
        return Config(128, 64, 8, 2 if small else 3)
    if block_q == 64 and dim > 64 and modifies_scores and major == 8:
        return Config(64, 64, 8, 2 if small else 3)
    return Config(block_q, 64, 4, 4 if dim <= 64 else 2 if small else 3)


def is_suitable(q_shape: tuple[int, ...], kv_len: int, dropout_p: float) -> bool:
    """Whether a call is small enough in queries and large enough in keys for split-KV; not with dropout."""
    return dropout_p == 0 and q_shape[2] <= MAX_QUERIES and kv_len >= KEYS_PER_QUERY * q_shape[2]


def num_splits(n_tiles: int, n_programs: int, n_sms: int) -> int:
    """Splits per tile row.

    n_tiles     of an average row, an upper bound on its splits
    n_programs  without splitting
    """
    return max(1, min(PROGRAMS_PER_SM * n_sms // n_programs, n_tiles, MAX_SPLITS))


# fmt: off
@triton.jit
def load_packed_queries(
    q_ptr, stride_q, i_batch, i_head, i_block, q_len, PACKED: tl.constexpr, C: tl.constexpr
):
    """(o_row, o_q, b_q): rows of a block are queries of PACKED heads from i_head on, head after head.

    o_row  [BLOCK_Q], rows; those from PACKED * q_len on are padding, computed and not stored
    o_q    [BLOCK_Q], their queries
    b_q    [BLOCK_Q, DIM]
    """
    o_row = i_block * C.BLOCK_Q + tl.arange(0, C.BLOCK_Q)
    o_q = o_row % q_len
    o_dim = tl.arange(0, C.DIM)
    p_q = head_base(q_ptr, stride_q, i_batch, i_head + o_row // q_len) + o_q.to(tl.int64) * stride_q[2]
    m_q = (o_row < PACKED * q_len)[:, None] & (o_dim < C.HEAD_DIM)[None, :]
    return o_row, o_q, tl.load(p_q[:, None] + o_dim[None, :], mask=m_q, other=0.0)


@triton.jit
def store_rows(
    out_ptr, lse_ptr, row, first, n_rows, b_out, b_max, b_sum,
    IS_SPLIT: tl.constexpr, V_DIM: tl.constexpr, ROWS: tl.constexpr, DIM_V: tl.constexpr,
):
    """Stores the results of a program, for those of its n_rows rows from `first` on; `row` counts all rows before."""
    o_row = first + tl.arange(0, ROWS)
    m_row = o_row < n_rows
    if IS_SPLIT:
        # max and sum instead of out and lse: rounded less often
        tl.store(lse_ptr + 2 * (row + o_row), b_max, mask=m_row)
        tl.store(lse_ptr + 2 * (row + o_row) + 1, b_sum, mask=m_row)
    else:
        m_empty = b_sum == 0.0
        b_sum = tl.where(m_empty, 1.0, b_sum)
        b_out = b_out * (1.0 / b_sum)[:, None]
        b_lse = tl.where(m_empty, float("-inf"), (b_max + tl.math.log2(b_sum)) * LN_2)
        tl.store(lse_ptr + row + o_row, b_lse, mask=m_row)
    store_tile(out_ptr + row * V_DIM, V_DIM, first, n_rows, b_out, V_DIM, ROWS, DIM_V)


@triton.jit(do_not_specialize=["n_heads", "n_rows", "n_blocks", "n_splits", "q_len", "kv_len"])
def split_kv_kernel(
    # inputs; sinks_ptr only with a single split
    q_ptr, k_ptr, v_ptr, records_ptr, indices_ptr, ids_ptr, words_ptr, kv_lengths_ptr,
    sinks_ptr, slopes_ptr, tables_ptr, pair_bias_ptr,
    # outputs, contiguous: out and lse, or with IS_SPLIT (n_splits, n_rows, V_DIM) and max and sum (n_splits, n_rows, 2)
    out_ptr, lse_ptr,
    # arguments.Strides
    strides,
    # sizes: n_rows = batch * heads * q_len; n_blocks programs share the PACKED * q_len rows of a split
    n_heads, n_rows, n_blocks, n_splits, q_len, kv_len, scale_log2, cap,
    # compile time: PACKED query heads share their keys; IS_SPLIT: n_splits > 1; C: arguments.Constants
    PACKED: tl.constexpr, IS_SPLIT: tl.constexpr, MAX_Q: tl.constexpr, C: tl.constexpr,
):
    DIM: tl.constexpr = C.DIM
    DIM_V: tl.constexpr = C.DIM_V
    BLOCK_Q: tl.constexpr = C.BLOCK_Q
    BLOCK_KV: tl.constexpr = C.BLOCK_KV
    PRECISION: tl.constexpr = C.PRECISION
    HAS_LAYOUT: tl.constexpr = records_ptr is not None
    LIMITED: tl.constexpr = kv_lengths_ptr is not None
    STEPS: tl.constexpr = C.TILE // BLOCK_KV
    # consecutive programs are blocks of one split, so that they share keys in L2
    i_block = tl.program_id(0) % n_blocks
    i_split = tl.program_id(0) // n_blocks % n_splits
    batch_head = tl.program_id(0) // n_blocks // n_splits * PACKED
    i_batch = batch_head // n_heads
    i_head = batch_head % n_heads
    limit = clamped_kv_len(kv_lengths_ptr, i_batch, kv_len)

    o_row, o_q, b_q = load_packed_queries(q_ptr, strides.q, i_batch, i_head, i_block, q_len, PACKED, C)
    b_out = tl.zeros([BLOCK_Q, DIM_V], tl.float32)
    b_lost = tl.zeros([BLOCK_Q, DIM_V], tl.float32)
    # finite, since -inf - (-inf) = nan, and below every score
    b_max = tl.full([BLOCK_Q], -3.0e38, tl.float32)
    b_sum = tl.zeros([BLOCK_Q], tl.float32)
    # clamped for padding rows
    o_head = tl.minimum(o_row // q_len, PACKED - 1)
    if sinks_ptr is not None:
        b_max, b_sum = with_sink(b_max, b_sum, sinks_ptr, i_head + o_head)
    factor = 1.0 if C.MODIFIES_SCORES else scale_log2
    b_slopes = None
    o_line = None
    o_pair = None
    if slopes_ptr is not None:
        b_slopes = load_slope(slopes_ptr + i_head, o_head)
    if tables_ptr is not None:
        o_line = o_head.to(tl.int64) * strides.tables[1] + o_q // C.CELL_Q * (C.TILE // C.CELL_KV)
    if pair_bias_ptr is not None:
        o_pair = o_head.to(tl.int64) * strides.pair_head + o_q.to(tl.int64) * strides.pair_q

    p_record = head_base(records_ptr, strides.records, i_batch, i_head) if HAS_LAYOUT else None
    first, end, n_full = kv_steps(
        indices_ptr, p_record, 0, q_len, kv_len, limit, C.CAUSAL, MAX_Q, BLOCK_KV, C.TILE
    )
    first, end = split_range(first, end, i_split, n_splits)
    kv_next = tile_start(indices_ptr, first, BLOCK_KV, C.TILE) if HAS_LAYOUT else first * BLOCK_KV
    for i_step in tl.range(first, end):
        kv_start, is_partial, kv_next = begin_step(indices_ptr, kv_next, i_step, i_step >= n_full, BLOCK_KV, C.TILE)
        # [BLOCK_KV, DIM]
        b_k = load_tile(
            k_ptr, strides.k, i_batch, i_head // C.GROUP, kv_start, limit, C.HEAD_DIM, BLOCK_KV, DIM,
            TMA=False, LIMITED=LIMITED,
        )
        # [BLOCK_Q, BLOCK_KV]
        b_scores = with_sign(product(b_q, tl.trans(b_k), PRECISION), C.SIGN)
        if C.MODIFIES_SCORES:
            b_scores = apply_row_score_mods(
                b_scores, scale_log2, cap, b_slopes, o_q, tables_ptr, pair_bias_ptr, strides, i_batch, i_head, o_line,
                o_pair, i_step // STEPS, kv_start, q_len, kv_len, C.CELL_Q, C.CELL_KV, BLOCK_Q, BLOCK_KV,
            )
        if is_partial:
            o_kv = kv_start + tl.arange(0, BLOCK_KV)
            if HAS_LAYOUT:
                i_bitmask = tl.load(ids_ptr + i_step // STEPS)
                m_pairs = query_pairs(words_ptr, i_bitmask, o_q, kv_start % C.TILE, BLOCK_Q, BLOCK_KV, C.TILE)
            elif C.CAUSAL:
                m_pairs = (o_kv < limit)[None, :] & (o_kv[None, :] <= o_q[:, None] + (kv_len - q_len))
            else:
                m_pairs = (o_kv < limit)[None, :]
            b_scores = tl.where(m_pairs, b_scores, float("-inf"))
        if LIMITED and HAS_LAYOUT:
            m_kv = kv_start + tl.arange(0, BLOCK_KV) < limit
            b_scores = tl.where(m_kv[None, :], b_scores, float("-inf"))
        b_p, b_max, b_sum, b_out, b_lost = softmax_step(b_scores, factor, b_max, b_sum, b_out, b_lost)
        # [BLOCK_KV, DIM_V]
        b_v = load_tile(
            v_ptr, strides.v, i_batch, i_head // C.GROUP, kv_start, limit, C.V_DIM, BLOCK_KV, DIM_V,
            TMA=False, LIMITED=LIMITED,
        )
        b_out, b_lost = add_product(b_p.to(b_v.dtype), b_v, b_out, b_lost, PRECISION)

    # heads of a program are neighbors, hence its rows too
    row = i_split.to(tl.int64) * n_rows + batch_head.to(tl.int64) * q_len
    store_rows(
        out_ptr, lse_ptr, row, i_block * BLOCK_Q, PACKED * q_len, b_out, b_max, b_sum, IS_SPLIT, C.V_DIM, BLOCK_Q, DIM_V
    )


@triton.jit
def combine_row(
    splits_ptr, max_sum_ptr, sinks_ptr, out_ptr, lse_ptr, i_row, i_head, first_row, n_rows, n_splits,
    V_DIM: tl.constexpr, DIM_V: tl.constexpr, SPLITS: tl.constexpr,
):
    """Combines the splits of a row of a head, in order, and stores it as row i_row.

    They are rows first_row, first_row + n_rows, ... of splits (rows, V_DIM), and of max and sum (rows, 2).
    """
    o_dim = tl.arange(0, DIM_V)
    b_out = tl.zeros([DIM_V], tl.float32)
    b_max = tl.full([1], -3.0e38, tl.float32)
    b_sum = tl.zeros([1], tl.float32)
    if sinks_ptr is not None:
        b_max, b_sum = with_sink(b_max, b_sum, sinks_ptr, i_head)
    for first in tl.range(0, n_splits, SPLITS):
        o_split = first + tl.arange(0, SPLITS)
        m_split = o_split < n_splits
        o_split_row = o_split.to(tl.int64) * n_rows + first_row
        b_split_max = tl.load(max_sum_ptr + 2 * o_split_row, mask=m_split, other=-3.0e38)
        b_split_sum = tl.load(max_sum_ptr + 2 * o_split_row + 1, mask=m_split, other=0.0)
        # [SPLITS, DIM_V]
        p_split = splits_ptr + o_split_row[:, None] * V_DIM + o_dim[None, :]
        b_split = tl.load(p_split, mask=m_split[:, None] & (o_dim < V_DIM)[None, :], other=0.0)
        b_out, b_max, b_sum = combine_step(b_out, b_max, b_sum, b_split_max, b_split_sum, b_split)
    b_out, b_lse = combine_end(b_out, b_max, b_sum)
    tl.store(out_ptr + i_row * V_DIM + o_dim, b_out.to(out_ptr.dtype.element_ty), mask=o_dim < V_DIM)
    tl.store(lse_ptr + i_row + tl.arange(0, 1), b_lse)


@triton.jit(do_not_specialize=["n_heads", "n_rows", "n_splits", "q_len"])
def combine_kernel(
    # inputs, contiguous: (n_splits, n_rows, V_DIM), and max and sum (n_splits, n_rows, 2)
    splits_ptr, max_sum_ptr, sinks_ptr,
    # outputs, contiguous
    out_ptr, lse_ptr,
    # sizes
    n_heads, n_rows, n_splits, q_len,
    # compile time
    V_DIM: tl.constexpr, DIM_V: tl.constexpr, SPLITS: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    i_head = i_row // q_len % n_heads
    combine_row(
        splits_ptr, max_sum_ptr, sinks_ptr, out_ptr, lse_ptr, i_row, i_head, i_row, n_rows, n_splits,
        V_DIM, DIM_V, SPLITS,
    )
# fmt: on


class Division(NamedTuple):
    """How a call is divided among programs: n_programs for each of n_splits.

    config    launch configuration; dim_v: columns of the values that a program computes
    packed    query heads of a program
    n_blocks  programs of such heads, for their queries
    """

    config: Config
    dim_v: int
    packed: int
    n_blocks: int
    n_programs: int
    n_splits: int


def division_of(
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    element_size: int,
    record_shape: tuple[int, ...] | None,
    n_listed: int,
    options: Options,
    n_sms: int,
) -> Division:
    """The division of calls with these shapes of q and v.

    record_shape, n_listed  of the plan's tile rows and of their list of tiles; None and 0 without a layout
    """
    (batch, heads, q_len, head_dim), (_, kv_heads, kv_len, v_dim) = shapes
    is_shared = record_shape is None or record_shape[1] == 1
    packed = heads // kv_heads if is_shared else 1
    fixed = constants(head_dim, v_dim, heads // kv_heads, False, options)
    dim_v = columns_of_values(fixed.DIM, fixed.DIM_V, element_size, options.major)
    chosen = config(
        packed * q_len,
        max(fixed.DIM, dim_v),
        element_size,
        shared_memory=options.shared_memory,
        major=options.major,
        modifies_scores=options.modifies_scores,
    )
    n_blocks = -(-packed * q_len // chosen.block_q)
    n_programs = batch * heads // packed * n_blocks
    n_tiles = n_listed // (record_shape[0] * record_shape[1]) if record_shape else -(-kv_len // options.tile)
    # at least 128 keys per split, and two tiles with 128 rows, to repay writing and reading 4 bytes per value
    n_worth = n_tiles // max(TILE // options.tile, chosen.block_q // 64)
    return Division(chosen, dim_v, packed, n_blocks, n_programs, num_splits(n_worth, n_programs, n_sms))


class SplitKVLaunches(NamedTuple):
    """The launches of a call; combine is None with a single split."""

    split: Launch
    combine: Launch | None
    n_splits: int


@functools.lru_cache(maxsize=1024)
def split_kv_launches(specs: TensorSpecs, lists: PlanSpecs, n_listed: int, options: Options) -> SplitKVLaunches:
    """Prepares the launches of calls with these specs and options.

    n_listed  length of the plan's list of tiles
    """
    q, _, v = specs.tensors
    (batch, heads, q_len, head_dim), (_, kv_heads, kv_len, v_dim) = q.shape, v.shape
    record_shape, _ = lists
    assert record_shape is None or record_shape[2] == 1, record_shape
    chosen, dim_v, packed, n_blocks, n_programs, n_splits = division_of(
        (q.shape, v.shape), q.dtype.itemsize, record_shape, n_listed, options, num_sms(options.device)
    )
    fixed = constants(head_dim, v_dim, heads // kv_heads, False, options)
    n_rows = batch * heads * q_len
    rest = {
        "strides": strides_of(specs, options, record_shape),
        "n_heads": heads,
        "n_rows": n_rows,
        "n_blocks": n_blocks,
        "n_splits": n_splits,
        "q_len": q_len,
        "kv_len": kv_len,
        "scale_log2": scale_log2(options.scale),
        **softcap_arguments(options, abs(options.scale)),
        "PACKED": packed,
        "IS_SPLIT": n_splits > 1,
        "MAX_Q": MAX_QUERIES,
        "C": fixed._replace(DIM_V=dim_v, SIGN=sign(options.scale)).with_blocks(chosen),
        **chosen.launch_options,
    }
    split = Launch(split_kv_kernel, (n_programs * n_splits,), rest)
    combine = None
    if n_splits > 1:
        at_once = max(2, min(triton.next_power_of_2(n_splits), 4096 // dim_v))
        sizes = {name: rest[name] for name in ("n_heads", "n_rows", "n_splits", "q_len")}
        widths = {"V_DIM": v_dim, "DIM_V": dim_v, "SPLITS": at_once}
        combine = Launch(combine_kernel, (n_rows,), {**sizes, **widths, "num_warps": 4})
    return SplitKVLaunches(split, combine, n_splits)


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: list[torch.Tensor],
    kv_lengths: torch.Tensor | None,
    scale: float,
    causal: bool,
    scores: Scores | None = None,
    specs: TensorSpecs | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out (batch, heads, q_len, v_head_dim) in q's dtype and memory order, and lse (batch, heads, q_len) float32.

    specs  of q, k and v, if known
    """
    batch, heads, q_len, _ = q.shape
    out = q.new_empty(batch, heads, q_len, v.shape[3])
    lse = q.new_empty(batch, heads, q_len, dtype=torch.float32)
    options = options_of(q, plan, scale, causal, 0.0, kv_lengths)
    sinks = slopes = tables = pair_bias = None
    if scores is not None:
        sinks, slopes, pair_bias = scores.sinks, scores.alibi_slopes, scores.pair_bias
        tables = scores.tables(0, base_2=True)
        options = options._replace(scores=score_specs_of(scores, tables))
    n_listed = plan[ROW_LISTS + 1].shape[0] if plan else 0
    lists = tile_lists(plan, ROW_LISTS)
    launches = split_kv_launches(specs or specs_of(q, k, v), plan_specs_of(lists), n_listed, options)
    inputs = (q, k, v, *lists, kv_lengths)
    if launches.combine is None:
        launches.split(*inputs, sinks, slopes, tables, pair_bias, out, lse)
        return in_order_of(q, out), lse
    splits = out.new_empty(launches.n_splits, *out.shape, dtype=torch.float32)
    max_sum = lse.new_empty(launches.n_splits, *lse.shape, 2)
    # a sink counts once per row, not once per split
    launches.split(*inputs, None, slopes, tables, pair_bias, splits, max_sum)
    launches.combine(splits, max_sum, sinks, out, lse)
    # a copy for several queries at most, which are few
    return in_order_of(q, out), lse
