"""Masking of accumulators by the bitmasks of a plan."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ... import plan_format
from ..triton.tile import TILE

# selects the tile index of a list entry, without the mark of a partial tile
INDEX_BITS = gl.constexpr(plan_format.PARTIAL - 1)
# In an accumulator, lane l has columns 8 j + 2 (l % 4) and 8 j + 2 (l % 4) + 1. mask_columns shifts each word by
# 2 (l % 4) once; the bits to test are then the same in every lane, and hence constants
COLUMN_PERIOD = gl.constexpr(8)


@gluon.jit
def load_words(p_words, WORDS: gl.constexpr):
    """WORDS (2 or 4) int32 tensors: consecutive words from each pointer, in one vector load.

    Pointers are aligned to the vector. The non-coherent load needs memory that is constant while the kernel runs.
    """
    if WORDS == 4:
        return gl.inline_asm_elementwise(
            "ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,l", [p_words],
            dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return gl.inline_asm_elementwise(
            "ld.global.nc.v2.b32 {$0, $1}, [$2];", "=r,=r,l", [p_words],
            dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
        )  # fmt: skip


@gluon.jit
def load_mask_words(words_ptr, i_bitmask, i_first, o_row, COLS: gl.constexpr, SIDE: gl.constexpr):
    """Words of rows o_row of a SIDE x SIDE bitmask that cover COLS columns, from word i_first of each row."""
    p_words = words_ptr + i_bitmask.to(gl.int64) * (SIDE * SIDE // 32) + o_row * (SIDE // 32) + i_first
    return load_words(p_words, COLS // 32)


@gluon.jit
def mask_by_bits(b_scores, b_bits, b_bit):
    """Scores [rows, columns], -inf where b_bits [rows, columns] & b_bit [1, columns] is 0.

    In assembly, since LLVM packs the tests of all pairs into words and unpacks them again: some 200 instructions a
    step.
    """
    b_bits, b_bit = gl.broadcast(b_bits, b_bit)
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 t; and.b32 t, $2, $3; setp.ne.u32 p, t, 0; selp.f32 $0, $1, 0fFF800000, p; }",
        "=f,f,r,r", [b_scores, b_bits, b_bit], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def mask_columns(b_scores, words, o_col):
    """Scores [rows, columns], -inf where the bitmask has no bit.

    words  columns / 32 int32 tensors [rows]
    o_col  column offsets [columns]
    """
    o_lane = gl.expand_dims(o_col % COLUMN_PERIOD // 2 * 2, 0)
    o_word = gl.expand_dims(o_col // 32, 0)
    b_bits = gl.expand_dims(words[0], 1) >> o_lane
    for i_word in gl.static_range(1, o_col.shape[0] // 32):
        b_bits = gl.where(o_word == i_word, gl.expand_dims(words[i_word], 1) >> o_lane, b_bits)
    b_bit = gl.expand_dims(1 << (o_col % 32 // COLUMN_PERIOD * COLUMN_PERIOD + o_col % 2), 0)
    return mask_by_bits(b_scores, b_bits, b_bit)


@gluon.jit
def transposed_mask(words_ptr, i_bitmask, o_kv, o_q, SIDE: gl.constexpr):
    """Which pairs attend: bool [keys, queries], for offsets o_kv and o_q within a tile of SIDE x SIDE."""
    o_kv = gl.expand_dims(o_kv, 1)
    p_words = words_ptr + i_bitmask.to(gl.int64) * (SIDE * SIDE // 32)
    return ((gl.load(p_words + (gl.expand_dims(o_q * (SIDE // 32), 0) + o_kv // 32)) >> (o_kv % 32)) & 1) != 0


@gluon.jit
def pair_mask(ptrs, sizes, kv_start, kv_limit, step, o_kv, o_q, CAUSAL: gl.constexpr, BLOCK_Q: gl.constexpr):
    """Which pairs of a partial step attend: [keys, queries].

    o_kv, o_q  offsets from the first key of the tile and the first query of the step
    """
    STEPS_PER_TILE: gl.constexpr = TILE // BLOCK_Q
    if ptrs.indices_ptr is not None:
        i_bitmask = gl.load(ptrs.bitmask_ids_ptr + step // STEPS_PER_TILE)
        return transposed_mask(ptrs.bitmasks_ptr, i_bitmask, o_kv, step % STEPS_PER_TILE * BLOCK_Q + o_q, TILE)
    else:
        # first query of the step that attends to each key
        o_first = o_kv * 0
        if CAUSAL:
            o_first = kv_start + o_kv - (step * BLOCK_Q + sizes.kv_len - sizes.q_len)
        o_first = gl.where(kv_start + o_kv < kv_limit, o_first, BLOCK_Q)
        return gl.expand_dims(o_q, 0) >= gl.expand_dims(o_first, 1)
