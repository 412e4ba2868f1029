"""Triton backward: dq, dk and dv from out, lse and their gradients; sm80 and later.

With p = exp(scale q k^T - lse), dp = dout v^T and delta = rowsum(dout * out) - dlse:
    ds = p * (dp - delta)      dv = p^T dout      dk = scale ds^T q      dq = scale ds k
Three launches: the preprocess (lse and delta of each query); dk and dv, one program per block of keys of a KV head,
iterating over the tile column for each query head of the group; dq, one program per block of queries, iterating over
the tile row. On Hopper one joint launch computes dk, dv and dq where that pays (`joint_pays`; always at head_dim 128).

No atomics, 8 bytes of workspace per query and head, bitwise reproducible. Rows without keys (lse -inf) give zeros.
Score mods are recomputed and differentiated; the dq launch also sums the gradients of slopes and block biases. The
gradient of a pair bias has a launch of its own (pair_bias_gradient.py).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ... import philox
from ...plan_format import COL_LISTS, ROW_LISTS
from ...runtime.launch import (
    Config,
    DescriptorFactory,
    Launch,
    Memory,
    allocator,
    axis_strides,
    contiguous,
    memory_in_order_of,
    num_sms,
)
from ...runtime.tensor_spec import TensorSpecs, specs_of
from ...score_mods import LOG2_E, Scores, sums_shape
from ..arguments import (
    Constants,
    Options,
    PlanSpecs,
    Shape,
    Tuning,
    constants,
    dropout_arguments,
    options_of,
    plan_specs_of,
    score_specs_of,
    seed_arguments,
    softcap_arguments,
    strides_of,
    strides_of_records,
    tile_lists,
    tuning_of,
    wants_descriptors,
)
from ..inputs import BackwardInputs
from .backward_kernels import joint_kernel, keys_kernel, queries_kernel
from .backward_preprocess import PADDED_TO, preprocess_launch
from .pair_bias_gradient import pair_bias_launch

# most programs per SM for which dk, dv and dq share a launch
JOINT_PROGRAMS = 8
# the same with TMA, for causal calls without a layout
CAUSAL_JOINT_PROGRAMS = 64


def config_keys(call: Tuning) -> Config:
    """Launch configuration of dk and dv: a program owns block_kv keys and iterates over steps of block_q queries.

    Timed on an H200 only, see TUNING.md: 7.5 ms dense at head_dim 128, 9.4 ms at 64 (16,384 tokens). Elsewhere (sm80,
    sm100, score mods) the nearest configuration that neither spills nor serializes wgmma.
    """
    dim, element_size, major, tma, dropout, shared_memory, modifies_scores, smaller_dim, _ = call
    if element_size == 4:
        return Config(32, 32, 8, 2) if dim <= 64 else Config(32 if dim <= 128 else 16, 32, 8, 1)
    if dim <= 128 and modifies_scores:
        if major == 10:
            return Config(32, 32, 8 if dim <= 64 else 4, 2)
        return Config(32, 32 if dropout and major == 8 else 64, 8, 2 if major == 9 else 1)
    if dim <= 128:
        if tma and dropout and major == 9:
            return Config(64 if 32 < dim <= 64 else 32, 64, 4, 2 if dim <= 32 else 3)
        if tma and not dropout:
            if major == 10 and dim <= 64:
                return Config(32, 64, 8, 3)
            return Config(64, 64, 4, 3 if dim <= 64 else 2)
        if major == 9:
            return Config(32, 64, 4, 1 if dim > 64 and not tma else 2)
        return Config(32, 64, 8, 1 if dropout or major == 10 else 2)
    if tma and major == 9 and not (dropout or modifies_scores):
        return Config(64, 64, 8, 1) if smaller_dim > 128 else Config(32, 64, 4, 2)
    return Config(32, 32, 4, 1) if shared_memory < 160 * 1024 else Config(32, 64, 8, 2)


def config_queries(call: Tuning) -> Config:
    """Launch configuration of dq: a program owns block_q queries and iterates over steps of block_kv keys.

    As for `config_keys`: 5.4 ms dense at head_dim 128, 5.0 ms at 64.
    """
    dim, element_size, major, tma, dropout, shared_memory, modifies_scores, smaller_dim, _ = call
    small = shared_memory < 160 * 1024
    if element_size == 4:
        return Config(64, 32, 8, 2) if dim <= 64 else Config(32 if dim <= 128 else 16, 32, 8, 1)
    if dim <= 128 and modifies_scores:
        if major == 10:
            return Config(128 if dim <= 64 else 64, 32, 8, 2)
        if major == 9:
            return Config(128, 64, 8, 3) if dim <= 64 else Config(64, 32, 4, 2)
        return Config(64, 32, 4, 2) if dim <= 64 else Config(64, 64, 8, 2)
    if dim <= 128 and dropout:
        if tma and major == 9:
            return Config(64, 64, 4, 3 if dim <= 64 else 2)
        return Config(64, 64, 8, 1 if dim > 64 and major == 10 else 2)
    if dim <= 64:
        return Config(128, 64, 4, 3) if tma else Config(128, 64, 8, 3)
    if dim <= 128:
        return Config(64, 64, 8 if major == 10 and not tma else 4, 2)
    if tma and major == 9 and not (dropout or modifies_scores):
        return Config(64, 64, 4, 2 if smaller_dim > 128 else 1)
    return Config(32, 32, 4, 1) if small else Config(64, 32, 8, 2)


def config_joint(call: Tuning) -> tuple[Config, Config] | None:
    """Configurations of keys and of queries in the joint launch; None where it is not used.

    At head_dim 128, grouped heads spill 40 bytes (664 with lengths), and lengths make ptxas serialize wgmma.
    """
    dim, element_size, major, tma, dropout, _, modifies_scores, _, group = call
    if major != 9 or element_size != 2 or dim > 128 or group > 1 or dropout or modifies_scores:
        return None
    if tma:
        # both read the same blocks, by the same descriptors
        chosen = Config(64, 64, 4, 3 if dim <= 64 else 2)
        return chosen, chosen
    stages = 1 if dim > 64 else 2
    return Config(32, 64, 4, stages), Config(64, 64, 4, stages)


def joint_pays(n_programs: int, dim: int, tma: bool, options: Options, *, has_layout: bool) -> bool:
    """Whether the joint launch beats two launches, which wait for each other's last programs and cost the host more.

    512 dense tokens at head_dim 128 on an H200: 26.6 instead of 38.4 microseconds, see TUNING.md. At head_dim 64 the
    programs of queries hold fewer queries than in a launch of their own. Without TMA only small calls were timed.
    """
    if tma and dim > 64:
        return True
    is_dense_causal = options.causal and not has_layout
    per_sm = CAUSAL_JOINT_PROGRAMS if tma and is_dense_causal else JOINT_PROGRAMS
    return n_programs <= per_sm * num_sms(options.device)


class BackwardLaunches(NamedTuple):
    """The launches (None for a gradient without elements), and the memory of dq, dk, dv and lse and delta.

    joint  replaces keys and queries, without lengths, where that pays
    bias_sums  see `bias_sums_shape`
    pair_bias  the launch and memory of its gradient
    """

    preprocess: Launch
    keys: Launch | None
    queries: Launch | None
    joint: Launch | None
    memory: tuple[Memory, ...]
    bias_sums: tuple[int, ...] | None
    pair_bias: tuple[Launch, Memory] | None


def bias_sums_shape(
    batch: int, heads: int, record_shape: Shape | None, chosen: Config, options: Options
) -> tuple[int, ...] | None:
    """Shape of the sums of ds for the gradient of a bias, written by the dq launch; None if not wanted."""
    scores = options.scores
    if scores is None or scores.bias_cell is None or record_shape is None or not scores.wanted[2]:
        return None
    tables = scores.tables[0]
    assert tables is not None
    step = chosen.block_q, chosen.block_kv
    return sums_shape((batch, heads), record_shape, tables.shape[2], scores.bias_cell, step)


def lines_and_programs(
    record_shape: Shape | None, length: int, block: int, tile: int, n_batch_heads: int
) -> tuple[int, int]:
    """(tile rows or columns per head, programs of all n_batch_heads heads); blocks instead of tiles without a plan."""
    n_lines = record_shape[2] if record_shape else -(-length // block)
    return n_lines, n_lines * (tile // block if record_shape else 1) * n_batch_heads


def descriptor_factories_of(specs: TensorSpecs, chosen: Config, dim: int, dim_v: int) -> dict[str, DescriptorFactory]:
    """TMA descriptor factories of q, k, v and dout."""
    q, k, v, dout = specs.tensors
    block_q, block_kv = chosen.block_q, chosen.block_kv
    return {
        "q_ref": DescriptorFactory(q, (1, 1, block_q, dim)),
        "k_ref": DescriptorFactory(k, (1, 1, block_kv, dim)),
        "v_ref": DescriptorFactory(v, (1, 1, block_kv, dim_v)),
        "dout_ref": DescriptorFactory(dout, (1, 1, block_q, dim_v)),
    }


@functools.lru_cache(maxsize=1024)
def backward_launches(specs: TensorSpecs, rows: PlanSpecs, cols: PlanSpecs, options: Options) -> BackwardLaunches:
    """Prepares the launches of calls with these specs and options."""
    q, k, v, dout = specs.tensors
    (batch, heads, q_len, head_dim), (_, kv_heads, kv_len, v_dim) = q.shape, v.shape
    tma = wants_descriptors(options.major, q, k, v, dout)
    fixed = constants(head_dim, v_dim, heads // kv_heads, tma, options).with_orders(q, k, v)
    dim, dim_v = fixed.DIM, fixed.DIM_V
    n_padded = -(-q_len // PADDED_TO.value) * PADDED_TO.value
    preprocess = preprocess_launch(dout, options.out_strides, n_padded, dropout_p=options.dropout_p)
    call = tuning_of(fixed, q.dtype.itemsize, options)
    keys_config, queries_config = config_keys(call).within(options.tile), config_queries(call).within(options.tile)

    common = {
        "q_len": q_len,
        "kv_len": kv_len,
        # no maximum is taken, so the scale may be negative or 0
        "scale_log2": options.scale * LOG2_E,
        "scale": options.scale,
    }

    def launch_over(kernel: Any, chosen: Config, direction: int, heads: int, length: int, sums: Shape | None) -> Launch:
        record_shape, block = (rows[0], chosen.block_q) if direction == 0 else (cols[0], chosen.block_kv)
        n_lines, n_programs = lines_and_programs(record_shape, length, block, options.tile, batch * heads)
        rest = {
            **common,
            "strides": strides_of(specs, options, record_shape, direction)._replace(sums=sums and axis_strides(sums)),
            "n_heads": heads,
            "n_batch_heads": batch * heads,
            "n_lines": n_lines,
            # dq's kernel computes it, since it has many parameters
            **({} if kernel is queries_kernel else {"n_padded": n_padded}),
            **dropout_arguments(options.dropout_p),
            **softcap_arguments(options, options.scale),
            "C": fixed.with_blocks(chosen),
            **chosen.launch_options,
        }
        return Launch(kernel, (n_programs,), rest, descriptor_factories_of(specs, chosen, dim, dim_v) if tma else None)

    keys = queries = None
    shape = bias_sums_shape(batch, heads, rows[0], queries_config, options)
    if batch * kv_heads * kv_len:
        keys = launch_over(keys_kernel, keys_config, 1, kv_heads, kv_len, None)
    if batch * heads * q_len:
        queries = launch_over(queries_kernel, queries_config, 0, heads, q_len, shape)
    memory = [memory_in_order_of(spec, spec.shape[3]) for spec in (q, k, v)]
    memory.append(contiguous(torch.float32, batch, heads, n_padded, 2))
    joint = None
    if keys is not None and queries is not None:
        joint = joint_launch(specs, (rows[0], cols[0]), {**common, "n_padded": n_padded}, fixed, options)
    of_pairs = None
    if options.scores is not None and options.scores.pair_bias is not None and options.scores.wanted[3]:
        of_pairs = pair_bias_launch(specs, rows[0], fixed, options)
    return BackwardLaunches(preprocess, keys, queries, joint, tuple(memory), shape, of_pairs)


def joint_launch(
    specs: TensorSpecs,
    lists: tuple[Shape | None, Shape | None],
    common: dict[str, Any],
    fixed: Constants,
    options: Options,
) -> Launch | None:
    """The launch of joint_kernel, for calls without lengths; None where two launches are faster.

    lists  shapes of the records of tile rows and tile columns
    common  arguments shared by the kernels
    """
    q, k, _, _ = specs.tensors
    (batch, heads, q_len, _), kv_len = q.shape, k.shape[2]
    dim, dim_v, tma = fixed.DIM, fixed.DIM_V, fixed.TMA
    chosen = config_joint(tuning_of(fixed, q.dtype.itemsize, options))
    if chosen is None:
        return None
    (of_keys, of_queries), (rows, cols) = chosen, lists
    n_cols, n_keys = lines_and_programs(cols, kv_len, of_keys.block_kv, options.tile, batch * heads)
    n_rows, n_queries = lines_and_programs(rows, q_len, of_queries.block_q, options.tile, batch * heads)
    if not joint_pays(n_keys + n_queries, max(dim, dim_v), tma, options, has_layout=rows is not None):
        return None
    rest = {
        **common,
        "strides": strides_of(specs, options, cols),
        "row_record_strides": strides_of_records(rows),
        "n_heads": heads,
        "n_batch_heads": batch * heads,
        "n_cols": n_cols,
        "n_rows": n_rows,
        "n_keys": n_keys,
        "KEYS": fixed.with_blocks(of_keys),
        "QUERIES": fixed.with_blocks(of_queries),
        **of_keys.launch_options,
    }
    descriptor_factories = descriptor_factories_of(specs, of_keys, dim, dim_v) if tma else None
    return Launch(joint_kernel, (n_keys + n_queries,), rest, descriptor_factories)


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
) -> tuple[torch.Tensor, ...]:
    """dq, dk, dv, in q's dtype and the memory orders of q, k and v.

    With score mods also the gradients of sinks, slopes and biases, empty where not `wanted` (a bool for each).
    """
    dout, dlse, q, k, v, out, lse = inputs
    dout = dout if dout.stride(-1) == 1 else dout.contiguous()
    dlse = None if dlse is None else dlse.contiguous()
    seeds = seed_arguments(seed, dropout_p, q.device)
    options = options_of(q, plan, scale, causal, dropout_p, lse, dlse, kv_lengths, seeds[0], out=out)
    slopes = rows = cols = pair_bias = sums = dslopes = dpair_bias = None
    if scores is not None:
        slopes, pair_bias = scores.alibi_slopes, scores.pair_bias
        rows, cols = scores.tables(0, base_2=True), scores.tables(1, base_2=True)
        options = options._replace(scores=score_specs_of(scores, rows, cols, wanted=wanted))
    by_rows, by_cols = tile_lists(plan, ROW_LISTS), tile_lists(plan, COL_LISTS)
    launches = backward_launches(specs_of(q, k, v, dout), plan_specs_of(by_rows), plan_specs_of(by_cols), options)
    if scores is not None:
        dslopes = torch.empty_like(lse) if wanted[1] else None
        sums = None if launches.bias_sums is None else scores.new_sums(launches.bias_sums)
    empty = allocator(q)
    dq, dk, dv, lse_delta = [empty(*memory) for memory in launches.memory]
    if lse.numel() > 0:
        launches.preprocess(out, dout, lse, dlse, lse_delta, None, None, None)

    if launches.joint is not None and kv_lengths is None:
        launches.joint(q, k, v, dout, lse_delta, *by_cols[:3], *by_rows, dq, dk, dv)
    else:
        if launches.keys is not None:
            launches.keys(q, k, v, dout, lse_delta, *by_cols, kv_lengths, *seeds, slopes, cols, pair_bias, dk, dv)
        if launches.queries is not None:
            mods = slopes, rows, pair_bias
            launches.queries(q, k, v, dout, lse_delta, *by_rows, kv_lengths, *seeds, *mods, dq, sums, dslopes)
    if launches.pair_bias is not None:
        launch, memory = launches.pair_bias
        dpair_bias = empty(*memory)
        launch(q, k, v, dout, lse_delta, *by_rows, kv_lengths, *seeds, slopes, rows, pair_bias, dpair_bias)
    if scores is None:
        return dq, dk, dv
    delta = lse_delta[:, :, : q.shape[2], 1]
    if dropout_p > 0:
        delta = delta / philox.kept_share(dropout_p)
    return dq, dk, dv, *scores.gradients(wanted, lse, delta, dslopes, sums, dpair_bias)
