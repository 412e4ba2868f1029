"""Which part of a layout does one forward of a model need? Built, bounded, cropped, planned, and remembered.

Knows: layouts and their specifications, lengths, positions, which slots of a sequence are padding. Must not know: models,
backends, or that transformers exists.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from ..layout import BlockLayout, number_of, numbered

# block size of what is not given as a layout
BLOCK = 128


class Whole(NamedTuple):
    """A layout of length x length, before it is made.

    layout       a BlockLayout, a specification for `masks.build`, or None: every pair
    length       tokens
    left, right  keeps -left <= kv_pos - q_pos <= right, tokens; None is no bound
    """

    layout: BlockLayout | str | None
    length: int
    left: int | None = None
    right: int | None = None


class Part(NamedTuple):
    """Queries q_start .. q_start + q_len - 1 and keys kv_start .. kv_start + kv_len - 1, on a device."""

    q_start: int
    q_len: int
    kv_start: int
    kv_len: int
    device: torch.device


def _near(length: int, left: int | None, right: int | None) -> BlockLayout:
    """The blocks that have a pair within the bounds, all of them full."""
    row = torch.arange(-(-length // BLOCK), device="cpu")
    first = torch.zeros_like(row) if left is None else (row * BLOCK - left).clamp(min=0) // BLOCK
    last = torch.full_like(row, length) if right is None else (row + 1) * BLOCK - 1 + right
    stop = last.clamp(max=length - 1) // BLOCK + 1
    return BlockLayout.from_ranges(first, stop, length, length, block_size=BLOCK)


@functools.lru_cache(maxsize=16)
def built(whole: Whole) -> BlockLayout:
    """The layout; of equal arguments the same object."""
    layout, length, left, right = whole
    if isinstance(layout, str):
        from .. import masks

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
def _cropped(whole: Whole, part: Part) -> BlockLayout:
    layout = built(whole)
    if part[:4] != (0, whole.length, 0, whole.length):
        layout = layout.crop(part.q_start, part.q_start + part.q_len, part.kv_start, part.kv_start + part.kv_len)
    layout._planned(part.device)
    return layout


# crops that compiled graphs hold, by id: torch.compile can read them here, and cannot look into an lru_cache
_COMPILED: dict[int, BlockLayout] = {}


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
) -> int:
    """The key of a crop in _COMPILED. A layout comes as its number, as torch 2.11 makes no constant of a layout."""
    given = numbered(layout) if isinstance(layout, int) else layout
    crop = _cropped(Whole(given, length, left, right), Part(q_start, q_len, kv_start, kv_len, device))
    _COMPILED[id(crop)] = crop
    return id(crop)


# torch.compile would trace how a layout is made; this way the key becomes a constant of the graph
_compiled._dynamo_marked_constant = True  # type: ignore[attr-defined]


def cropped(whole: Whole, part: Part) -> BlockLayout:
    """The layout of a part, planned on its device, also while torch.compile traces. Made once, then remembered."""
    if torch.compiler.is_compiling():
        layout, length, left, right = whole
        known = number_of(layout) if isinstance(layout, BlockLayout) else layout
        return _COMPILED[_compiled(known, length, left, right, *part[:4], part.device)]
    return _cropped(whole, part)


def in_slots(layout: BlockLayout, is_token: Tensor, part: Part) -> BlockLayout:
    """The layout of one sequence for slots, some of which hold padding, which attends to nothing.

    layout    of positions, which count tokens only
    is_token  bool (slots,), on the host
    part      of the slots, up to the last
    """
    q_stop = part.q_start + part.q_len
    n_tokens = int(is_token.sum())
    behind = (0, len(is_token) - n_tokens)
    # tokens in their order, then padding
    position = torch.where(is_token, is_token.cumsum(0), n_tokens + (~is_token).cumsum(0)) - 1
    if is_token[part.q_start : q_stop].all():
        first = int(position[part.q_start])
        moved = layout.crop(first, first + part.q_len, 0, n_tokens).pad(kv=behind).permute(kv_order=position)
        return moved.crop(kv_start=part.kv_start)
    moved = layout.crop(0, n_tokens, 0, n_tokens).pad(behind, behind).permute(position, position)
    return moved.crop(part.q_start, q_stop, part.kv_start)
