"""Hopper backward beyond head_dim 128: dQ, dK and dV, in one launch for dK and dV and another for dQ.

    p = exp(scale q k^T - lse)      delta = rowsum(dO * O) - dLSE
    dp = dO v^T                     ds = p * (dp - delta)
    dv = p^T dO                     dk = scale ds^T q               dq = scale ds k

    dk, dv   wide_dkdv.py: 64 keys of a KV head per work tile, steps of 64 queries
    dq       wide_dq.py: 128 queries of a head per work tile, steps of 64 keys

Each computes scores and dp for itself: seven products per pair of tiles, where five would do if the sums of dk, dv and
dq fitted into registers. At head_dim 256, dk and dv of 64 keys fill half of an SM's. In return dQ needs no float32 sum
in memory, and all results have the same bits in every run.

Long tile rows and tile columns are split among programs: see schedule.py and combine_splits.py.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ...runtime.launch import Launch, Memory, allocator, contiguous, num_sms
from ...runtime.tensor_spec import TensorSpecs
from ...score_mods import Scores
from ..arguments import TILE, Options, PlanSpecs, options_of, plan_specs_of, strides_of_records, tile_lists
from ..inputs import BackwardInputs
from ..schedule import Split, heads_in_turn, padded_dim, split_of
from ..triton.backward_preprocess import preprocess_launch
from ..triton.combine_splits import sum_splits
from .backward_producer import Pointers as ColPointers
from .registers import WARPGROUP_ROWS
from .score_mods import PLAIN, ModSpecs, mod_specs_of
from .tma import DescriptorFactory, tma_padded_memory, to_tma_loadable
from .wide_dkdv import BLOCK_Q, KEYS, wide_dkdv_kernel
from .wide_dq import Config, wide_dq_kernel
from .wide_dq import Pointers as RowPointers


class BackwardLaunches(NamedTuple):
    """The launches of a backward and its memory; None for what it does not need.

    sum_cols, sum_rows  sum dk and dv of split tile columns, dq of split tile rows
    outputs     dq, dk and dv, with rows padded so that TMA can write them; LSE and delta, (2, batch * heads * n_padded)
    workspaces  tile counters of both kernels; splits of the tile columns and of the tile rows
    """

    preprocess: Launch
    dkdv: Launch
    dq: Launch
    sum_cols: Launch | None
    sum_rows: Launch | None
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
) -> BackwardLaunches:
    """Prepares the launches of calls with these specs and options.

    specs             of q, k, v and dout
    by_rows, by_cols  of the plan
    of_rows, of_cols  splits of its tile rows and tile columns
    """
    q, k, v, dout = specs.tensors
    (batch, heads, q_len, head_dim), (_, kv_heads, kv_len, v_dim) = q.shape, v.shape
    dim, dim_v, scale = padded_dim("hopper", head_dim), padded_dim("hopper", v_dim), options.scale
    n_rows, n_cols, n_padded = -(-q_len // TILE), -(-kv_len // TILE), -(-q_len // TILE) * TILE
    # the memory has padded rows; the descriptors see the first head_dim columns
    dq, dk, dv = (tma_padded_memory(each.dtype, each.shape) for each in (q, k, v))
    dq_spec, dk_spec, dv_spec = (made.spec._replace(shape=each.shape) for made, each in ((dq, q), (dk, k), (dv, v)))
    line = contiguous(torch.float32, batch * heads * n_padded).spec
    keys, queries, rows = KEYS.value, BLOCK_Q.value, WARPGROUP_ROWS.value
    chosen = Config()
    col_descriptors = {
        "q_desc": DescriptorFactory(q, (1, 1, queries, dim)),
        "k_desc": DescriptorFactory(k, (1, 1, keys, dim)),
        "v_desc": DescriptorFactory(v, (1, 1, keys, dim_v)),
        "dout_desc": DescriptorFactory(dout, (1, 1, queries, dim_v)),
        "lse_desc": DescriptorFactory(line, (queries,)),
        "delta_desc": DescriptorFactory(line, (queries,)),
        "dk_desc": DescriptorFactory(dk_spec, (1, 1, keys, dim)),
        "dv_desc": DescriptorFactory(dv_spec, (1, 1, keys, dim_v)),
    }
    row_descriptors = {
        "q_desc": DescriptorFactory(q, (1, 1, rows, dim)),
        "k_desc": DescriptorFactory(k, (1, 1, chosen.block_kv, dim)),
        "v_desc": DescriptorFactory(v, (1, 1, chosen.block_kv, dim_v)),
        "dout_desc": DescriptorFactory(dout, (1, 1, rows, dim_v)),
        "dq_desc": DescriptorFactory(dq_spec, (1, 1, rows, dim)),
    }
    n_sms, causal = num_sms(options.device), options.causal
    sizes = {
        "q_len": q_len,
        "kv_len": kv_len,
        "n_padded": n_padded,
        **mods.arguments(scale, is_forward=False),
        "scale": scale,
        "CAUSAL": causal,
        "num_warps": 4,
    }
    col_arguments = {
        **sizes,
        "record_strides": strides_of_records(by_cols[0]),
        "n_heads": kv_heads,
        "n_batch_heads": batch * kv_heads,
        "n_tile_cols": n_cols,
        "n_split_lines": of_cols.n_split_lines,
        "num_splits": of_cols.num_splits,
        "n_in_turn": heads_in_turn(n_cols, batch * kv_heads, n_sms, q_len, kv_len, causal=causal),
        "GROUP": heads // kv_heads,
    }
    row_arguments = {
        **sizes,
        "record_strides": strides_of_records(by_rows[0]),
        "n_heads": heads,
        "n_batch_heads": batch * heads,
        "n_lines": n_rows,
        "n_split_lines": of_rows.n_split_lines,
        "num_splits": of_rows.num_splits,
        "n_in_turn": heads_in_turn(n_rows, batch * heads, n_sms, q_len, kv_len, causal=causal),
        "group": heads // kv_heads,
        "CONFIG": chosen,
    }
    col_work = of_cols.n_programs(n_cols, batch * kv_heads) * (TILE // keys)
    row_work = of_rows.n_programs(n_rows, batch * heads)
    col_floats, row_floats = of_cols.floats(dim + dim_v, batch * kv_heads), of_rows.floats(dim, batch * heads)
    # dq is summed as dk is, over query heads without groups
    summed_rows = {**row_arguments, "kv_len": q_len, "GROUP": 1}
    counter = contiguous(torch.int32, 1)
    return BackwardLaunches(
        preprocess=preprocess_launch(dout, n_padded),
        dkdv=Launch(wide_dkdv_kernel, (min(col_work, n_sms),), col_arguments, col_descriptors),
        dq=Launch(wide_dq_kernel, (min(row_work, n_sms),), row_arguments, row_descriptors),
        sum_cols=sum_splits(of_cols, by_cols[0], dk_spec, dv_spec, col_arguments, (dim, dim_v)),
        sum_rows=sum_splits(of_rows, by_rows[0], dq_spec, None, summed_rows, (dim, 16)),
        outputs=(dq, dk, dv, contiguous(torch.float32, 2, batch * heads * n_padded)),
        workspaces=(
            counter if col_work > n_sms else None,
            counter if row_work > n_sms else None,
            contiguous(torch.float32, col_floats) if of_cols.num_splits > 1 else None,
            contiguous(torch.float32, row_floats) if of_rows.num_splits > 1 else None,
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
    """dq, dk, dv, contiguous and in q's type; with score mods also their gradients, as in backward.backward."""
    dout, dlse, q, k, v, out, lse = inputs
    dim, dim_v = q.shape[3], v.shape[3]
    # gradients from autograd may have strides of 0
    (q, k, v, dout), specs = to_tma_loadable(q, k, v, dout)
    dlse = None if dlse is None else dlse.contiguous()
    options = options_of(q, plan, scale, causal, 0.0, out, lse, dlse, kv_lengths)
    by_rows, by_cols, empty, n_sms = tile_lists(plan, 0), tile_lists(plan, 3), allocator(q), num_sms(options.device)
    of_rows, of_cols = (split_of(plan, first, q.shape, k.shape, causal, n_sms) for first in (0, 3))
    slopes, mods = None if scores is None else scores.alibi_slopes, mod_specs_of(scores)
    of_lists = plan_specs_of(by_rows), plan_specs_of(by_cols)
    ready = backward_launches(specs, *of_lists, of_rows, of_cols, options, mods)
    dq, dk, dv, lse_delta = [empty(*memory) for memory in ready.outputs]
    col_counter, row_counter, col_splits, row_splits = [memory and empty(*memory) for memory in ready.workspaces]
    lse_line, delta_line = lse_delta.unbind()
    # also zeroes the tile counter
    ready.preprocess(out, dout, lse, dlse, None, lse_delta, None, col_counter)
    if row_counter is not None:
        row_counter.zero_()
    col_pointers = ColPointers(
        *by_cols, kv_lengths_ptr=kv_lengths, tile_counter_ptr=col_counter, splits_ptr=col_splits, slopes_ptr=slopes,
        dq_sum_ptr=None, dk_sum_ptr=None, dv_sum_ptr=None,
    )  # fmt: skip
    ready.dkdv(q, k, v, dout, lse_line, delta_line, dk, dv, col_pointers)
    if ready.sum_cols is not None:
        ready.sum_cols(col_splits, by_cols[0], dk, dv)
    row_pointers = RowPointers(
        *by_rows, kv_lengths_ptr=kv_lengths, slopes_ptr=slopes, lse_ptr=lse_line, delta_ptr=delta_line,
        tile_counter_ptr=row_counter, splits_ptr=row_splits,
    )  # fmt: skip
    ready.dq(q, k, v, dout, dq, row_pointers)
    if ready.sum_rows is not None:
        ready.sum_rows(row_splits, by_rows[0], dq, None)
    if dim % 8 or dim_v % 8:
        dq, dk, dv = dq[..., :dim].contiguous(), dk[..., :dim].contiguous(), dv[..., :dim_v].contiguous()
    if scores is None:
        return dq, dk, dv
    delta = delta_line.view(*q.shape[:2], -1)[..., : q.shape[2]]
    return dq, dk, dv, *scores.gradients(wanted, lse, delta, None, None)
