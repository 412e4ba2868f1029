"""Cached crops of a layout for decoding: built from a specification, bounded by a window, cropped and planned."""

from __future__ import annotations

import functools
import operator
from typing import NamedTuple

import torch
from torch import Tensor

from .blocks.stored_blocks import number_of, numbered
from .layout import BlockLayout

# block size of layouts built from a window alone
BLOCK = 128


class FullLayout(NamedTuple):
    """Description of a layout of length x length, used as a cache key.

    layout       a BlockLayout, a specification for `masks.build`, or None for every pair
    length       tokens
    left, right  keeps -left <= kv_pos - q_pos <= right, in tokens; None means no bound
    """

    layout: BlockLayout | str | None
    length: int
    left: int | None = None
    right: int | None = None


class Crop(NamedTuple):
    """Queries q_start .. q_start + q_len - 1 and keys kv_start .. kv_start + kv_len - 1, on a device."""

    q_start: int
    q_len: int
    kv_start: int
    kv_len: int
    device: torch.device


def _near(length: int, left: int | None, right: int | None) -> BlockLayout:
    """All blocks with a pair within the bounds, as full blocks."""
    row = torch.arange(-(-length // BLOCK), device="cpu")
    first = torch.zeros_like(row) if left is None else (row * BLOCK - left).clamp(min=0) // BLOCK
    last = torch.full_like(row, length) if right is None else (row + 1) * BLOCK - 1 + right
    stop = last.clamp(max=length - 1) // BLOCK + 1
    return BlockLayout.from_ranges(first, stop, length, length, block_size=BLOCK)


# layers may differ in layout and window
@functools.lru_cache(maxsize=128)
def built(full: FullLayout) -> BlockLayout:
    """The layout; equal arguments give the same object."""
    layout, length, left, right = full
    if isinstance(layout, str):
        from . import masks

        layout = masks.build(layout, length)
    if layout is None:
        layout = _near(length, left, right)
    if left is None and right is None:
        return layout
    block_q, block_kv = layout.block_size

    def is_within(q_pos: Tensor, kv_pos: Tensor) -> Tensor:
        is_late_enough = kv_pos >= (0 if left is None else q_pos - left)
        return is_late_enough & (kv_pos <= (length if right is None else q_pos + right))

    return BlockLayout.from_predicate(
        is_within,
        length,
        length,
        block_size=layout.block_size,
        within=layout,
        dedup_key=lambda row, col: row * block_q - col * block_kv,
    )


@functools.lru_cache(maxsize=256)
def _cropped(full: FullLayout, crop: Crop) -> BlockLayout:
    layout = built(full)
    if crop[:4] != (0, full.length, 0, full.length):
        layout = layout.crop(crop.q_start, crop.q_start + crop.q_len, crop.kv_start, crop.kv_start + crop.kv_len)
    layout._planned(crop.device)
    return layout


class _Compiled:
    """Crops in compiled graphs, as attributes.

    torch.compile cannot read an lru_cache, and of a dict it sees what was there when a graph first read it.
    """


_COMPILED = _Compiled()


def _compiled(
    layout: int | str | None,
    length: int,
    left: int | None,
    right: int | None,
    q_start: int,
    q_len: int,
    kv_start: int,
    kv_len: int,
    device: torch.device,
) -> str:
    """The name of a crop in _COMPILED. Layouts come by number: torch 2.11 has no constants of type BlockLayout."""
    given = numbered(layout) if isinstance(layout, int) else layout
    crop = _cropped(FullLayout(given, length, left, right), Crop(q_start, q_len, kv_start, kv_len, device))
    name = f"crop_{id(crop)}"
    setattr(_COMPILED, name, crop)
    return name


# makes the name a constant of the graph; otherwise torch.compile would trace the construction of the layout
_compiled._dynamo_marked_constant = True  # type: ignore[attr-defined]


def cropped(full: FullLayout, crop: Crop) -> BlockLayout:
    """The cropped layout, planned on its device and cached, also under torch.compile."""
    if torch.compiler.is_compiling():
        layout, length, left, right = full
        known = number_of(layout) if isinstance(layout, BlockLayout) else layout
        # torch.compile leaves sizes open once it has seen two of them; index makes them constants of the graph
        left, right = (None if bound is None else operator.index(bound) for bound in (left, right))
        q_start, q_len, kv_start, kv_len = (operator.index(size) for size in crop[:4])
        sizes = q_start, q_len, kv_start, kv_len
        name = _compiled(known, operator.index(length), left, right, *sizes, crop.device)
        found: BlockLayout = getattr(_COMPILED, name)
        return found
    return _cropped(full, crop)


class Rows(NamedTuple):
    """A layout on a device, for reading the keys of single queries there.

    blocks    int64 (n_rows, n_cols): index into bitmasks
    bitmasks  int32 (distinct, block_q, words); the first two are empty and full
    most      keys of the query with the most, counting whole blocks
    """

    blocks: Tensor
    bitmasks: Tensor
    block_kv: int
    length: int
    most: int

    def attended(self, positions: Tensor) -> Tensor:
        """Whether queries at int64 positions (n,) attend to each key: bool (n, length)."""
        block_q = self.bitmasks.shape[1]
        words = self.bitmasks[self.blocks[positions // block_q], (positions % block_q)[:, None]]
        bits = words[..., None] >> torch.arange(32, dtype=torch.int32, device=words.device) & 1
        return bits.flatten(2)[:, :, : self.block_kv].flatten(1)[:, : self.length].bool()


@functools.lru_cache(maxsize=128)
def rows(full: FullLayout, device: torch.device) -> Rows:
    """The rows of a layout that all heads share."""
    layout = built(full)
    if layout.shape[:2] != (1, 1):
        raise ValueError(
            f"a static cache needs a layout that all heads share, got one of shape {layout.shape}: use DynamicCache, "
            "in generate cache_implementation='dynamic'"
        )
    fields = layout.indptr, layout.indices, layout.bitmask_ids, layout.bitmasks
    indptr, cols, ids, bitmasks = (field.cpu() for field in fields)
    counts = indptr[0, 0].diff()
    blocks = torch.zeros(layout.n_rows, layout.n_cols, dtype=torch.int64, device="cpu")
    # full blocks have the id -1
    blocks[torch.arange(layout.n_rows, device="cpu").repeat_interleave(counts), cols.long()] = ids.long() + 2
    empty = torch.zeros(1, layout.block_size[0], -(-layout.block_size[1] // 32), dtype=torch.int32, device="cpu")
    known = torch.cat([empty, ~empty, bitmasks])
    most = min(layout.kv_len, int(counts.max()) * layout.block_size[1])
    return Rows(blocks.to(device), known.to(device), layout.block_size[1], layout.kv_len, most)


def in_slots(layout: BlockLayout, is_token: Tensor, crop: Crop) -> BlockLayout:
    """A layout over the positions of one sequence's tokens, in slots of a cache; slots of padding attend to nothing.

    layout    in positions, which count tokens only
    is_token  bool (slots,), on the host
    crop      in slots, up to the last one
    """
    q_stop = crop.q_start + crop.q_len
    n_tokens = int(is_token.sum())
    after = (0, len(is_token) - n_tokens)
    # tokens in order, then padding
    position = torch.where(is_token, is_token.cumsum(0), n_tokens + (~is_token).cumsum(0)) - 1
    if is_token[crop.q_start : q_stop].all():
        first = int(position[crop.q_start])
        moved = layout.crop(first, first + crop.q_len, 0, n_tokens).pad(kv=after).permute(kv_order=position)
        return moved.crop(kv_start=crop.kv_start)
    moved = layout.crop(0, n_tokens, 0, n_tokens).pad(after, after).permute(position, position)
    return moved.crop(crop.q_start, q_stop, crop.kv_start)
