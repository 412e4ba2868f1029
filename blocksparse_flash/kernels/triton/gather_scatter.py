"""Gather and scatter of token rows for context parallelism; each row is read and written once.

    move    target[:, :, target_index] = source[:, :, source_index], for pairs with the same index lists
    add     total[:, :, rows] = sum over ranks, in order and in float32, of indexed rows; for one or more totals
    merge   out[:, :, rows] and lse[:, :, rows] of attention over the keys of all ranks, from indexed partial results

Tensors are (batch, heads, rows, features) with a last stride of 1. A message is contiguous: (rows, batch, heads,
features of all its tensors, concatenated). PyTorch's index_select and index_copy_ would read and write a row several
times, launch once per tensor, and sum into a float32 copy.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from ...runtime.launch import Launch
from ...runtime.tensor_spec import TensorSpec, TensorSpecs, specs_of
from .tile import head_base

# elements of a program: 16 bytes per thread, four loads in flight
ELEMENTS = 8192


# fmt: off
# strides are (batch, head, row, offset of the first feature), in elements
@triton.jit
def load_rows(ptr, strides, i_batch, i_head, o_row, m_row, FEATURES: tl.constexpr, DIM: tl.constexpr):
    """[rows, DIM]: rows of a head, 0 where m_row is False."""
    o_dim = tl.arange(0, DIM)
    p_row = head_base(ptr, strides, i_batch, i_head) + strides[3] + o_row[:, None] * strides[2] + o_dim[None, :]
    return tl.load(p_row, mask=m_row[:, None] & (o_dim < FEATURES)[None, :], other=0.0)


@triton.jit
def store_rows(ptr, strides, i_batch, i_head, o_row, m_row, b_rows, FEATURES: tl.constexpr, DIM: tl.constexpr):
    o_dim = tl.arange(0, DIM)
    p_row = head_base(ptr, strides, i_batch, i_head) + strides[3] + o_row[:, None] * strides[2] + o_dim[None, :]
    tl.store(p_row, b_rows.to(ptr.dtype.element_ty), mask=m_row[:, None] & (o_dim < FEATURES)[None, :])


@triton.jit
def locate(n_rows, n_blocks, n_heads, ROWS: tl.constexpr):
    """(batch, head, rows, row mask) of a program."""
    batch_head = tl.program_id(0) // n_blocks
    o_row = (tl.program_id(0) % n_blocks) * ROWS + tl.arange(0, ROWS)
    return batch_head // n_heads, batch_head % n_heads, o_row, o_row < n_rows


@triton.jit(do_not_specialize=["n_rows", "n_blocks", "n_heads"])
def move_kernel(
    # inputs, the sources as a tuple; the index lists are int64, or None for all rows in order
    source_ptrs, source_index_ptr, target_index_ptr,
    # outputs, a target for each source; program_id(1) is the pair
    target_ptrs,
    # of each source, of each target
    source_strides, target_strides,
    n_rows, n_blocks, n_heads,
    # compile time; FEATURES and DIMS of each pair
    FEATURES: tl.constexpr, DIMS: tl.constexpr, ROWS: tl.constexpr,
):
    i_batch, i_head, o_row, m_row = locate(n_rows, n_blocks, n_heads, ROWS)
    o_from = o_row.to(tl.int64)
    o_to = o_from
    if source_index_ptr is not None:
        o_from = tl.load(source_index_ptr + o_row, mask=m_row, other=0)
    if target_index_ptr is not None:
        o_to = tl.load(target_index_ptr + o_row, mask=m_row, other=0)
    i_pair = tl.program_id(1)
    for i in tl.static_range(len(FEATURES)):
        if i_pair == i:
            b_rows = load_rows(source_ptrs[i], source_strides[i], i_batch, i_head, o_from, m_row, FEATURES[i], DIMS[i])
            store_rows(
                target_ptrs[i], target_strides[i], i_batch, i_head, o_to, m_row, b_rows, FEATURES[i], DIMS[i]
            )


@triton.jit
def add_rows(
    mine_ptrs, base_ptrs, other_ptrs, others_ptr, table_ptr, total_ptrs,
    mine_strides, base_strides, other_strides, others_strides, total_strides,
    i_batch, i_head, o_row, o_to, m_row, n_rows, SUM: tl.constexpr,
    RANK: tl.constexpr, N_RANKS: tl.constexpr, FEATURES: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
):
    """Some rows of a sum."""
    b_total = tl.zeros([ROWS, DIM], tl.float32)
    for i_rank in tl.static_range(N_RANKS):
        # -1: this rank has no such row
        o_from = tl.load(table_ptr + i_rank * n_rows + o_row, mask=m_row, other=-1).to(tl.int64)
        m_from = o_from >= 0
        if i_rank == RANK:
            if base_ptrs is not None:
                b_total += load_rows(
                    base_ptrs[SUM], base_strides[SUM], i_batch, i_head, o_to, m_row, FEATURES, DIM).to(tl.float32)
            if other_ptrs is not None:
                b_total += load_rows(
                    other_ptrs[SUM], other_strides[SUM], i_batch, i_head, o_to, m_row, FEATURES, DIM).to(tl.float32)
            b_part = load_rows(mine_ptrs[SUM], mine_strides[SUM], i_batch, i_head, o_from, m_from, FEATURES, DIM)
        else:
            b_part = load_rows(others_ptr, others_strides[SUM], i_batch, i_head, o_from, m_from, FEATURES, DIM)
        b_total += b_part.to(tl.float32)
    store_rows(total_ptrs[SUM], total_strides[SUM], i_batch, i_head, o_to, m_row, b_total, FEATURES, DIM)


@triton.jit(do_not_specialize=["n_rows", "n_blocks", "n_heads"])
def add_kernel(
    # inputs; mine, base and other are tuples with a tensor of each sum, the last two of total's shape or None;
    # rows is int64, or None for all
    mine_ptrs, base_ptrs, other_ptrs, others_ptr, table_ptr, rows_ptr,
    # outputs, which may be bases; program_id(1) is the sum
    total_ptrs,
    # of the tensors of each sum
    mine_strides, base_strides, other_strides, others_strides, total_strides,
    n_rows, n_blocks, n_heads,
    # compile time; FEATURES and DIMS of each sum
    RANK: tl.constexpr, N_RANKS: tl.constexpr, FEATURES: tl.constexpr, DIMS: tl.constexpr, ROWS: tl.constexpr,
):
    i_batch, i_head, o_row, m_row = locate(n_rows, n_blocks, n_heads, ROWS)
    o_to = o_row.to(tl.int64)
    if rows_ptr is not None:
        o_to = tl.load(rows_ptr + o_row, mask=m_row, other=0)
    i_sum = tl.program_id(1)
    for i in tl.static_range(len(FEATURES)):
        if i_sum == i:
            add_rows(
                mine_ptrs, base_ptrs, other_ptrs, others_ptr, table_ptr, total_ptrs,
                mine_strides, base_strides, other_strides, others_strides, total_strides,
                i_batch, i_head, o_row, o_to, m_row, n_rows, SUM=i,
                RANK=RANK, N_RANKS=N_RANKS, FEATURES=FEATURES[i], DIM=DIMS[i], ROWS=ROWS,
            )


@triton.jit
def load_lse(ptr, strides, i_batch, i_head, o_row, m_row, HALVES: tl.constexpr):
    """lse of rows, -inf where m_row is False. HALVES: stored as two 16-bit values, the low half first."""
    p_lse = head_base(ptr, strides, i_batch, i_head) + strides[3] + o_row * strides[2]
    if HALVES:
        b_low = tl.load(p_lse, mask=m_row, other=0.0).to(tl.uint16, bitcast=True).to(tl.uint32)
        b_high = tl.load(p_lse + 1, mask=m_row, other=0.0).to(tl.uint16, bitcast=True).to(tl.uint32)
        b_lse = ((b_high << 16) | b_low).to(tl.float32, bitcast=True)
    else:
        b_lse = tl.load(p_lse, mask=m_row, other=0.0).to(tl.float32)
    return tl.where(m_row, b_lse, float("-inf"))


@triton.jit(do_not_specialize=["n_rows", "n_blocks", "n_heads"])
def merge_kernel(
    # inputs; others is a message of outputs and lse
    mine_ptr, mine_lse_ptr, others_ptr, table_ptr, rows_ptr,
    # outputs
    out_ptr, lse_ptr,
    mine_strides, mine_lse_strides, others_strides, others_lse_strides, out_strides, lse_strides,
    n_rows, n_blocks, n_heads,
    RANK: tl.constexpr, N_RANKS: tl.constexpr, HALVES: tl.constexpr,
    FEATURES: tl.constexpr, DIMS: tl.constexpr, ROWS: tl.constexpr,
):
    DIM: tl.constexpr = DIMS[0]
    i_batch, i_head, o_row, m_row = locate(n_rows, n_blocks, n_heads, ROWS)
    o_to = tl.load(rows_ptr + o_row, mask=m_row, other=0)
    b_highest = tl.full([ROWS], float("-inf"), tl.float32)
    for i_rank in tl.static_range(N_RANKS):
        o_from = tl.load(table_ptr + i_rank * n_rows + o_row, mask=m_row, other=-1).to(tl.int64)
        if i_rank == RANK:
            b_lse = load_lse(mine_lse_ptr, mine_lse_strides, i_batch, i_head, o_from, o_from >= 0, False)
        else:
            b_lse = load_lse(others_ptr, others_lse_strides, i_batch, i_head, o_from, o_from >= 0, HALVES)
        b_highest = tl.maximum(b_highest, b_lse)
    # a row without keys keeps -inf; a finite pivot avoids -inf - (-inf) = nan
    b_pivot = tl.where(b_highest == float("-inf"), 0.0, b_highest)
    b_weight = tl.zeros([ROWS], tl.float32)
    b_out = tl.zeros([ROWS, DIM], tl.float32)
    for i_rank in tl.static_range(N_RANKS):
        o_from = tl.load(table_ptr + i_rank * n_rows + o_row, mask=m_row, other=-1).to(tl.int64)
        m_from = o_from >= 0
        if i_rank == RANK:
            b_lse = load_lse(mine_lse_ptr, mine_lse_strides, i_batch, i_head, o_from, m_from, False)
            b_part = load_rows(mine_ptr, mine_strides, i_batch, i_head, o_from, m_from, FEATURES[0], DIM)
        else:
            b_lse = load_lse(others_ptr, others_lse_strides, i_batch, i_head, o_from, m_from, HALVES)
            b_part = load_rows(others_ptr, others_strides, i_batch, i_head, o_from, m_from, FEATURES[0], DIM)
        b_share = tl.exp(b_lse - b_pivot)
        b_weight += b_share
        b_out += b_share[:, None] * b_part.to(tl.float32)
    m_empty = b_weight == 0.0
    b_divisor = tl.where(m_empty, 1.0, b_weight)
    store_rows(out_ptr, out_strides, i_batch, i_head, o_to, m_row, b_out / b_divisor[:, None], FEATURES[0], DIM)
    b_lse = tl.where(m_empty, float("-inf"), b_pivot + tl.log(b_divisor))
    p_lse = head_base(lse_ptr, lse_strides, i_batch, i_head) + o_to * lse_strides[2]
    tl.store(p_lse, b_lse, mask=m_row)
# fmt: on


def _sizes(shape: Sequence[int], n_rows: int, features: Sequence[int]) -> tuple[int, dict[str, Any]]:
    """(number of programs, size arguments) of a launch over n_rows rows of every batch entry and head."""
    batch, heads = shape[:2]
    dims = [triton.next_power_of_2(width) for width in features]
    rows = max(1, min(ELEMENTS // max(dims), 128))
    n_blocks = -(-n_rows // rows)
    sizes = {"n_rows": n_rows, "n_blocks": n_blocks, "n_heads": heads, "ROWS": rows, "num_warps": 8}
    return n_blocks * batch * heads, {**sizes, "FEATURES": tuple(features), "DIMS": tuple(dims)}


def _message_strides(shape: Sequence[int], features: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Strides of the tensors in a message, with the given numbers of features."""
    batch, heads = shape[:2]
    width = sum(features)
    firsts = [0, *itertools.accumulate(features)]
    return tuple((heads * width, width, batch * heads * width, first) for first in firsts[:-1])


