"""Dilated attention of LongNet: segments of growing length with growing dilation, offset per head."""

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
from .kinds import joint_ids
from .public import public

Numbers = Sequence[int] | np.ndarray | torch.Tensor


class Scale(NamedTuple):
    """Segments of `segment` tokens, with the positions offset, offset + dilation, ... of each kept."""

    segment: int
    dilation: int
    offset: int


def _sides(kept: np.ndarray, segment: int, shift: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Distinct (segments, blocks) of the kept positions, ascending; blocks of `side` tokens begin at `shift`."""
    segments, blocks = kept // segment, (kept - shift) // side
    is_new = np.ones(kept.size, dtype=bool)
    is_new[1:] = (np.diff(segments) != 0) | (np.diff(blocks) != 0)
    return segments[is_new], blocks[is_new]


def _kept(scale: Scale, first: int, stop: int) -> np.ndarray:
    """The positions kept by the scale in first .. stop - 1, ascending."""
    begins = np.arange(first // scale.segment, -(-stop // scale.segment)) * scale.segment
    # [segments, kept per segment]
    kept = begins[:, None] + np.arange(scale.offset, scale.segment, scale.dilation)
    return kept[(kept >= first) & (kept < stop)]


def _candidates(canvas: Canvas, scale: Scale) -> tuple[np.ndarray, np.ndarray]:
    """(rows, cols) of the blocks whose queries and keys share a kept segment, with repeats."""
    kept_queries = _kept(scale, max(canvas.shift, 0), canvas.kv_len)
    row_segments, rows = _sides(kept_queries, scale.segment, canvas.shift, canvas.block_q)
    col_segments, cols = _sides(_kept(scale, 0, canvas.kv_len), scale.segment, 0, canvas.block_kv)
    first, stop = (np.searchsorted(col_segments, row_segments, side=side) for side in ("left", "right"))
    sources, places = spread(first, stop)
    return rows[sources], cols[places]


def _dedup_parts(canvas: Canvas, scale: Scale, row: np.ndarray, col: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
    """(parts, is_full): numbers that are equal for blocks with equal pairs, and whether all pairs are kept."""
    segment, dilation, _ = scale
    chunks = chunks_in(canvas, segment, row, col)
    parts = [chunks.chunk_distance]
    for begins, first in ((chunks.queries, row * canvas.block_q + canvas.shift), (chunks.keys, col * canvas.block_kv)):
        # inside a segment the kept positions repeat with period `dilation`
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
            # kept tokens get the number of their segment, the others numbers that never match
            queries = torch.where((q_pos - q_segment * segment) % dilation == offset, q_segment, canvas.kv_len)
            keys = torch.where(kv_pos % segment % dilation == offset, kv_segment, canvas.kv_len + 1)
            is_kept = is_kept | (queries == keys)
        return is_kept & (kv_pos <= q_pos) if causal else is_kept

    def dedup_key(row: np.ndarray, col: np.ndarray) -> np.ndarray:
        parts, is_full = [], np.zeros(row.shape, dtype=bool)
        for scale in scales:
            scale_parts, is_full_scale = _dedup_parts(canvas, scale, row, col)
            parts += scale_parts
            is_full |= is_full_scale
        parts = [np.where(is_full, 0, part) for part in parts]
        if causal:
            lowest, _ = canvas.distances(row, col)
            parts.append(np.minimum(lowest, 0))
        return joint_ids(*parts, is_full.astype(np.int64))

    rows, cols = (
        np.concatenate(sides) for sides in zip(*(_candidates(canvas, scale) for scale in scales), strict=True)
    )
    if causal:
        _, highest = canvas.distances(rows, cols)
        rows, cols = rows[highest >= 0], cols[highest >= 0]
    rows, cols = distinct_blocks(canvas, rows, cols)
    return canvas.from_predicate(attends, within=canvas.from_blocks(rows, cols), dedup_key=dedup_key)


@public
def longnet(
    length: Length,
    *,
    segments: Numbers,
    dilations: Numbers,
    causal: bool = False,
    heads: int | None = None,
    block_size: BlockSize = 128,
) -> BlockLayout:
    """At each scale (segment length and dilation), tokens attend within segments; only every dilation-th takes part.

    Scale k cuts the keys into segments of segments[k] tokens, and head h keeps the positions p of a segment with
    p % dilations[k] == h % dilations[k]. A pair attends if some scale keeps both tokens in one segment. Query i is at
    key position i + kv_len - q_len. In a head in which no scale keeps a token, that token attends to nothing; a scale
    with dilation 1 keeps every token.

    The scales share one softmax over the union of their pairs. LongNet adds one softmax per scale, weighted by the
    denominators, so a key kept by two scales counts twice there, and the weights pass no gradient. The forward results
    agree only where the scales are disjoint, and the gradients differ.

    segments=[2, 4], dilations=[1, 2] on 4 tokens, heads 0 and 1:
        1 1 1 0     1 1 0 0
        1 1 0 0     1 1 0 1
        1 0 1 1     0 0 1 1
        0 0 1 1     0 1 1 1

    length      tokens, or (q_len, kv_len)
    segments    tokens in a segment, for each scale; the last segment may be shorter
    dilations   every how many positions one is kept, for each scale: 1 to the segment of the scale
    causal      True also requires d >= 0, where d = q_pos + (kv_len - q_len) - kv_pos
    heads       how many heads the layout has, each with its own offsets; None is head 0's mask, shared by every head
    block_size  tokens per side of a block, a multiple of 16, or (block_q, block_kv)
    returns     BlockLayout of shape (1, heads or 1, q_len, kv_len), exact to the token
    raises      ValueError if there is no scale, segments and dilations differ in number, or one is out of range

    Ding et al., "LongNet", arXiv:2307.02486, sections 2.2 and 2.3 (dilated attention, offsets of the heads).

    >>> longnet(65536, segments=[2048, 65536], dilations=[1, 1024]).nnz
    12160
    """
    canvas = read_canvas(length, block_size)
    causal, heads = read_switch("causal", causal), read_heads(heads)
    sizes, steps = read_integers("segments", segments).tolist(), read_integers("dilations", dilations).tolist()
    if not sizes or len(sizes) != len(steps):
        raise ValueError(
            f"segments, dilations: expected one of each for every scale, at least one, got {len(sizes)} "
            f"and {len(steps)}"
        )
    for size, step in zip(sizes, steps, strict=True):
        read_integer("segments", size, at_least=1, unit="tokens")
        read_integer("dilations", step, at_least=1, at_most=size, unit="tokens")
    # a segment this long holds every token
    unlimited = max(1, canvas.q_len + canvas.kv_len)
    settings = [
        tuple(Scale(min(size, unlimited), step, head % step) for size, step in zip(sizes, steps, strict=True))
        for head in range(heads or 1)
    ]
    return by_head(lambda scales: _one_head(canvas, scales, causal=causal), settings)
