"""Bytes that a call reads, writes and allocates. Each tensor counts once, however often tiles read it again."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..kernels.schedule import (
    MAX_JOINT_HEAD_DIM,
    PROGRAMS_PER_SM,
    WHOLE,
    Split,
    backward_columns,
    forward_columns,
    is_dq_separate,
    padded_dim,
    split_of,
    sums_over_heads,
)
from ..plan_format import TILE
from .call import Call

# bytes of an element of lse, delta and the sum of dq
FLOAT = 4


class Moved(NamedTuple):
    """Bytes of one direction.

    reads        tensors and metadata that are read, each once
    writes       results
    workspace    allocated beside the results, and freed at the end; None where PyTorch's operators allocate
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
        "lse": (8 if size == 8 else FLOAT) * queries,
    }


def _pair_bias(call: Call) -> int:
    """Bytes of pair_bias, as if all of its tiles were stored."""
    bias = call.mods.pair_bias
    return 0 if bias is None else bias.numel() * bias.element_size()


def _padded(count: int) -> int:
    """Elements of a row after padding to a multiple of 8, as TMA requires."""
    return -(-count // 8) * 8


def _copies(call: Call) -> int:
    """Bytes of the copies that `hopper` makes of tensors that TMA cannot load."""
    sizes, dims = _sizes(call), {"q": call.head_dim, "k": call.head_dim, "v": call.v_dim}
    return sum(sizes[name] // dims[name] * _padded(dims[name]) for name in call.unreadable)


def split(call: Call, first: int, n_sms: int) -> Split:
    """How `hopper` splits rows (first = 0) or columns (3)."""
    if call.is_fine:
        n_sms *= PROGRAMS_PER_SM
    if first and sums_dkdv(call, n_sms):
        return WHOLE
    return split_of(call.plan or (), first, call.q_shape, call.k_shape, call.causal, n_sms)


def _tile_counter(call: Call, first: int, n_sms: int) -> int:
    """Bytes of the counter from which `hopper` programs take tile rows (first = 0) or columns (3), if needed."""
    if call.is_fine:
        return 0
    length, heads = (call.kv_len, call.kv_heads) if first else (call.q_len, call.heads)
    if first and sums_dkdv(call, n_sms):
        heads = call.heads
    n_programs = split(call, first, n_sms).n_programs(-(-length // TILE), call.batch * heads)
    if first and _is_wide(call):
        # the kernel for wide heads has two work tiles per tile column
        n_programs *= 2
    return FLOAT if n_programs > n_sms else 0


def _parts(call: Call, first: int, n_sms: int) -> int:
    """Bytes that splits of tile rows (first = 0) or columns (3) write."""
    of_lines = split(call, first, n_sms)
    if first:
        return FLOAT * of_lines.floats(sum(_columns(call)), call.batch * call.kv_heads)
    columns = padded_dim("hopper", call.v_dim) if call.is_fine else forward_columns(call.head_dim, call.v_dim)[1]
    # + 1 for lse
    return FLOAT * of_lines.floats(columns + 1, call.batch * call.heads)


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


def _with_gathers(moved: Moved, call: Call, *, of_lse: bool) -> Moved:
    """The same with copies in another order of k and v, and of q and out, or of their gradients.

    of_lse  whether lse is put back too
    """
    if call.reordered is None:
        return moved
    sizes, reads, writes, copies = _sizes(call), 0, 0, 0
    # (copied or put back, tokens of the call, tokens in the other order)
    for name, length, new_length in (
        *((name, call.k.shape[2], call.kv_len) for name in ("k", "v") if call.reordered.kv is not None),
        *((name, call.q.shape[2], call.q_len) for name in ("q", "out", "lse") if call.reordered.q is not None),
    ):
        if name == "lse" and not of_lse:
            continue
        copy = sizes[name]
        own = copy // new_length * length
        is_result = name in ("out", "lse") if of_lse else name != "out"
        reads += copy if is_result else own
        writes += own if is_result else copy
        copies += copy
    workspace = None if moved.workspace is None else moved.workspace + copies
    extra_bytes = moved.extra_bytes + reads + writes
    return Moved(moved.reads + reads, moved.writes + writes, workspace, moved.main_bytes, extra_bytes)


def forward(call: Call, n_sms: int | None = None) -> Moved:
    """Bytes of a forward. Tensors that autocast converts and copies in another order count as workspace.

    n_sms  SMs of the GPU; None: of the GPU that holds the tensors
    """
    return _with_gathers(_forward(call, n_sms), call, of_lse=True)


def backward(call: Call, n_sms: int | None = None) -> Moved:
    """Bytes of a backward with a contiguous gradient of the output."""
    return _with_gathers(_backward(call, n_sms), call, of_lse=False)


def _forward(call: Call, n_sms: int | None) -> Moved:
    """`forward` of tokens in the order in which kernels read them."""
    n_sms = call.n_sms if n_sms is None else n_sms
    sizes = _sizes(call)
    reads = sizes["q"] + sizes["k"] + sizes["v"] + _lists(call, "row")
    writes = sizes["out"] + sizes["lse"]
    reads += _pair_bias(call)
    workspace: int | None = None
    parts = 0
    if call.is_empty:
        workspace = 0
    elif call.backend in ("triton", "hopper"):
        named = {"q": call.q, "k": call.k, "v": call.v}
        workspace = sum(sizes[name] for name, tensor in named.items() if tensor.dtype != call.dtype)
    if workspace is not None and call.backend == "hopper" and not call.is_empty:
        # and the tile counter, and what the splits of rows write
        parts = _parts(call, 0, n_sms)
        workspace += _copies(call) + _tile_counter(call, 0, n_sms) + parts
        if call.v_dim % 8:
            # the padding of the last row is not allocated
            filling = _padded(call.v_dim) - call.v_dim
            workspace += sizes["out"] // call.v_dim * _padded(call.v_dim) - call.dtype.itemsize * filling
    # the launch that combines splits reads them again
    return Moved(reads, writes, workspace, reads + writes + parts, parts)


def _backward(call: Call, n_sms: int | None) -> Moved:
    """`backward` of tokens in the order in which kernels read them."""
    n_sms = call.n_sms if n_sms is None else n_sms
    sizes = _sizes(call)
    inputs = sizes["q"] + sizes["k"] + sizes["v"]
    sides = ("col",) if adds_dq(call) else ("row", "col")
    reads = inputs + 2 * sizes["out"] + sizes["lse"] + _lists(call, *sides)
    of_pairs, results = _pair_bias(call), inputs
    reads += of_pairs
    bias = call.mods.pair_bias
    if bias is not None and bias.requires_grad and torch.is_grad_enabled():
        results += of_pairs
    if call.is_empty or call.backend not in ("triton", "hopper"):
        return Moved(reads, results, 0 if call.is_empty else None, 0, 0)
    # lse and delta of each query, padded to whole tiles
    side = call.side if uses_hopper_backward(call) else TILE
    statistics = 2 * FLOAT * call.batch * call.heads * -(-call.q_len // side) * side
    extra_bytes = 2 * sizes["out"] + sizes["lse"] + statistics
    # of a launch for dk and dv, and of one for dq
    shared = inputs + sizes["out"] + statistics
    main_bytes = 2 * shared + inputs + _lists(call, "row", "col")
    if not uses_hopper_backward(call):
        return Moved(reads, results, statistics, main_bytes, extra_bytes)
    rows = call.batch * call.heads * call.q_len
    dq = call.dtype.itemsize * rows * _padded(call.head_dim)
    if sums_in_registers(call):
        workspace = statistics + (dq if call.head_dim % 8 else 0)
    else:
        # of whole tiles
        dq_sum = statistics // 2 * _columns(call)[0]
        workspace = statistics + dq_sum
        if call.head_dim % 8:
            workspace += dq
        # added to, it is read and written
        main_bytes = shared + sizes["k"] + sizes["v"] + _lists(call, "col") + 2 * dq_sum
        extra_bytes += 2 * dq_sum + dq
    if sums_dkdv(call, n_sms):
        columns = sum(_columns(call))
        sums = FLOAT * call.batch * call.kv_heads * -(-call.kv_len // TILE) * TILE * columns
        workspace, main_bytes, extra_bytes = workspace + sums, main_bytes + 2 * sums, extra_bytes + 2 * sums
    parts = _parts(call, 3, n_sms)
    if sums_in_registers(call):
        # of dq
        columns, _ = _columns(call)
        parts += FLOAT * split(call, 0, n_sms).floats(columns, call.batch * call.heads)
        workspace += _tile_counter(call, 0, n_sms)
    workspace, main_bytes, extra_bytes = workspace + parts, main_bytes + parts, extra_bytes + parts
    workspace += _copies(call) + _tile_counter(call, 3, n_sms)
    for name, dim in (("k", call.head_dim), ("v", call.v_dim), ("out", call.v_dim)):
        # dk and dv are written in padded rows first; dout is copied into padded rows
        if dim % 8:
            workspace += sizes[name] // dim * _padded(dim)
    return Moved(reads, inputs, workspace, main_bytes, extra_bytes)


def has_separate_dq(call: Call) -> bool:
    """Whether hopper's backward leaves dq out of the kernel for dk and dv, which could compute it."""
    if not uses_hopper_backward(call) or call.is_fine or _is_wide(call):
        return False
    if call.has_bias_gradient:
        # its sums need it
        return True
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
