"""Which pairs does some scale of LongNet's dilated attention keep?

Knows segments of growing length, of which fewer and fewer positions are kept, other ones by each head.
Must not know how bitmasks are packed or shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from blocksparse_flash import BlockLayout

from .canvas import BlockSize, Canvas, Length, distinct_blocks, read_canvas, spread
from .checks import read_integer, read_integers, read_switch
from .chunks import chunks_in
from .heads import by_head, read_heads
from .kinds import joint_numbers

Numbers = Sequence[int] | np.ndarray | torch.Tensor


class Scale(NamedTuple):
    """Segments of `segment` tokens, of which the positions offset, offset + dilation, ... are kept."""

    segment: int
    dilation: int
    offset: int


def _sides(kept: np.ndarray, segment: int, shift: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """(segments, blocks) that hold one of the kept positions, ascending: rows if shifted by the alignment, or cols."""
    segments, blocks = kept // segment, (kept - shift) // side
    is_new = np.ones(kept.size, dtype=bool)
    is_new[1:] = (np.diff(segments) != 0) | (np.diff(blocks) != 0)
    return segments[is_new], blocks[is_new]


def _kept(scale: Scale, first: int, stop: int) -> np.ndarray:
    """The positions first .. stop - 1 which the scale keeps, ascending."""
    begins = np.arange(first // scale.segment, -(-stop // scale.segment)) * scale.segment
    # [segments, kept in each]
    kept = begins[:, None] + np.arange(scale.offset, scale.segment, scale.dilation)
    return kept[(kept >= first) & (kept < stop)]


def _candidates(canvas: Canvas, scale: Scale) -> tuple[np.ndarray, np.ndarray]:
    """(rows, cols) of the blocks that hold kept positions of one segment on both sides; some come twice."""
    kept_queries = _kept(scale, max(canvas.shift, 0), canvas.kv_len)
    row_segments, rows = _sides(kept_queries, scale.segment, canvas.shift, canvas.block_q)
    col_segments, cols = _sides(_kept(scale, 0, canvas.kv_len), scale.segment, 0, canvas.block_kv)
    first, stop = (np.searchsorted(col_segments, row_segments, side=side) for side in ("left", "right"))
    sources, places = spread(first, stop)
    return rows[sources], cols[places]


def _looks_of(canvas: Canvas, scale: Scale, row: np.ndarray, col: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
    """(parts, is_full): numbers that are equal where the scale keeps equal pairs, and whether it keeps all."""
    segment, dilation, _ = scale
    chunks = chunks_in(canvas, segment, row, col)
    parts = [chunks.apart]
    for begins, first in ((chunks.queries, row * canvas.block_q + canvas.shift), (chunks.keys, col * canvas.block_kv)):
        # in one segment, what is kept repeats every dilation
        places = np.where(begins < 0, first % segment % dilation, dilation + begins)
        parts.append(np.where(chunks.is_apart, -1, places))
    return parts, chunks.is_inside & (dilation == 1)


def _one_head(canvas: Canvas, scales: Sequence[Scale], *, causal: bool) -> BlockLayout:
    shift = canvas.shift

    def attends(q_pos: torch.Tensor, kv_pos: torch.Tensor) -> torch.Tensor:
        q_pos = q_pos + shift
        is_kept = torch.zeros((), dtype=torch.bool, device=q_pos.device)
        for segment, dilation, offset in scales:
            q_segment, kv_segment = q_pos.div(segment, rounding_mode="floor"), kv_pos // segment
            # kept tokens have the number of their segment, the others numbers beyond all of them, not in common
            queries = torch.where((q_pos - q_segment * segment) % dilation == offset, q_segment, canvas.kv_len)
            keys = torch.where(kv_pos % segment % dilation == offset, kv_segment, canvas.kv_len + 1)
            is_kept = is_kept | (queries == keys)
        return is_kept & (kv_pos <= q_pos) if causal else is_kept

    def looks(row: np.ndarray, col: np.ndarray) -> np.ndarray:
        parts, is_full = [], np.zeros(row.shape, dtype=bool)
        for scale in scales:
            scale_parts, is_full_scale = _looks_of(canvas, scale, row, col)
            parts += scale_parts
            is_full |= is_full_scale
        parts = [np.where(is_full, 0, part) for part in parts]
        if causal:
            lowest, _ = canvas.distances(row, col)
            parts.append(np.minimum(lowest, 0))
        return joint_numbers(*parts, is_full.astype(np.int64))

    rows, cols = (
        np.concatenate(sides) for sides in zip(*(_candidates(canvas, scale) for scale in scales), strict=True)
    )
    if causal:
        _, highest = canvas.distances(rows, cols)
        rows, cols = rows[highest >= 0], cols[highest >= 0]
    rows, cols = distinct_blocks(canvas, rows, cols)
    within = BlockLayout.from_blocks(rows, cols, canvas.q_len, canvas.kv_len, block_size=canvas.block_size)
    return BlockLayout.from_predicate(
        attends, canvas.q_len, canvas.kv_len, block_size=canvas.block_size, within=within, dedup_key=looks
    )


def longnet(
    length: Length,
    *,
    segments: Numbers,
    dilations: Numbers,
    causal: bool = False,
    heads: int | None = None,
    block_size: BlockSize = 128,
) -> BlockLayout:
    """Each token attends to the kept tokens of its segment, at some of several scales, if it is kept there itself.

    Scale k cuts the keys into segments of segments[k] tokens, and head h keeps the positions p in a segment with
    p % dilations[k] == h % dilations[k]. A pair attends if at least one scale keeps both tokens in one segment.
    Query i stands at key i + kv_len - q_len.

    This is the union of the supports, under one softmax. LongNet adds up one softmax a scale, weighted by their
    denominators, so that a key kept by two scales counts twice, and it passes no gradient through the weights: the
    same forward only where supports are disjoint, and never quite the same gradients. A token that no scale of a head
    keeps attends to nothing there; with a dilation of 1 among the scales there is none.

    segments=[2, 4], dilations=[1, 2] on 4 tokens, heads 0 and 1:
        1 1 1 0     1 1 0 0
        1 1 0 0     1 1 0 1
        1 0 1 1     0 0 1 1
        0 0 1 1     0 1 1 1

    length      tokens, or (q_len, kv_len)
    segments    tokens in a segment, at each scale; the last segment holds what is left
    dilations   one position of so many is kept, at each scale: 1 to the scale's segment
    causal      True keeps d >= 0 only, where d = q_pos + (kv_len - q_len) - kv_pos
    heads       how many heads the layout has, each with its own offsets; None is head 0's mask, shared by every head
    block_size  tokens per side of a block, a multiple of 16, or (block_q, block_kv)
    returns     BlockLayout of shape (1, heads or 1, q_len, kv_len), exact to the token
    raises      ValueError if there is no scale, or segments and dilations differ in number, or one is out of range

    Ding et al., "LongNet", arXiv:2307.02486, sections 2.2 and 2.3 (dilated attention, offsets of the heads).

    >>> longnet(65536, segments=[2048, 65536], dilations=[1, 1024]).nnz
    12160
    """
    canvas = read_canvas(length, block_size)
    causal, heads = read_switch("causal", causal), read_heads(heads)
    sizes, steps = read_integers("segments", segments).tolist(), read_integers("dilations", dilations).tolist()
    if not sizes or len(sizes) != len(steps):
        raise ValueError(
            f"segments, dilations: expected one of each for every scale, at least one, got {len(sizes)} and {len(steps)}"
        )
    for size, step in zip(sizes, steps, strict=True):
        read_integer("segments", size, at_least=1, unit="tokens")
        read_integer("dilations", step, at_least=1, at_most=size, unit="tokens")
    # segments as long as everything hold everything, wherever their ends are
    unlimited = max(1, canvas.q_len + canvas.kv_len)
    settings = [
        tuple(Scale(min(size, unlimited), step, head % step) for size, step in zip(sizes, steps, strict=True))
        for head in range(heads or 1)
    ]
    return by_head(lambda scales: _one_head(canvas, scales, causal=causal), settings)
