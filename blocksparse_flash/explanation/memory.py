"""Bytes that a call reads, writes and allocates. Each tensor counts once, however often tiles read it again."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from ..dispatch import has_gradient
from ..kernels.schedule import (
    MAX_JOINT_HEAD_DIM,
    PROGRAMS_PER_SM,
    WHOLE,
    Split,
    are_rows_sorted,
    backward_columns,
    forward_columns,
    is_dq_separate,
    needs_tile_counter,
    padded_dim,
    split_of,
    sums_over_heads,
)
from ..plan.block_bias import bias_cell_of
from ..plan_format import COL_LISTS, ROW_LISTS, TILE
from .call import Call

# bytes of an element of lse, delta and the sum of dq
FLOAT = 4


class Moved(NamedTuple):
    """Bytes of one direction.

    reads        tensors and metadata that are read, each once
    writes       results
    workspace    the peak of what is allocated, less the results; None where PyTorch's operators allocate
    main_bytes   least bytes read and written by the kernels that iterate over tiles
    extra_bytes  bytes read and written by the launches before and after; 0 where there are none
    """

    reads: int
    writes: int
    workspace: int | None
    main_bytes: int
    extra_bytes: int


def _sizes(call: Call) -> dict[str, int]:
    """Bytes of q, k, v, out, lse in the type of the products."""
    queries, keys = call.batch * call.heads * call.q_len, call.batch * call.kv_heads * call.kv_len
    size = call.dtype.itemsize
    return {
        "q": size * queries * call.head_dim,
        "k": size * keys * call.head_dim,
        "v": size * keys * call.v_dim,
        "out": size * queries * call.v_dim,
        "lse": _float(call) * queries,
    }


def _float(call: Call) -> int:
    """Bytes of an element of lse and of score mods."""
    return 8 if call.dtype.itemsize == 8 else FLOAT


def _pair_bias(call: Call) -> int:
    """Bytes of pair_bias, as if all of its tiles were stored."""
    bias = call.mods.pair_bias
    return 0 if bias is None else bias.numel() * bias.element_size()


# ---- block_bias ----


def _bias(call: Call) -> int:
    """Bytes of block_bias in the type of the scores."""
    bias = call.mods.block_bias
    return 0 if bias is None else bias.numel() * _float(call)


def _listed_cells(call: Call, *sides: str) -> int:
    """Bias cells of the tiles that a plan lists for these sides."""
    if call.mods.block_bias is None or call.layout is None or call.plan is None or call.backend == "reference":
        return 0
    (cell_q, cell_kv), plan = bias_cell_of(call.layout.block_size), call.plan._asdict()
    return sum(len(plan[f"{side}_indices"]) for side in sides) * (TILE // cell_q) * (TILE // cell_kv)


def _bias_tables(call: Call, *sides: str) -> int:
    """Bytes of the bias of each cell that `_listed_cells` counts: `Scores.tables`.

    The copy of the bias from which a table is gathered is freed before anything larger is allocated.
    """
    bias = call.mods.block_bias
    # of each batch and head of the bias
    n_tables = 0 if bias is None else math.prod(bias.shape[:-1])
    return _float(call) * n_tables * _listed_cells(call, *sides)


def _places(call: Call) -> int:
    """Cells of all stored blocks."""
    if call.layout is None or not _listed_cells(call, "row"):
        return 0
    block_q, block_kv = call.layout.block_size
    cell_q, cell_kv = bias_cell_of(call.layout.block_size)
    return call.layout.capacity * (block_q // cell_q) * (block_kv // cell_kv)


def _bias_index(call: Call, *sides: str, n_places: int) -> int:
    """Bytes of a `block_bias.BiasIndex`: of these sides, and of the places of the blocks in n_places of them."""
    return 4 * _listed_cells(call, *sides) + 8 * n_places * _places(call)


class _Trained(NamedTuple):
    """Bytes of the gradients of sinks, alibi_slopes and block_bias; zeros without any.

    results  the gradients
    sums     that kernels write: of ds for the bias, of ds times the distances of each query for slopes
    peak     of what is allocated after the kernels, the gradients included
    """

    results: int
    sums: int
    peak: int


def _trained(call: Call) -> _Trained:
    """Of `Scores.gradients` on `triton` and `hopper`, in its order."""
    statistics, vector = _sizes(call)["lse"], _float(call) * call.heads
    # a sum per head, in float64
    total = 8 * call.heads
    results = sums = peak = 0
    if call.has_sinks_gradient:
        # the weights of the sinks, and their products with delta
        results, peak = vector, 2 * statistics + total
    if call.has_slopes_gradient:
        peak = max(peak, results + total + vector)
        results, sums = results + vector, statistics
    sums_of_bias, reduced = _bias_gradient(call)
    trained_bias = _bias(call) if call.has_bias_gradient else 0
    return _Trained(results + trained_bias, sums + sums_of_bias, max(peak, results + reduced))


def _bias_gradient(call: Call) -> tuple[int, int]:
    """Bytes of the sums of ds, and of what is allocated to make the gradient of block_bias of them, including it."""
    if not call.has_bias_gradient or call.plan is None or call.layout is None:
        return 0, 0
    batches, heads = call.plan.row_records.shape[:2]
    # batches and heads that share the tiles of the layout: each has sums of its own
    n_sharing = (call.batch if batches == 1 else 1) * (call.heads if heads == 1 else 1)
    listed = call.plan.col_indices if adds_dq(call) else call.plan.row_indices
    n_tiles, blocks = len(listed) + 1, call.layout.capacity
    down, across = (TILE // side for side in bias_cell_of(call.layout.block_size))
    sums = n_sharing * n_tiles * math.prod(_sums_of_tile(call))
    # sums over cells, those of the cells of each block, and their sums
    reduced = n_sharing * (n_tiles * down * across + _places(call) + blocks)
    return FLOAT * sums, FLOAT * reduced


def _sums_of_tile(call: Call) -> tuple[int, int]:
    """Sums of ds along the queries and the keys of a tile."""
    if uses_hopper_backward(call):
        from ..kernels.hopper.backward import config as config_cols
        from ..kernels.hopper.backward_dq import dq_config
        from ..kernels.hopper.registers import CONSUMER_WARPS

        columns, changes_scores = _columns(call), bool(call.mods.softcap) or call.mods.alibi_slopes is not None
        if sums_in_registers(call):
            of_dq = dq_config(max(columns), has_sums_and_mods=changes_scores)
            return CONSUMER_WARPS.value, TILE // of_dq.block_kv
        of_cols = config_cols(columns, has_fewer_queries=changes_scores)
        return TILE // of_cols.block_q, CONSUMER_WARPS.value
    from ..kernels.arguments import Tuning
    from ..kernels.triton.backward import config_queries
    from ..runtime.launch import device_limits

    assert call.layout is not None
    small, dim = sorted(padded_dim("triton", dim) for dim in (call.head_dim, call.v_dim))
    major, shared_memory = device_limits(call.q.device.index)
    # whether TMA loads the inputs makes no difference with score mods
    facts = Tuning(dim, call.dtype.itemsize, major, False, call.dropout_p > 0, shared_memory, True, small)
    steps, cell = config_queries(facts), bias_cell_of(call.layout.block_size)
    return TILE // min(cell[0], steps.block_q), TILE // min(cell[1], steps.block_kv)


# ---- splits, copies and lists ----


def _padded(count: int) -> int:
    """Elements of a row after padding to a multiple of 8, as TMA requires."""
    return -(-count // 8) * 8


def _copies(call: Call) -> int:
    """Bytes of the copies that `hopper` makes of tensors that TMA cannot load."""
    sizes, dims = _sizes(call), {"q": call.head_dim, "k": call.head_dim, "v": call.v_dim}
    return sum(sizes[name] // dims[name] * _padded(dims[name]) for name in call.unreadable)


def split(call: Call, first: int, n_sms: int) -> Split:
    """How `hopper` splits tile rows (first = ROW_LISTS) or tile columns (COL_LISTS)."""
    if call.is_fine:
        n_sms *= PROGRAMS_PER_SM
    if first == COL_LISTS and sums_dkdv(call, n_sms):
        return WHOLE
    return split_of(call.plan or (), first, call.q_shape, call.k_shape, call.causal, n_sms)


def _tile_counter(call: Call, first: int, n_sms: int, *, is_sorted: bool = False) -> int:
    """Bytes of the counter from which `hopper` programs take tile rows or tile columns, if needed.

    first      ROW_LISTS or COL_LISTS
    is_sorted  see needs_tile_counter
    """
    if call.is_fine:
        return 0
    of_cols = first == COL_LISTS
    length, heads = (call.kv_len, call.kv_heads) if of_cols else (call.q_len, call.heads)
    if of_cols and sums_dkdv(call, n_sms):
        heads = call.heads
    n_programs = split(call, first, n_sms).n_programs(-(-length // TILE), call.batch * heads)
    if of_cols and _is_wide(call):
        # the kernel for wide heads has two work tiles per tile column
        n_programs *= 2
    return FLOAT if needs_tile_counter(n_programs, n_sms, is_sorted=is_sorted) else 0


def _split_bytes(call: Call, first: int, n_sms: int) -> int:
    """Bytes that splits of tile rows (first = ROW_LISTS) or tile columns (COL_LISTS) write."""
    of_lines = split(call, first, n_sms)
    if first == COL_LISTS:
        return FLOAT * of_lines.floats(sum(_columns(call)), call.batch * call.kv_heads)
    columns = padded_dim("hopper", call.v_dim) if call.is_fine else forward_columns(call.head_dim, call.v_dim)[1]
    # + 1 for lse
    return FLOAT * of_lines.floats(columns + 1, call.batch * call.heads)


def _split_kv_bytes(call: Call, n_sms: int) -> int:
    """Bytes that the splits of `triton` write for a few queries over many keys (split-KV)."""
    from ..kernels.arguments import options_of
    from ..kernels.triton import split_kv

    sizes, plan = _sizes(call), call.plan
    shape_v = *call.k_shape[:3], call.v_dim
    if not split_kv.is_suitable(call.q_shape, call.kv_len, call.dropout_p):
        return 0
    records = None if plan is None else tuple(plan.row_records.shape)
    n_listed = 0 if plan is None else len(plan.row_indices)
    options = options_of(call.q, plan or (), 1.0, call.causal, 0.0)
    found = split_kv.division_of((call.q_shape, shape_v), call.dtype.itemsize, records, n_listed, options, n_sms)
    # of each split: out in float32, and the maximum and the sum of each row
    of_split = sizes["out"] // call.dtype.itemsize * FLOAT + 2 * sizes["lse"]
    return found.n_splits * of_split if found.n_splits > 1 else 0


def _columns(call: Call) -> tuple[int, int]:
    """Columns of (q and k, v and dO) in the backward."""
    if call.is_fine:
        return padded_dim("hopper", call.head_dim), padded_dim("hopper", call.v_dim)
    return backward_columns(call.head_dim, call.v_dim)


def _lists(call: Call, *sides: str) -> int:
    """Bytes of a plan's lists for these sides ("row", "col"), and of its bitmasks."""
    if call.plan is None or call.backend == "reference":
        return 0
    return sum(
        tensor.nbytes
        for name, tensor in call.plan._asdict().items()
        if name == "bitmasks" or name.partition("_")[0] in sides
    )