def _strides(tensors: Sequence[TensorSpec]) -> tuple[tuple[int, ...], ...]:
    """(batch, head, row, first feature) strides of tensors that are not part of a message."""
    return tuple((*tensor.strides[:3], 0) for tensor in tensors)


def _is_aligned(tensor: torch.Tensor | None) -> bool:
    """Whether a tensor is 16-byte aligned; True for None."""
    return tensor is None or tensor.data_ptr() % 16 == 0


@functools.lru_cache(maxsize=1024)
def _move_launch(
    specs: TensorSpecs,
    operation: str,
    n_rows: int,
    others: tuple[Any, ...],  # noqa: ARG001  cache key of message, lists and device
) -> Launch:
    """specs: sources and then targets of "move", sources of "pack", targets of "unpack"."""
    tensors = specs.tensors
    n_pairs = len(tensors) // 2 if operation == "move" else len(tensors)
    features = [of.shape[3] for of in tensors[:n_pairs]]
    shape = tensors[0].shape
    ours, message = _strides(tensors), _message_strides(shape, features)
    n_programs, sizes = _sizes(shape, n_rows, features)
    strides = {
        "source_strides": message if operation == "unpack" else ours[:n_pairs],
        "target_strides": message if operation == "pack" else ours[-n_pairs:],
    }
    return Launch(move_kernel, (n_programs, n_pairs), strides | sizes)


