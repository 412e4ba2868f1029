"""Hopper backward beyond head_dim 128: one kernel for dK and dV, another one for dQ.

    p = exp(scale q k^T - lse)      delta = rowsum(dO * O) - dLSE
    dp = dO v^T                     ds = p * (dp - delta)
    dv = p^T dO                     dk = scale ds^T q               dq = scale ds k

    dk, dv   wide_dkdv.py: 64 keys of a KV head per work tile, steps of 64 queries
    dq       backward_dq.py: 128 queries of a head per work tile, steps of 64 keys

Each computes scores and dp for itself: seven products per tile instead of the five of backward.py, which adds dq to a
float32 sum in memory. Registers do not suffice for that here: at head_dim 256, dk and dv of 64 keys take 128 KiB, half
of the register file. In return there is no sum of dQ, and all results have the same bits in every run.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ...plan_format import COL_LISTS, ROW_LISTS, TILE
from ...runtime.launch import Launch, Memory, allocator, contiguous, num_sms
from ...runtime.tensor_spec import TensorSpecs, in_order_of
from ...score_mods import Scores
from ..arguments import Options, PlanSpecs, options_of, plan_specs_of, strides_of_records, tile_lists
from ..inputs import BackwardInputs
from ..schedule import Split, are_uneven, backward_columns, interleaved_heads, needs_tile_counter, split_of
from ..triton.backward_preprocess import preprocess_launch
from ..triton.combine_splits import sum_splits
from .backward_dq import DqLaunches, dq_launches
from .backward_producer import Pointers
from .score_mods import PLAIN, ModSpecs, bias_table, mod_specs_of
from .tma import DescriptorFactory, block_columns, tma_padded_memory, to_tma_loadable
from .wide_dkdv import BLOCK_Q, KEYS, wide_dkdv_kernel


class BackwardLaunches(NamedTuple):
    """The launches of a backward and its memory; None for what it does not need.

    dkdv, dq    the kernels
    sum_cols    sums dk and dv of split tile columns
    outputs     dk and dv, with rows padded so that TMA can write them; LSE and delta, (2, batch * heads * n_padded)
    workspaces  tile counter; splits of the tile columns
    """

    preprocess: Launch
    dkdv: Launch
    sum_cols: Launch | None
    dq: DqLaunches
    outputs: tuple[Memory, ...]
    workspaces: tuple[Memory | None, ...]


@functools.lru_cache(maxsize=1024)
def backward_launches(
    specs: TensorSpecs,
    by_rows: PlanSpecs,
    by_cols: PlanSpecs,
    of_rows: Split,
    of_cols: Split,
    options: Options,
    mods: ModSpecs = PLAIN,
    *,
    is_uneven: bool,
) -> BackwardLaunches:
    """Prepares the launches of calls with these specs and options.

    specs             of q, k, v and dout
    by_rows, by_cols  of the plan
    of_rows, of_cols  splits of its tile rows and tile columns
    is_uneven         see schedule.are_uneven
    """
    q, k, v, dout = specs.tensors
    (batch, heads, q_len, head_dim), (_, kv_heads, kv_len, v_dim) = q.shape, v.shape
    columns = backward_columns(head_dim, v_dim)
    cols, cols_v = columns
    n_tile_cols, n_padded, n_batch_heads = -(-kv_len // TILE), -(-q_len // TILE) * TILE, batch * kv_heads
    n_sms, causal, scale = num_sms(options.device), options.causal, options.scale
    # rows in memory are padded to 16 bytes; the descriptors cover the first head_dim columns, without the padding
    dk, dv = (tma_padded_memory(each) for each in (k, v))
    dk_spec, dv_spec = dk.spec._replace(shape=k.shape), dv.spec._replace(shape=v.shape)
    flat = contiguous(torch.float32, batch * heads * n_padded).spec
    keys, queries, width, width_v = KEYS.value, BLOCK_Q.value, block_columns(cols), block_columns(cols_v)
    descriptor_factories = {
        "q_desc": DescriptorFactory(q, (1, 1, queries, width)),
        "k_desc": DescriptorFactory(k, (1, 1, keys, width)),
        "v_desc": DescriptorFactory(v, (1, 1, keys, width_v)),
        "dout_desc": DescriptorFactory(dout, (1, 1, queries, width_v)),
        "lse_desc": DescriptorFactory(flat, (queries,)),
        "delta_desc": DescriptorFactory(flat, (queries,)),
        "dk_desc": DescriptorFactory(dk_spec, (1, 1, keys, width)),
        "dv_desc": DescriptorFactory(dv_spec, (1, 1, keys, width_v)),
    }
    arguments = {
        "record_strides": strides_of_records(by_cols[0]),
        "n_heads": kv_heads,
        "n_batch_heads": n_batch_heads,
        "n_tile_cols": n_tile_cols,
        "q_len": q_len,
        "kv_len": kv_len,
        "n_padded": n_padded,
        "n_split_lines": of_cols.n_split_lines,
        "num_splits": of_cols.num_splits,
        "n_interleaved": interleaved_heads(n_tile_cols, n_batch_heads, n_sms, q_len, kv_len, is_uneven=is_uneven),
        **mods.arguments(scale, is_forward=False),
        "bias_strides": mods.bias_strides(1),
        "scale": scale,
        "CAUSAL": causal,
        "GROUP": heads // kv_heads,
        "COLS": cols,
        "COLS_V": cols_v,
        # buffers of q and dO; at 256, shared memory has no room for a third (TUNING.md: 3 to 5 % at 192)
        "STAGES": 3 if max(columns) < 256 else 2,
        "num_warps": 4,
    }
    # two work tiles per tile column
    n_work = of_cols.n_programs(n_tile_cols, n_batch_heads) * (TILE // keys)
    n_floats = of_cols.floats(cols + cols_v, n_batch_heads)
    return BackwardLaunches(
        preprocess=preprocess_launch(dout, options.out_strides, n_padded),
        dkdv=Launch(wide_dkdv_kernel, (min(n_work, n_sms),), arguments, descriptor_factories),
        sum_cols=sum_splits(of_cols, by_cols[0], dk_spec, dv_spec, arguments, columns),
        dq=dq_launches(specs, columns, by_rows, of_rows, options, mods, is_uneven=is_uneven),
        outputs=(dk, dv, contiguous(torch.float32, 2, batch * heads * n_padded)),
        workspaces=(
            contiguous(torch.int32, 1) if needs_tile_counter(n_work, n_sms) else None,
            contiguous(torch.float32, n_floats) if n_floats else None,
        ),
    )


def backward(
    inputs: BackwardInputs,
    plan: list[torch.Tensor],
    kv_lengths: torch.Tensor | None,
    scale: float,
    causal: bool,
    scores: Scores | None = None,
    wanted: Sequence[bool] = (),
) -> tuple[torch.Tensor, ...]:
    """dq, dk, dv, in q's dtype and the memory orders of q, k and v, and those of score mods: see backward.backward."""
    dout, dlse, q, k, v, out, lse = inputs
    dim, dim_v = q.shape[3], v.shape[3]
    # gradients from autograd may have strides of 0
    (q, k, v, dout), specs = to_tma_loadable(q, k, v, dout)
    dlse = None if dlse is None else dlse.contiguous()
    options = options_of(q, plan, scale, causal, 0.0, lse, dlse, kv_lengths, out=out)
    by_rows, by_cols = tile_lists(plan, ROW_LISTS), tile_lists(plan, COL_LISTS)
    empty, n_sms = allocator(q), num_sms(options.device)
    of_rows, of_cols = (split_of(plan, first, q.shape, k.shape, causal, n_sms) for first in (ROW_LISTS, COL_LISTS))
    slopes = None if scores is None else scores.alibi_slopes
    tables = bias_table(scores, 0), bias_table(scores, 1)
    mods = mod_specs_of(scores, *tables, wanted=wanted)
    of_lists = plan_specs_of(by_rows), plan_specs_of(by_cols)
    ready = backward_launches(specs, *of_lists, of_rows, of_cols, options, mods, is_uneven=are_uneven(plan, causal))
    dk, dv, lse_delta = [empty(*memory) for memory in ready.outputs]
    tile_counter, splits = [memory and empty(*memory) for memory in ready.workspaces]
    flat_lse, flat_delta = lse_delta.unbind()
    # also zeroes the tile counter; that of dq is zeroed by DqLaunches.run
    ready.preprocess(out, dout, lse, dlse, None, lse_delta, None, tile_counter)
    pointers = Pointers(
        *by_cols, kv_lengths_ptr=kv_lengths, tile_counter_ptr=tile_counter, splits_ptr=splits, slopes_ptr=slopes,
        bias_ptr=tables[1], bias_sums_ptr=None, dq_sum_ptr=None, dk_sum_ptr=None, dv_sum_ptr=None,
    )  # fmt: skip
    ready.dkdv(q, k, v, dout, flat_lse, flat_delta, dk, dv, pointers)
    if ready.sum_cols is not None:
        ready.sum_cols(splits, by_cols[0], dk, dv)
    dq, bias_sums = ready.dq.run((q, k, v, dout), flat_lse, flat_delta, by_rows, kv_lengths, scores, tables[0], empty)
    if dim % 8 or dim_v % 8:
        dq, dk, dv = (in_order_of(each, grad[..., : each.shape[3]]) for each, grad in ((q, dq), (k, dk), (v, dv)))
    if scores is None:
        return dq, dk, dv
    delta = flat_delta.view(*q.shape[:2], -1)[..., : q.shape[2]]
    return dq, dk, dv, *scores.gradients(wanted, lse, delta, None, bias_sums)
