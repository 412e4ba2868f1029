"""Masking of accumulators by the bitmasks and the 64 x 64 subtiles of a plan."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ... import plan_format
from ..triton.tile import TILE

# clears the sign with which a plan marks a partial tile
INDEX_BITS = gl.constexpr(plan_format.PARTIAL - 1)
SUBTILES_BIT = gl.constexpr(plan_format.SUBTILES_BIT)
# bits a column is shifted by before the rest, so that one shift serves every eighth column
LANE_BITS = gl.constexpr(8)


@gluon.jit
def load_words(p_words, WORDS: gl.constexpr):
    """WORDS int32 (2 or 4) from each pointer on, which is aligned to them, in one load; none is written while the
    kernel runs."""
    if WORDS == 4:
        return gl.inline_asm_elementwise(
            "ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,l", [p_words],
            dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return gl.inline_asm_elementwise(
            "ld.global.nc.v2.b32 {$0, $1}, [$2];",
            "=r,=r,l",
            [p_words],
            dtype=(gl.int32, gl.int32),
            is_pure=True,
            pack=1,
        )


@gluon.jit
def load_mask_words(words_ptr, i_bitmask, i_first, o_row, COLS: gl.constexpr):
    """The words of rows of a bitmask that hold COLS columns, from word i_first of each row on."""
    p_words = words_ptr + i_bitmask.to(gl.int64) * (TILE * TILE // 32) + o_row * (TILE // 32) + i_first
    return load_words(p_words, COLS // 32)


@gluon.jit
def mask_by_bits(b_scores, b_bits, b_bit):
    """b_scores where a bit is set, -inf else: [rows, columns], the bits to be looked at [1, columns].

    In assembly: LLVM packs the tests of all pairs into words again, and unpacks those, some 200 instructions a step.
    """
    b_bits, b_bit = gl.broadcast(b_bits, b_bit)
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 t; and.b32 t, $2, $3; setp.ne.u32 p, t, 0; selp.f32 $0, $1, 0fFF800000, p; }",
        "=f,f,r,r", [b_scores, b_bits, b_bit], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def mask_columns(b_scores, words, o_col):
    """The scores of the pairs that attend, -inf else; `words` of each row and 1-D column offsets, each of a slice of
    one layout."""
    o_lane = gl.expand_dims(o_col % LANE_BITS // 2 * 2, 0)
    o_word = gl.expand_dims(o_col // 32, 0)
    b_bits = gl.expand_dims(words[0], 1) >> o_lane
    for i_word in gl.static_range(1, o_col.shape[0] // 32):
        b_bits = gl.where(o_word == i_word, gl.expand_dims(words[i_word], 1) >> o_lane, b_bits)
    b_bit = gl.expand_dims(1 << (o_col % 32 // LANE_BITS * LANE_BITS + o_col % 2), 0)
    return mask_by_bits(b_scores, b_bits, b_bit)


@gluon.constexpr_function
def _halves_assembly(columns, bits, stride, fill):
    # registers of a thread: two rows, a quarter of the columns of each
    n, n_half = columns * bits // 64, bits
    lines = [f"mov.b32 ${i}, ${n + i};" for i in range(n)]
    for i_half in range(columns // 64):
        lines.append(f"and.b32 b, ${2 * n}, {1 << (i_half * stride)}; setp.ne.u32 p, b, 0; @p bra.uni KEPT{i_half};")
        lines += [f"mov.b32 ${i_half * n_half + i}, {fill};" for i in range(n_half)]
        lines.append(f"KEPT{i_half}:")
    return "{ .reg .pred p; .reg .b32 b; " + " ".join(lines) + " }"


@gluon.constexpr_function
def _halves_constraints(columns, bits):
    n, kind = columns * bits // 64, "f" if bits == 32 else "r"
    return ",".join([f"=&{kind}"] * n + [kind] * n + ["r"] * (columns // 2))


@gluon.jit
def mask_subtiles(b_values, bits, STRIDE: gl.constexpr, FILL: gl.constexpr):
    """An accumulator [64, columns], or what is rounded from one; of 64 columns each whose bit is not set every
    register becomes FILL.

    bits  of the lowest the first 64 columns, of those STRIDE apart the next ones

    A branch for 64 columns, at which all threads of a warpgroup agree: to select each value would be 64 instructions
    a step.
    """
    COLS: gl.constexpr = b_values.shape[1]
    BITS: gl.constexpr = b_values.dtype.primitive_bitwidth
    text: gl.constexpr = _halves_assembly(COLS, BITS, STRIDE, FILL)
    constraints: gl.constexpr = _halves_constraints(COLS, BITS)
    b_bits = gl.full(b_values.shape, 0, gl.int32, b_values.type.layout) + bits
    return gl.inline_asm_elementwise(
        text, constraints, [b_values, b_bits], dtype=b_values.dtype, is_pure=True, pack=COLS // 2
    )


@gluon.jit
def transposed_mask(words_ptr, i_bitmask, o_kv, o_q):
    """The same transposed: keys x queries."""
    o_kv = gl.expand_dims(o_kv, 1)
    p_words = words_ptr + i_bitmask.to(gl.int64) * (TILE * TILE // 32)
    return ((gl.load(p_words + (gl.expand_dims(o_q * (TILE // 32), 0) + o_kv // 32)) >> (o_kv % 32)) & 1) != 0
