"""How does a Triton kernel change a tile of scores between the product and the mask? Softcap, ALiBi, the bias of blocks.

Knows: tables of biases, positions. Does not know: launches, torch, what a gradient is. Scores come out in base 2.
"""

import triton
import triton.language as tl

from .tile import INTERPRETED, LOG2_E, TILE


@triton.jit
def tanh(b_x):
    """tanh to a few float32 roundings of its own size: 1 - 2 / (e^2|x| + 1), or x + x^3 p(x^2) where that would cancel.

    p is fitted to (tanh x - x) / x^3 over |x| < 0.6, to a twentieth of a rounding.
    """
    b_square = b_x * b_x
    b_p = -5.89516e-3 * b_square + 2.079597e-2
    b_p = b_p * b_square - 5.378383e-2
    b_p = b_p * b_square + 1.3331924e-1
    b_p = b_p * b_square - 3.3333298e-1
    b_small = b_x + b_x * b_square * b_p
    b_far = tl.abs(b_x)
    # past 44 the power is inf, and the quotient 0
    b_large = 1.0 - 2.0 / (tl.math.exp2(b_far * (2.0 * LOG2_E)) + 1.0)
    b_large = tl.where(b_x < 0.0, -b_large, b_large)
    return tl.where(b_far < 0.6, b_small, b_large)


@triton.jit
def query_distances(o_q, near, BLOCK_KV: tl.constexpr, T: tl.constexpr):
    """|o_q + near - o_kv| of BLOCK_KV keys from 0 on: float32 [queries, BLOCK_KV], or [BLOCK_KV, queries] if T."""
    # the difference of the starts first: near pairs are exact at any position
    o_q = o_q.to(tl.float32) + near.to(tl.float32)
    o_kv = tl.arange(0, BLOCK_KV).to(tl.float32)
    if T:
        return tl.abs(o_q[None, :] - o_kv[:, None])
    else:
        return tl.abs(o_q[:, None] - o_kv[None, :])


@triton.jit
def distances(q_start, kv_start, ahead, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, T: tl.constexpr):
    """|q_pos + ahead - kv_pos|: float32 [BLOCK_Q, BLOCK_KV], or [BLOCK_KV, BLOCK_Q] if T; ahead = kv_len - q_len."""
    return query_distances(tl.arange(0, BLOCK_Q), q_start + ahead - kv_start, BLOCK_KV, T)