def metadata_bytes(call: Call) -> int:
    """Bytes that a layout keeps on the device for such calls."""
    return _lists(call, "row", "col") + _bias_index(call, "row", "col", n_places=2)


def _sides(call: Call) -> tuple[str, ...]:
    """The sides of a plan that a backward reads."""
    if adds_dq(call):
        return ("col",)
    return ("row",) if call.backend == "eager" else ("row", "col")


# ---- a call ----


# of a reordered call, tensors that are copied into the other order, and tensors that are put back; of a backward, the
# gradients of these
_FORWARD_COPIES = ("q", "k", "v"), ("out", "lse")
_BACKWARD_COPIES = ("out",), ("q", "k", "v")


def _with_copies(moved: Moved, call: Call, copied: tuple[str, ...], put_back: tuple[str, ...]) -> Moved:
    """The same with copies of these tensors, where the call is reordered."""
    if call.reordered is None:
        return moved
    sizes, reads, writes, workspace = _sizes(call), 0, 0, 0
    for name in (*copied, *put_back):
        is_key = name in ("k", "v")
        if (call.reordered.kv if is_key else call.reordered.q) is None:
            continue
        n_tokens, n_ordered = (call.k.shape[2], call.kv_len) if is_key else (call.q.shape[2], call.q_len)
        ordered = sizes[name]
        own = ordered // n_ordered * n_tokens
        reads += own if name in copied else ordered
        writes += ordered if name in copied else own
        workspace += ordered
    return Moved(
        moved.reads + reads,
        moved.writes + writes,
        None if moved.workspace is None else moved.workspace + workspace,
        moved.main_bytes,
        moved.extra_bytes + reads + writes,
    )


