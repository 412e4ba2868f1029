"""Score mods on a tile of scores, between product and mask: softcap, ALiBi slopes, block bias, pair bias; in
base 2.
"""

import triton
import triton.language as tl

from .tile import INTERPRETED, LOG2_E, TILE


@triton.jit
def tanh(b_x):
    """tanh to a few float32 ulp: 1 - 2 / (e^2|x| + 1), or x + x^3 p(x^2) for |x| < 0.6, where that would cancel.

    p is fitted to (tanh x - x) / x^3 with an error of 1/20 ulp.
    """
    b_square = b_x * b_x
    b_p = -5.89516e-3 * b_square + 2.079597e-2
    b_p = b_p * b_square - 5.378383e-2
    b_p = b_p * b_square + 1.3331924e-1
    b_p = b_p * b_square - 3.3333298e-1
    b_small = b_x + b_x * b_square * b_p
    b_far = tl.abs(b_x)
    # from |x| = 44 on exp2 is inf and the quotient 0
    b_large = 1.0 - 2.0 / (tl.math.exp2(b_far * (2.0 * LOG2_E)) + 1.0)
    b_large = tl.where(b_x < 0.0, -b_large, b_large)
    return tl.where(b_far < 0.6, b_small, b_large)


@triton.jit
def load_slope(slopes_ptr, o_head):
    """The slopes of heads in base 2; 0 without slopes."""
    if slopes_ptr is None:
        return 0.0
    else:
        return tl.load(slopes_ptr + o_head) * LOG2_E


@triton.jit
def query_distances(o_q, near, BLOCK_KV: tl.constexpr, TRANSPOSED: tl.constexpr):
    """|o_q + near - o_kv| for keys 0 .. BLOCK_KV - 1: float32 [queries, BLOCK_KV], or TRANSPOSED."""
    # subtracting the starts first keeps small distances exact at any position
    o_q = o_q.to(tl.float32) + near.to(tl.float32)
    o_kv = tl.arange(0, BLOCK_KV).to(tl.float32)
    if TRANSPOSED:
        return tl.abs(o_q[None, :] - o_kv[:, None])
    else:
        return tl.abs(o_q[:, None] - o_kv[None, :])


@triton.jit
def distances(q_start, kv_start, ahead, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, TRANSPOSED: tl.constexpr):
    """|q_pos + ahead - kv_pos|: float32 [BLOCK_Q, BLOCK_KV], or TRANSPOSED; ahead = kv_len - q_len."""
    return query_distances(tl.arange(0, BLOCK_Q), q_start + ahead - kv_start, BLOCK_KV, TRANSPOSED)


