"""Union, intersection, difference, complement, transpose and stacking of canonical block lists."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from .block_list import (
    EMPTY,
    FULL,
    Array,
    Axis,
    BlockList,
    Frame,
    Size,
    canonical,
    canonical_from_bitmasks,
    chunks,
    distinct,
    edge_kinds,
    full_list,
    in_bounds_bitmasks,
    pack,
    ranges,
    renumber,
    run_lengths,
    unpack,
    words_per_query,
)

Operation = Literal["|", "&", "-", "^"]


def broadcast(found: BlockList, frame: Frame, axes: Size) -> BlockList:
    """The list with its axes of size 1 repeated to (batch, heads) = axes."""
    if frame[:2] == axes:
        return found
    batch_heads = np.broadcast_to(np.arange(frame.batch_heads).reshape(frame[:2]), axes).reshape(-1)
    bounds = np.searchsorted(found.keys, np.arange(frame.batch_heads + 1) * frame.blocks_per_batch_head)
    counts = (bounds[1:] - bounds[:-1])[batch_heads]
    source = ranges(bounds[batch_heads], counts)
    keys = found.keys[source] + np.repeat(
        (np.arange(len(batch_heads)) - batch_heads) * frame.blocks_per_batch_head, counts
    )
    return renumber(keys, found.ids[source], found.bitmasks)


def keys_over(keys: Array, frame: Frame, axes: Size) -> Array:
    """The keys for (batch, heads) = axes: sizes of 1 in axes merge the keys, sizes of 1 in frame repeat them."""
    if frame[:2] == axes or not len(keys):
        return keys
    batch_head, place = np.divmod(keys, frame.blocks_per_batch_head)
    batch, head = np.divmod(batch_head, frame.heads)
    merged = frame._replace(batch=min(frame.batch, axes[0]), heads=min(frame.heads, axes[1]))
    batch_head = np.minimum(batch, merged.batch - 1) * merged.heads + np.minimum(head, merged.heads - 1)
    flags = full_list(np.unique(batch_head * frame.blocks_per_batch_head + place), frame.block_size)
    return broadcast(flags, merged, axes).keys


def _ids_at(blocks: BlockList, keys: Array) -> Array:
    """The id of the block at each key, EMPTY if it is not stored, int64."""
    if len(keys) == len(blocks.keys) and np.array_equal(keys, blocks.keys):
        return blocks.ids.astype(np.int64)
    found = np.full(len(keys), EMPTY, np.int64)
    if not len(blocks.keys):
        return found
    where = np.minimum(np.searchsorted(blocks.keys, keys), len(blocks.keys) - 1)
    hit = blocks.keys[where] == keys
    found[hit] = blocks.ids[where[hit]]
    return found


def _words_of(ids: Array, kinds: Array, bitmasks: Array, in_bounds: Array) -> Array:
    """The bitmask of each id, including FULL and EMPTY, uint32 (n, block_q, words)."""
    words = np.zeros((len(ids), *in_bounds.shape[1:]), np.uint32)
    is_full, is_partial = ids == FULL, ids >= 0
    words[is_full] = in_bounds[kinds[is_full]]
    words[is_partial] = bitmasks[ids[is_partial]]
    return words


_ON_WORDS: dict[Operation, Callable[[Array, Array], Array]] = {
    "|": np.bitwise_or,
    "&": np.bitwise_and,
    "^": np.bitwise_xor,
    "-": lambda a, b: a & ~b,
}


def combine(a: BlockList, b: BlockList, op: Operation, frame: Frame) -> BlockList:
    """a | b, a & b, a - b or a ^ b. Bits are computed once per distinct (id in a, id in b, edge kind)."""
    if op == "&" and not len(a.bitmasks):
        a, b = b, a
    if op == "&" and not len(b.bitmasks):
        # the intersection with a full block changes nothing
        is_met = _ids_at(b, a.keys) != EMPTY
        return a if is_met.all() else renumber(a.keys[is_met], a.ids[is_met], a.bitmasks)
    keys = a.keys
    if op in ("|", "^"):
        keys = np.concatenate([a.keys, b.keys])
        # merges two ascending arrays in linear time
        keys.sort(kind="stable")
        keys = keys[run_lengths(keys)[0]]
    elif op == "&" and len(b.keys) < len(a.keys):
        keys = b.keys
    kinds, n_b = edge_kinds(keys, frame), len(b.bitmasks) + 2
    # ids begin at -2
    codes = ((_ids_at(a, keys) + 2) * n_b + _ids_at(b, keys) + 2) * 4 + kinds
    values, which = distinct(codes, (len(a.bitmasks) + 2) * n_b * 4)
    in_bounds, kinds = in_bounds_bitmasks(frame), values % 4
    of_a = _words_of(values // 4 // n_b - 2, kinds, a.bitmasks, in_bounds)
    of_b = _words_of(values // 4 % n_b - 2, kinds, b.bitmasks, in_bounds)
    return canonical_from_bitmasks(keys, which, _ON_WORDS[op](of_a, of_b), kinds, in_bounds)


def complement(found: BlockList, frame: Frame) -> BlockList:
    """The existing pairs that are not in the list. O(batch_heads * n_rows * n_cols)."""
    is_full = found.ids == FULL
    stays = np.ones(frame.n_blocks, np.bool_)
    stays[found.keys[is_full]] = False
    keys = np.flatnonzero(stays)
    ids = np.full(len(keys), FULL, np.int32)
    ids[np.searchsorted(keys, found.keys[~is_full])] = found.ids[~is_full]
    return canonical(BlockList(keys, ids, ~found.bitmasks), frame)


def transpose(found: BlockList, frame: Frame) -> BlockList:
    """The list with queries and keys swapped, as of `frame.transposed`."""
    (block_q, block_kv), bitmasks = frame.block_size, found.bitmasks
    batch_heads, rows, cols = frame.positions(found.keys)
    turned = (batch_heads * frame.n_cols + cols) * frame.n_rows + rows
    order = np.argsort(turned, kind="stable")
    words = np.empty((len(bitmasks), block_kv, words_per_query(block_q)), np.uint32)
    for part in chunks(len(bitmasks), block_q * block_kv):
        words[part] = pack(unpack(bitmasks[part], block_kv).swapaxes(1, 2))
    return renumber(turned[order], found.ids[order], words)


# ----------------------------------------------------------------------------------------------------------------- axes


def stack(lists: Sequence[BlockList], frames: Sequence[Frame], axis: Axis) -> tuple[BlockList, Frame]:
    """(concatenation of the lists along heads or batches, its frame); the frames are equal otherwise."""
    total = sum(getattr(frame, axis) for frame in frames)
    keys, ids, before, n_words = [], [], 0, 0
    for found, frame in zip(lists, frames, strict=True):
        batch_head, place = np.divmod(found.keys, max(frame.blocks_per_batch_head, 1))
        batch, head = np.divmod(batch_head, frame.heads)
        batch_head = batch * total + before + head if axis == "heads" else (before + batch) * frame.heads + head
        keys.append(batch_head * frame.blocks_per_batch_head + place)
        ids.append(np.where(found.ids >= 0, found.ids + n_words, found.ids))
        before += getattr(frame, axis)
        n_words += len(found.bitmasks)
    every = np.concatenate(keys)
    order = np.argsort(every, kind="stable")
    bitmasks = np.concatenate([found.bitmasks for found in lists])
    stacked = frames[0]._replace(**{axis: total})
    return canonical(BlockList(every[order], np.concatenate(ids)[order], bitmasks), stacked), stacked


def pick(found: BlockList, frame: Frame, axis: Axis, index: int) -> BlockList:
    """The list of one head, or of one batch."""
    batch_head, place = np.divmod(found.keys, max(frame.blocks_per_batch_head, 1))
    batch, head = np.divmod(batch_head, frame.heads)
    chosen, stays = (head == index, batch) if axis == "heads" else (batch == index, head)
    return renumber((stays * frame.blocks_per_batch_head + place)[chosen], found.ids[chosen], found.bitmasks)


# ---------------------------------------------------------------------------------------------------------------- pairs


def counts_of_pairs(found: BlockList, frame: Frame) -> Array:
    """Attending pairs of each block, int64 (nnz,)."""
    in_edge = np.bitwise_count(in_bounds_bitmasks(frame)).sum(axis=(1, 2), dtype=np.int64)
    counts = in_edge[edge_kinds(found.keys, frame)]
    is_partial = found.ids >= 0
    in_bitmask = np.bitwise_count(found.bitmasks).sum(axis=(1, 2), dtype=np.int64)
    counts[is_partial] = in_bitmask[found.ids[is_partial]]
    return counts


def first_pair(found: BlockList, frame: Frame) -> tuple[int, int, int, int]:
    """(batch, head, q_pos, kv_pos) of the first pair in lexicographic order; the list must not be empty."""
    block_q, block_kv = frame.block_size
    batch_heads, rows, cols = frame.positions(found.keys)
    # in the first row that has a block
    n_first = int(np.searchsorted(found.keys, (found.keys[0] // frame.n_cols + 1) * frame.n_cols))
    kinds = edge_kinds(found.keys[:n_first], frame)
    words = _words_of(found.ids[:n_first], kinds, found.bitmasks, in_bounds_bitmasks(frame))
    # [block_q, blocks, block_kv]
    bits = unpack(words, block_kv).swapaxes(0, 1)
    query, block, key = (int(i) for i in np.unravel_index(bits.argmax(), bits.shape))
    batch, head = divmod(int(batch_heads[0]), frame.heads)
    return batch, head, int(rows[0]) * block_q + query, int(cols[block]) * block_kv + key