def _move(
    operation: str,
    tensors: Sequence[torch.Tensor],
    message: torch.Tensor | None,
    sources: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    source_index: torch.Tensor | None,
    target_index: torch.Tensor | None,
) -> None:
    n_rows = targets[0].shape[0 if operation == "pack" else 2] if target_index is None else target_index.shape[0]
    if n_rows == 0 or tensors[0].shape[0] * tensors[0].shape[1] == 0:
        return
    lists = source_index is None, _is_aligned(source_index), target_index is None, _is_aligned(target_index)
    others = None if message is None else message.dtype, _is_aligned(message), lists, tensors[0].device
    launch = _move_launch(specs_of(*tensors), operation, n_rows, others)
    launch(tuple(sources), source_index, target_index, tuple(targets))


def move(
    sources: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    source_index: torch.Tensor | None,
    target_index: torch.Tensor | None,
) -> None:
    """target[:, :, target_index] = source[:, :, source_index] in target's dtype, for each pair.

    All pairs have equal batch, heads and rows.

    source_index, target_index  contiguous int64; None is all rows
    """
    _move("move", [*sources, *targets], None, sources, targets, source_index, target_index)


def pack(sources: Sequence[torch.Tensor], message: torch.Tensor, source_index: torch.Tensor | None) -> None:
    """Copies rows of tensors to a message of their dtype."""
    _move("pack", sources, message, sources, [message] * len(sources), source_index, None)