def forward(call: Call, n_sms: int | None = None) -> Moved:
    """Bytes of a forward. Tensors that autocast converts and copies in another order count as workspace.

    n_sms  SMs of the GPU; None: of the GPU that holds the tensors
    """
    return _with_copies(_forward(call, n_sms), call, *_FORWARD_COPIES)


def backward(call: Call, n_sms: int | None = None) -> Moved:
    """Bytes of a backward with a contiguous gradient of the output."""
    return _with_copies(_backward(call, n_sms), call, *_BACKWARD_COPIES)


def _forward(call: Call, n_sms: int | None) -> Moved:
    """`forward` of tokens in the order in which kernels read them."""
    n_sms = call.n_sms if n_sms is None else n_sms
    sizes = _sizes(call)
    reads = sizes["q"] + sizes["k"] + sizes["v"] + _lists(call, "row")
    writes = sizes["out"] + sizes["lse"]
    reads += _pair_bias(call)
    # a table is made of the bias and its index, and read by the kernel
    of_table, table = _bias(call) + _bias_index(call, "row", n_places=0), _bias_tables(call, "row")
    workspace: int | None = None
    of_splits = 0
    if call.is_empty:
        workspace = 0
    elif call.backend in ("triton", "hopper"):
        named = {"q": call.q, "k": call.k, "v": call.v}
        workspace = table + sum(sizes[name] for name, tensor in named.items() if tensor.dtype != call.dtype)
        bias = call.mods.block_bias
        if bias is not None and bias.dtype != torch.float32:
            workspace += _bias(call)
    if workspace is not None and call.backend == "hopper" and not call.is_empty:
        # and the tile counter, and what the splits of rows write
        of_splits = _split_bytes(call, ROW_LISTS, n_sms)
        is_sorted = (
            call.plan is None
            and not call.has_kv_lengths
            and are_rows_sorted(call.q_len, call.kv_len, call.batch * call.heads, n_sms, causal=call.causal)
        )
        workspace += _copies(call) + _tile_counter(call, ROW_LISTS, n_sms, is_sorted=is_sorted) + of_splits
        if call.v_dim % 8:
            # the padding of the last row is not allocated
            filling = _padded(call.v_dim) - call.v_dim
            workspace += sizes["out"] // call.v_dim * _padded(call.v_dim) - call.dtype.itemsize * filling
    if workspace is not None and call.backend == "triton" and not call.is_empty:
        of_splits = _split_kv_bytes(call, n_sms)
        workspace += of_splits
    # the launch that combines splits reads them again
    main_bytes, extra_bytes = reads + table + writes + of_splits, of_table + table + of_splits
    return Moved(reads + of_table, writes, workspace, main_bytes, extra_bytes)


