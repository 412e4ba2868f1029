"""How do rows of tensors move and add up on a GPU? Two kernels that read and write each row once, at the speed of memory.

    copy    target[:, :, put] = source[:, :, taken], of one pair (source, target) or of two with the same lists
    add     total[:, :, rows] = sums over ranks, in their order and in float32, of rows which a table names

With PyTorch's index_select and index_copy_ a row is read and written several times on its way, and sums keep a float32 tensor
of the whole. Tensors are (batch, heads, rows, features) with a last stride of 1. Knows pointers, strides,
index lists. Does not know ranks' messages, layouts, autograd.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from ..seen import Seen, see
from .launch import Launch
from .tile import head_base

# rows and elements of a program: 16 bytes a thread, four loads in flight
ELEMENTS = 8192


# fmt: off
@triton.jit(do_not_specialize=["n_rows", "n_blocks", "n_heads"])
def copy_kernel(
    # inputs; the lists are int64, or None for all rows in order; program_id(1) tells the first source from the second one
    source_ptr, second_source_ptr, taken_ptr, put_ptr,
    # outputs
    target_ptr, second_target_ptr,
    # strides in elements: (batch, head, row)
    source_strides, target_strides, second_source_strides, second_target_strides,
    n_rows, n_blocks, n_heads,
    # compile time; the DIM of the wider one
    FEATURES: tl.constexpr, SECOND_FEATURES: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
):
    i_axis = tl.program_id(0) // n_blocks
    i_batch, i_head = i_axis // n_heads, i_axis % n_heads
    o_row = (tl.program_id(0) % n_blocks) * ROWS + tl.arange(0, ROWS)
    m_row = o_row < n_rows
    o_from = o_row.to(tl.int64)
    o_to = o_from
    if taken_ptr is not None:
        o_from = tl.load(taken_ptr + o_row, mask=m_row, other=0)
    if put_ptr is not None:
        o_to = tl.load(put_ptr + o_row, mask=m_row, other=0)
    o_dim = tl.arange(0, DIM)
    if tl.program_id(1) == 0:
        # [ROWS, DIM]
        m_rows = m_row[:, None] & (o_dim < FEATURES)[None, :]
        p_source = head_base(source_ptr, source_strides, i_batch, i_head) + o_from[:, None] * source_strides[2]
        p_target = head_base(target_ptr, target_strides, i_batch, i_head) + o_to[:, None] * target_strides[2]
        b_rows = tl.load(p_source + o_dim[None, :], mask=m_rows, other=0.0)
        tl.store(p_target + o_dim[None, :], b_rows.to(target_ptr.dtype.element_ty), mask=m_rows)
    # names of its own: the types of the two branches differ
    elif second_source_ptr is not None:
        m_seconds = m_row[:, None] & (o_dim < SECOND_FEATURES)[None, :]
        p_second = head_base(second_source_ptr, second_source_strides, i_batch, i_head)
        p_into = head_base(second_target_ptr, second_target_strides, i_batch, i_head)
        p_second += o_from[:, None] * second_source_strides[2] + o_dim[None, :]
        p_into += o_to[:, None] * second_target_strides[2] + o_dim[None, :]
        b_seconds = tl.load(p_second, mask=m_seconds, other=0.0)
        tl.store(p_into, b_seconds.to(second_target_ptr.dtype.element_ty), mask=m_seconds)


@triton.jit(do_not_specialize=["n_rows", "n_blocks", "n_heads"])
def add_kernel(
    # inputs; `base` and `other` hold every row of total or are None; rows is int64, or None for all
    mine_ptr, others_ptr, base_ptr, other_ptr, table_ptr, rows_ptr,
    # output, which may be base
    total_ptr,
    mine_strides, others_strides, base_strides, other_strides, total_strides,
    n_rows, n_blocks, n_heads,
    RANK: tl.constexpr, N_RANKS: tl.constexpr, FEATURES: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
):
    i_axis = tl.program_id(0) // n_blocks
    i_batch, i_head = i_axis // n_heads, i_axis % n_heads
    o_row = (tl.program_id(0) % n_blocks) * ROWS + tl.arange(0, ROWS)
    m_row = o_row < n_rows
    o_to = o_row.to(tl.int64)
    if rows_ptr is not None:
        o_to = tl.load(rows_ptr + o_row, mask=m_row, other=0)
    o_dim = tl.arange(0, DIM)
    # [ROWS, DIM]
    m_dim = (o_dim < FEATURES)[None, :]
    m_rows = m_row[:, None] & m_dim
    b_total = tl.zeros([ROWS, DIM], tl.float32)
    for i_rank in tl.static_range(N_RANKS):
        # -1: this rank has nothing for the row
        o_from = tl.load(table_ptr + i_rank * n_rows + o_row, mask=m_row, other=-1).to(tl.int64)
        m_from = (o_from >= 0)[:, None] & m_dim
        if i_rank == RANK:
            if base_ptr is not None:
                p_base = head_base(base_ptr, base_strides, i_batch, i_head) + o_to[:, None] * base_strides[2]
                b_total += tl.load(p_base + o_dim[None, :], mask=m_rows, other=0.0).to(tl.float32)
            if other_ptr is not None:
                p_other = head_base(other_ptr, other_strides, i_batch, i_head) + o_to[:, None] * other_strides[2]
                b_total += tl.load(p_other + o_dim[None, :], mask=m_rows, other=0.0).to(tl.float32)
            p_part = head_base(mine_ptr, mine_strides, i_batch, i_head) + o_from[:, None] * mine_strides[2]
        else:
            p_part = head_base(others_ptr, others_strides, i_batch, i_head) + o_from[:, None] * others_strides[2]
        b_total += tl.load(p_part + o_dim[None, :], mask=m_from, other=0.0).to(tl.float32)
    p_total = head_base(total_ptr, total_strides, i_batch, i_head) + o_to[:, None] * total_strides[2] + o_dim[None, :]
    tl.store(p_total, b_total.to(total_ptr.dtype.element_ty), mask=m_rows)
# fmt: on


def _sizes(shape: tuple[int, ...], n_rows: int) -> tuple[int, dict[str, Any]]:
    """Programs of a launch over so many rows of tensors of such a shape, and the arguments that say so."""
    batch, heads, _, features = shape
    dim = triton.next_power_of_2(features)
    rows = max(1, min(ELEMENTS // dim, 128))
    n_blocks = -(-n_rows // rows)
    sizes = {"n_rows": n_rows, "n_blocks": n_blocks, "n_heads": heads, "FEATURES": features, "DIM": dim, "ROWS": rows}
    return n_blocks * batch * heads, sizes | {"num_warps": 8}


@functools.lru_cache(maxsize=1024)
def _copy_launch(
    tensors: tuple[Seen | None, ...],
    n_rows: int,
    device: torch.device,  # noqa: ARG001  a launch is of one
) -> Launch:
    source, second_source, _, _, target, second_target = tensors
    assert source is not None and target is not None
    pair = [(source, target)]
    if second_source is not None and second_target is not None:
        pair.append((second_source, second_target))
    wide = max((of[1].shape for of in pair), key=lambda shape: shape[3])
    n_programs, sizes = _sizes(wide, n_rows)
    (source, target), (second_source, second_target) = pair[0], pair[-1]
    strides = {
        "source_strides": source.strides[:3],
        "target_strides": target.strides[:3],
        "second_source_strides": second_source.strides[:3],
        "second_target_strides": second_target.strides[:3],
    }
    features = {"FEATURES": target.shape[3], "SECOND_FEATURES": second_target.shape[3]}
    return Launch(copy_kernel, (n_programs, len(pair)), strides | sizes | features)


def copy(
    source: torch.Tensor,
    target: torch.Tensor,
    taken: torch.Tensor | None,
    put: torch.Tensor | None,
    second: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """target[:, :, put] = source[:, :, taken], in target's type, and likewise of the second (source, target).

    The lists are contiguous int64; None is all rows. Batches, heads and rows of both pairs are equal.
    """
    n_rows = len(taken) if taken is not None else source.shape[2]
    if n_rows and target.numel():
        second_source, second_target = (None, None) if second is None else second
        tensors = tuple(see(tensor) for tensor in (source, second_source, taken, put, target, second_target))
        launch = _copy_launch(tensors, n_rows, source.device)
        launch(source, second_source, taken, put, target, second_target)


@functools.lru_cache(maxsize=1024)
def _add_launch(
    tensors: tuple[Seen | None, ...],
    n_rows: int,
    rank: int,
    n_ranks: int,
    device: torch.device,  # noqa: ARG001  likewise
) -> Launch:
    names = ("mine", "others", "base", "other", "total")
    strides = {f"{name}_strides": t.strides[:3] if t else (0, 0, 0) for name, t in zip(names, tensors, strict=False)}
    assert tensors[4] is not None
    n_programs, sizes = _sizes(tensors[4].shape, n_rows)
    return Launch(add_kernel, (n_programs,), strides | sizes | {"RANK": rank, "N_RANKS": n_ranks})


def add(
    total: torch.Tensor,
    mine: torch.Tensor,
    others: torch.Tensor,
    bases: list[torch.Tensor],
    table: torch.Tensor,
    rows: torch.Tensor | None,
    rank: int,
) -> None:
    """total[:, :, rows] = for each rank r in order others[:, :, table[r]], at `rank` bases[...][:, :, rows] + mine.

    table  int32 (ranks, rows), contiguous; -1: nothing. bases: at most two, of total's shape; one may be total itself
    """
    n_ranks, n_rows = table.shape
    if n_rows == 0 or total.numel() == 0:
        return
    base, other = (*bases, None, None)[:2]
    seen = tuple(see(t) for t in (mine, others, base, other, total, table, rows))
    launch = _add_launch(seen, n_rows, rank, n_ranks, total.device)
    launch(mine, others, base, other, table, rows, total)
