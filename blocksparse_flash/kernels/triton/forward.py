"""How does the portable Triton forward run? out = softmax(scale q k^T on the layout) v, and lse; sm80 and later.

One program owns BLOCK_Q queries of one head and walks the tiles of its row: the partial ones (masked), then the full
ones (neither masked nor bounds-checked). Empty tiles are never visited. With m the running maximum of the base-2 scores
and l the running sum, a row without keys keeps l = 0 and writes out 0, lse -inf. Few queries over many keys: decode.py. Options of the scores are compiled in
where a call has them: they change a tile of scores before its mask (score_tile.py); a sink is where m and l start.

Knows: a plan's tensors, strides, launch configurations. Does not know: layouts, autograd, how a backend is chosen.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from ...runtime.launch import Config, DescriptorFactory, Launch, Memory, allocator, contiguous, num_sms
from ...runtime.tensor_spec import TensorSpecs, specs_of
from ...score_mods import Scores
from ..arguments import TILE as TILE_SIDE
from ..arguments import (
    Options,
    PlanSpecs,
    columns_of_values,
    constants,
    device_seed,
    options_of,
    plan_specs_of,
    scaling,
    score_arguments,
    score_specs_of,
    walk,
    walk_strides,
    wants_descriptors,
)
from . import split_kv
from .score_mods import changed_scores
from .tile import (
    LN_2,
    LOG2_E,
    TILE,
    WITHOUT_SIGN,
    add_product,
    attending_pairs,
    dense_keys,
    find_record,
    kept_pairs,
    load_tile,
    product,
    store_tile,
    tile_start,
    with_sign,
)

# up to so many blocks of 128 queries a multiprocessor, of a causal call without a layout, halves are done sooner
TRIANGLE_BLOCKS = 8


def config(
    dim: int,
    element_size: int,
    *,
    major: int,
    tma: bool,
    dropout: bool,
    shared_memory: int,
    changed: bool = False,
    narrow: bool = False,
) -> Config:
    """The launch table: dim is the larger padded head dimension, narrow says that blocks of 64 queries pay.

    H200, (1, 2048 / dim, 16384, dim) bf16 dense, TFLOP/s. 128, tma: 128x64 4 warps 2 stages (two programs a
    multiprocessor) 551; 8 warps 3 stages 484, 128x128 8 warps 482, 128x32 441. 64, tma: 128x64 4 warps 3 stages 438;
    4 stages 428, 8 warps 427, 128x128 324. Dropout, milliseconds of (256, 2, 1024, 32), (1, 32, 8192, 64), (1, 16, 8192, 128):
    64x64 4 warps 0.59, 2.65, 1.65; 128x64 4 warps 0.62, 2.60, 1.92 (2 stages, spills); 128x64 8 warps 0.63, 2.80, 2.09; without
    dropout 0.25, 1.25, 1.01. Pointers: 8 warps at 128, 4 spill. float32: 4 warps spill. sm100, where nothing was run, and changed scores (softcap, ALiBi, bias), which were not: what is
    nearest and does not spill.
    """
    small = shared_memory < 160 * 1024
    if element_size == 4:
        return Config(64, 32, 8, 2) if dim <= 64 else Config(32, 32, 8, 1 if dim > 128 and small else 2)
    if dim <= 128 and dropout and major == 9 and tma and not changed:
        return Config(128 if 32 < dim <= 64 else 64, 64, 4, 3)
    if dim <= 128 and (dropout or changed):
        return Config(128, 64, 8, 2)
    if dim <= 128 and narrow and major == 9:
        return Config(64, 64, 4, 3)
    if dim <= 64:
        return Config(128, 64, 8 if major == 10 else 4, 3)
    if dim <= 128 and major == 10 and not tma:
        return Config(128, 32, 8, 3)
    if dim <= 128:
        return Config(128, 64, 4, 2) if tma else Config(128, 64, 8, 2 if small else 3)
    return Config(64, 32, 4, 1) if small else Config(128, 64, 8, 2)


def narrow_pays(q_len: int, n_axes: int, options: Options, *, has_layout: bool) -> bool:
    """Whether blocks of 64 queries are done sooner than those of 128: if these leave SMs idle, and on a diagonal.

    H200, hidden size 2048, microseconds of the GPU alone, 128 and 64 queries; dense, causal, local, butterfly:
        512 tokens   128  20.6 12.8  21.3 12.8  21.0 13.2  17.1 11.9    64  14.2 12.7  14.6 12.5  14.6 13.1  13.1 11.8
        1,024        128  34.9 24.4  35.4 24.1  29.7 24.8  21.1 17.3    64  28.8 35.1  28.7 25.4  28.8 32.4  20.2 24.3
        2,048        128  75.3 75.8  74.3 58.4  47.7 49.0  32.4 33.7    64  90.3 93.5  74.0 63.1  58.5 58.5  38.9 40.4
        8,192        128  1008 1020  614  567   168  177   141  149     64  1257 1265  714  674   211  208   175  174
    Causal at 16,384, called over and over, TFLOP/s: 128  499 485    64  417 412.
    """
    n_blocks, n_multiprocessors = -(-q_len // TILE_SIDE) * n_axes, num_sms(options.device)
    return n_blocks <= (TRIANGLE_BLOCKS if options.causal and not has_layout else 1) * n_multiprocessors


# fmt: off
@triton.jit(do_not_specialize=["n_heads", "n_axes", "n_lines", "q_len", "kv_len", "threshold"])
def forward_kernel(
    # inputs
    q_ref, k_ref, v_ref, items_ptr, indices_ptr, ids_ptr, words_ptr, kv_lengths_ptr, seed_ptr,
    sinks_ptr, slopes_ptr, tables_ptr,
    # outputs, contiguous
    out_ptr, lse_ptr,
    # strides in elements: (batch, head, row)
    q_strides, k_strides, v_strides, items_strides, tables_strides,
    # sizes: n_axes = batch * heads, n_lines = tile rows (blocks of queries without a layout)
    n_heads, n_axes, n_lines, q_len, kv_len, scale_log2, threshold, keep_scale, cap,
    # compile time
    SIGN: tl.constexpr, GROUP: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr, HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr,
    PIECE_Q: tl.constexpr, PIECE_KV: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
):
    HAS_LAYOUT: tl.constexpr = items_ptr is not None
    LIMITED: tl.constexpr = kv_lengths_ptr is not None
    CHANGED: tl.constexpr = cap is not None or slopes_ptr is not None or tables_ptr is not None
    STEPS: tl.constexpr = TILE // BLOCK_KV
    if HAS_LAYOUT:
        i_axis, p_record, i_part = find_record(
            items_ptr, items_strides, tl.program_id(0), n_lines, n_heads, n_axes, TILE // BLOCK_Q, 1
        )
        q_start = tl.load(p_record) * TILE + i_part * BLOCK_Q
    else:
        # without a layout the last rows are the longest, if any
        i_axis = tl.program_id(0) // n_lines
        q_start = (n_lines - 1 - tl.program_id(0) % n_lines) * BLOCK_Q
    i_batch = i_axis // n_heads
    i_head = i_axis % n_heads
    i_kv_head = i_head // GROUP
    limit = kv_len
    if LIMITED:
        # a length on the GPU is never read on the host: out of range is clamped here
        limit = tl.minimum(tl.maximum(tl.load(kv_lengths_ptr + i_batch), 0), kv_len).to(tl.int32)

    # [BLOCK_Q, DIM]
    b_q = load_tile(q_ref, q_strides, i_batch, i_head, q_start, q_len, HEAD_DIM, BLOCK_Q, DIM, TMA, True, False)
    b_out = tl.zeros([BLOCK_Q, DIM_V], tl.float32)
    b_lost = tl.zeros([BLOCK_Q, DIM_V], tl.float32)
    # a row which has met no key yet: finite, since -inf - (-inf) = nan, and below every score
    b_max = tl.full([BLOCK_Q], -3.0e38, tl.float32)
    b_sum = tl.zeros([BLOCK_Q], tl.float32)
    if sinks_ptr is not None:
        # a key without a value, which every row meets first; a sink of -inf is none
        sink = tl.load(sinks_ptr + i_head) * LOG2_E
        b_max = tl.maximum(b_max, sink)
        b_sum += tl.where(sink == float("-inf"), 0.0, 1.0)
    factor = scale_log2
    slope = 0.0
    if CHANGED:
        factor = 1.0
        if slopes_ptr is not None:
            slope = tl.load(slopes_ptr + i_head) * LOG2_E

    # steps of BLOCK_KV keys: the partial tiles of the row, then the full ones
    if HAS_LAYOUT:
        first = tl.load(p_record + 1) * STEPS
        end = first + tl.load(p_record + 2) * STEPS
        kv_next = tile_start(indices_ptr, first, BLOCK_KV, STEPS)
    else:
        n_full, end = dense_keys(q_start, q_len, kv_len, limit, CAUSAL, BLOCK_Q, BLOCK_KV)
        first = 0
        kv_next = 0
    for i_step in tl.range(first, end):
        # the next index is loaded a step ahead: loaded in its own step it would take a pipeline stage from the keys
        kv_start = kv_next
        if HAS_LAYOUT:
            is_partial = kv_start < 0
            kv_start = kv_start & WITHOUT_SIGN
            kv_next = tile_start(indices_ptr, i_step + 1, BLOCK_KV, STEPS)
        else:
            is_partial = i_step >= n_full
            kv_next = kv_start + BLOCK_KV
        # [BLOCK_KV, DIM]
        b_k = load_tile(k_ref, k_strides, i_batch, i_kv_head, kv_start, limit, HEAD_DIM, BLOCK_KV, DIM, TMA, True, LIMITED)
        # [BLOCK_Q, BLOCK_KV]
        b_scores = with_sign(product(b_q, tl.trans(b_k), PRECISION), SIGN)
        if CHANGED:
            b_scores, _ = changed_scores(
                b_scores, scale_log2, cap, slopes_ptr, slope, tables_ptr, tables_strides, i_batch, i_head, i_step // STEPS,
                q_start, kv_start, kv_len - q_len, PIECE_Q, PIECE_KV, BLOCK_Q, BLOCK_KV, False,
            )
        if is_partial:
            i_bitmask = 0
            if HAS_LAYOUT:
                i_bitmask = tl.load(ids_ptr + i_step // STEPS)
            m_pairs = attending_pairs(
                words_ptr, i_bitmask, q_start, kv_start, q_len, kv_len, limit,
                HAS_LAYOUT, CAUSAL, BLOCK_Q, BLOCK_KV, False,
            )
            b_scores = tl.where(m_pairs, b_scores, float("-inf"))
        if LIMITED and HAS_LAYOUT:
            m_kv = kv_start + tl.arange(0, BLOCK_KV) < limit
            b_scores = tl.where(m_kv[None, :], b_scores, float("-inf"))
        b_new_max = tl.maximum(b_max, tl.max(b_scores, 1) * factor)
        b_p = tl.math.exp2(b_scores * factor - b_new_max[:, None])
        b_decay = tl.math.exp2(b_max - b_new_max)
        b_sum = b_sum * b_decay + tl.sum(b_p, 1)
        b_out = b_out * b_decay[:, None]
        b_lost = b_lost * b_decay[:, None]
        b_max = b_new_max
        if DROPOUT:
            m_kept = kept_pairs(seed_ptr, threshold, i_batch, i_head, q_start, kv_start, BLOCK_Q, BLOCK_KV, False)
            b_p = tl.where(m_kept, b_p, 0.0)
        # [BLOCK_KV, DIM_V]
        b_v = load_tile(v_ref, v_strides, i_batch, i_kv_head, kv_start, limit, V_DIM, BLOCK_KV, DIM_V, TMA, True, LIMITED)
        b_out, b_lost = add_product(b_p.to(b_v.dtype), b_v, b_out, b_lost, PRECISION)

    # computed anew: kept over the loop it would cost a register
    i_axis = i_batch * n_heads + i_head
    m_empty = b_sum == 0.0
    b_sum = tl.where(m_empty, 1.0, b_sum)
    b_out = b_out * (keep_scale / b_sum)[:, None]
    store_tile(out_ptr + i_axis.to(tl.int64) * q_len * V_DIM, q_start, q_len, b_out, V_DIM, BLOCK_Q, DIM_V)
    b_lse = tl.where(m_empty, float("-inf"), (b_max + tl.math.log2(b_sum)) * LN_2)
    o_q = q_start + tl.arange(0, BLOCK_Q)
    tl.store(lse_ptr + i_axis.to(tl.int64) * q_len + o_q, b_lse, mask=o_q < q_len)
# fmt: on


@functools.lru_cache(maxsize=1024)
def prepare(specs: TensorSpecs, walked: PlanSpecs, options: Options) -> tuple[Memory, Memory, Launch]:
    """The memory of the results of a call on such q, k and v, and how it is launched."""
    q, k, v = specs.tensors
    (batch, heads, q_len, head_dim), (_, kv_heads, kv_len, v_dim) = q.shape, v.shape
    items, _ = walked
    tma = wants_descriptors(options.major, q, k, v)
    fixed = constants(head_dim, v_dim, heads // kv_heads, tma, options)
    dim = fixed["DIM"]
    fixed["DIM_V"] = dim_v = columns_of_values(dim, fixed["DIM_V"], q.dtype.itemsize, options.major)
    chosen = config(
        max(dim, dim_v),
        q.dtype.itemsize,
        major=options.major,
        tma=tma,
        dropout=options.dropout_p > 0,
        shared_memory=options.shared_memory,
        changed=options.changes_scores,
        narrow=narrow_pays(q_len, batch * heads, options, has_layout=items is not None),
    )
    n_lines = items[2] if items else -(-q_len // chosen.block_q)
    split = TILE_SIDE // chosen.block_q if items else 1
    rest = {
        "q_strides": q.strides[:3],
        "k_strides": k.strides[:3],
        "v_strides": v.strides[:3],
        "items_strides": walk_strides(items),
        "n_heads": heads,
        "n_axes": batch * heads,
        "n_lines": n_lines,
        "q_len": q_len,
        "kv_len": kv_len,
        **fixed,
        **scaling(options.scale),
        **score_arguments(options, 0, scale=abs(options.scale)),
        **chosen.arguments,
    }
    descriptor_factories = {}
    if tma:
        descriptor_factories["q_ref"] = DescriptorFactory(q, (1, 1, chosen.block_q, dim))
        descriptor_factories["k_ref"] = DescriptorFactory(k, (1, 1, chosen.block_kv, dim))
        descriptor_factories["v_ref"] = DescriptorFactory(v, (1, 1, chosen.block_kv, dim_v))
    return (
        contiguous(q.dtype, batch, heads, q_len, v_dim),
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
    """out (batch, heads, q_len, v_head_dim) in q's type and lse (batch, heads, q_len) float32, both contiguous.

    kind  that of q, k and v, where it is known already
    """
    if split_kv.takes(q.shape, k.shape[2], dropout_p):
        return split_kv.forward(q, k, v, plan, kv_lengths, scale, causal, scores, specs)
    if q.numel() == 0:
        return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(*q.shape[:3], dtype=torch.float32)
    seed = device_seed(seed, q.device)
    options = options_of(q, scale, causal, dropout_p, kv_lengths, seed)
    added: tuple[torch.Tensor | None, ...] = (None, None, None)
    if scores is not None:
        added = scores.sinks, scores.alibi_slopes, scores.tables(0, base_2=True)
        options = options._replace(scores=score_specs_of(scores, added[2]))
    walked = walk(plan, 0)
    out_memory, lse_memory, launch = prepare(specs or specs_of(q, k, v), plan_specs_of(walked), options)
    empty = allocator(q)
    out, lse = empty(*out_memory), empty(*lse_memory)
    launch(q, k, v, *walked, kv_lengths, seed, *added, out, lse)
    return out, lse