def unpack(message: torch.Tensor, targets: Sequence[torch.Tensor], target_index: torch.Tensor | None) -> None:
    """Copies the rows of a message to tensors of its dtype."""
    _move("unpack", targets, message, [message] * len(targets), targets, None, target_index)


@functools.lru_cache(maxsize=1024)
def _add_launch(
    specs: TensorSpecs,
    n_sums: int,
    n_bases: int,
    n_rows: int,
    rank: int,
    n_ranks: int,
    others: tuple[Any, ...],  # noqa: ARG001
) -> Launch:
    """specs: totals, `mine`, then each list of bases."""
    tensors = specs.tensors
    features = [of.shape[3] for of in tensors[:n_sums]]
    n_programs, sizes = _sizes(tensors[0].shape, n_rows, features)
    strides: dict[str, Any] = {"others_strides": _message_strides(tensors[0].shape, features)}
    for i, name in enumerate(("total", "mine", "base", "other")):
        strides[f"{name}_strides"] = _strides(tensors[i * n_sums : (i + 1) * n_sums]) if i < 2 + n_bases else None
    return Launch(add_kernel, (n_programs, n_sums), strides | sizes | {"RANK": rank, "N_RANKS": n_ranks})


def add(
    totals: Sequence[torch.Tensor],
    mine: Sequence[torch.Tensor],
    others: torch.Tensor,
    bases: Sequence[Sequence[torch.Tensor]],
    table: torch.Tensor,
    rows: torch.Tensor | None,
    rank: int,
) -> None:
    """total[:, :, rows] = sum over ranks r of row table[r] of `others`; rank `rank` adds bases + mine instead.

    totals, mine  as many tensors each; others is a message of as many
    bases    up to two lists with a tensor of the shape of each total; they may be the totals themselves
    table    int32 (ranks, rows), contiguous; -1: no row
    """
    n_ranks, n_rows = table.shape
    if n_rows == 0 or totals[0].numel() == 0:
        return
    n_sums = len(totals)
    specs = specs_of(*totals, *mine, *itertools.chain(*bases))
    rest = others.dtype, _is_aligned(others), rows is None, _is_aligned(rows), _is_aligned(table), totals[0].device
    launch = _add_launch(specs, n_sums, len(bases), n_rows, rank, n_ranks, rest)
    base, other = [*map(tuple, bases), None, None][:2]
    launch(tuple(mine), base, other, others, table, rows, tuple(totals))