@triton.jit
def load_floats(ptr, o_value):
    """float32 at each offset, loaded where it is used: see tile.load_words."""
    p_values = ptr + o_value
    if INTERPRETED:
        return tl.load(p_values)
    else:
        return tl.inline_asm_elementwise(
            "ld.global.nc.f32 $0, [$1];", "=f,l", [p_values.to(tl.int64)], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def find_table(
    tables_ptr, tables_strides, i_batch, i_head, i_tile, PIECE_Q: tl.constexpr, PIECE_KV: tl.constexpr
):  # fmt: skip
    """The table of a listed tile: (128 / PIECE_Q, 128 / PIECE_KV) numbers."""
    p_table = tables_ptr + i_batch.to(tl.int64) * tables_strides[0] + i_head.to(tl.int64) * tables_strides[1]
    # 64-bit; a step is a plain number to the interpreter
    return p_table + (tl.zeros([], tl.int64) + i_tile) * ((TILE // PIECE_Q) * (TILE // PIECE_KV))


@triton.jit
def line_values(p_table, o_line, STEP: tl.constexpr, LINES: tl.constexpr, COLS: tl.constexpr, PIECE: tl.constexpr):
    """[LINES, COLS]: of each line the numbers from o_line on in a table, STEP apart, each for PIECE columns."""
    b_values = tl.zeros([LINES, COLS], tl.float32)
    if PIECE >= COLS:
        b_values += load_floats(p_table, o_line)[:, None]
    else:
        o_col = tl.arange(0, COLS)
        for i_piece in tl.static_range(COLS // PIECE):
            b_line = load_floats(p_table, o_line + i_piece * STEP)
            b_values = tl.where((o_col // PIECE == i_piece)[None, :], b_line[:, None], b_values)
    return b_values


@triton.jit
def piece_values(
    p_table, start, along, STEP: tl.constexpr, STEP_ALONG: tl.constexpr,
    LINES: tl.constexpr, PIECE: tl.constexpr, COLS: tl.constexpr, PIECE_ALONG: tl.constexpr,
):  # fmt: skip
    """[LINES, COLS]: the number of each pair's piece. `start` and `along` are tokens within the tile, STEPs apart in a table."""
    b_values = tl.zeros([LINES, COLS], tl.float32)
    first = along // PIECE_ALONG * STEP_ALONG
    if PIECE >= LINES:
        o_col = tl.arange(0, COLS)
        p_first = p_table + start // PIECE * STEP + first
        if PIECE_ALONG >= COLS:
            b_values += tl.load(p_first)
        else:
            for i_piece in tl.static_range(COLS // PIECE_ALONG):
                is_here = o_col // PIECE_ALONG == i_piece
                b_values = tl.where(is_here[None, :], tl.load(p_first + i_piece * STEP_ALONG), b_values)
    else:
        o_line = (start + tl.arange(0, LINES)) // PIECE * STEP + first
        b_values = line_values(p_table, o_line, STEP_ALONG, LINES, COLS, PIECE_ALONG)
    return b_values


@triton.jit
def capped_scores(b_scores, factor, cap):
    """(scores in base 2, the tanh of the cap), as changed_scores has it."""
    b_tanh = b_scores * factor
    if cap is not None:
        b_tanh = tanh(b_tanh)
        b_scores = b_tanh * cap
    else:
        b_scores = b_tanh
    return b_scores, b_tanh


# fmt: off
@triton.jit
def changed_scores(
    b_scores, factor, cap, slopes_ptr, slope, tables_ptr, tables_strides, i_batch, i_head, i_tile,
    q_start, kv_start, ahead,
    PIECE_Q: tl.constexpr, PIECE_KV: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, T: tl.constexpr,
):
    """(scores in base 2, the tanh of the cap): [BLOCK_Q, BLOCK_KV], or [BLOCK_KV, BLOCK_Q] if T.

    factor   on raw scores: into base 2, or where there is a cap into its multiples
    cap      in base 2, or None: no cap, and no tanh
    slope    in base 2, read only where slopes_ptr is given
    i_tile   listed tile, read only where tables_ptr, in base 2, is given
    """
    b_scores, b_tanh = capped_scores(b_scores, factor, cap)
    if slopes_ptr is not None:
        b_scores -= slope * distances(q_start, kv_start, ahead, BLOCK_Q, BLOCK_KV, T)
    if tables_ptr is not None:
        p_table = find_table(tables_ptr, tables_strides, i_batch, i_head, i_tile, PIECE_Q, PIECE_KV)
        if T:
            b_scores += piece_values(
                p_table, kv_start % TILE, q_start % TILE, 1, TILE // PIECE_KV, BLOCK_KV, PIECE_KV, BLOCK_Q, PIECE_Q
            )
        else:
            b_scores += piece_values(
                p_table, q_start % TILE, kv_start % TILE, TILE // PIECE_KV, 1, BLOCK_Q, PIECE_Q, BLOCK_KV, PIECE_KV
            )
    return b_scores, b_tanh


@triton.jit
def changed_row_scores(
    b_scores, factor, cap, b_slopes, o_q, tables_ptr, tables_strides, i_batch, i_head, o_line, i_tile, kv_start, ahead,
    PIECE_Q: tl.constexpr, PIECE_KV: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
):
    """Scores in base 2, [BLOCK_Q, BLOCK_KV], of rows that are queries o_q of several heads from i_head on, in the first tile.

    b_slopes  of each row, in base 2, or None
    o_line    where the line of each row begins, in the table of i_head
    the rest  as changed_scores
    """
    b_scores, _ = capped_scores(b_scores, factor, cap)
    if b_slopes is not None:
        b_scores -= b_slopes[:, None] * query_distances(o_q, ahead - kv_start, BLOCK_KV, False)
    if tables_ptr is not None:
        p_table = find_table(tables_ptr, tables_strides, i_batch, i_head, i_tile, PIECE_Q, PIECE_KV)
        b_scores += line_values(p_table + kv_start % TILE // PIECE_KV, o_line, 1, BLOCK_Q, BLOCK_KV, PIECE_KV)
    return b_scores


@triton.jit
def store_sums(
    sums_ptr, sums_strides, i_batch, i_head, i_tile, q_start, kv_start, b_values,
    PIECE_Q: tl.constexpr, PIECE_KV: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
):
    """The sum of the values of each grain of a step, in its own place: no atomics. A grain is a piece, or all of the step's."""
    GRAIN_Q: tl.constexpr = min(PIECE_Q, BLOCK_Q)
    GRAIN_KV: tl.constexpr = min(PIECE_KV, BLOCK_KV)
    p_sums = find_table(sums_ptr, sums_strides, i_batch, i_head, i_tile, GRAIN_Q, GRAIN_KV)
    p_sums += q_start % TILE // GRAIN_Q * (TILE // GRAIN_KV) + kv_start % TILE // GRAIN_KV
    b_grains = tl.reshape(b_values, [BLOCK_Q // GRAIN_Q, GRAIN_Q, BLOCK_KV // GRAIN_KV, GRAIN_KV])
    b_sums = tl.sum(tl.sum(b_grains, 3), 1)
    o_q = tl.arange(0, BLOCK_Q // GRAIN_Q) * (TILE // GRAIN_KV)
    o_kv = tl.arange(0, BLOCK_KV // GRAIN_KV)
    tl.store(p_sums + o_q[:, None] + o_kv[None, :], b_sums)
# fmt: on
