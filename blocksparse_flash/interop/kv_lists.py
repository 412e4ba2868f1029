"""Padded block lists, the common format of FlexAttention and FlashAttention-4.

Each list is a pair: counts int32 (batch, heads, n_rows), and cols int32 (batch, heads, n_rows, width), whose first
`count` entries per row are valid. One list holds the partial blocks, whose pairs are decided by a function
mask_mod(batch, head, q_pos, kv_pos), the other the full blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from ..blocks import block_list, checks
from ..blocks.block_list import FULL, Array, Size
from ..layout import BlockLayout
from .block_arrays import full_layout, host, stored

MaskMod = Callable[..., torch.Tensor]


class KvList(NamedTuple):
    """Padded block list, int32: counts (batch, heads, n_rows), cols (batch, heads, n_rows, width)."""

    counts: torch.Tensor
    cols: torch.Tensor


# ------------------------------------------------------------------------------------------------- layout -> lists


def to_kv_lists(layout: BlockLayout, *, ragged_is_full: bool, width: int | None = None) -> tuple[KvList, KvList]:
    """(partial, full) lists of a layout, ascending by col, on its device.

    ragged_is_full  whether a ragged last block in which every existing pair attends counts as full
    width           entries per row; None: those of the longest row, at least 1
    """
    found = stored(layout)
    is_full = found.is_full
    if not ragged_is_full:
        is_full = is_full & ~(
            ((found.rows + 1) * layout.block_size[0] > layout.q_len)
            | ((found.cols + 1) * layout.block_size[1] > layout.kv_len)
        )
    flat_rows = found.leads * layout.n_rows + found.rows
    shape = (*layout.shape[:2], layout.n_rows)
    partial, full = (_padded(flat_rows[some], found.cols[some], shape, width, layout) for some in (~is_full, is_full))
    return partial, full


def _padded(flat_rows: Array, cols: Array, shape: tuple[int, ...], width: int | None, layout: BlockLayout) -> KvList:
    counts = np.bincount(flat_rows, minlength=math.prod(shape))
    width = max(1, int(counts.max(initial=0))) if width is None else width
    checks.check_nnz(len(counts) * width)
    index = np.zeros((len(counts), width), np.int32)
    starts = np.cumsum(counts) - counts
    index[flat_rows, np.arange(len(cols)) - starts[flat_rows]] = cols
    count = counts.astype(np.int32).reshape(shape)
    return KvList(*(torch.from_numpy(array).to(layout.device) for array in (count, index.reshape(*shape, width))))


def block_table(layout: BlockLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """(table, bitmasks) that find any pair of a layout by its position, on the layout's device.

    table     int32 (batch, heads, n_rows, n_cols): -1 full, -2 empty, or an index into bitmasks
    bitmasks  int32 (distinct, block_q, words), at least one
    """
    found, heads = stored(layout), layout.shape[1]
    words = found.bitmasks if len(found.bitmasks) else np.zeros((1, *found.bitmasks.shape[1:]), np.uint32)
    shape = (*layout.shape[:2], layout.n_rows, layout.n_cols)
    if max(math.prod(shape), words.size) >= 2**31:
        raise ValueError(
            f"layout must have fewer than 2**31 blocks, stored or not, and words of bitmasks, to be found by position, "
            f"got {math.prod(shape)} and {words.size}: use a larger block_size, or convert fewer heads at a time"
        )
    table = np.full(shape, block_list.EMPTY, np.int32)
    table[found.leads // heads, found.leads % heads, found.rows, found.cols] = found.ids
    return torch.from_numpy(table).to(layout.device), torch.from_numpy(words.view(np.int32)).to(layout.device)


def mask_mod_of(layout: BlockLayout) -> MaskMod:
    """mask_mod(batch, head, q_pos, kv_pos) -> bool of a layout, valid in every block, not only in partial ones."""
    table, bitmasks = (tensor.reshape(-1) for tensor in block_table(layout))
    batch_size, heads, n_rows, n_cols = *layout.shape[:2], layout.n_rows, layout.n_cols
    (block_q, block_kv), words = layout.block_size, block_list.words_per_query(layout.block_size[1])
    # a shared axis has step 0
    batch_step = heads * n_rows * n_cols if batch_size > 1 else 0
    head_step = n_rows * n_cols if heads > 1 else 0

    def mask_mod(batch: torch.Tensor, head: torch.Tensor, q_pos: torch.Tensor, kv_pos: torch.Tensor) -> torch.Tensor:
        place = (q_pos // block_q) * n_cols + kv_pos // block_kv
        index = table[batch * batch_step + head * head_step + place]
        key = kv_pos % block_kv
        word = bitmasks[(index.clamp(min=0) * block_q + q_pos % block_q) * words + key // 32]
        return (index == FULL) | ((index >= 0) & (((word >> (key % 32)) & 1) == 1))

    return mask_mod


# ------------------------------------------------------------------------------------------------- lists -> layout


def from_kv_lists(
    partial: KvList,
    full: KvList | None,
    names: tuple[str, str],
    mask_mod: MaskMod | None,
    *,
    q_len: int,
    kv_len: int,
    block_size: object,
    axes: tuple[int | None, int | None] = (None, None),
) -> BlockLayout:
    """The layout of full blocks and of partial blocks with the pairs where mask_mod is true, on the host.

    names       names of the two lists, for messages
    mask_mod    None if there are no partial blocks
    block_size  multiples of 16; sides above 256 are split
    axes        (batch, heads) for which mask_mod is evaluated; None: those of the lists
    """
    block_size, fine = _sizes(block_size)
    lengths: dict[str, Any] = {"q_len": q_len, "kv_len": kv_len, "block_size": fine}
    keys, own_axes = _keys(partial, names[0], q_len, kv_len, block_size)
    layout = full_layout(_split(keys, block_size, fine, q_len, kv_len), own_axes, **lengths)
    if mask_mod is not None:
        batch, heads = (size if want is None else want for size, want in zip(own_axes, axes, strict=True))
        checks.joint((checks.axis(batch, "batch"), checks.axis(heads, "heads")), own_axes, names[0])
        fn = _by_position(mask_mod, partial.counts.device)
        layout = BlockLayout.from_predicate(fn, **lengths, within=layout, batch=batch, heads=heads)
    elif len(keys) or axes != (None, None):
        raise ValueError(
            f"mask_mod must be given: {names[0]} names {len(keys)} blocks whose pairs it decides"
            + ("" if axes == (None, None) else ", and batch and heads are what it is evaluated for")
        )
    if full is None:
        return layout
    full_keys, full_axes = _keys(full, names[1], q_len, kv_len, block_size)
    if full_axes != own_axes:
        raise ValueError(f"{names[1]} must have the (batch, heads) of {names[0]}, {own_axes}, got {full_axes}")
    twice = np.intersect1d(keys, full_keys, assume_unique=True)
    if len(twice):
        row, col = _row_and_col(int(twice[0]), q_len, kv_len, block_size)
        raise ValueError(
            f"{names[0]} and {names[1]} both name block (row {row}, col {col}): kernels would count its keys twice"
        )
    return layout | full_layout(_split(full_keys, block_size, fine, q_len, kv_len), full_axes, **lengths)


def _row_and_col(key: int, q_len: int, kv_len: int, block_size: Size) -> Size:
    n_rows, n_cols = block_list.grid(q_len, kv_len, block_size)
    return key // n_cols % n_rows, key % n_cols


def _by_position(mask_mod: MaskMod, device: torch.device) -> MaskMod:
    """mask_mod, which takes single positions, for tensors that broadcast; vectorised by create_mask."""
    from torch.nn.attention.flex_attention import create_mask

    def fn(batch: torch.Tensor, head: torch.Tensor, q_pos: torch.Tensor, kv_pos: torch.Tensor) -> torch.Tensor:
        # (n, 1, 1), (n, 1, 1), (n, block_q, 1), (n, 1, block_kv)
        b, h = batch[:, 0, 0].to(device), head[:, 0, 0].to(device)
        q, kv = q_pos[:, :, 0].to(device), kv_pos[:, 0].to(device)

        def at(i: torch.Tensor, _: torch.Tensor, row: torch.Tensor, col: torch.Tensor) -> torch.Tensor:
            return mask_mod(b[i], h[i], q[i, row], kv[i, col])

        return create_mask(at, len(b), 1, q.shape[1], kv.shape[1], device=device)[:, 0]

    return fn


def _keys(given: KvList, name: str, q_len: int, kv_len: int, block_size: Size) -> tuple[Array, Size]:
    """(ascending keys, (batch, heads)) of a list, checked."""
    n_rows, n_cols = block_list.grid(q_len, kv_len, block_size)
    for tensor in given:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be torch tensors, got {type(tensor).__name__}")
        if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
            raise ValueError(f"{name} must be integers, got {tensor.dtype}")
    count, index = (host(tensor).astype(np.int64) for tensor in given)
    if count.ndim > 3 or index.ndim != count.ndim + 1 or index.shape[:-1] != count.shape or count.ndim < 1:
        raise ValueError(
            f"{name} must be counts (batch, heads, n_rows) and cols (batch, heads, n_rows, width), "
            f"got shapes {count.shape} and {index.shape}"
        )
    batch, heads, own_rows = (1,) * (3 - count.ndim) + count.shape
    if own_rows != n_rows or 0 in (batch, heads):
        raise ValueError(
            f"{name} must have {n_rows} rows for {q_len} queries in blocks of {block_size[0]}, got shape {count.shape}"
        )
    count, index = count.reshape(-1), index.reshape(batch * heads * n_rows, index.shape[-1])
    checks.check_range(count, index.shape[1] + 1, f"{name} counts", "(width + 1)")
    flat_rows = np.repeat(np.arange(len(count)), count)
    cols = index[np.arange(index.shape[1]) < count[:, None]]
    checks.check_range(cols, n_cols, f"{name} cols", "n_cols")
    keys = np.sort(flat_rows * n_cols + cols)
    twice = keys[1:] == keys[:-1]
    if twice.any():
        row, col = _row_and_col(int(keys[twice.argmax()]), q_len, kv_len, block_size)
        raise ValueError(f"{name} must name every block once, but (row {row}, col {col}) comes again")
    return keys, (batch, heads)


# ------------------------------------------------------------------------------------------------------ block sizes


def _sizes(block_size: object) -> tuple[Size, Size]:
    """(the block size as a pair, the largest block size of this library that divides it)."""
    given = tuple(block_size) if isinstance(block_size, (tuple, list)) else (block_size, block_size)
    if len(given) != 2:
        raise ValueError(f"block_size must be (block_q, block_kv), got {block_size!r}")
    block_q, block_kv = (checks.integer(side, "block_size") for side in given)
    for side in (block_q, block_kv):
        if side < 16 or side % 16:
            raise ValueError(
                f"block_size must be a multiple of 16 on each side, got {block_size!r}: "
                "make the lists again with such a size, 128 for example"
            )
    fine_q, fine_kv = (next(size for size in range(256, 0, -16) if side % size == 0) for side in (block_q, block_kv))
    return (block_q, block_kv), (fine_q, fine_kv)


def _split(keys: Array, old: Size, new: Size, q_len: int, kv_len: int) -> Array:
    """The ascending keys of the blocks of size `new` that tile the given blocks of size `old`, a multiple of `new`."""
    if old == new:
        return keys
    n_rows, n_cols = block_list.grid(q_len, kv_len, old)
    n_fine_rows, n_fine_cols = block_list.grid(q_len, kv_len, new)
    flat_rows, cols = np.divmod(keys, max(n_cols, 1))
    leads, rows = np.divmod(flat_rows, max(n_rows, 1))
    down, across = old[0] // new[0], old[1] // new[1]
    heights = np.minimum(down, n_fine_rows - rows * down)
    widths = np.repeat(np.minimum(across, n_fine_cols - cols * across), heights)
    fine_rows = np.repeat(leads * n_fine_rows, heights) + block_list.ranges(rows * down, heights)
    starts = fine_rows * n_fine_cols + np.repeat(cols * across, heights)
    return np.sort(block_list.ranges(starts, widths))