@functools.lru_cache(maxsize=1024)
def _merge_launch(
    specs: TensorSpecs,
    n_rows: int,
    rank: int,
    n_ranks: int,
    others: tuple[Any, ...],  # noqa: ARG001
) -> Launch:
    out, lse, mine, mine_lse = specs.tensors
    halves = out.dtype.itemsize == 2
    features = [out.shape[3], 2 if halves else 1]
    n_programs, sizes = _sizes(out.shape, n_rows, features[:1])
    part, part_lse = _message_strides(out.shape, features)
    strides = {
        "mine_strides": (*mine.strides[:3], 0),
        "mine_lse_strides": (*mine_lse.strides, 0),
        "others_strides": part,
        "others_lse_strides": part_lse,
        "out_strides": (*out.strides[:3], 0),
        "lse_strides": (*lse.strides, 0),
    }
    return Launch(merge_kernel, (n_programs,), strides | sizes | {"RANK": rank, "N_RANKS": n_ranks, "HALVES": halves})


def merge(
    out: torch.Tensor,
    lse: torch.Tensor,
    mine: tuple[torch.Tensor, torch.Tensor],
    others: torch.Tensor,
    table: torch.Tensor,
    rows: torch.Tensor,
    rank: int,
) -> None:
    """out[:, :, rows] and lse[:, :, rows] from the partial results of all ranks, like blocksparse_flash.merge.

    lse      (batch, heads, rows) float32
    mine     out and lse of this rank; others is a message with those of the other ranks, lse bitcast to its dtype
    table    as in `add`: the row of each rank's partial result
    """
    n_ranks, n_rows = table.shape
    if n_rows == 0 or out.numel() == 0:
        return
    rest = _is_aligned(others), _is_aligned(rows), _is_aligned(table), out.device
    launch = _merge_launch(specs_of(out, lse, *mine), n_rows, rank, n_ranks, rest)
    launch(*mine, others, table, rows, out, lse)
