"""Online softmax of the Hopper forward: masks, exponentials, row sums and rescaling of a step.

Scores and the running maximum are in base 2.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..triton.tile import TILE
from .bitmask import SUBTILES_BIT, load_mask_words, mask_columns
from .forward_producer import entries_of, key_start
from .registers import WARPGROUP_ROWS, accumulator

# the bits of a float32
MINUS_INFINITY = gl.constexpr(0xFF800000)


@gluon.jit
def mask_words(ptrs, row, i_step, WARPGROUP: gl.constexpr, BLOCK_KV: gl.constexpr):
    """The words of a partial step's bitmask, where there is a layout: two loads, one after the other."""
    _, _, ids_ptr, words_ptr, _, _, _, _ = ptrs
    _, _, begin, _, _, _, _ = row
    STEPS: gl.constexpr = TILE // BLOCK_KV
    i_bitmask = gl.load(ids_ptr + (begin + i_step // STEPS))
    o_q = WARPGROUP * WARPGROUP_ROWS + gl.arange(0, WARPGROUP_ROWS, layout=gl.SliceLayout(1, accumulator(BLOCK_KV)))
    return load_mask_words(words_ptr, i_bitmask, i_step % STEPS * (BLOCK_KV // 32), o_q, BLOCK_KV)


@gluon.jit
def no_words(BLOCK_KV: gl.constexpr):
    """As many words as `mask_words` loads, of no pair."""
    none = gl.zeros([WARPGROUP_ROWS], gl.int32, gl.SliceLayout(1, accumulator(BLOCK_KV)))
    if BLOCK_KV == 128:
        return none, none, none, none
    else:
        return none, none


@gluon.jit
def mask_quarters(ptrs, row, i_step, WARPGROUP: gl.constexpr, BLOCK_KV: gl.constexpr):
    """Which keys of a step attend, as far as whole quarters of its tile tell: 64 a bit, from the lowest on."""
    _, indices_ptr, _, _, _, _, _, _ = ptrs
    _, _, begin, _, _, _, _ = row
    STEPS: gl.constexpr = TILE // BLOCK_KV
    if STEPS == 1:
        i_entry, is_pair, has_second = entries_of(row, i_step)
        entry = gl.load(indices_ptr + i_entry)
        other = gl.load(indices_ptr + i_entry + has_second.to(gl.int32))
        quarters, others = entry >> (SUBTILES_BIT + 2 * WARPGROUP), other >> (SUBTILES_BIT + 2 * WARPGROUP)
        # of either tile of a pair one half of the keys is there
        first, second = ((quarters & 3) != 0).to(gl.int32), ((others & 3) != 0).to(gl.int32)
        quarters = gl.where(is_pair, first + 2 * second * has_second.to(gl.int32), quarters)
    else:
        entry = gl.load(indices_ptr + (begin + i_step // STEPS))
        quarters = entry >> (SUBTILES_BIT + 2 * WARPGROUP + i_step % STEPS)
    # a full tile's says nothing
    return gl.where(entry < 0, quarters, -1)


@gluon.jit
def mask_scores(
    b_scores, words, ptrs, sizes, row, i_step, limit, WARPGROUP: gl.constexpr, MASKED: gl.constexpr, CAUSAL: gl.constexpr,
    BLOCK_KV: gl.constexpr,
):  # fmt: skip
    """-inf where a pair does not attend.

    MASKED  whether the step is partial, and not of a tile made of whole quarters
    words   of its bitmask, as `mask_words` loads them; None: they are loaded here, if there are any
    """
    _, indices_ptr, _, _, kv_lengths_ptr, _, _, _ = ptrs
    _, _, _, q_len, kv_len, _, _, _ = sizes
    _, q_start, _, _, _, _, _ = row
    if MASKED or kv_lengths_ptr is not None:
        kv_start = key_start(indices_ptr, row, i_step, BLOCK_KV)
        o_q = WARPGROUP * WARPGROUP_ROWS + gl.arange(0, WARPGROUP_ROWS, layout=gl.SliceLayout(1, accumulator(BLOCK_KV)))
        o_kv = gl.arange(0, BLOCK_KV, layout=gl.SliceLayout(0, accumulator(BLOCK_KV)))
    if indices_ptr is not None:
        if MASKED:
            if words is None:
                words = mask_words(ptrs, row, i_step, WARPGROUP, BLOCK_KV)
            b_scores = mask_columns(b_scores, words, o_kv)
        if kv_lengths_ptr is not None:
            b_scores = gl.where(gl.expand_dims(kv_start + o_kv < limit, 0), b_scores, float("-inf"))
    elif MASKED:
        last = gl.full([WARPGROUP_ROWS], 0, gl.int32, gl.SliceLayout(1, accumulator(BLOCK_KV))) + limit
        if CAUSAL:
            last = gl.minimum(last, q_start + o_q + (kv_len - q_len) + 1)
        b_scores = gl.where(gl.expand_dims(kv_start + o_kv, 0) < gl.expand_dims(last, 1), b_scores, float("-inf"))
    return b_scores


@gluon.constexpr_function
def row_parts():
    """How the sums over the columns of an accumulator that each thread holds lie in registers: [64, 4], four threads
    a row."""
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[8, 0]], lanes, [[16, 0], [32, 0]], [], [64, 4])


@gluon.jit
def online_softmax(b_scores, b_max, b_sum, scale_log2, SLACK: gl.constexpr):
    """One step of the softmax: p, the decay of what was summed before, the new maximum and sum.

    The sum stays in four parts a row, one a thread, so that a step exchanges none. With SLACK the maximum follows
    only where
    it grew by more, so that most steps decay nothing: p is then at most 2 ^ SLACK, which moves the exponent of p, of
    its sum
    and of out, whose roundings are relative, and no more.
    """
    b_new_max = gl.max(b_scores, 1) * scale_log2
    if SLACK > 0:  # noqa: SIM108
        b_new_max = gl.where(b_new_max > b_max + SLACK, b_new_max, b_max)
    else:
        b_new_max = gl.maximum(b_max, b_new_max)
    b_p = gl.exp2(b_scores * scale_log2 - gl.expand_dims(b_new_max, 1))
    b_decay = gl.exp2(b_max - b_new_max)
    # a thread holds two of every eight columns
    b_parts = gl.sum(gl.sum(b_p.reshape([WARPGROUP_ROWS, b_p.shape[1] // 8, 4, 2]), 3), 1)
    b_parts = gl.convert_layout(b_parts, row_parts(), assert_trivial=True)
    b_part_decay = gl.convert_layout(b_decay, gl.SliceLayout(1, row_parts()), assert_trivial=True)
    return b_p, b_decay, b_new_max, b_sum * gl.expand_dims(b_part_decay, 1) + b_parts


@gluon.constexpr_function
def _rescale_assembly(values):
    lines = [f"mov.b32 ${i}, ${values + i};" for i in range(values)]
    # the two rows of a thread alternate by two values
    lines.append(f"setp.neu.f32 p, ${2 * values}, 0f3F800000; @!p setp.neu.f32 p, ${2 * values + 2}, 0f3F800000;")
    lines.append("vote.sync.any.pred p, p, 0xffffffff; @!p bra.uni DONE;")
    lines += [f"mul.rn.f32 ${i}, ${i}, ${2 * values + i};" for i in range(values)]
    return "{ .reg .pred p; " + " ".join(lines) + " DONE: }"


@gluon.constexpr_function
def _rescale_constraints(values):
    return ",".join(["=&f"] * values + ["f"] * (2 * values))


@gluon.jit
def rescale(b_out, b_decay):
    """b_out * b_decay ([64, columns], [64, 1]); a warp whose decays are all 1 leaves the products out."""
    VALUES: gl.constexpr = b_out.shape[1] // 2
    text: gl.constexpr = _rescale_assembly(VALUES)
    constraints: gl.constexpr = _rescale_constraints(VALUES)
    operands = gl.broadcast(b_out, b_decay)
    return gl.inline_asm_elementwise(text, constraints, operands, dtype=gl.float32, is_pure=True, pack=VALUES)