def _backward(call: Call, n_sms: int | None) -> Moved:
    """`backward` of tokens in the order in which kernels read them."""
    n_sms = call.n_sms if n_sms is None else n_sms
    sizes, sides, trained = _sizes(call), _sides(call), _trained(call)
    inputs = sizes["q"] + sizes["k"] + sizes["v"]
    reads = inputs + 2 * sizes["out"] + sizes["lse"] + _lists(call, *sides) + _pair_bias(call) + _sources(call)
    results = inputs + trained.results
    if has_gradient(call.mods.pair_bias):
        results += _pair_bias(call)
    if call.is_empty or call.backend not in ("triton", "hopper"):
        return Moved(reads, results, 0 if call.is_empty else None, 0, 0)
    if uses_hopper_backward(call):
        return Moved(reads, results, *_hopper_backward(call, n_sms))
    workspace = _statistics(call) + _of_mods(call) + trained.peak - trained.results
    return Moved(reads, results, workspace, _in_two_launches(call), _before_and_after(call))


def _sources(call: Call) -> int:
    """Bytes from which a backward makes its tables of block_bias."""
    return _bias(call) + _bias_index(call, *_sides(call), n_places=int(call.has_bias_gradient))


def _of_mods(call: Call) -> int:
    """Bytes of the tables of block_bias, which launches before the kernels make, and of the sums that follow them."""
    return _bias_tables(call, *_sides(call)) + _trained(call).sums


