"""Padded block lists, the common format of FlexAttention and FlashAttention-4.

One list holds the full blocks, the other the partial blocks; a function mask_mod(batch, head, q_pos, kv_pos) decides
which pairs of partial blocks attend.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from ..blocks import block_list, checks, predicates
from ..blocks.block_list import EMPTY, FULL, Array, Frame, Size
from ..layout import BlockLayout
from .block_arrays import blocks_of, host

MaskMod = Callable[..., torch.Tensor]


class KvList(NamedTuple):
    """int32 counts (batch, heads, n_rows), and cols (batch, heads, n_rows, width): the first `count` are valid."""

    counts: torch.Tensor
    cols: torch.Tensor


# ------------------------------------------------------------------------------------------------- layout -> lists


def to_kv_lists(layout: BlockLayout, *, ragged_is_full: bool, width: int | None = None) -> tuple[KvList, KvList]:
    """(partial, full) lists of a layout, ascending by col, on its device.

    ragged_is_full  whether a ragged last block in which every existing pair attends counts as full
    width           entries per row; None: those of the longest row, at least 1
    """
    found, frame = blocks_of(layout)
    is_full = found.ids == FULL
    if not ragged_is_full:
        is_full &= block_list.edge_kinds(found.keys, frame) == 0
    partial, full = (_padded(found.keys[some], frame, width, layout.device) for some in (~is_full, is_full))
    return partial, full


def _padded(keys: Array, frame: Frame, width: int | None, device: torch.device) -> KvList:
    lines, cols = np.divmod(keys, max(frame.n_cols, 1))
    counts = np.bincount(lines, minlength=frame.batch_heads * frame.n_rows)
    width = max(1, int(counts.max(initial=0))) if width is None else width
    checks.check_nnz(len(counts) * width)
    padded = np.zeros((len(counts), width), np.int32)
    padded[np.arange(width) < counts[:, None]] = cols
    shape = frame.batch, frame.heads, frame.n_rows
    arrays = counts.astype(np.int32).reshape(shape), padded.reshape(*shape, width)
    return KvList(*(torch.from_numpy(array).to(device) for array in arrays))


def block_table(layout: BlockLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """(table, bitmasks) that find any pair of a layout by its position, on the layout's device.

    table     int32 (batch, heads, n_rows, n_cols): index into bitmasks
    bitmasks  int32 (2 + distinct, block_q, words): of an empty block, of a full block, then of partial blocks
    """
    found, frame = blocks_of(layout)
    one = 1, *found.bitmasks.shape[1:]
    # in the order of EMPTY and FULL, which are -2 and -1
    words = np.concatenate([np.zeros(one, np.uint32), np.full(one, 2**32 - 1, np.uint32), found.bitmasks])
    if max(frame.n_blocks, words.size) >= 2**31:
        raise ValueError(
            f"layout must have fewer than 2**31 blocks, stored or not, and words of bitmasks, to be found by position, "
            f"got {frame.n_blocks} and {words.size}: use a larger block_size, or convert fewer heads at a time"
        )
    table = np.zeros((frame.batch, frame.heads, frame.n_rows, frame.n_cols), np.int32)
    table.reshape(-1)[found.keys] = found.ids - EMPTY
    return torch.from_numpy(table).to(layout.device), torch.from_numpy(words.view(np.int32)).to(layout.device)


def mask_mod_of(layout: BlockLayout) -> MaskMod:
    """mask_mod(batch, head, q_pos, kv_pos) -> bool of a layout, valid in every block, not only in partial ones."""
    table, bitmasks = (tensor.reshape(-1) for tensor in block_table(layout))
    batch_size, heads, n_rows, n_cols = *layout.shape[:2], layout.n_rows, layout.n_cols
    (block_q, block_kv), words = layout.block_size, block_list.words_per_query(layout.block_size[1])
    # a shared axis has step 0
    batch_step = heads * n_rows * n_cols if batch_size > 1 else 0
    head_step = n_rows * n_cols if heads > 1 else 0

    # one index per tensor, since torch.compile generates an ambiguous C++ call for several (PyTorch 2.13)
    def mask_mod(batch: torch.Tensor, head: torch.Tensor, q_pos: torch.Tensor, kv_pos: torch.Tensor) -> torch.Tensor:
        place = (q_pos // block_q) * n_cols + kv_pos // block_kv
        index = table[batch * batch_step + head * head_step + place]
        key = kv_pos % block_kv
        word = bitmasks[(index * block_q + q_pos % block_q) * words + key // 32]
        return ((word >> (key % 32)) & 1) == 1

    return mask_mod


# ------------------------------------------------------------------------------------------------- lists -> layout


def from_kv_lists(
    partial: KvList,
    full: tuple[torch.Tensor | None, torch.Tensor | None],
    names: tuple[str, str],
    mask_mod: MaskMod | None,
    *,
    q_len: int,
    kv_len: int,
    block_size: object,
    axes: tuple[int | None, int | None] = (None, None),
) -> BlockLayout:
    """The layout of full blocks and of partial blocks with the pairs where mask_mod is true, on the host.

    full        both None if there are none
    names       names of the two lists, for messages
    mask_mod    None if there are no partial blocks
    block_size  multiples of 16; sides above 256 are split
    axes        (batch, heads) for which mask_mod is evaluated; None: those of the lists
    """
    if mask_mod is not None and not predicates.accepts(mask_mod, 4):
        raise TypeError(f"mask_mod must be a function of (batch, head, q_pos, kv_pos), got {mask_mod!r}")
    keys, frame = _keys(partial, names[0], q_len, kv_len, checks.sides(block_size, most=None))
    layout, has_axes = _full_layout(keys, frame), any(size is not None for size in axes)
    if mask_mod is not None:
        batch, heads = (size if want is None else want for size, want in zip(frame[:2], axes, strict=True))
        checks.joint((checks.axis(batch, "batch"), checks.axis(heads, "heads")), frame[:2], names[0])
        fn = _by_position(mask_mod, partial.counts.device)
        with checks.renamed("fn", "mask_mod"):
            layout = BlockLayout.from_predicate(
                fn, q_len, kv_len, block_size=layout.block_size, within=layout, batch=batch, heads=heads
            )
    elif len(keys) or has_axes:
        raise ValueError(
            f"mask_mod must be given: {names[0]} names {len(keys)} blocks whose pairs it decides"
            + ("; batch= and heads= only apply to mask_mod" if has_axes else "")
        )
    counts, cols = full
    if counts is None or cols is None:
        return layout
    full_keys, full_frame = _keys(KvList(counts, cols), names[1], q_len, kv_len, frame.block_size)
    if full_frame != frame:
        raise ValueError(f"{names[1]} must have the (batch, heads) of {names[0]}, {frame[:2]}, got {full_frame[:2]}")
    twice = np.intersect1d(keys, full_keys, assume_unique=True)
    if len(twice):
        _, row, col = frame.positions(twice[0])
        raise ValueError(
            f"{names[0]} and {names[1]} both name block (row {row}, col {col}): kernels would count its keys twice"
        )
    return layout | _full_layout(full_keys, frame)


def _by_position(mask_mod: MaskMod, device: torch.device) -> MaskMod:
    """mask_mod, which takes single positions, for tensors that broadcast; vectorized by create_mask."""
    from torch.nn.attention.flex_attention import create_mask

    def fn(batch: torch.Tensor, head: torch.Tensor, q_pos: torch.Tensor, kv_pos: torch.Tensor) -> torch.Tensor:
        # (n, 1, 1), (n, 1, 1), (n, block_q, 1), (n, 1, block_kv)
        b, h = batch[:, 0, 0].to(device), head[:, 0, 0].to(device)
        q, kv = q_pos[:, :, 0].to(device), kv_pos[:, 0].to(device)

        def at(i: torch.Tensor, _: torch.Tensor, row: torch.Tensor, col: torch.Tensor) -> torch.Tensor:
            attends: Any = mask_mod(b[i], h[i], q[i, row], kv[i, col])
            if not isinstance(attends, torch.Tensor):
                kind = type(attends).__name__
                raise TypeError(f"mask_mod must return a bool tensor of one element, got {attends!r} ({kind})")
            return attends

        return create_mask(at, len(b), 1, q.shape[1], kv.shape[1], device=device)[:, 0]

    return fn


def _keys(given: KvList, name: str, q_len: int, kv_len: int, block_size: Size) -> tuple[Array, Frame]:
    """(ascending keys, frame) of a list, checked."""
    for tensor in given:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be torch tensors, got {type(tensor).__name__}")
        if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
            raise ValueError(f"{name} must be integers, got {tensor.dtype}")
    count, index = (checks.as_int64(host(tensor, name), name) for tensor in given)
    if not 1 <= count.ndim <= 3 or index.ndim != count.ndim + 1 or index.shape[:-1] != count.shape:
        raise ValueError(
            f"{name} must be counts (batch, heads, n_rows) and cols (batch, heads, n_rows, width), "
            f"got shapes {count.shape} and {index.shape}"
        )
    batch, heads, own_rows = (1,) * (3 - count.ndim) + count.shape
    frame = Frame(batch, heads, q_len, kv_len, block_size)
    if own_rows != frame.n_rows or 0 in (batch, heads):
        raise ValueError(
            f"{name} must have {frame.n_rows} rows for {q_len} queries in blocks of {block_size[0]}, "
            f"got shape {count.shape}"
        )
    count, index = count.reshape(-1), index.reshape(frame.batch_heads * frame.n_rows, index.shape[-1])
    checks.check_range(count, index.shape[1] + 1, f"{name} counts", "(width + 1)")
    cols = index[np.arange(index.shape[1]) < count[:, None]]
    checks.check_range(cols, frame.n_cols, f"{name} cols", "n_cols")
    keys = np.sort(np.repeat(np.arange(len(count)), count) * frame.n_cols + cols)
    checks.check_distinct(keys, frame, name)
    return keys, frame


def _full_layout(keys: Array, frame: Frame) -> BlockLayout:
    """The layout of full blocks at the ascending keys; sides above 256 become the largest divisor up to 256.

    A block may be as large as 2**30 x 2**30, so regrouping its bitmask is no option.
    """
    fine_q, fine_kv = (next(size for size in range(256, 0, -16) if side % size == 0) for side in frame.block_size)
    fine = frame._replace(block_size=(fine_q, fine_kv))
    down, across = frame.block_size[0] // fine_q, frame.block_size[1] // fine_kv
    batch_heads, rows, cols = frame.positions(keys)
    heights = np.minimum(down, fine.n_rows - rows * down)
    lines = block_list.ranges(batch_heads * fine.n_rows + rows * down, heights)
    starts = lines * fine.n_cols + np.repeat(cols * across, heights)
    widths = np.repeat(np.minimum(across, fine.n_cols - cols * across), heights)
    keys = np.sort(block_list.ranges(starts, widths))
    return BlockLayout._from_block_list(block_list.full_list(keys, fine.block_size), fine)
