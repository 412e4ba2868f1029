"""Hopper backward (sm90) in Gluon, warp-specialized: dQ, dK and dV from out, LSE and their gradients.

    p = exp(scale q k^T - lse)      delta = rowsum(dO * O) - dLSE
    dp = dO v^T                     ds = p * (dp - delta)
    dv = p^T dO                     dk = scale ds^T q               dq = scale ds k

q, dO (batch, heads, q_len, head_dim | v_head_dim), k, v (batch, kv_heads, kv_len, ...). Each score is computed once, in
five products per tile.

There is one program per SM. The tile scheduler assigns it tile columns (128 keys of a KV head), and it iterates over
their steps: BLOCK_Q queries each, of every query head of the group. A producer warp loads K and V, then Q, LSE, dO and
delta of each step (backward_producer.py). Two consumer warpgroups (backward_consumer.py) have 64 keys each:

    wgmma  s^T = k q^T, dp^T = v dO^T           scores are transposed: [keys, queries]
           p, ds in registers; ds also to shared memory, since dq sums over the keys of both warpgroups
    wgmma  dv += p^T dO, dk += ds^T q           in registers until the tile column ends
    wgmma  dq = ds k                            added to a float32 sum in global memory

TMA (if q or v has 128 columns and neither has 96) or atomics from registers add to the sum of dQ, in no fixed order, so
the last bits of dQ vary from run to run. The preprocess launch zeroes it and computes LSE and delta; the postprocess
launch scales and converts it (backward_postprocess.py).

Long tile columns are split (schedule.py): each program computes an equal share of the steps of every query head and
writes float32 dK and dV to a workspace, which another launch sums in order (triton/combine_splits.py).

With grouped heads, in causal calls and in layouts with few long tile columns, a work tile is a tile column for one
query head, which adds its dK and dV to float32 sums with atomics (schedule.sums_over_heads). The last bits of dK and dV
then vary too.

For deterministic calls, for few tiles per row and for few long tile columns (schedule.is_dq_separate), this kernel
leaves dQ out, and another launch computes it (backward_dq.py), with two more products per tile. Beyond head_dim 128,
registers do not suffice: wide_backward.py has the kernels.

For the gradient of a block bias, the kernel that computes dQ also stores sums of ds, a few for each tile
(registers.store_warp_sums).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ...plan_format import COL_LISTS, ROW_LISTS
from ...plan_format import TILE as TILE_SIDE
from ...runtime.launch import Launch, Memory, allocator, contiguous, num_sms
from ...runtime.tensor_spec import TensorSpecs, in_order_of
from ...score_mods import Scores
from ..arguments import Options, PlanSpecs, options_of, plan_specs_of, strides_of_records, tile_lists
from ..inputs import BackwardInputs
from ..schedule import (
    MAX_JOINT_HEAD_DIM,
    WHOLE,
    Split,
    are_uneven,
    backward_columns,
    interleaved_heads,
    is_dq_separate,
    needs_tile_counter,
    split_of,
    sums_over_heads,
)
from ..triton import backward as triton_backward
from ..triton.backward_preprocess import preprocess_launch
from ..triton.combine_splits import sum_splits
from ..triton.tile import TILE
from . import wide_backward
from .backward_consumer import DQ_SUM_COLS, Staging, mma
from .backward_dq import DqLaunches, dq_launches
from .backward_postprocess import postprocess_launch
from .backward_producer import (
    WORK_TILE_STRIDE,
    Descriptors,
    DOutBuffers,
    KVBuffers,
    Pipelines,
    Pointers,
    QBuffers,
    Sizes,
    load,
)
from .barriers import Pipeline, allocate_mbarriers, allocate_pipeline
from .registers import WARP_ROWS, reinterpret
from .score_mods import PLAIN, ModSpecs, ScoreMods, bias_table, mod_specs_of
from .tma import (
    DescriptorFactory,
    allocate_rows,
    allocate_tail,
    block_columns,
    has_tail,
    tma_padded_memory,
    to_tma_loadable,
)
from .work_tiles import WORK_TILE_STAGES

# buffers of queries and dO
STAGES = gl.constexpr(2)
# registers per thread of the second consumer and of the producer warp; Triton gives the first consumer, the default
# partition, those that are left
REGISTERS = gl.constexpr(240)
PRODUCER_REGISTERS = gl.constexpr(32)


@dataclasses.dataclass(frozen=True)
class Config:
    """One launch configuration.

    block_q    queries per step
    kv_stages  buffers of K and V; with 2, the next tile column loads during this one
    dq_from_registers  each consumer computes half of the dq of a step and adds it with atomics. False: they take turns,
                       one computes the whole dq of a step, and TMA adds it; only with block_q = 64 and without 96
                       columns
    """

    block_q: int = 64
    kv_stages: int = 1
    dq_from_registers: bool = False


# by the larger number of columns of q and v
CONFIGS = {
    # a second K/V stage or 128 queries do not fit into shared memory (H200: dense 661 TFLOP/s)
    128: Config(block_q=64, kv_stages=1),
    # H200, dense and butterfly: 556 and 426 TFLOP/s; 64 queries and 3 stages of them: 513 and 400
    64: Config(block_q=128, kv_stages=2, dq_from_registers=True),
}


# with a softcap, whose tanh stays in registers until ds is computed, and with slopes if there is a block bias, or if dq
# has a launch of its own: steps of 128 queries would spill 2,800 and 3,100 to 5,700 bytes
FEWER_QUERIES = {128: CONFIGS[128], 64: Config(block_q=64, kv_stages=2, dq_from_registers=True)}
# if q or v has 96 columns
WITH_TAIL = Config(block_q=64, kv_stages=1, dq_from_registers=True)


def config(columns: tuple[int, int], has_fewer_queries: bool) -> Config:
    """The launch configuration for the columns of q and v. TUNING.md has the candidates that lost.

    has_fewer_queries  see FEWER_QUERIES
    """
    if 96 in columns:
        return WITH_TAIL
    return (FEWER_QUERIES if has_fewer_queries else CONFIGS)[max(columns)]


# ---- shared memory ----


@gluon.constexpr_function
def bits_of(dtype):
    """Bits of an element."""
    return dtype.primitive_bitwidth


@gluon.constexpr_function
def bytes_of(shape, dtype):
    """Bytes of a tensor."""
    return math.prod(shape) * bits_of(dtype) // 8


@gluon.constexpr_function
def blocks_of(n_bytes, desc):
    """Shape of n_bytes as blocks of a descriptor."""
    shape = desc.block_type.shape
    return [n_bytes // bytes_of(shape, desc.dtype), *shape]


@gluon.jit
def staging_buffer(buffers, desc, N_TAKEN: gl.constexpr):
    """Buffer from which TMA stores dk or dv: in `buffers` after its first N_TAKEN bytes if it fits, else new memory.

    buffers  memory that only the steps of a work tile use
    """
    blocks: gl.constexpr = blocks_of(bytes_of(buffers.shape, buffers.dtype), desc)
    i_block: gl.constexpr = -(-N_TAKEN // bytes_of(desc.block_type.shape, desc.dtype))
    if blocks[0] > i_block:
        return reinterpret(buffers, blocks, desc.layout, desc.dtype).index(i_block)
    else:
        return gl.allocate_shared_memory(desc.dtype, desc.block_type.shape, desc.layout)


# ---- kernel ----


@gluon.jit(
    do_not_specialize=[
        "n_heads", "heads_per_kv", "n_batch_heads", "n_tile_cols", "q_len", "kv_len", "n_padded", "n_split_lines",
        "num_splits", "n_interleaved",
    ]
)  # fmt: skip
def hopper_backward_kernel(
    # TMA descriptors; dq_sum_desc is None if the consumers add dQ from registers, or another launch computes it
    q_desc, k_desc, v_desc, dout_desc, lse_desc, delta_desc, dq_sum_desc, dk_desc, dv_desc,
    # backward_producer.Pointers; (batch, head) strides of the records, in elements
    ptrs, record_strides,
    # backward_producer.Sizes, one by one, since Triton would specialize the integers of a tuple
    n_heads, heads_per_kv, n_batch_heads, n_tile_cols, q_len, kv_len, n_padded, n_split_lines, num_splits,
    n_interleaved, scale_log2, scale,
    # softcap and strides of the bias, see score_mods.ScoreMods
    cap, bias_strides,
    # GROUP: query heads of a work tile; COLS, COLS_V: columns of q and of v, padded
    CAUSAL: gl.constexpr, GROUP: gl.constexpr, KV_STAGES: gl.constexpr, COLS: gl.constexpr, COLS_V: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_desc.dtype
    BLOCK_Q: gl.constexpr = q_desc.block_type.shape[2]
    q_buffers = allocate_rows(q_desc, STAGES, COLS)
    dout_buffers = allocate_rows(dout_desc, STAGES, COLS_V)
    k_buffers = allocate_rows(k_desc, KV_STAGES, COLS)
    v_buffers = allocate_rows(v_desc, KV_STAGES, COLS_V)
    q_tails, dout_tails, k_tails, v_tails = None, None, None, None
    if has_tail(q_desc, COLS):
        q_tails, k_tails = allocate_tail(q_desc, STAGES), allocate_tail(k_desc, KV_STAGES)
    if has_tail(v_desc, COLS_V):
        dout_tails, v_tails = allocate_tail(dout_desc, STAGES), allocate_tail(v_desc, KV_STAGES)
    # placeholders, never used
    ds_buffers, dq_buffers, dk_buffer, dv_buffer = q_buffers, q_buffers, k_buffers, v_buffers
    if ptrs.dq_sum_ptr is not None:
        ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, BLOCK_Q], dtype)
        ds_buffers = gl.allocate_shared_memory(dtype, [2, TILE, BLOCK_Q], ds_layout)
        if dq_sum_desc is not None:
            dq_buffers = gl.allocate_shared_memory(gl.float32, dq_sum_desc.block_type.shape, dq_sum_desc.layout)
    # with a tail, dk and dv are staged in the buffers of K and V
    if k_tails is None and v_tails is None:
        if ptrs.dq_sum_ptr is None:
            dk_buffer = gl.allocate_shared_memory(dtype, dk_desc.block_type.shape, dk_desc.layout)
            dv_buffer = gl.allocate_shared_memory(dtype, dv_desc.block_type.shape, dv_desc.layout)
        else:
            dk_buffer = staging_buffer(ds_buffers, dk_desc, 0)
            if dq_sum_desc is not None:
                dv_buffer = staging_buffer(dq_buffers, dv_desc, 0)
            else:
                dv_buffer = staging_buffer(ds_buffers, dv_desc, bytes_of(dk_desc.block_type.shape, dtype))
    lse_buffers = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_Q], lse_desc.layout)
    delta_buffers = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_Q], delta_desc.layout)
    work_tile_ints = gl.allocate_shared_memory(
        gl.int32, [WORK_TILE_STAGES * WORK_TILE_STRIDE, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    # not by allocate_pipeline: named tuples that jitted functions return lose the names of their fields
    kv = Pipeline(
        buffers=KVBuffers(k=k_buffers, k_tail=k_tails, v=v_buffers, v_tail=v_tails),
        full=allocate_mbarriers(KV_STAGES, 1),
        empty=allocate_mbarriers(KV_STAGES, 2),
    )
    q = Pipeline(
        buffers=QBuffers(q=q_buffers, q_tail=q_tails, lse=lse_buffers),
        full=allocate_mbarriers(STAGES, 1),
        empty=allocate_mbarriers(STAGES, 2),
    )
    dout = Pipeline(
        buffers=DOutBuffers(dout=dout_buffers, dout_tail=dout_tails, delta=delta_buffers),
        full=allocate_mbarriers(STAGES, 1),
        empty=allocate_mbarriers(STAGES, 2),
    )
    work_tiles = allocate_pipeline(work_tile_ints, WORK_TILE_STAGES, CONSUMERS=2)
    pipelines = Pipelines(work_tiles=work_tiles, kv=kv, q=q, dout=dout)
    fence_async_shared()
    staging = Staging(ds=ds_buffers, dq=dq_buffers, dk=dk_buffer, dv=dv_buffer)
    descs = Descriptors(
        q=q_desc, k=k_desc, v=v_desc, dout=dout_desc, lse=lse_desc, delta=delta_desc, dq_sum=dq_sum_desc, dk=dk_desc,
        dv=dv_desc,
    )  # fmt: skip
    sizes = Sizes(
        n_heads=n_heads, heads_per_kv=heads_per_kv, n_batch_heads=n_batch_heads, n_tile_cols=n_tile_cols, q_len=q_len,
        kv_len=kv_len, n_padded=n_padded, scale=scale, n_split_lines=n_split_lines, num_splits=num_splits,
        n_interleaved=n_interleaved,
    )  # fmt: skip
    mods = ScoreMods(
        factor=scale_log2, cap=cap, sinks_ptr=None, slopes_ptr=ptrs.slopes_ptr, bias_ptr=ptrs.bias_ptr,
        bias_strides=bias_strides,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (mma, (descs, pipelines, staging, ptrs, record_strides, sizes, mods, 0, CAUSAL, GROUP)),
            (mma, (descs, pipelines, staging, ptrs, record_strides, sizes, mods, 1, CAUSAL, GROUP)),
            (load, (descs, pipelines, ptrs, record_strides, sizes, CAUSAL, GROUP, BLOCK_Q)),
        ],
        [4, 1],
        [REGISTERS, PRODUCER_REGISTERS],
    )


# ---- launches ----


class BackwardLaunches(NamedTuple):
    """The launches and the memory of a call; None for what it does not need.

    cols         the main kernel
    sum_splits   sums dK and dV of split tile columns
    convert_dk, convert_dv  of sums over query heads
    outputs      dk and dv, with rows padded so that TMA can write them; LSE and delta, (2, batch * heads * n_padded)
    dq           the launches for dQ, if it is not summed by the main kernel
    bias_sums    shape of the main kernel's sums of ds, for the gradient of the bias
    workspaces   dQ and its float32 sum; tile counter; splits; sums of dK and of dV over query heads
    adds_by_tma  whether TMA adds to the sum of dQ
    """

    preprocess: Launch
    cols: Launch
    sum_splits: Launch | None
    convert_dk: Launch | None
    convert_dv: Launch | None
    postprocess: Launch | None
    dq: DqLaunches | None
    bias_sums: tuple[int, ...] | None
    outputs: tuple[Memory, ...]
    workspaces: tuple[Memory | None, ...]
    adds_by_tma: bool


@functools.lru_cache(maxsize=1024)
def backward_launches(
    specs: TensorSpecs,
    lists: PlanSpecs,
    split: Split,
    of_rows: tuple[PlanSpecs, Split] | None,
    options: Options,
    mods: ModSpecs = PLAIN,
    *,
    is_uneven: bool,
    by_head: bool = False,
) -> BackwardLaunches:
    """Prepares the launches of calls with these specs and options.

    specs        of q, k, v and dout
    lists        of the plan's tile columns
    split        of the tile columns
    of_rows      the plan's tile rows and their split, if dq has launches of its own; else None
    mods         score mods
    is_uneven    see schedule.are_uneven
    by_head      see schedule.sums_over_heads
    """
    q, k, v, dout = specs.tensors
    (batch, heads, q_len, head_dim), (_, kv_heads, kv_len, v_dim) = q.shape, v.shape
    columns, columns_v = backward_columns(head_dim, v_dim)
    is_short_of_registers = mods.slopes is not None and (mods.tables != () or of_rows is not None)
    chosen = config((columns, columns_v), mods.softcap > 0 or is_short_of_registers)
    block_q, scale = chosen.block_q, options.scale
    group = heads // kv_heads
    n_work_heads = heads if by_head else kv_heads
    n_padded = -(-q_len // TILE_SIDE) * TILE_SIDE
    n_tile_cols, n_batch_heads = -(-kv_len // TILE_SIDE), batch * n_work_heads
    # the memory has padded rows; the descriptors and sums see the first head_dim columns
    dq, dk, dv = (tma_padded_memory(each) for each in (q, k, v))
    dk_spec, dv_spec = dk.spec._replace(shape=k.shape), dv.spec._replace(shape=v.shape)
    flat = contiguous(torch.float32, batch * heads * n_padded).spec
    block, block_v = block_columns(columns), block_columns(columns_v)
    descriptor_factories = {
        "q_desc": DescriptorFactory(q, (1, 1, block_q, block)),
        "k_desc": DescriptorFactory(k, (1, 1, TILE_SIDE, block)),
        "v_desc": DescriptorFactory(v, (1, 1, TILE_SIDE, block_v)),
        "dout_desc": DescriptorFactory(dout, (1, 1, block_q, block_v)),
        "lse_desc": DescriptorFactory(flat, (block_q,)),
        "delta_desc": DescriptorFactory(flat, (block_q,)),
        "dk_desc": DescriptorFactory(dk_spec, (1, 1, TILE_SIDE, block)),
        "dv_desc": DescriptorFactory(dv_spec, (1, 1, TILE_SIDE, block_v)),
    }
    n_sms, n_programs = num_sms(options.device), split.n_programs(n_tile_cols, n_batch_heads)
    postprocess = dq_sum = alone = None
    if of_rows is not None:
        alone = dq_launches(specs, (columns, columns_v), *of_rows, options, mods, is_uneven=is_uneven)
    else:
        # whole tiles, so that additions need no mask
        dq_sum = contiguous(torch.float32, batch * heads, n_padded, columns)
        if not chosen.dq_from_registers:
            n_values, n_step_values = batch * heads * n_padded * columns, block_q * columns
            sum_spec = contiguous(torch.float32, n_values // DQ_SUM_COLS.value, DQ_SUM_COLS.value).spec
            sum_block = (n_step_values // DQ_SUM_COLS.value, DQ_SUM_COLS.value)
            descriptor_factories["dq_sum_desc"] = DescriptorFactory(sum_spec, sum_block)
        postprocess = postprocess_launch(dq_sum.spec, dq.spec, scale)
    bias_sums = None
    if mods.has_bias_gradient and alone is None:
        bias_sums = mods.sums_shape(1, (batch, heads), lists, (block_q, WARP_ROWS.value))
    arguments = {
        "record_strides": strides_of_records(lists[0]),
        "n_heads": n_work_heads,
        "heads_per_kv": group if by_head else 1,
        "n_batch_heads": n_batch_heads,
        "n_tile_cols": n_tile_cols,
        "q_len": q_len,
        "kv_len": kv_len,
        "n_padded": n_padded,
        "n_split_lines": split.n_split_lines,
        "num_splits": split.num_splits,
        "n_interleaved": interleaved_heads(
            n_tile_cols, n_batch_heads, n_sms, q_len, kv_len, is_uneven=is_uneven or by_head
        ),
        **mods.arguments(scale, is_forward=False),
        "bias_strides": mods.bias_strides(1, bias_sums),
        "scale": scale,
        "CAUSAL": options.causal,
        "GROUP": 1 if by_head else group,
        "KV_STAGES": chosen.kv_stages,
        "COLS": columns,
        "COLS_V": columns_v,
        "num_warps": 4,
    }
    sums_dk = sums_dv = convert_dk = convert_dv = None
    if by_head:
        rows = batch * kv_heads, n_tile_cols * TILE_SIDE
        sums_dk, sums_dv = contiguous(torch.float32, *rows, columns), contiguous(torch.float32, *rows, columns_v)
        convert_dk = postprocess_launch(sums_dk.spec, dk.spec, scale)
        convert_dv = postprocess_launch(sums_dv.spec, dv.spec, 1.0)
    splits = (
        contiguous(torch.float32, split.floats(columns + columns_v, n_batch_heads)) if split.num_splits > 1 else None
    )
    return BackwardLaunches(
        preprocess=preprocess_launch(dout, options.out_strides, n_padded, cleared=0 if alone else columns),
        cols=Launch(hopper_backward_kernel, (min(n_programs, n_sms),), arguments, descriptor_factories),
        sum_splits=sum_splits(split, lists[0], dk_spec, dv_spec, arguments, (columns, columns_v)),
        convert_dk=convert_dk,
        convert_dv=convert_dv,
        postprocess=postprocess,
        dq=alone,
        bias_sums=bias_sums,
        outputs=(dk, dv, contiguous(torch.float32, 2, batch * heads * n_padded)),
        workspaces=(
            None if alone else dq,
            dq_sum,
            contiguous(torch.int32, 1) if needs_tile_counter(n_programs, n_sms) else None,
            splits,
            sums_dk,
            sums_dv,
        ),
        adds_by_tma="dq_sum_desc" in descriptor_factories,
    )


def backward(
    inputs: BackwardInputs,
    plan: list[torch.Tensor],
    kv_lengths: torch.Tensor | None,
    seed: torch.Tensor | None,
    scale: float,
    causal: bool,
    dropout_p: float,
    scores: Scores | None = None,
    wanted: Sequence[bool] = (),
    *,
    deterministic: bool = False,
) -> tuple[torch.Tensor, ...]:
    """dq, dk, dv, in q's dtype and the memory orders of q, k and v; with scores also the gradients of the score mods.

    plan, kv_lengths, causal  as in the forward
    seed, dropout_p  None and 0: dispatch refuses dropout on this backend
    wanted           with scores: whether the gradients of sinks, slopes, block bias and pair bias are. They come in
                     this order, and are empty otherwise
    deterministic    whether the results must be bitwise identical in every run
    """
    dout, dlse, q, k, v, out, lse = inputs
    assert seed is None and dropout_p == 0.0, "dispatch refuses dropout on this backend"
    dim, dim_v = q.shape[3], v.shape[3]
    widest = max(dim, dim_v)
    # the gradient of the slopes, which are hardly ever trained, has no kernel here
    if scores is not None and wanted[1]:
        return triton_backward.backward(inputs, plan, kv_lengths, seed, scale, causal, dropout_p, scores, wanted)
    if widest > MAX_JOINT_HEAD_DIM:
        return wide_backward.backward(inputs, plan, kv_lengths, scale, causal, scores, wanted)
    # gradients from autograd may have strides of 0
    (q, k, v, dout), specs = to_tma_loadable(q, k, v, dout)
    dlse = None if dlse is None else dlse.contiguous()
    options = options_of(q, plan, scale, causal, dropout_p, lse, dlse, kv_lengths, out=out)
    by_cols, empty, n_sms = tile_lists(plan, COL_LISTS), allocator(q), num_sms(options.device)
    q_shape, k_shape = specs.tensors[0].shape, specs.tensors[1].shape
    by_head = sums_over_heads(plan, q_shape, k_shape, causal, n_sms, deterministic=deterministic)
    split = WHOLE if by_head else split_of(plan, COL_LISTS, q_shape, k_shape, causal, n_sms)
    by_rows, of_rows = tile_lists(plan, ROW_LISTS), None
    if is_dq_separate(plan, q_shape, widest, n_sms, deterministic=deterministic):
        of_rows = plan_specs_of(by_rows), split_of(plan, ROW_LISTS, q_shape, k_shape, causal, n_sms)
    slopes = None if scores is None else scores.alibi_slopes
    tables = bias_table(scores, 0) if of_rows else None, bias_table(scores, 1)
    mods = mod_specs_of(scores, *tables, wanted=wanted)
    ready = backward_launches(
        specs,
        plan_specs_of(by_cols),
        split,
        of_rows,
        options,
        mods,
        is_uneven=are_uneven(plan, causal),
        by_head=by_head,
    )
    dk, dv, lse_delta = [empty(*memory) for memory in ready.outputs]
    dq, dq_sum, tile_counter, splits, sums_dk, sums_dv = [memory and empty(*memory) for memory in ready.workspaces]
    flat_lse, flat_delta = lse_delta.unbind()
    # also zeroes the sum of dq and the tile counter
    ready.preprocess(out, dout, lse, dlse, None, lse_delta, dq_sum, tile_counter)
    bias_sums = None
    if scores is not None and ready.bias_sums is not None:
        bias_sums = scores.new_sums(ready.bias_sums, is_partial=kv_lengths is not None)
    pointers = Pointers(
        *by_cols, kv_lengths_ptr=kv_lengths, tile_counter_ptr=tile_counter, splits_ptr=splits, slopes_ptr=slopes,
        bias_ptr=tables[1], bias_sums_ptr=bias_sums, dq_sum_ptr=dq_sum, dk_sum_ptr=sums_dk, dv_sum_ptr=sums_dv,
    )  # fmt: skip
    if sums_dk is not None and sums_dv is not None:
        sums_dk.zero_()
        sums_dv.zero_()
    sum_by_tma = dq_sum if ready.adds_by_tma else None
    ready.cols(q, k, v, dout, flat_lse, flat_delta, sum_by_tma, dk, dv, pointers)
    if ready.sum_splits is not None:
        ready.sum_splits(splits, by_cols[0], dk, dv)
    if ready.convert_dk is not None and ready.convert_dv is not None:
        ready.convert_dk(sums_dk, dk)
        ready.convert_dv(sums_dv, dv)
    if ready.dq is None:
        assert dq is not None and ready.postprocess is not None
        ready.postprocess(dq_sum, dq)
    else:
        dq, bias_sums = ready.dq.run(
            (q, k, v, dout), flat_lse, flat_delta, by_rows, kv_lengths, scores, tables[0], empty
        )
    if dim % 8 or dim_v % 8:
        dq, dk, dv = (in_order_of(each, grad[..., : each.shape[3]]) for each, grad in ((q, dq), (k, dk), (v, dv)))
    if scores is None:
        return dq, dk, dv
    delta = flat_delta.view(*q.shape[:2], -1)[..., : q.shape[2]]
    direction = 1 if ready.dq is None else 0
    return dq, dk, dv, *scores.gradients(wanted, lse, delta, None, bias_sums, bias_direction=direction)