def _statistics(call: Call) -> int:
    """Bytes of lse and delta of each query, padded to whole tiles."""
    side = call.side if uses_hopper_backward(call) else TILE
    return 2 * FLOAT * call.batch * call.heads * -(-call.q_len // side) * side


def _read_by_launch(call: Call) -> int:
    """Bytes of the tensors that a kernel of the backward reads."""
    sizes = _sizes(call)
    return sizes["q"] + sizes["k"] + sizes["v"] + sizes["out"] + _statistics(call)


def _in_two_launches(call: Call) -> int:
    """`main_bytes` of a launch for dk and dv, and of one for dq."""
    sizes = _sizes(call)
    results = sizes["q"] + sizes["k"] + sizes["v"]
    return 2 * _read_by_launch(call) + results + _lists(call, "row", "col") + _of_mods(call)


def _before_and_after(call: Call) -> int:
    """`extra_bytes` of the launches for delta, and of those for the tables and gradients of score mods."""
    sizes = _sizes(call)
    of_mods = _sources(call) + _of_mods(call) + 2 * _trained(call).peak
    return 2 * sizes["out"] + sizes["lse"] + _statistics(call) + of_mods


def _hopper_backward(call: Call, n_sms: int) -> tuple[int, int, int]:
    """(workspace, main_bytes, extra_bytes) of hopper's own kernels."""
    sizes, trained = _sizes(call), _trained(call)
    workspace, extra_bytes = _statistics(call) + _of_mods(call), _before_and_after(call)
    of_splits = _split_bytes(call, COL_LISTS, n_sms)
    # of the launches for dq alone
    of_dq = 0
    if sums_in_registers(call):
        main_bytes = _in_two_launches(call)
        columns, _ = _columns(call)
        splits_of_dq = FLOAT * split(call, ROW_LISTS, n_sms).floats(columns, call.batch * call.heads)
        of_dq = splits_of_dq + _tile_counter(call, ROW_LISTS, n_sms)
        workspace += of_splits
        of_splits += splits_of_dq
    else:
        # of whole tiles; added to, so that it is read and written
        dq_sum = _statistics(call) // 2 * _columns(call)[0]
        main_bytes = _read_by_launch(call) + sizes["k"] + sizes["v"] + _lists(call, "col") + 2 * dq_sum + _of_mods(call)
        workspace += of_splits + dq_sum
        rows = call.batch * call.heads * call.q_len
        extra_bytes += 2 * dq_sum + call.dtype.itemsize * rows * _padded(call.head_dim)
    if sums_dkdv(call, n_sms):
        columns = sum(_columns(call))
        sums = FLOAT * call.batch * call.kv_heads * -(-call.kv_len // TILE) * TILE * columns
        workspace, main_bytes, extra_bytes = workspace + sums, main_bytes + 2 * sums, extra_bytes + 2 * sums
    workspace += _copies(call) + _tile_counter(call, COL_LISTS, n_sms)
    if call.is_fine:
        # kept to the end
        workspace, of_dq = workspace + of_dq, 0
    # gradients are written in padded rows first
    padded = copied = 0
    for name, dim in (("q", call.head_dim), ("k", call.head_dim), ("v", call.v_dim)):
        if dim % 8:
            padded, copied = padded + sizes[name] // dim * _padded(dim), copied + sizes[name]
    if call.v_dim % 8:
        # dout is copied into padded rows
        workspace += sizes["out"] // call.v_dim * _padded(call.v_dim)
    # at its peak while dq is computed, while padded rows are copied, or while the gradients of score mods are made
    workspace += padded + max(of_dq - copied, 0, trained.peak - padded) - trained.results
    return workspace, main_bytes + of_splits, extra_bytes + of_splits


def has_separate_dq(call: Call) -> bool:
    """Whether hopper's backward leaves dq out of the kernel for dk and dv, which could compute it."""
    if not uses_hopper_backward(call) or call.is_fine or _is_wide(call):
        return False
    dim = max(call.head_dim, call.v_dim)
    return is_dq_separate(call.plan or (), call.q_shape, dim, call.n_sms, deterministic=call.deterministic)


def varying_gradients(call: Call) -> str:
    """The gradients that are summed in no fixed order."""
    if sums_dkdv(call, call.n_sms):
        return "dq, dk and dv" if adds_dq(call) else "dk and dv"
    return "dq" if adds_dq(call) else ""


def adds_dq(call: Call) -> bool:
    """Whether tile columns add to dq, in no fixed order."""
    return uses_hopper_backward(call) and not sums_in_registers(call)


def sums_dkdv(call: Call, n_sms: int) -> bool:
    """Whether the query heads of a group add to sums of dk and dv, in no fixed order."""
    shapes = call.q_shape, call.k_shape
    return (
        uses_hopper_backward(call)
        and not call.is_fine
        and not _is_wide(call)
        and sums_over_heads(call.plan or (), *shapes, call.causal, n_sms, deterministic=call.deterministic)
    )


def sums_in_registers(call: Call) -> bool:
    """Whether hopper's backward has a launch for dk and dv and one for dq, which keeps its sums in registers."""
    return uses_hopper_backward(call) and (call.is_fine or _is_wide(call) or has_separate_dq(call))


def _is_wide(call: Call) -> bool:
    return max(call.head_dim, call.v_dim) > MAX_JOINT_HEAD_DIM


def uses_hopper_backward(call: Call) -> bool:
    """Whether the backward is hopper's own; the gradient of slopes uses that of `triton`."""
    return call.backend == "hopper" and not call.has_slopes_gradient
