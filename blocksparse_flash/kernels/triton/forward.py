"""Triton forward: out = softmax(scale q k^T on the layout) v, and lse; sm80 and later.

    q (batch, heads, q_len, head_dim)    k, v (batch, kv_heads, kv_len, head_dim | v_head_dim)
    out (batch, heads, q_len, v_head_dim)    lse (batch, heads, q_len), natural logarithm

One program owns BLOCK_Q queries of one head and iterates over the tiles of its tile row: the partial ones (masked),
then the full ones (not masked). Empty tiles are never visited. Online softmax in base 2 with running maximum m and sum
l; a row without keys keeps l = 0 and writes out 0, lse -inf. Score mods are compiled in where a call has them
(score_mods.py); a sink is where m and l start. Few queries over many keys are computed by split_kv.py.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from ...plan_format import ROW_LISTS
from ...plan_format import TILE as TILE_SIDE
from ...runtime.launch import (
    Config,
    DescriptorFactory,
    Launch,
    Memory,
    allocator,
    contiguous,
    memory_in_order_of,
    num_sms,
)
from ...runtime.tensor_spec import TensorSpecs, new_in_order_of, specs_of
from ...score_mods import Scores
from ..arguments import (
    Options,
    PlanSpecs,
    Tuning,
    columns_of_values,
    constants,
    dropout_arguments,
    options_of,
    plan_specs_of,
    scale_log2,
    score_specs_of,
    seed_arguments,
    sign,
    softcap_arguments,
    strides_of,
    tile_lists,
    tuning_of,
    wants_descriptors,
)
from . import split_kv
from .score_mods import apply_score_mods, load_slope
from .tile import (
    LN_2,
    NUMBER,
    add_product,
    attending_pairs,
    begin_step,
    bitmask_of,
    clamped_kv_len,
    find_work_record,
    kept_pairs,
    kv_steps,
    load_seed,
    load_tile,
    product,
    result_rows,
    softmax_step,
    store_tile,
    tile_start,
    where_kept,
    with_sign,
    with_sink,
)

# most 128-query blocks per SM for which dense causal calls use blocks of 64
CAUSAL_BLOCKS = 8


def config(call: Tuning, *, narrow: bool = False) -> Config:
    """Launch configuration; narrow asks for blocks of 64 queries.

    Timed on an H200 only, see TUNING.md: 551 TFLOP/s dense at head_dim 128, 438 at 64. Elsewhere (sm80, sm100, score
    mods) the nearest configuration that does not spill.
    """
    dim, element_size, major, tma, dropout, shared_memory, modifies_scores, *_ = call
    small = shared_memory < 160 * 1024
    if element_size == 4:
        return Config(64, 32, 8, 2) if dim <= 64 else Config(32, 32, 8, 1 if dim > 128 and small else 2)
    if dim <= 128 and dropout and major == 9 and tma and not modifies_scores:
        return Config(128 if 32 < dim <= 64 else 64, 64, 4, 3)
    if dim <= 128 and (dropout or modifies_scores):
        return Config(128, 64, 8, 2)
    if dim <= 128 and narrow and major == 9:
        return Config(64, 64, 4, 3)
    if dim <= 64 and narrow and major == 10:
        return Config(64, 64, 8, 3)
    if dim <= 64:
        return Config(128, 64, 8 if major == 10 else 4, 3)
    if dim <= 128 and major == 10 and not tma:
        return Config(128, 32, 8, 3)
    if dim <= 128:
        return Config(128, 64, 4, 2) if tma else Config(128, 64, 8, 2 if small else 3)
    return Config(64, 32, 4, 1) if small else Config(128, 64, 8, 2)


def narrow_pays(q_len: int, n_batch_heads: int, options: Options, *, has_layout: bool) -> bool:
    """Whether blocks of 64 queries beat blocks of 128: if those leave SMs idle, and on a dense causal diagonal.

    512 dense tokens at head_dim 128 on an H200: 14.2 instead of 20.6 microseconds, see TUNING.md.
    """
    n_blocks = -(-q_len // TILE_SIDE) * n_batch_heads
    per_sm = CAUSAL_BLOCKS if options.causal and not has_layout else 1
    return n_blocks <= per_sm * num_sms(options.device)


# fmt: off
@triton.jit(do_not_specialize=["seed", "n_heads", "n_batch_heads", "n_lines", "q_len", "kv_len", "threshold"])
def forward_kernel(
    # inputs
    q_ref, k_ref, v_ref, records_ptr, indices_ptr, ids_ptr, words_ptr, kv_lengths_ptr, seed_ptr, seed: tl.int64,
    sinks_ptr, slopes_ptr, tables_ptr, pair_bias_ptr,
    # outputs without gaps, out in the memory order of q
    out_ptr, lse_ptr,
    # arguments.Strides
    strides,
    # sizes: n_batch_heads = batch * heads, n_lines = tile rows (blocks of queries without a layout)
    n_heads, n_batch_heads, n_lines, q_len, kv_len, scale_log2, threshold, keep_scale, cap,
    # arguments.Constants
    C: tl.constexpr,
):
    DIM: tl.constexpr = C.DIM
    DIM_V: tl.constexpr = C.DIM_V
    BLOCK_Q: tl.constexpr = C.BLOCK_Q
    BLOCK_KV: tl.constexpr = C.BLOCK_KV
    PRECISION: tl.constexpr = C.PRECISION
    HAS_LAYOUT: tl.constexpr = records_ptr is not None
    LIMITED: tl.constexpr = kv_lengths_ptr is not None
    STEPS: tl.constexpr = C.TILE // BLOCK_KV
    if HAS_LAYOUT:
        batch_head, p_record, i_split = find_work_record(
            records_ptr, strides.records, tl.program_id(0), n_lines, n_heads, n_batch_heads, C.TILE // BLOCK_Q, 1
        )
        q_start = tl.load(p_record + NUMBER) * C.TILE + i_split * BLOCK_Q
    else:
        # last rows first: with CAUSAL they are the longest
        batch_head = tl.program_id(0) // n_lines
        q_start = (n_lines - 1 - tl.program_id(0) % n_lines) * BLOCK_Q
    i_batch = batch_head // n_heads
    i_head = batch_head % n_heads
    i_kv_head = i_head // C.GROUP
    limit = clamped_kv_len(kv_lengths_ptr, i_batch, kv_len)

    # [BLOCK_Q, DIM]
    b_q = load_tile(
        q_ref, strides.q, i_batch, i_head, q_start, q_len, C.HEAD_DIM, BLOCK_Q, DIM, TMA=C.TMA, LIMITED=False
    )
    b_out = tl.zeros([BLOCK_Q, DIM_V], tl.float32)
    b_lost = tl.zeros([BLOCK_Q, DIM_V], tl.float32)
    # finite, since -inf - (-inf) = nan, and below every score
    b_max = tl.full([BLOCK_Q], -3.0e38, tl.float32)
    b_sum = tl.zeros([BLOCK_Q], tl.float32)
    if sinks_ptr is not None:
        b_max, b_sum = with_sink(b_max, b_sum, sinks_ptr, i_head)
    if C.DROPOUT:
        b_seed = load_seed(seed_ptr, seed)
    factor = 1.0 if C.MODIFIES_SCORES else scale_log2
    slope = load_slope(slopes_ptr, i_head)

    p_tiles = p_record if HAS_LAYOUT else None
    first, end, n_full = kv_steps(
        indices_ptr, p_tiles, q_start, q_len, kv_len, limit, C.CAUSAL, BLOCK_Q, BLOCK_KV, C.TILE
    )
    kv_next = tile_start(indices_ptr, first, BLOCK_KV, C.TILE) if HAS_LAYOUT else 0
    for i_step in tl.range(first, end):
        kv_start, is_partial, kv_next = begin_step(indices_ptr, kv_next, i_step, i_step >= n_full, BLOCK_KV, C.TILE)
        # [BLOCK_KV, DIM]
        b_k = load_tile(
            k_ref, strides.k, i_batch, i_kv_head, kv_start, limit, C.HEAD_DIM, BLOCK_KV, DIM, TMA=C.TMA, LIMITED=LIMITED
        )
        # [BLOCK_Q, BLOCK_KV]
        b_scores = with_sign(product(b_q, tl.trans(b_k), PRECISION), C.SIGN)
        if C.MODIFIES_SCORES:
            b_scores, _ = apply_score_mods(
                b_scores, scale_log2, cap, slopes_ptr, slope, tables_ptr, pair_bias_ptr, strides, i_batch, i_head,
                i_tile=i_step // STEPS, q_start=q_start, kv_start=kv_start, q_len=q_len, kv_len=kv_len,
                CELL_Q=C.CELL_Q, CELL_KV=C.CELL_KV, BLOCK_Q=BLOCK_Q, BLOCK_KV=BLOCK_KV, TRANSPOSED=False,
            )
        if is_partial:
            m_pairs = attending_pairs(
                words_ptr, bitmask_of(ids_ptr, i_step // STEPS), q_start, kv_start, q_len, kv_len, limit,
                C.CAUSAL, BLOCK_Q, BLOCK_KV, C.TILE, False,
            )
            b_scores = tl.where(m_pairs, b_scores, float("-inf"))
        if LIMITED and HAS_LAYOUT:
            m_kv = kv_start + tl.arange(0, BLOCK_KV) < limit
            b_scores = tl.where(m_kv[None, :], b_scores, float("-inf"))
        b_p, b_max, b_sum, b_out, b_lost = softmax_step(b_scores, factor, b_max, b_sum, b_out, b_lost)
        if C.DROPOUT:
            m_kept = kept_pairs(b_seed, threshold, i_batch, i_head, q_start, kv_start, BLOCK_Q, BLOCK_KV, False)
            b_p = where_kept(m_kept, b_p, keep_scale)
        # [BLOCK_KV, DIM_V]
        b_v = load_tile(
            v_ref, strides.v, i_batch, i_kv_head, kv_start, limit, C.V_DIM, BLOCK_KV, DIM_V, TMA=C.TMA, LIMITED=LIMITED
        )
        b_out, b_lost = add_product(b_p.to(b_v.dtype), b_v, b_out, b_lost, PRECISION)

    # recomputed: kept over the loop it would cost a register
    batch_head = i_batch * n_heads + i_head
    m_empty = b_sum == 0.0
    b_sum = tl.where(m_empty, 1.0, b_sum)
    b_out = b_out * (keep_scale / b_sum)[:, None]
    p_out, out_stride = result_rows(out_ptr, batch_head, n_heads, q_len, C.V_DIM, C.Q_BY_TOKEN)
    store_tile(p_out, out_stride, q_start, q_len, b_out, C.V_DIM, BLOCK_Q, DIM_V)
    b_lse = tl.where(m_empty, float("-inf"), (b_max + tl.math.log2(b_sum)) * LN_2)
    o_q = q_start + tl.arange(0, BLOCK_Q)
    tl.store(lse_ptr + batch_head.to(tl.int64) * q_len + o_q, b_lse, mask=o_q < q_len)
# fmt: on


@functools.lru_cache(maxsize=1024)
def forward_launch(specs: TensorSpecs, lists: PlanSpecs, options: Options) -> tuple[Memory, Memory, Launch]:
    """Memory of out and lse, and the launch, for calls with these specs and options."""
    q, k, v = specs.tensors
    (batch, heads, q_len, head_dim), (_, kv_heads, kv_len, v_dim) = q.shape, v.shape
    record_shape, _ = lists
    tma = wants_descriptors(options.major, q, k, v)
    fixed = constants(head_dim, v_dim, heads // kv_heads, tma, options).with_orders(q, k, v)
    dim, dim_v = fixed.DIM, columns_of_values(fixed.DIM, fixed.DIM_V, q.dtype.itemsize, options.major)
    narrow = options.tile < TILE_SIDE
    narrow = narrow or narrow_pays(q_len, batch * heads, options, has_layout=record_shape is not None)
    chosen = config(tuning_of(fixed, q.dtype.itemsize, options), narrow=narrow).within(options.tile)
    n_lines = record_shape[2] if record_shape else -(-q_len // chosen.block_q)
    split = options.tile // chosen.block_q if record_shape else 1
    rest = {
        "strides": strides_of(specs, options, record_shape),
        "n_heads": heads,
        "n_batch_heads": batch * heads,
        "n_lines": n_lines,
        "q_len": q_len,
        "kv_len": kv_len,
        "scale_log2": scale_log2(options.scale),
        **dropout_arguments(options.dropout_p),
        **softcap_arguments(options, abs(options.scale)),
        "C": fixed._replace(DIM_V=dim_v, SIGN=sign(options.scale)).with_blocks(chosen),
        **chosen.launch_options,
    }
    descriptor_factories = {}
    if tma:
        descriptor_factories["q_ref"] = DescriptorFactory(q, (1, 1, chosen.block_q, dim))
        descriptor_factories["k_ref"] = DescriptorFactory(k, (1, 1, chosen.block_kv, dim))
        descriptor_factories["v_ref"] = DescriptorFactory(v, (1, 1, chosen.block_kv, dim_v))
    return (
        memory_in_order_of(q, v_dim),
        contiguous(torch.float32, batch, heads, q_len),
        Launch(forward_kernel, (n_lines * split * batch * heads,), rest, descriptor_factories),
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
    scores: Scores | None = None,
    specs: TensorSpecs | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out (batch, heads, q_len, v_head_dim) in q's dtype and memory order, and lse (batch, heads, q_len) float32.

    specs  of q, k and v, if known
    """
    if q.numel() == 0:
        return new_in_order_of(q, v.shape[3]), q.new_empty(*q.shape[:3], dtype=torch.float32)
    if split_kv.is_suitable(q.shape, k.shape[2], dropout_p):
        return split_kv.forward(q, k, v, plan, kv_lengths, scale, causal, scores, specs)
    seeds = seed_arguments(seed, dropout_p, q.device)
    options = options_of(q, plan, scale, causal, dropout_p, kv_lengths, seeds[0])
    added: tuple[torch.Tensor | None, ...] = (None, None, None, None)
    if scores is not None:
        added = scores.sinks, scores.alibi_slopes, scores.tables(0, base_2=True), scores.pair_bias
        options = options._replace(scores=score_specs_of(scores, added[2]))
    lists = tile_lists(plan, ROW_LISTS)
    out_memory, lse_memory, launch = forward_launch(specs or specs_of(q, k, v), plan_specs_of(lists), options)
    empty = allocator(q)
    out, lse = empty(*out_memory), empty(*lse_memory)
    launch(q, k, v, *lists, kv_lengths, *seeds, *added, out, lse)
    return out, lse
