"""How does the Hopper forward run? out = softmax(scale q k^T on the layout) v, and lse; Gluon, sm90.

One or two programs a multiprocessor take tile rows from a queue until none is left. A warp moves data: it fetches the next
row, tells the others, and loads q, then k and v of each step of the row, into a ring, running ahead over the end of a row.
Two warpgroups compute, 64 of the 128 queries each, out in registers. Where one program has a multiprocessor:

    issue q k^T of step i | issue p v of step i - 1 | wait for the first | softmax of step i while the second runs

While one warpgroup issues, the other is kept from it (named barriers 9 and 10): one computes exponentials while the other
multiplies. Partial tiles come first, in a loop of their own, so that full ones pay for no mask. A row without keys writes
out 0, lse -inf. Scores and the running maximum are in base 2, `lse` in memory is natural.

Knows: a plan's tensors, descriptors, launch configurations. Does not know: layouts, autograd, how a backend is chosen.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .hopper import (
    HALF,
    Describer,
    accumulator,
    bit_columns,
    clear_tail,
    key_limit,
    named_barrier,
    padded_dim,
    pin,
    readable,
    store_async,
    writable,
)
from .hopper_rows import (
    K_EMPTY,
    K_FULL,
    Q_EMPTY,
    Q_FULL,
    ROW_EMPTY,
    ROW_FIELDS,
    ROW_FULL,
    V_EMPTY,
    V_FULL,
    key_start,
    move,
    take_row,
)
from .launch import TILE as TILE_SIDE
from .launch import Launch, Options, Seen, constants, multiprocessors, options_of, see, see_walk, walk, walk_strides
from .tile import LN_2, TILE

# whether pinning is free of spills
PINS = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9)


@dataclass(frozen=True)
class Config:
    """One launch configuration.

    block_kv   keys of a step
    stages     steps of k and v in flight
    overlap    p v of a step runs during the softmax of the next one
    ping_pong  the warpgroups issue in turn
    pin        keep ptxas from ending the overlap early, see hopper.pin
    hold_q     q in registers, else in shared memory
    out_in_q   out takes the place of q in shared memory, which must not be held
    programs   of a multiprocessor
    registers, mover_registers, max_registers  of a computing thread, of the moving warp, of all on average (None: Triton's)
    """

    block_kv: int = 128
    stages: int = 2
    overlap: bool = True
    ping_pong: bool = True
    pin: bool = False
    hold_q: bool = True
    out_in_q: bool = False
    programs: int = 1
    registers: int = 240
    mover_registers: int = 24
    max_registers: int | None = None


@functools.cache
def config(dim: int) -> Config:
    """The launch table: dim is the larger padded head dimension.

    Ahead of time only: held queries and `pin` together spill (128: 36 to 204 bytes), as `pin` does with Triton 3.9 (84).

    What binds (Nsight Compute, H200, 16,384 tokens, hidden size 2048, bf16, of the cycles): 128 dense tensor cores 80 %, shared
    memory 53 %, exponentials 41 %, L2 45 %; 128 butterfly 63, 44, 33, 44. 64 dense tensor cores 51 %, exponentials 52 %, issue 46 %,
    so both pipes wait for each other; 64 local 43, 45, 42. Tried on 64: an eighth of the exponentials as
    polynomials, dense 437 TFLOP/s for 423, random 418 for 422; a quarter 422 and 401.
    """
    if dim == 256:
        # out takes 128 registers, and there is no room for it beside q
        return Config(block_kv=64, hold_q=False, out_in_q=True)
    return Config(stages=2 if dim == 128 else 4, hold_q=False, pin=PINS)


# ---- the warpgroups that compute ----


@gluon.jit
def wait_for_turn(WHO: gl.constexpr, PING_PONG: gl.constexpr):
    """Until the other warpgroup has issued its products. Turns alternate over the end of a row, as both walk one list."""
    if PING_PONG:
        if WHO == 0:
            named_barrier("sync", 9)
        else:
            named_barrier("sync", 10)


@gluon.jit
def give_turn(WHO: gl.constexpr, PING_PONG: gl.constexpr):
    if PING_PONG:
        if WHO == 0:
            named_barrier("arrive", 10)
        else:
            named_barrier("arrive", 9)


@gluon.jit
def mask_scores(
    b_scores, ptrs, sizes, row, i_step, limit, WHO: gl.constexpr, MASKED: gl.constexpr, CAUSAL: gl.constexpr,
    BLOCK_KV: gl.constexpr,
):  # fmt: skip
    """-inf where a pair does not attend; MASKED says whether the step is partial."""
    _, indices_ptr, ids_ptr, words_ptr, kv_lengths_ptr, _, _ = ptrs
    _, _, _, q_len, kv_len, _ = sizes
    _, q_start, begin, _, n_partial = row
    STEPS: gl.constexpr = TILE // BLOCK_KV
    if MASKED or kv_lengths_ptr is not None:
        kv_start = key_start(indices_ptr, begin, n_partial, i_step, BLOCK_KV)
        o_q = WHO * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, accumulator(BLOCK_KV)))
        o_kv = gl.arange(0, BLOCK_KV, layout=gl.SliceLayout(0, accumulator(BLOCK_KV)))
    if indices_ptr is not None:
        if MASKED:
            i_bitmask = gl.load(ids_ptr + begin + i_step // STEPS)
            i_first = i_step % STEPS * (BLOCK_KV // 32)
            m_pairs = bit_columns(words_ptr, i_bitmask, i_first, o_q, o_kv, BLOCK_KV)
            b_scores = gl.where(m_pairs, b_scores, float("-inf"))
        if kv_lengths_ptr is not None:
            b_scores = gl.where(gl.expand_dims(kv_start + o_kv < limit, 0), b_scores, float("-inf"))
    elif MASKED:
        last = gl.full([HALF], 0, gl.int32, gl.SliceLayout(1, accumulator(BLOCK_KV))) + limit
        if CAUSAL:
            last = gl.minimum(last, q_start + o_q + (kv_len - q_len) + 1)
        b_scores = gl.where(gl.expand_dims(kv_start + o_kv, 0) < gl.expand_dims(last, 1), b_scores, float("-inf"))
    return b_scores


@gluon.jit
def soften(b_scores, b_max, b_sum, scale_log2):
    """One step of the softmax: p, the decay of what was summed before, the new maximum and sum."""
    b_new_max = gl.maximum(b_max, gl.max(b_scores, 1) * scale_log2)
    b_p = gl.exp2(b_scores * scale_log2 - gl.expand_dims(b_new_max, 1))
    b_decay = gl.exp2(b_max - b_new_max)
    return b_p, b_decay, b_new_max, b_sum * b_decay + gl.sum(b_p, 1)


@gluon.jit
def clear_values(rings, barriers, ptrs, row, n_now, i_step, limit, WHO: gl.constexpr, STAGES: gl.constexpr):
    """Makes the values of a step finite. The warpgroups meet in it: never while one holds the turn that the other waits for."""
    _, indices_ptr, _, _, kv_lengths_ptr, _, _ = ptrs
    if kv_lengths_ptr is not None:
        v_tile = wait_for_values(rings, barriers, n_now, STAGES)
        clear_tail(v_tile, key_start(indices_ptr, row[2], row[4], i_step, v_tile.shape[0]), limit, WHO)


@gluon.jit
def wait_for_values(rings, barriers, n_now, STAGES: gl.constexpr):
    """The values of a step: [BLOCK_KV, DIM_V]."""
    _, _, v_ring, _, _ = rings
    stage = n_now % STAGES
    mbarrier.wait(barriers.index(V_FULL + 4 * stage), (n_now // STAGES) & 1)
    return v_ring.index(stage).reshape([v_ring.shape[3], v_ring.shape[4]])


@gluon.jit
def attend(
    state, b_q, rings, barriers, ptrs, sizes, row, n_done, i_step, limit, WHO: gl.constexpr, MASKED: gl.constexpr,
    SIGN: gl.constexpr, CAUSAL: gl.constexpr, STAGES: gl.constexpr, FIRST: gl.constexpr, OVERLAP: gl.constexpr,
    PIN: gl.constexpr, PING_PONG: gl.constexpr,
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
    mbarrier.wait(barriers.index(K_FULL + 4 * stage), (n_now // STAGES) & 1)
    if BEFORE:
        clear_values(rings, barriers, ptrs, row, n_now - 1, i_step - 1, limit, WHO, STAGES)
    wait_for_turn(WHO, PING_PONG)
    b_zero = gl.zeros([HALF, BLOCK_KV], gl.float32, score_layout)
    k_tile = k_ring.index(stage).reshape([BLOCK_KV, k_ring.shape[4]]).permute((1, 0))
    # [HALF, BLOCK_KV]
    scores_token = warpgroup_mma(b_q, k_tile, b_zero, use_acc=False, is_async=True)
    if BEFORE:
        v_tile = wait_for_values(rings, barriers, n_now - 1, STAGES)
        # [HALF, DIM_V]
        out_token = warpgroup_mma(b_p, v_tile, b_out, is_async=True)
    give_turn(WHO, PING_PONG)
    b_scores = warpgroup_mma_wait(1 if BEFORE else 0, deps=(scores_token,))
    mbarrier.arrive(barriers.index(K_EMPTY + 4 * stage), count=1)
    if SIGN != 1:
        b_scores = b_scores * SIGN
    if FIRST:
        # partial or not, it is the one step that is looked at
        if row[4] > 0:
            b_scores = mask_scores(b_scores, ptrs, sizes, row, i_step, limit, WHO, True, CAUSAL, BLOCK_KV)
        elif ptrs[4] is not None:
            b_scores = mask_scores(b_scores, ptrs, sizes, row, i_step, limit, WHO, False, CAUSAL, BLOCK_KV)
    else:
        b_scores = mask_scores(b_scores, ptrs, sizes, row, i_step, limit, WHO, MASKED, CAUSAL, BLOCK_KV)
    b_p32, b_decay, b_max, b_sum = soften(b_scores, b_max, b_sum, sizes[5])
    if BEFORE:
        # with lengths to look at it would spill more
        if PIN and ptrs[4] is None:
            b_sum = pin(b_sum)
        b_out = warpgroup_mma_wait(0, deps=(out_token,))
        mbarrier.arrive(barriers.index(V_EMPTY + 4 * v_stage), count=1)
    if not (OVERLAP and FIRST):
        b_out = b_out * gl.expand_dims(gl.convert_layout(b_decay, gl.SliceLayout(1, out_layout)), 1)
    b_p = gl.convert_layout(b_p32.to(k_ring.dtype), gl.DotOperandLayout(0, out_layout, 2))
    if not OVERLAP:
        b_out = add_values(b_out, b_p, rings, barriers, ptrs, row, n_now, i_step, limit, WHO, STAGES)
    return b_out, b_max, b_sum, b_p


@gluon.jit
def add_values(b_out, b_p, rings, barriers, ptrs, row, n_now, i_step, limit, WHO: gl.constexpr, STAGES: gl.constexpr):
    """out + p v of one step: [HALF, DIM_V]."""
    clear_values(rings, barriers, ptrs, row, n_now, i_step, limit, WHO, STAGES)
    v_tile = wait_for_values(rings, barriers, n_now, STAGES)
    out_token = warpgroup_mma(b_p, v_tile, b_out, is_async=True)
    b_out = warpgroup_mma_wait(0, deps=(out_token,))
    mbarrier.arrive(barriers.index(V_EMPTY + 4 * (n_now % STAGES)), count=1)
    return b_out


@gluon.jit
def compute(
    descriptors, rings, barriers, ptrs, sizes, WHO: gl.constexpr, SIGN: gl.constexpr, CAUSAL: gl.constexpr,
    STAGES: gl.constexpr, OVERLAP: gl.constexpr, PIN: gl.constexpr, PING_PONG: gl.constexpr, HOLD_Q: gl.constexpr,
    OUT_IN_Q: gl.constexpr,
):  # fmt: skip
    _, _, _, out_desc = descriptors
    q_ring, k_ring, v_ring, out_ring, row_ring = rings
    _, _, _, _, kv_lengths_ptr, lse_ptr, _ = ptrs
    n_heads, _, _, q_len, kv_len, _ = sizes
    BLOCK_KV: gl.constexpr = k_ring.shape[3]
    DIM: gl.constexpr = q_ring.shape[4]
    DIM_V: gl.constexpr = v_ring.shape[4]
    score_layout: gl.constexpr = accumulator(BLOCK_KV)
    out_layout: gl.constexpr = accumulator(DIM_V)
    query_layout: gl.constexpr = gl.SliceLayout(1, score_layout)
    dtype: gl.constexpr = q_ring.dtype
    i_row = 0
    n_done = 0
    if WHO == 1:
        # warpgroup 0 goes first
        give_turn(WHO, PING_PONG)
    row = take_row(row_ring, barriers, i_row)
    while row[0] >= 0:
        i_axis, q_start, _begin, n_steps, n_partial = row
        i_batch = i_axis // n_heads
        limit = key_limit(kv_lengths_ptr, i_batch, kv_len)
        b_zero = gl.zeros([HALF, BLOCK_KV], gl.float32, score_layout)
        b_p = gl.convert_layout(b_zero.to(dtype), gl.DotOperandLayout(0, out_layout, 2))
        # a row which has met no key yet: finite, since -inf - (-inf) = nan, and below every score
        b_max = gl.full([HALF], -3.0e38, gl.float32, query_layout)
        b_sum = gl.full([HALF], 0.0, gl.float32, query_layout)
        state = (gl.zeros([HALF, DIM_V], gl.float32, out_layout), b_max, b_sum, b_p)
        mbarrier.wait(barriers.index(Q_FULL + WHO), i_row & 1)
        # [HALF, DIM]
        q_tile = q_ring.index(WHO).reshape([HALF, DIM])
        if HOLD_Q:
            b_q = q_tile.load(gl.DotOperandLayout(0, score_layout, 2))
            mbarrier.arrive(barriers.index(Q_EMPTY + WHO), count=1)
        else:
            b_q = q_tile
        # one is known when compiling, the other is not
        if OVERLAP:  # noqa: SIM102
            if n_steps > 0:
                state = attend(
                    state, b_q, rings, barriers, ptrs, sizes, row, n_done, 0, limit, WHO, False, SIGN, CAUSAL, STAGES,
                    True, OVERLAP, PIN, PING_PONG,
                )  # fmt: skip
        for i_step in range(1 if OVERLAP else 0, n_partial):
            state = attend(
                state, b_q, rings, barriers, ptrs, sizes, row, n_done, i_step, limit, WHO, True, SIGN, CAUSAL, STAGES,
                False, OVERLAP, PIN, PING_PONG,
            )  # fmt: skip
        for i_step in range(gl.maximum(n_partial, 1) if OVERLAP else n_partial, n_steps):
            state = attend(
                state, b_q, rings, barriers, ptrs, sizes, row, n_done, i_step, limit, WHO, False, SIGN, CAUSAL, STAGES,
                False, OVERLAP, PIN, PING_PONG,
            )  # fmt: skip
        b_out, b_max, b_sum, b_p = state
        n_done += n_steps
        if not HOLD_Q and not OUT_IN_Q:
            # nothing reads the queries any more
            mbarrier.arrive(barriers.index(Q_EMPTY + WHO), count=1)
        if OVERLAP:  # noqa: SIM102
            if n_steps > 0:
                # the output of the last step
                b_out = add_values(b_out, b_p, rings, barriers, ptrs, row, n_done - 1, n_steps - 1, limit, WHO, STAGES)
        m_empty = b_sum == 0.0
        b_sum = gl.where(m_empty, 1.0, b_sum)
        o_q = q_start + WHO * HALF + gl.arange(0, HALF, layout=query_layout)
        b_lse = gl.where(m_empty, float("-inf"), (b_max + gl.log2(b_sum)) * LN_2)
        gl.store(lse_ptr + i_axis.to(gl.int64) * q_len + o_q, b_lse, mask=o_q < q_len)
        b_out = b_out * gl.expand_dims(gl.convert_layout(1.0 / b_sum, gl.SliceLayout(1, out_layout)), 1)
        if not OUT_IN_Q:
            # the row before has left the buffer
            tma.store_wait(0)
        out_tile = out_ring.index(WHO)
        out_tile.reshape([HALF, DIM_V]).store(b_out.to(dtype))
        fence_async_shared()
        store_async(out_desc, [i_batch, i_axis % n_heads, q_start + WHO * HALF, 0], out_tile)
        if OUT_IN_Q:
            tma.store_wait(0)
            mbarrier.arrive(barriers.index(Q_EMPTY + WHO), count=1)
        i_row += 1
        row = take_row(row_ring, barriers, i_row)
    if WHO == 0:
        # the last turn that warpgroup 1 gave
        wait_for_turn(WHO, PING_PONG)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["n_heads", "n_axes", "n_lines", "q_len", "kv_len", "group"])
def hopper_forward_kernel(
    # inputs
    q_desc, k_desc, v_desc, items_ptr, indices_ptr, ids_ptr, words_ptr, kv_lengths_ptr, queue_ptr,
    # outputs
    out_desc, lse_ptr,
    # strides in elements: (batch, head)
    items_strides,
    # sizes: n_axes = batch * heads, n_lines = tile rows, group = query heads of a key head
    n_heads, n_axes, n_lines, q_len, kv_len, group, scale_log2,
    # compile time
    SIGN: gl.constexpr, CAUSAL: gl.constexpr, STAGES: gl.constexpr, OVERLAP: gl.constexpr, PIN: gl.constexpr,
    PING_PONG: gl.constexpr, HOLD_Q: gl.constexpr, OUT_IN_Q: gl.constexpr, REGISTERS: gl.constexpr,
    MOVER_REGISTERS: gl.constexpr,
):  # fmt: skip
    BLOCK_KV: gl.constexpr = k_desc.block_type.shape[2]
    DIM: gl.constexpr = q_desc.block_type.shape[3]
    DIM_V: gl.constexpr = v_desc.block_type.shape[3]
    q_ring = gl.allocate_shared_memory(q_desc.dtype, [2, 1, 1, HALF, DIM], q_desc.layout)
    k_ring = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, 1, BLOCK_KV, DIM], k_desc.layout)
    v_ring = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, 1, BLOCK_KV, DIM_V], v_desc.layout)
    if OUT_IN_Q:
        out_ring = q_ring
    else:
        out_ring = gl.allocate_shared_memory(out_desc.dtype, [2, 1, 1, HALF, DIM_V], out_desc.layout)
    row_ring = gl.allocate_shared_memory(gl.int32, [2 * ROW_FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    barriers = gl.allocate_shared_memory(gl.int64, [K_FULL + 4 * STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(barriers.index(ROW_FULL + i), count=1)
        mbarrier.init(barriers.index(ROW_EMPTY + i), count=2)
        mbarrier.init(barriers.index(Q_FULL + i), count=1)
        mbarrier.init(barriers.index(Q_EMPTY + i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(barriers.index(K_FULL + 4 * i), count=1)
        mbarrier.init(barriers.index(K_EMPTY + 4 * i), count=2)
        mbarrier.init(barriers.index(V_FULL + 4 * i), count=1)
        mbarrier.init(barriers.index(V_EMPTY + 4 * i), count=2)
    fence_async_shared()
    descriptors = (q_desc, k_desc, v_desc, out_desc)
    rings = (q_ring, k_ring, v_ring, out_ring, row_ring)
    ptrs = (items_ptr, indices_ptr, ids_ptr, words_ptr, kv_lengths_ptr, lse_ptr, queue_ptr)
    sizes = (n_heads, n_axes, n_lines, q_len, kv_len, scale_log2)
    gl.warp_specialize(
        [
            (compute, (descriptors, rings, barriers, ptrs, sizes, 0, SIGN, CAUSAL, STAGES, OVERLAP, PIN, PING_PONG, HOLD_Q,
                       OUT_IN_Q)),
            (compute, (descriptors, rings, barriers, ptrs, sizes, 1, SIGN, CAUSAL, STAGES, OVERLAP, PIN, PING_PONG, HOLD_Q,
                       OUT_IN_Q)),
            (move, (descriptors, rings, barriers, ptrs, items_strides, sizes, group, CAUSAL, BLOCK_KV, STAGES)),
        ],
        [4, 1],
        [REGISTERS, MOVER_REGISTERS],
    )  # fmt: skip


# ---- the launch ----


class Prepared(NamedTuple):
    """A launch, and what makes the descriptors of its tensors."""

    launch: Launch
    q: Describer
    k: Describer
    v: Describer
    out: Describer


@functools.lru_cache(maxsize=1024)
def prepare(q: Seen, k: Seen, v: Seen, out: Seen, walked: tuple[Seen | None, bool], options: Options) -> Prepared:
    """How a call on such tensors is launched."""
    (batch, heads, q_len, head_dim), (_, kv_heads, kv_len, v_dim) = q.shape, v.shape
    items, _ = walked
    fixed = constants(head_dim, v_dim, heads // kv_heads, True, options)
    dim, dim_v = padded_dim(head_dim), padded_dim(v_dim)
    chosen = config(max(dim, dim_v))
    if chosen.out_in_q:
        dim = dim_v = max(dim, dim_v)
    n_lines = -(-q_len // TILE_SIDE)
    rest = {
        "items_strides": walk_strides(items),
        "n_heads": heads,
        "n_axes": batch * heads,
        "n_lines": n_lines,
        "q_len": q_len,
        "kv_len": kv_len,
        "group": heads // kv_heads,
        "scale_log2": fixed["scale_log2"],
        "SIGN": fixed["SIGN"],
        "CAUSAL": options.causal,
        "STAGES": chosen.stages,
        "OVERLAP": chosen.overlap,
        "PIN": chosen.pin,
        "PING_PONG": chosen.ping_pong,
        "HOLD_Q": chosen.hold_q,
        "OUT_IN_Q": chosen.out_in_q,
        "REGISTERS": chosen.registers,
        "MOVER_REGISTERS": chosen.mover_registers,
        "num_warps": 4,
    }
    if chosen.max_registers is not None:
        rest["maxnreg"] = chosen.max_registers
    n_programs = min(n_lines * batch * heads, chosen.programs * multiprocessors(options.device))
    half = HALF.value
    return Prepared(
        Launch(hopper_forward_kernel, (n_programs,), rest),
        Describer(q, (1, 1, half, dim)),
        Describer(k, (1, 1, chosen.block_kv, dim)),
        Describer(v, (1, 1, chosen.block_kv, dim_v)),
        Describer(out, (1, 1, half, dim_v)),
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
) -> tuple[torch.Tensor, torch.Tensor]:
    """out (batch, heads, q_len, v_head_dim) in q's type and lse (batch, heads, q_len) float32, both contiguous."""
    assert seed is None and dropout_p == 0.0, "the choice of the backend refuses dropout"
    batch, heads, q_len, _ = q.shape
    out = writable(q, (batch, heads, q_len, v.shape[3]))
    lse = q.new_empty(batch, heads, q_len, dtype=torch.float32)
    if out.numel() == 0:
        return out, lse
    q, k, v = readable(q), readable(k), readable(v)
    options = options_of(q, scale, causal, dropout_p, kv_lengths)
    ready = prepare(see(q), see(k), see(v), see(out), see_walk(plan, 0), options)
    queue = torch.zeros(1, dtype=torch.int32, device=q.device)
    refs = ready.q(q), ready.k(k), ready.v(v)
    ready.launch(*refs, *walk(plan, 0), kv_lengths, queue, ready.out(out), lse)
    return out.contiguous(), lse
