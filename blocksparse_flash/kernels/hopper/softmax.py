"""Online softmax of the Hopper forward: masks, exponentials, row sums and rescaling of a step.

For scores s of a step, in base 2, with m and l the running maximum and sum of a row, and O its unnormalized output:

    m' = max(m, max s)    p = 2^(s - m')    decay = 2^(m - m')    l' = l decay + sum p    O' = O decay + p v
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..triton.tile import TILE
from .bitmask import load_mask_words, mask_columns
from .forward_producer import kv_start_of
from .registers import WARPGROUP_ROWS, accumulator

# ---- masks ----


@gluon.jit
def load_bitmask(ptrs, work_tile, i_step, WARPGROUP: gl.constexpr, BLOCK_KV: gl.constexpr):
    """This warpgroup's rows of the bitmask of a partial step of a layout: BLOCK_KV / 32 words, each int32 [64].

    Two dependent loads: the index of the bitmask, then its words.
    """
    STEPS_PER_TILE: gl.constexpr = TILE // BLOCK_KV
    i_bitmask = gl.load(ptrs.bitmask_ids_ptr + (work_tile.begin + i_step // STEPS_PER_TILE))
    o_q = WARPGROUP * WARPGROUP_ROWS + gl.arange(0, WARPGROUP_ROWS, layout=gl.SliceLayout(1, accumulator(BLOCK_KV)))
    return load_mask_words(
        ptrs.bitmasks_ptr, i_bitmask, i_step % STEPS_PER_TILE * (BLOCK_KV // 32), o_q, BLOCK_KV, TILE
    )


@gluon.jit
def empty_bitmask(BLOCK_KV: gl.constexpr):
    """A bitmask like that of `load_bitmask`, of no pair."""
    b_zero = gl.zeros([WARPGROUP_ROWS], gl.int32, gl.SliceLayout(1, accumulator(BLOCK_KV)))
    if BLOCK_KV == 128:
        return b_zero, b_zero, b_zero, b_zero
    else:
        return b_zero, b_zero


@gluon.jit
def mask_scores(
    b_scores, bitmask, ptrs, sizes, work_tile, i_step, kv_limit,
    WARPGROUP: gl.constexpr, MASKED: gl.constexpr, CAUSAL: gl.constexpr, BLOCK_KV: gl.constexpr,
):  # fmt: skip
    """Scores [64, BLOCK_KV], -inf where a pair does not attend.

    bitmask  of the step, as `load_bitmask` gives it; None: loaded here if needed
    MASKED   whether the step needs its bitmask or, without a layout, a comparison of positions
    """
    if MASKED or ptrs.kv_lengths_ptr is not None:
        kv_start = kv_start_of(ptrs.indices_ptr, work_tile, i_step, BLOCK_KV)
        o_q = WARPGROUP * WARPGROUP_ROWS + gl.arange(0, WARPGROUP_ROWS, layout=gl.SliceLayout(1, accumulator(BLOCK_KV)))
        o_kv = gl.arange(0, BLOCK_KV, layout=gl.SliceLayout(0, accumulator(BLOCK_KV)))
    if ptrs.indices_ptr is not None:
        if MASKED:
            if bitmask is None:
                bitmask = load_bitmask(ptrs, work_tile, i_step, WARPGROUP, BLOCK_KV)
            b_scores = mask_columns(b_scores, bitmask, o_kv)
        if ptrs.kv_lengths_ptr is not None:
            b_scores = gl.where(gl.expand_dims(kv_start + o_kv < kv_limit, 0), b_scores, float("-inf"))
    elif MASKED:
        # first key that each query does not attend to
        o_end = gl.full([WARPGROUP_ROWS], 0, gl.int32, gl.SliceLayout(1, accumulator(BLOCK_KV))) + kv_limit
        if CAUSAL:
            o_end = gl.minimum(o_end, work_tile.q_start + o_q + (sizes.kv_len - sizes.q_len) + 1)
        b_scores = gl.where(gl.expand_dims(kv_start + o_kv, 0) < gl.expand_dims(o_end, 1), b_scores, float("-inf"))
    return b_scores


# ---- softmax ----


@gluon.constexpr_function
def row_sum_layout():
    """Layout of row sums [64, 4]: each of the four threads that share a row holds the sum over its own columns."""
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[8, 0]], lanes, [[16, 0], [32, 0]], [], [64, 4])


@gluon.jit
def online_softmax(b_scores, b_max, b_sum, scale_log2, b_shift, RESCALE_THRESHOLD: gl.constexpr):
    """One step: (p, decay of earlier sums, new maximum, new sum) from scores [64, BLOCK_KV].

    scale_log2  brings the scores to base 2; 1 after score mods
    b_shift  [64] or a number, still to be added to the scores of each row, in base 2; None: nothing
    b_sum  [64, 4], one partial sum per thread of a row, so that no step exchanges sums between threads
    RESCALE_THRESHOLD  the maximum follows only if it grew by more, so that most steps have decay 1. p is then at most
                       2 ** RESCALE_THRESHOLD, which shifts exponents of p, sum and out, but not their relative errors
    """
    b_new_max = gl.max(b_scores, 1) * scale_log2
    if b_shift is not None:
        b_new_max = b_new_max + b_shift
    if RESCALE_THRESHOLD > 0:
        b_new_max = gl.where(b_new_max > b_max + RESCALE_THRESHOLD, b_new_max, b_max)
    else:
        b_new_max = gl.maximum(b_max, b_new_max)
    b_subtrahend = b_new_max
    if b_shift is not None:
        b_subtrahend = b_new_max - b_shift
    b_p = gl.exp2(b_scores * scale_log2 - gl.expand_dims(b_subtrahend, 1))
    b_decay = gl.exp2(b_max - b_new_max)
    # a thread holds two of every eight columns
    b_step_sum = gl.sum(gl.sum(b_p.reshape([WARPGROUP_ROWS, b_p.shape[1] // 8, 4, 2]), 3), 1)
    b_step_sum = gl.convert_layout(b_step_sum, row_sum_layout(), assert_trivial=True)
    b_sum_decay = gl.convert_layout(b_decay, gl.SliceLayout(1, row_sum_layout()), assert_trivial=True)
    return b_p, b_decay, b_new_max, b_sum * gl.expand_dims(b_sum_decay, 1) + b_step_sum


@gluon.constexpr_function
def _rescale_assembly(values):
    lines = [f"mov.b32 ${i}, ${values + i};" for i in range(values)]
    # of every four values of a thread, two belong to one row and two to another
    lines.append(f"setp.neu.f32 p, ${2 * values}, 0f3F800000; @!p setp.neu.f32 p, ${2 * values + 2}, 0f3F800000;")
    lines.append("vote.sync.any.pred p, p, 0xffffffff; @!p bra.uni DONE;")
    lines += [f"mul.rn.f32 ${i}, ${i}, ${2 * values + i};" for i in range(values)]
    return "{ .reg .pred p; " + " ".join(lines) + " DONE: }"


@gluon.constexpr_function
def _rescale_constraints(values):
    return ",".join(["=&f"] * values + ["f"] * (2 * values))


@gluon.jit
def rescale(b_out, b_decay):
    """b_out * b_decay ([64, columns], [64, 1]); a warp whose decays are all 1 skips the multiplications."""
    VALUES: gl.constexpr = b_out.shape[1] // 2
    text: gl.constexpr = _rescale_assembly(VALUES)
    constraints: gl.constexpr = _rescale_constraints(VALUES)
    operands = gl.broadcast(b_out, b_decay)
    return gl.inline_asm_elementwise(text, constraints, operands, dtype=gl.float32, is_pure=True, pack=VALUES)
