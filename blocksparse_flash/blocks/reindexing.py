"""Block lists of reordered token sequences: `gather` for any order, `crop` for an interval.

An order is int64 (new length,): order[i] is the token that comes to position i, NONE for a new token. token_orders.py
makes the orders of shift, pad, permute and select.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np

from . import block_list
from .block_list import Array, BlockList, Frame, Size
from .set_operations import transpose

# entry of an order at the position of a new token, which has no pairs
NONE = -1


def gather(found: BlockList, frame: Frame, q_order: Array, kv_order: Array) -> BlockList:
    """The canonical list of mask[q_order[i], kv_order[j]], of lengths len(q_order) x len(kv_order); False at NONE.

    q_order, kv_order  int64, NONE or a position below q_len, kv_len; tokens may repeat

    Time O(n log n), n = tokens + pieces, where a piece is the overlap of an old block with a new one: up to 4 per block
    if runs of tokens stay together, up to one per pair if the order scatters them.
    """
    if not _is_identity(q_order, frame.q_len):
        found = _gather_queries(found, frame, q_order)
        frame = frame._replace(q_len=len(q_order))
    if not _is_identity(kv_order, frame.kv_len):
        turned = frame.transposed
        moved = _gather_queries(transpose(found, frame), turned, kv_order)
        found = transpose(moved, turned._replace(q_len=len(kv_order)))
    return found


def crop(found: BlockList, frame: Frame, q: Size, kv: Size) -> BlockList:
    """The canonical list of mask[q[0] : q[1], kv[0] : kv[1]].

    O(nnz) if kv[0] is a multiple of block_kv, otherwise as `gather` of the blocks in between.
    """
    block_q, block_kv = frame.block_size
    q_len, kv_len = q[1] - q[0], kv[1] - kv[0]
    if not q_len or not kv_len:
        return block_list.full_list(found.keys[:0], frame.block_size)
    first, stop = kv[0] // block_kv, -(-kv[1] // block_kv)
    line, col = np.divmod(found.keys, frame.n_cols)
    is_kept = (first <= col) & (col < stop)
    found = BlockList((line * (stop - first) + col - first)[is_kept], found.ids[is_kept], found.bitmasks)
    frame = frame._replace(kv_len=min(stop * block_kv, frame.kv_len) - first * block_kv)
    if q[0] % block_q and frame.n_rows == 1:
        # blocks stay, the rows of their bitmasks move up
        words = np.zeros_like(found.bitmasks)
        words[:, :q_len] = found.bitmasks[:, q[0] : q[1]]
        found = found._replace(bitmasks=words)
    elif q[0] % block_q:
        found, frame = _gather_queries(found, frame, np.arange(*q)), frame._replace(q_len=q_len)
    if kv[0] % block_kv:
        return gather(found, frame, np.arange(q_len), np.arange(*kv) - first * block_kv)
    return block_list.canonical(found, frame._replace(q_len=q_len, kv_len=kv_len))


def _is_identity(order: Array, length: int) -> bool:
    return len(order) == length and np.array_equal(order, np.arange(length))


class _Patches(NamedTuple):
    """Tokens that each new row takes from each old row, ordered by (row, source).

    row, source, pattern  int64 (patches,): new row, old row, index of the pattern
    codes           int64: new offset * block_q + old offset of each token of a pattern, pattern by pattern
    starts, counts  int64 (patterns,): first code of each pattern, number of its codes
    """

    row: Array
    source: Array
    pattern: Array
    codes: Array
    starts: Array
    counts: Array


def _patches(order: Array, block_q: int) -> _Patches:
    position = np.flatnonzero(order != NONE)
    token = order[position]
    row, source = position // block_q, token // block_q
    n_sources = int(source.max()) + 1
    # stable, so that positions ascend within a patch
    by_patch = np.argsort(row * n_sources + source, kind="stable")
    position, token, row, source = position[by_patch], token[by_patch], row[by_patch], source[by_patch]
    codes = position % block_q * block_q + token % block_q
    starts, counts = block_list.run_lengths(row, source)
    alike = block_list.first_equal_run(codes, starts, counts, np.zeros(len(starts), np.int64))
    first, pattern = block_list.distinct(alike, len(starts))
    return _Patches(row[starts], source[starts], pattern, codes, starts[first], counts[first])


def _gather_queries(found: BlockList, frame: Frame, order: Array) -> BlockList:
    """`gather` along the queries alone. Bits are built once per distinct set of pieces."""
    new = frame._replace(q_len=len(order))
    if not len(found.keys) or (order == NONE).all():
        return block_list.full_list(found.keys[:0], frame.block_size)
    patches = _patches(order, frame.block_size[0])
    # line = batch_head * n_rows + row; one entry per patch of each batch_head
    batch_heads = np.arange(frame.batch_heads)[:, None]
    offsets = np.searchsorted(found.keys, np.arange(frame.batch_heads * frame.n_rows + 1) * frame.n_cols)
    old_line = (batch_heads * frame.n_rows + patches.source).reshape(-1)
    new_line = (batch_heads * new.n_rows + patches.row).reshape(-1)
    pattern = np.tile(patches.pattern, frame.batch_heads)
    begin, counts = offsets[old_line], offsets[old_line + 1] - offsets[old_line]

    in_bounds = block_list.in_bounds_bitmasks(new)
    collector = block_list.BitmaskCollector(in_bounds)
    keys, numbers, n_added = [], [], 0
    for part in _parts(new_line, counts, block_list.items_per_chunk(in_bounds[0].nbytes)):
        source = block_list.ranges(begin[part], counts[part])
        piece_keys = np.repeat(new_line[part], counts[part]) * new.n_cols + found.keys[source] % frame.n_cols
        codes = (found.ids[source].astype(np.int64) + 1) * len(patches.starts) + np.repeat(pattern[part], counts[part])
        by_block = np.argsort(piece_keys, kind="stable")
        piece_keys, codes = piece_keys[by_block], codes[by_block]
        starts, n_pieces = block_list.run_lengths(piece_keys)
        kinds = block_list.edge_kinds(piece_keys[starts], new)
        chosen, number = block_list.distinct(block_list.first_equal_run(codes, starts, n_pieces, kinds), len(starts))
        pieces = block_list.ranges(starts[chosen], n_pieces[chosen])
        words = _join(codes[pieces], n_pieces[chosen], found.bitmasks, patches)
        collector.add(words & in_bounds[kinds[chosen]], kinds[chosen])
        keys.append(piece_keys[starts])
        numbers.append(number + n_added)
        n_added += len(chosen)
    return collector.canonical(np.concatenate(keys), np.concatenate(numbers))


def _parts(lines: Array, counts: Array, limit: int) -> list[slice]:
    """Slices of the patches with about `limit` pieces each; they end between lines, so that blocks are whole."""
    is_first = np.append(True, lines[1:] != lines[:-1])
    before = (np.cumsum(counts) - counts)[is_first] // limit
    cuts = np.flatnonzero(is_first)[np.flatnonzero(before[1:] != before[:-1]) + 1]
    edges = [0, *cuts.tolist(), len(lines)]
    return [slice(start, stop) for start, stop in itertools.pairwise(edges)]


def _join(codes: Array, counts: Array, bitmasks: Array, patches: _Patches) -> Array:
    """Bitmasks of blocks, uint32 (len(counts), block_q, words), from the codes of their pieces, block by block."""
    block_q, n_words = bitmasks.shape[1:]
    # row 0 is a full block: codes hold id + 1
    source = np.concatenate([np.full((1, block_q, n_words), 0xFFFFFFFF, np.uint32), bitmasks])
    which, pattern = codes // len(patches.starts), codes % len(patches.starts)
    n_tokens = patches.counts[pattern]
    moves = patches.codes[block_list.ranges(patches.starts[pattern], n_tokens)]
    block = np.repeat(np.repeat(np.arange(len(counts)), counts), n_tokens)
    joined = np.zeros((len(counts), block_q, n_words), np.uint32)
    joined[block, moves // block_q] = source[np.repeat(which, n_tokens), moves % block_q]
    return joined
