"""Union, intersection, difference, complement, transpose and stacking of canonical block lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from .block_list import (
    EMPTY,
    FULL,
    SIDE_UNIT,
    Array,
    Axis,
    BlockList,
    Frame,
    Size,
    chunks,
    distinct,
    edge_kinds,
    existing,
    full_list,
    grid,
    pack,
    ranges,
    renumber,
    settle,
    unpack,
    words_per_query,
)

Operation = Literal["|", "&", "-", "^"]


def broadcast(blocks: BlockList, old: Size, new: Size, n_blocks: int) -> BlockList:
    """Broadcast a list from (batch, heads) = old to new; n_blocks = n_rows * n_cols."""
    if old == new or not n_blocks:
        return blocks
    leads = np.broadcast_to(np.arange(old[0] * old[1]).reshape(old), new).reshape(-1)
    bounds = np.searchsorted(blocks.keys, np.arange(old[0] * old[1] + 1) * n_blocks)
    counts = (bounds[1:] - bounds[:-1])[leads]
    source = ranges(bounds[leads], counts)
    keys = blocks.keys[source] + np.repeat((np.arange(len(leads)) - leads) * n_blocks, counts)
    return renumber(keys, blocks.ids[source], blocks.bitmasks)


def keys_over(keys: Array, old: Size, new: Size, n_blocks: int) -> Array:
    """The keys for (batch, heads) = new: axes of size 1 in new are merged, axes of size 1 in old are repeated."""
    if old == new or not len(keys):
        return keys
    batch, head = np.divmod(keys // n_blocks, old[1])
    merged = old[0] if new[0] > 1 else 1, old[1] if new[1] > 1 else 1
    lead = (batch if merged[0] > 1 else 0) * merged[1] + (head if merged[1] > 1 else 0)
    # any block size does: the blocks are full
    flags = full_list(np.unique(lead * n_blocks + keys % n_blocks), (SIDE_UNIT, SIDE_UNIT))
    return broadcast(flags, merged, new, n_blocks).keys


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


def _words_of(ids: Array, kinds: Array, bitmasks: Array, there: Array) -> Array:
    """The bitmask of each id, including FULL and EMPTY, uint32 (n, block_q, words)."""
    words = np.zeros((len(ids), *there.shape[1:]), np.uint32)
    is_full, is_partial = ids == FULL, ids >= 0
    words[is_full] = there[kinds[is_full]]
    words[is_partial] = bitmasks[ids[is_partial]]
    return words


def combine(a: BlockList, b: BlockList, op: Operation, *, q_len: int, kv_len: int, block_size: Size) -> BlockList:
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
        keys.sort(kind="stable")
        keys = keys[np.append(True, keys[1:] != keys[:-1])] if len(keys) else keys
    elif op == "&" and len(b.keys) < len(a.keys):
        keys = b.keys
    ids_a, ids_b = _ids_at(a, keys), _ids_at(b, keys)
    kinds = edge_kinds(keys, q_len=q_len, kv_len=kv_len, block_size=block_size)
    n_b = len(b.bitmasks) + 2
    values, which = distinct(((ids_a + 2) * n_b + ids_b + 2) * 4 + kinds, (len(a.bitmasks) + 2) * n_b * 4)
    there = existing(q_len, kv_len, block_size)
    kinds = values % 4
    words = _words_of(values // 4 // n_b - 2, kinds, a.bitmasks, there)
    others = _words_of(values // 4 % n_b - 2, kinds, b.bitmasks, there)
    if op == "|":
        words |= others
    elif op == "&":
        words &= others
    elif op == "^":
        words ^= others
    else:
        words &= ~others
    return settle(keys, which, words, kinds, there)


def complement(blocks: BlockList, *, leads: int, q_len: int, kv_len: int, block_size: Size) -> BlockList:
    """The existing pairs that are not in the list. O(leads * n_rows * n_cols)."""
    n_rows, n_cols = grid(q_len, kv_len, block_size)
    stays = np.ones(leads * n_rows * n_cols, np.bool_)
    is_full = blocks.ids == FULL
    stays[blocks.keys[is_full]] = False
    keys = np.flatnonzero(stays)
    partial = BlockList(blocks.keys[~is_full], blocks.ids[~is_full], blocks.bitmasks)
    there = existing(q_len, kv_len, block_size)
    kinds = edge_kinds(partial.keys, q_len=q_len, kv_len=kv_len, block_size=block_size)
    values, inverse = distinct(partial.ids.astype(np.int64) * 4 + kinds, 4 * len(blocks.bitmasks))
    words = there[values % 4] & ~blocks.bitmasks[values // 4]
    ids = np.full(len(keys), FULL, np.int64)
    ids[np.searchsorted(keys, partial.keys)] = inverse
    return settle(keys, ids, words, values % 4, there)


def transpose(keys: Array, ids: Array, bitmasks: Array, *, q_len: int, kv_len: int, block_size: Size) -> BlockList:
    """The list with queries and keys swapped: lengths (kv_len, q_len), block size (block_kv, block_q)."""
    n_rows, n_cols = grid(q_len, kv_len, block_size)
    rows = keys // max(n_cols, 1)
    leads = rows // max(n_rows, 1)
    turned = (leads * n_cols + keys % max(n_cols, 1)) * n_rows + rows % max(n_rows, 1)
    order = np.argsort(turned, kind="stable")
    words = np.empty((len(bitmasks), block_size[1], words_per_query(block_size[0])), np.uint32)
    for part in chunks(len(bitmasks), block_size[0] * block_size[1]):
        words[part] = pack(unpack(bitmasks[part], block_size[1]).swapaxes(1, 2))
    return renumber(turned[order], ids[order], words)


# ----------------------------------------------------------------------------------------------------------------- axes


def stack(lists: Sequence[BlockList], frames: Sequence[Frame], axis: Axis) -> tuple[BlockList, Frame]:
    """(concatenation of the lists along heads or batches, its frame); the frames are equal otherwise."""
    n_blocks, total = frames[0].n_rows * frames[0].n_cols, sum(getattr(frame, axis) for frame in frames)
    keys, ids, before, n_words = [], [], 0, 0
    for found, frame in zip(lists, frames, strict=True):
        lead, place = np.divmod(found.keys, max(n_blocks, 1))
        batch, head = np.divmod(lead, frame.heads)
        lead = batch * total + before + head if axis == "heads" else (before + batch) * frame.heads + head
        keys.append(lead * n_blocks + place)
        ids.append(np.where(found.ids >= 0, found.ids + n_words, found.ids).astype(np.int64))
        before += getattr(frame, axis)
        n_words += len(found.bitmasks)
    every = np.concatenate(keys)
    order = np.argsort(every, kind="stable")
    words = np.concatenate([found.bitmasks for found in lists])
    # no bitmask is full at any edge; as an interior block it stays partial
    kinds = np.zeros(len(words), np.int64)
    stacked = settle(every[order], np.concatenate(ids)[order], words, kinds, existing(**frames[0].sizes))
    return stacked, frames[0]._replace(**{axis: total})


def pick(found: BlockList, frame: Frame, axis: Axis, index: int) -> BlockList:
    """The list of one head, or of one batch."""
    n_blocks = max(frame.n_rows * frame.n_cols, 1)
    lead, place = found.keys // n_blocks, found.keys % n_blocks
    batch, head = lead // frame.heads, lead % frame.heads
    chosen, stays = (head == index, batch) if axis == "heads" else (batch == index, head)
    return renumber((stays * n_blocks + place)[chosen], found.ids[chosen], found.bitmasks)


# ---------------------------------------------------------------------------------------------------------------- pairs


def counts_of_pairs(found: BlockList, frame: Frame) -> Array:
    """Attending pairs of each block, int64 (nnz,)."""
    in_edge = np.bitwise_count(existing(**frame.sizes)).sum(axis=(1, 2), dtype=np.int64)
    counts = in_edge[edge_kinds(found.keys, **frame.sizes)]
    is_partial = found.ids >= 0
    in_bitmask = np.bitwise_count(found.bitmasks).sum(axis=(1, 2), dtype=np.int64)
    counts[is_partial] = in_bitmask[found.ids[is_partial]]
    return counts


def first_pair(found: BlockList, frame: Frame) -> tuple[int, int, int, int]:
    """(batch, head, q_pos, kv_pos) of the first pair in lexicographic order; the list must not be empty."""
    block_q, block_kv = frame.block_size
    line = int(found.keys[0]) // frame.n_cols
    of_row = slice(0, int(np.searchsorted(found.keys, (line + 1) * frame.n_cols)))
    kinds = edge_kinds(found.keys[of_row], **frame.sizes)
    words = _words_of(found.ids[of_row], kinds, found.bitmasks, existing(**frame.sizes))
    # [block_q, blocks]
    has_pair = words.any(axis=2).T
    query = int(has_pair.any(axis=1).argmax())
    block = int(has_pair[query].argmax())
    key = int(unpack(words[block], block_kv)[query].argmax())
    lead, row = divmod(line, frame.n_rows)
    col = int(found.keys[block]) % frame.n_cols
    return *divmod(lead, frame.heads), row * block_q + query, col * block_kv + key