@triton.jit
def load_floats(ptr, o_value):
    """The values at each offset as float32, loaded in the layout of their use: see tile.load_words."""
    p_values = ptr + o_value
    DTYPE: tl.constexpr = ptr.dtype.element_ty
    if INTERPRETED:
        return tl.load(p_values).to(tl.float32)
    elif DTYPE.primitive_bitwidth == 16:
        b_bits = tl.inline_asm_elementwise(
            "ld.global.nc.b16 $0, [$1];", "=h,l", [p_values.to(tl.int64)], dtype=tl.int16, is_pure=True, pack=1
        )
        return b_bits.to(DTYPE, bitcast=True).to(tl.float32)
    else:
        return tl.inline_asm_elementwise(
            "ld.global.nc.f32 $0, [$1];", "=f,l", [p_values.to(tl.int64)], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def find_table(
    tables_ptr, tables_strides, i_batch, i_head, i_tile, CELL_Q: tl.constexpr, CELL_KV: tl.constexpr
):  # fmt: skip
    """Pointer to the bias table of a listed tile: (128 / CELL_Q, 128 / CELL_KV) values."""
    p_table = tables_ptr + i_batch.to(tl.int64) * tables_strides[0] + i_head.to(tl.int64) * tables_strides[1]
    # 64-bit offsets; in the interpreter a step is a Python int
    return p_table + (tl.zeros([], tl.int64) + i_tile) * ((TILE // CELL_Q) * (TILE // CELL_KV))


@triton.jit
def line_values(p_table, o_line, STEP: tl.constexpr, LINES: tl.constexpr, COLS: tl.constexpr, CELL: tl.constexpr):
    """[LINES, COLS]: values of a table from o_line on, STEP apart, each repeated for CELL columns."""
    b_values = tl.zeros([LINES, COLS], tl.float32)
    if CELL >= COLS:
        b_values += load_floats(p_table, o_line)[:, None]
    else:
        o_col = tl.arange(0, COLS)
        for i_cell in tl.static_range(COLS // CELL):
            b_line = load_floats(p_table, o_line + i_cell * STEP)
            b_values = tl.where((o_col // CELL == i_cell)[None, :], b_line[:, None], b_values)
    return b_values


@triton.jit
def cell_values(
    p_table, start, along, STEP: tl.constexpr, STEP_ALONG: tl.constexpr,
    LINES: tl.constexpr, CELL: tl.constexpr, COLS: tl.constexpr, CELL_ALONG: tl.constexpr,
):  # fmt: skip
    """[LINES, COLS]: the table value of each pair. `start` and `along` are tokens within the tile."""
    b_values = tl.zeros([LINES, COLS], tl.float32)
    first = along // CELL_ALONG * STEP_ALONG
    if CELL >= LINES:
        o_col = tl.arange(0, COLS)
        p_first = p_table + start // CELL * STEP + first
        if CELL_ALONG >= COLS:
            b_values += tl.load(p_first)
        else:
            for i_cell in tl.static_range(COLS // CELL_ALONG):
                is_here = o_col // CELL_ALONG == i_cell
                b_values = tl.where(is_here[None, :], tl.load(p_first + i_cell * STEP_ALONG), b_values)
    else:
        o_line = (start + tl.arange(0, LINES)) // CELL * STEP + first
        b_values = line_values(p_table, o_line, STEP_ALONG, LINES, COLS, CELL_ALONG)
    return b_values


@triton.jit
def load_pair_bias(
    pair_bias_ptr, strides, i_batch, i_head, o_row, kv_start, kv_len, BLOCK_KV: tl.constexpr, TRANSPOSED: tl.constexpr
):  # fmt: skip
    """pair_bias in base 2: float32 [rows, BLOCK_KV], or [BLOCK_KV, rows] if TRANSPOSED.

    o_row  64-bit offset of each row, an existing query of the head. Past kv_len the last key is read, whose values the
           mask drops
    """
    p_head = pair_bias_ptr + i_batch.to(tl.int64) * strides.pair_batch + i_head.to(tl.int64) * strides.pair_head
    o_kv = tl.minimum(kv_start + tl.arange(0, BLOCK_KV), kv_len - 1).to(tl.int64) * strides.pair_kv
    if TRANSPOSED:
        return load_floats(p_head, o_kv[:, None] + o_row[None, :]) * LOG2_E
    else:
        return load_floats(p_head, o_row[:, None] + o_kv[None, :]) * LOG2_E


@triton.jit
def load_pair_bias_tile(
    pair_bias_ptr, strides, i_batch, i_head, q_start, kv_start, q_len, kv_len,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """`load_pair_bias` of queries q_start .. q_start + BLOCK_Q - 1; past q_len of the last one."""
    o_q = tl.minimum(q_start + tl.arange(0, BLOCK_Q), q_len - 1).to(tl.int64) * strides.pair_q
    return load_pair_bias(pair_bias_ptr, strides, i_batch, i_head, o_q, kv_start, kv_len, BLOCK_KV, TRANSPOSED)


@triton.jit
def capped_scores(b_scores, factor, cap):
    """(scores in base 2, tanh of the softcap), see apply_score_mods."""
    b_tanh = b_scores * factor
    if cap is not None:
        b_tanh = tanh(b_tanh)
        b_scores = b_tanh * cap
    else:
        b_scores = b_tanh
    return b_scores, b_tanh


# fmt: off
@triton.jit
def apply_score_mods(
    b_scores, factor, cap, slopes_ptr, slope, tables_ptr, pair_bias_ptr, strides, i_batch, i_head, i_tile,
    q_start, kv_start, q_len, kv_len,
    CELL_Q: tl.constexpr, CELL_KV: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """(scores in base 2, tanh of the softcap): [BLOCK_Q, BLOCK_KV], or [BLOCK_KV, BLOCK_Q] if TRANSPOSED.

    factor   multiplies raw scores: converts to base 2, or with a softcap to multiples of it
    cap      softcap in base 2, or None for neither cap nor tanh
    slope    in base 2, used if slopes_ptr is given
    i_tile   list entry of the tile, used if tables_ptr (in base 2) is given
    strides  arguments.Strides
    """
    b_scores, b_tanh = capped_scores(b_scores, factor, cap)
    if slopes_ptr is not None:
        b_scores -= slope * distances(q_start, kv_start, kv_len - q_len, BLOCK_Q, BLOCK_KV, TRANSPOSED)
    if tables_ptr is not None:
        p_table = find_table(tables_ptr, strides.tables, i_batch, i_head, i_tile, CELL_Q, CELL_KV)
        if TRANSPOSED:
            b_scores += cell_values(
                p_table, kv_start % TILE, q_start % TILE, 1, TILE // CELL_KV, BLOCK_KV, CELL_KV, BLOCK_Q, CELL_Q
            )
        else:
            b_scores += cell_values(
                p_table, q_start % TILE, kv_start % TILE, TILE // CELL_KV, 1, BLOCK_Q, CELL_Q, BLOCK_KV, CELL_KV
            )
    if pair_bias_ptr is not None:
        b_scores += load_pair_bias_tile(
            pair_bias_ptr, strides, i_batch, i_head, q_start, kv_start, q_len, kv_len, BLOCK_Q, BLOCK_KV, TRANSPOSED
        )
    return b_scores, b_tanh


@triton.jit
def apply_row_score_mods(
    b_scores, factor, cap, b_slopes, o_q, tables_ptr, pair_bias_ptr, strides, i_batch, i_head, o_line, o_pair, i_tile,
    kv_start, q_len, kv_len,
    CELL_Q: tl.constexpr, CELL_KV: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
):
    """Scores in base 2, [BLOCK_Q, BLOCK_KV], where rows are queries o_q of several heads from i_head on, in one tile.

    b_slopes  slope of each row in base 2, or None
    o_line    offset of each row in the table of i_head
    o_pair    64-bit offset of each row in the pair_bias of i_head
    other arguments as in apply_score_mods
    """
    b_scores, _ = capped_scores(b_scores, factor, cap)
    if b_slopes is not None:
        b_scores -= b_slopes[:, None] * query_distances(o_q, kv_len - q_len - kv_start, BLOCK_KV, False)
    if tables_ptr is not None:
        p_table = find_table(tables_ptr, strides.tables, i_batch, i_head, i_tile, CELL_Q, CELL_KV)
        b_scores += line_values(p_table + kv_start % TILE // CELL_KV, o_line, 1, BLOCK_Q, BLOCK_KV, CELL_KV)
    if pair_bias_ptr is not None:
        b_scores += load_pair_bias(
            pair_bias_ptr, strides, i_batch, i_head, o_pair, kv_start, kv_len, BLOCK_KV, False
        )
    return b_scores


@triton.jit
def store_sums(
    sums_ptr, sums_strides, i_batch, i_head, i_tile, q_start, kv_start, b_values,
    CELL_Q: tl.constexpr, CELL_KV: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
):
    """Stores the sum over each bias cell of a step (or the step, if smaller) to its own place, without atomics."""
    GRAIN_Q: tl.constexpr = min(CELL_Q, BLOCK_Q)
    GRAIN_KV: tl.constexpr = min(CELL_KV, BLOCK_KV)
    p_sums = find_table(sums_ptr, sums_strides, i_batch, i_head, i_tile, GRAIN_Q, GRAIN_KV)
    p_sums += q_start % TILE // GRAIN_Q * (TILE // GRAIN_KV) + kv_start % TILE // GRAIN_KV
    b_grains = tl.reshape(b_values, [BLOCK_Q // GRAIN_Q, GRAIN_Q, BLOCK_KV // GRAIN_KV, GRAIN_KV])
    b_sums = tl.sum(tl.sum(b_grains, 3), 1)
    o_q = tl.arange(0, BLOCK_Q // GRAIN_Q) * (TILE // GRAIN_KV)
    o_kv = tl.arange(0, BLOCK_KV // GRAIN_KV)
    tl.store(p_sums + o_q[:, None] + o_kv[None, :], b_sums)
# fmt: on
