"""The gradient of a pair bias.

Each program computes one block of it: the sum of ds over the batches and heads that share the block, in a fixed order,
without atomics. Blocks without a tile get 0, so the output is not zeroed before.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...runtime.launch import Config, Launch, Memory, contiguous
from ...runtime.tensor_spec import TensorSpecs
from ...score_mods import LOG2_E
from ..arguments import Constants, Options, Shape, dropout_arguments, softcap_arguments, strides_of
from .backward_preprocess import PADDED_TO, load_lse_delta
from .score_mods import apply_score_mods, load_pair_bias_tile, load_slope
from .tile import (
    BEGIN,
    N_TILES,
    PARTIAL,
    attending_pairs,
    clamped_kv_len,
    find_line_record,
    kept_pairs,
    load_seed,
    load_tile,
    product,
)

# list entries that a program compares in a step
ENTRIES = tl.constexpr(128)


def config(dim: int, element_size: int, *, major: int) -> Config:
    """Launch configuration; dim is the larger padded head dimension. Not tuned: large blocks that do not spill.

    32 queries beyond head_dim 128: with 64, Triton uses wgmma, in which ptxas reads unwritten registers
    (tests/kernels/test_compile.py).
    """
    if element_size == 4:
        return Config(32, 32, 8, 1)
    if dim > 128:
        return Config(32, 64, 8, 1)
    return Config(64, 64 if dim <= 64 and major == 9 else 32, 8, 1)


# fmt: off
@triton.jit
def find_tile(indices_ptr, p_record, i_col):
    """List entry of the tile in column i_col of a tile row; -1 if the row has none."""
    first = tl.load(p_record + BEGIN)
    n_tiles = tl.load(p_record + N_TILES)
    found = tl.full([ENTRIES], -1, tl.int32)
    for start in tl.range(0, n_tiles, ENTRIES):
        o_tile = start + tl.arange(0, ENTRIES)
        b_col = tl.load(indices_ptr + first + o_tile, mask=o_tile < n_tiles, other=0) & (PARTIAL - 1)
        found = tl.where((b_col == i_col) & (o_tile < n_tiles), first + o_tile, found)
    return tl.max(found, 0)


@triton.jit(do_not_specialize=["seed", "n_batch", "n_heads", "q_len", "kv_len", "n_padded", "threshold"])
def pair_bias_kernel(
    # inputs
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_delta_ptr,
    records_ptr, indices_ptr, ids_ptr, words_ptr, kv_lengths_ptr, seed_ptr, seed: tl.int64,
    slopes_ptr, tables_ptr, pair_bias_ptr,
    # output, contiguous
    dpair_bias_ptr,
    # arguments.Strides
    strides,
    n_batch, n_heads, q_len, kv_len, n_padded, scale_log2, threshold, keep_scale, cap,
    # compile time: whether batches, and heads, share the bias; and all of them the plan; C: arguments.Constants
    ONE_BATCH: tl.constexpr, ONE_HEAD: tl.constexpr, ONE_PLAN: tl.constexpr, C: tl.constexpr,
):
    DIM: tl.constexpr = C.DIM
    DIM_V: tl.constexpr = C.DIM_V
    BLOCK_Q: tl.constexpr = C.BLOCK_Q
    BLOCK_KV: tl.constexpr = C.BLOCK_KV
    PRECISION: tl.constexpr = C.PRECISION
    HAS_LAYOUT: tl.constexpr = records_ptr is not None
    LIMITED: tl.constexpr = kv_lengths_ptr is not None
    # the heads of the bias are the slowest, so that consecutive programs share queries in L2
    n_cols = tl.cdiv(kv_len, BLOCK_KV)
    n_rows = tl.cdiv(q_len, BLOCK_Q)
    kv_start = tl.program_id(0) % n_cols * BLOCK_KV
    q_start = tl.program_id(0) // n_cols % n_rows * BLOCK_Q
    i_bias = tl.program_id(0) // n_cols // n_rows
    # batches and heads that share the block
    batches = n_batch if ONE_BATCH else 1
    heads = n_heads if ONE_HEAD else 1
    first_batch = i_bias // (n_heads // heads)
    first_head = i_bias % (n_heads // heads)

    i_tile = 0
    if HAS_LAYOUT and ONE_PLAN:
        i_tile = find_tile(indices_ptr, find_line_record(
            records_ptr, strides.records, first_batch, first_head, q_start // C.TILE
        ), kv_start // C.TILE)
    # [BLOCK_Q, BLOCK_KV]
    b_bias = load_pair_bias_tile(
        pair_bias_ptr, strides, first_batch, first_head, q_start, kv_start, q_len, kv_len, BLOCK_Q, BLOCK_KV, False
    )
    b_sum = tl.zeros([BLOCK_Q, BLOCK_KV], tl.float32)
    if C.DROPOUT:
        b_seed = load_seed(seed_ptr, seed)
    for i_member in tl.range(0, batches * heads):
        i_batch = first_batch + i_member // heads
        i_head = first_head + i_member % heads
        limit = clamped_kv_len(kv_lengths_ptr, i_batch, kv_len)
        if HAS_LAYOUT and not ONE_PLAN:
            i_tile = find_tile(indices_ptr, find_line_record(
                records_ptr, strides.records, i_batch, i_head, q_start // C.TILE
            ), kv_start // C.TILE)
        has_pairs = (i_tile >= 0) & (kv_start < limit)
        if C.CAUSAL:
            has_pairs = has_pairs & (kv_start < q_start + BLOCK_Q + (kv_len - q_len))
        if has_pairs:
            b_q = load_tile(
                q_ptr, strides.q, i_batch, i_head, q_start, q_len, C.HEAD_DIM, BLOCK_Q, DIM, TMA=False, LIMITED=False
            )
            b_k = load_tile(
                k_ptr, strides.k, i_batch, i_head // C.GROUP, kv_start, limit, C.HEAD_DIM, BLOCK_KV, DIM,
                TMA=False, LIMITED=LIMITED,
            )
            b_scores = product(b_q, tl.trans(b_k), PRECISION)
            slope = load_slope(slopes_ptr, i_head)
            b_scores, _ = apply_score_mods(
                b_scores, scale_log2, cap, slopes_ptr, slope, tables_ptr, None, strides, i_batch, i_head,
                i_tile=i_tile, q_start=q_start, kv_start=kv_start, q_len=q_len, kv_len=kv_len,
                CELL_Q=C.CELL_Q, CELL_KV=C.CELL_KV, BLOCK_Q=BLOCK_Q, BLOCK_KV=BLOCK_KV, TRANSPOSED=False,
            )
            b_lse, b_delta = load_lse_delta(lse_delta_ptr, i_batch * n_heads + i_head, q_start, n_padded, BLOCK_Q)
            b_p = tl.math.exp2(b_scores + b_bias - b_lse[:, None])
            is_partial = True
            i_bitmask = 0
            if HAS_LAYOUT:
                is_partial = tl.load(indices_ptr + i_tile) < 0
                if is_partial:
                    i_bitmask = tl.load(ids_ptr + i_tile)
            if LIMITED and HAS_LAYOUT:
                m_kv = kv_start + tl.arange(0, BLOCK_KV) < limit
                b_p = tl.where(m_kv[None, :], b_p, 0.0)
            if is_partial:
                m_pairs = attending_pairs(
                    words_ptr, i_bitmask, q_start, kv_start, q_len, kv_len, limit,
                    C.CAUSAL, BLOCK_Q, BLOCK_KV, C.TILE, False,
                )
                b_p = tl.where(m_pairs, b_p, 0.0)
            b_dout = load_tile(
                dout_ptr, strides.dout, i_batch, i_head, q_start, q_len, C.V_DIM, BLOCK_Q, DIM_V,
                TMA=False, LIMITED=False,
            )
            b_v = load_tile(
                v_ptr, strides.v, i_batch, i_head // C.GROUP, kv_start, limit, C.V_DIM, BLOCK_KV, DIM_V,
                TMA=False, LIMITED=LIMITED,
            )
            b_dp = product(b_dout, tl.trans(b_v), PRECISION)
            if C.DROPOUT:
                m_kept = kept_pairs(b_seed, threshold, i_batch, i_head, q_start, kv_start, BLOCK_Q, BLOCK_KV, False)
                b_dp = tl.where(m_kept, b_dp, 0.0)
            b_sum += b_p * (b_dp - b_delta[:, None])

    o_q = q_start + tl.arange(0, BLOCK_Q)
    o_kv = kv_start + tl.arange(0, BLOCK_KV)
    if C.DROPOUT:
        b_sum *= keep_scale
    p_sum = dpair_bias_ptr + i_bias.to(tl.int64) * q_len * kv_len + o_q.to(tl.int64)[:, None] * kv_len + o_kv[None, :]
    m_sum = (o_q < q_len)[:, None] & (o_kv < kv_len)[None, :]
    tl.store(p_sum, b_sum.to(dpair_bias_ptr.dtype.element_ty), mask=m_sum)
# fmt: on


def pair_bias_launch(
    specs: TensorSpecs, record_shape: Shape | None, fixed: Constants, options: Options
) -> tuple[Launch, Memory]:
    """The launch that computes the gradient of pair_bias, and its memory.

    specs         of q, k, v and dout
    record_shape  of the records of tile rows; None without a layout
    """
    assert options.scores is not None and options.scores.pair_bias is not None
    q, k, _, _ = specs.tensors
    bias = options.scores.pair_bias
    (batch, heads, q_len, _), kv_len = q.shape, k.shape[2]
    chosen = config(max(fixed.DIM, fixed.DIM_V), q.dtype.itemsize, major=options.major)
    n_blocks = -(-q_len // chosen.block_q) * -(-kv_len // chosen.block_kv)
    rest = {
        "strides": strides_of(specs, options, record_shape),
        "n_batch": batch,
        "n_heads": heads,
        "q_len": q_len,
        "kv_len": kv_len,
        "n_padded": -(-q_len // PADDED_TO.value) * PADDED_TO.value,
        "scale_log2": options.scale * LOG2_E,
        **dropout_arguments(options.dropout_p),
        **softcap_arguments(options, options.scale),
        "ONE_BATCH": bias.shape[0] == 1,
        "ONE_HEAD": bias.shape[1] == 1,
        "ONE_PLAN": record_shape is None or record_shape[:2] == (1, 1),
        "C": fixed._replace(TMA=False).with_blocks(chosen),
        **chosen.launch_options,
    }
    launch = Launch(pair_bias_kernel, (n_blocks * bias.shape[0] * bias.shape[1],), rest)
    return launch, contiguous(bias.dtype, *bias.shape)
