"""Orders of queries and keys in which a layout has fewer tiles, chosen on the host.

A tile is computed as a whole, so a key that many queries attend to costs a column of tiles if its neighbors are not
attended to as widely. Up to three orders are tried, and the tiles of each are counted:

    keys      wide keys, to which more tile rows attend than to their neighbors, move to the end, next to each other
    queries   wide queries, which attend to many more keys than their neighbors, move to the end; then wide keys do
    periodic  tokens at distance `period` become neighbors: a tile takes 1, 8, 16 or 32 consecutive tokens of each of
              several periods. For dilated windows, strides, and neighborhoods of grids

An order is int64 (new length,): the token of each place, NONE for a place without a token. Tokens that are not wide
keep their place within their tile, so the tiles of windows do not change; a place that a wide token leaves is NONE.
Keys that no query attends to are left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..blocks import block_list, set_operations
from ..blocks.block_list import Array, BlockList, BlockRows, Frame
from ..blocks.reindexing import NONE, gather
from ..blocks.transfer import to_device
from ..plan_format import TILE
from .tile_choice import shares_of

# an order is used if it lowers the cost (see `_cost` and `_candidate`) to at most this share
WORTH = 0.75
# time to gather 128 tokens of a head, k and v or q and out, in units of the forward time of a 128 x 128 tile: 128 KB at
# 4.3 TB/s take 30 ns, 8.4 MFLOP at 600 TFLOP/s 14 ns (H200, head_dim 128). The ratio is about the same in the backward
GATHER_TILES = 2.0
# if the order of the keys costs less than ENOUGH times its lower bound (its pairs in full tiles, plus gathering its
# keys), no other order is tried
ENOUGH = 1.5
# tile rows below which gathering takes longer than it can save
MIN_ROWS = 3
# stored blocks beyond which the search would take seconds
MAX_BLOCKS = 1 << 20
# in layouts of more than MANY_BLOCKS blocks, wide keys are looked for only if some key is attended to in over WIDE
# times as many tile rows as the median key
MANY_BLOCKS, WIDE = 1 << 12, 8
# quantiles of the counts that are tried as the limit above which a key is wide
_QUANTILES = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99, 0.995)
# a query is wide if it attends to this many times as many keys as the median of its tile row
_FACTORS = (1.25, 2.0, 4.0)
# bits of a query that attends to all keys of a tile
_ALL = np.full((1, TILE // 32), 0xFFFFFFFF, np.uint32)
# queries from which a period is read, and tile rows in which a periodic order is judged before it is made
_SAMPLED_QUERIES, _SAMPLED_ROWS = 5, 8


class Orders(NamedTuple):
    """Orders of a layout's tokens: int64 (batch | 1, heads | 1, new length); None keeps the order.

    blocks  canonical blocks of 128 x 128, of the reordered tokens
    frame   of blocks
    """

    q: Array | None
    kv: Array | None
    blocks: BlockList
    frame: Frame


class TokenOrder(NamedTuple):
    """An order of tokens on a device; each token has at most one place.

    order    int32 (batch | 1, groups, new length): the token of each place, -1 if it is empty
    inverse  int32 (batch | 1, groups, length): the place of each token, -1 if it is left out
    """

    order: Tensor
    inverse: Tensor

    @classmethod
    def of(cls, order: Array | None, length: int) -> TokenOrder | None:
        """The order on the host, with its inverse; None for None."""
        if order is None:
            return None
        inverse = np.full((*order.shape[:2], length), NONE, np.int32)
        batch, group, place = np.nonzero(order != NONE)
        inverse[batch, group, order[batch, group, place]] = place
        return cls(torch.from_numpy(order.astype(np.int32)), torch.from_numpy(inverse))

    def to(self, device: torch.device) -> TokenOrder:
        """The same order on another device."""
        return TokenOrder(*to_device(self, device))


class _Order(NamedTuple):
    """A candidate for one group of heads: orders (None keeps the order), the blocks in it, and their cost in tiles."""

    q: Array | None
    kv: Array | None
    blocks: BlockList
    frame: Frame
    cost: float


def can_pay(frame: Frame, n_blocks: int, n_bitmasks: int) -> bool:
    """Whether an order may save tiles, from sizes alone: not without partial blocks, nor for few queries."""
    return n_bitmasks > 0 and n_blocks <= MAX_BLOCKS and frame.q_len > (MIN_ROWS - 1) * TILE


def is_mostly_full(rows: BlockRows) -> bool:
    """Whether full blocks leave too little to save: their pairs fill as many tiles in any order."""
    return bool(np.count_nonzero(rows.ids < 0) >= WORTH * len(rows.ids))


def find(blocks: BlockList, frame: Frame, n_groups: int) -> Orders | None:
    """The orders in which a layout is fastest, or None if that is its own.

    blocks    canonical, in blocks of 128 x 128
    n_groups  number of KV heads, if heads of the layout differ: query heads of a group share their keys
    """
    n_groups = n_groups if frame.heads > 1 else 1
    size = frame.heads // n_groups
    group_frame = frame._replace(batch=1, heads=size)
    bounds = np.searchsorted(blocks.keys, np.arange(0, frame.batch_heads + 1, size) * frame.blocks_per_batch_head)
    own, chosen = [], []
    for group, (begin, end) in enumerate(itertools.pairwise(bounds)):
        keys = blocks.keys[begin:end] - group * size * frame.blocks_per_batch_head
        of_group = block_list.renumber(keys, blocks.ids[begin:end].astype(np.int64), blocks.bitmasks)
        own.append(_Order(None, None, of_group, group_frame, _cost(of_group, group_frame)))
        chosen.append(min([own[-1], *_candidates(own[-1])], key=lambda order: order.cost))
    orders_q = _stacked([order.q for order in chosen], frame.q_len, frame.batch)
    orders_kv = _stacked([order.kv for order in chosen], frame.kv_len, frame.batch)
    is_worth = sum(order.cost for order in chosen) <= WORTH * sum(order.cost for order in own)
    if not is_worth or (orders_q is None and orders_kv is None):
        return None
    return Orders(orders_q, orders_kv, *_joined(own, chosen, orders_q, orders_kv, frame))


def _stacked(orders: list[Array | None], length: int, batch: int) -> Array | None:
    """(batch, groups / batch, longest length) of the orders of all groups; None if all keep the order."""
    if all(order is None for order in orders):
        return None
    every = [np.arange(length) if order is None else order for order in orders]
    stacked = np.full((len(every), max(map(len, every))), NONE)
    for row, order in zip(stacked, every, strict=True):
        row[: len(order)] = order
    return stacked.reshape(batch, -1, stacked.shape[1])


def _joined(
    own: list[_Order], chosen: list[_Order], q: Array | None, kv: Array | None, frame: Frame
) -> tuple[BlockList, Frame]:
    """The blocks of all groups in their orders, which have been filled up to equal lengths."""
    new = frame._replace(
        q_len=frame.q_len if q is None else q.shape[2], kv_len=frame.kv_len if kv is None else kv.shape[2]
    )
    lists = []
    for group, (before, after) in enumerate(zip(own, chosen, strict=True)):
        blocks = after.blocks
        if all(old == now or old % TILE == 0 for old, now in zip(after.frame[2:4], new[2:4], strict=True)):
            batch_heads, rows, cols = after.frame.positions(blocks.keys)
            blocks = blocks._replace(keys=(batch_heads * new.n_rows + rows) * new.n_cols + cols)
        else:
            # full blocks at a ragged edge become partial
            q_order = np.arange(frame.q_len) if q is None else q.reshape(-1, q.shape[2])[group]
            kv_order = np.arange(frame.kv_len) if kv is None else kv.reshape(-1, kv.shape[2])[group]
            blocks = gather(before.blocks, before.frame, q_order, kv_order)
        lists.append(blocks)
    if len(lists) == 1:
        return lists[0], new
    group_frame = new._replace(batch=1, heads=own[0].frame.heads)
    per_batch = len(lists) // frame.batch
    batches = [
        set_operations.stack(lists[i : i + per_batch], [group_frame] * per_batch, "heads")
        for i in range(0, len(lists), per_batch)
    ]
    return set_operations.stack([one for one, _ in batches], [of for _, of in batches], "batch")


# ---- cost


def _cost(blocks: BlockList, frame: Frame) -> float:
    """Forward time in the fastest tiles, in units of the time of a 128 x 128 tile."""
    if not len(blocks.keys):
        return 0.0
    return len(blocks.keys) * shares_of(block_list.by_rows(blocks, frame), frame).time(128, "hopper")


def _candidate(q: Array | None, kv: Array | None, own: _Order) -> _Order:
    """The candidate with these orders, filled up to whole tiles; its cost includes gathering the tokens."""
    q, kv = (None if order is None else np.append(order, np.full(-len(order) % TILE, NONE)) for order in (q, kv))
    q_order = np.arange(own.frame.q_len) if q is None else q
    kv_order = np.arange(own.frame.kv_len) if kv is None else kv
    blocks = gather(own.blocks, own.frame, q_order, kv_order)
    frame = own.frame._replace(q_len=len(q_order), kv_len=len(kv_order))
    n_gathered = (0 if q is None else frame.heads * len(q)) + (0 if kv is None else len(kv))
    return _Order(q, kv, blocks, frame, _cost(blocks, frame) + GATHER_TILES * n_gathered / TILE)


# ---- candidates


def _candidates(own: _Order) -> Iterator[_Order]:
    """Orders that may be faster, each with its blocks and cost."""
    # pairs fill at least this many tiles, in any order
    n_pairs = int(set_operations.counts_of_pairs(own.blocks, own.frame).sum())
    if n_pairs > WORTH * own.cost * TILE**2:
        return
    kv_order = wide_keys(own.blocks, own.frame)
    if kv_order is not None:
        of_keys = _candidate(None, kv_order, own)
        yield of_keys
        if of_keys.cost < ENOUGH * (n_pairs / TILE**2 + GATHER_TILES * len(kv_order) / TILE):
            return
    q_order = wide_queries(own.blocks, own.frame)
    if q_order is not None:
        of_queries = _candidate(q_order, None, own)
        kv_order = wide_keys(of_queries.blocks, of_queries.frame)
        yield of_queries if kv_order is None else _candidate(q_order, kv_order, own)
    for q_order, kv_order in periodic(own.blocks, own.frame):
        yield _candidate(q_order, kv_order, own)


def _moved_last(is_wide: Array, is_read: Array) -> Array:
    """The order in which the tokens that are read stay, except for the wide ones, which come last.

    is_wide, is_read  bool (whole tiles,)

    Tiles without a token that stays are left out.
    """
    tokens, stays = np.arange(len(is_wide)), is_read & ~is_wide
    staying = np.where(stays, tokens, NONE).reshape(-1, TILE)[stays.reshape(-1, TILE).any(axis=1)]
    return np.concatenate([staying.reshape(-1), np.flatnonzero(is_wide)])


# ---- wide keys


def wide_keys(blocks: BlockList, frame: Frame) -> Array | None:
    """The order of the keys that moves wide ones to the end; None if it is not worth gathering them.

    Tries a few limits on the number of tile rows in which a key is attended to, and on how far this number is above the
    median of its block of 128 keys.
    """
    if not len(blocks.keys):
        return None
    n_ids = len(blocks.bitmasks) + 1
    line, col = np.divmod(blocks.keys, frame.n_cols)
    # all that is counted depends on the column and the bitmask alone
    codes, kind, n_alike = np.unique(col * n_ids + blocks.ids + 1, return_inverse=True, return_counts=True)
    col_of_kind = codes // n_ids
    # uint32 (kinds, words): the keys that some query of the block attends to
    read = np.concatenate([_ALL, np.bitwise_or.reduce(blocks.bitmasks, axis=1)])[codes % n_ids]
    bits = block_list.unpack(read, TILE)
    n_read = int(np.bitwise_count(read).sum(axis=1) @ n_alike)
    if n_read > WORTH * len(blocks.keys) * TILE:
        return None
    # tile rows in which each key is attended to
    first = np.searchsorted(col_of_kind, np.arange(frame.n_cols))
    counts = np.zeros((frame.n_cols, TILE), np.int64)
    has_blocks = np.append(first[1:], len(codes)) > first
    counts[has_blocks] = np.add.reduceat(bits * n_alike[:, None], first[has_blocks], axis=0)
    # full blocks at a ragged edge
    counts.reshape(-1)[frame.kv_len :] = 0
    if len(blocks.keys) > MANY_BLOCKS and counts.max() <= WIDE * np.median(counts[counts > 0]):
        return None
    beyond = counts - np.median(counts, axis=1, keepdims=True).astype(np.int64)

    def n_tiles(is_wide: Array) -> int:
        words = block_list.pack(is_wide)[col_of_kind]
        n_staying = int(n_alike[(read & ~words).any(axis=1)].sum())
        reads_wide = (read & words).any(axis=1)[kind]
        # the tiles in which the wide keys of a column come to lie: two at most
        n_wide = is_wide.sum(axis=1)
        end = np.cumsum(n_wide)
        begin = end - n_wide
        marks = np.zeros((frame.batch_heads * frame.n_rows, int(end[-1]) // TILE + 2), np.bool_)
        lines, cols = line[reads_wide], col[reads_wide]
        marks[lines, begin[cols] // TILE] = True
        marks[lines, (end[cols] - 1) // TILE] = True
        return n_staying + int(np.count_nonzero(marks))

    best, fewest = None, WORTH * len(blocks.keys) - GATHER_TILES * frame.n_cols
    for values in (counts, beyond):
        positive = values[values > 0]
        limits = {0, *np.quantile(positive, _QUANTILES, method="lower").tolist()} if len(positive) else ()
        for limit in sorted(limits):
            is_wide = (values > limit) & (counts > 0)
            n = n_tiles(is_wide) if is_wide.any() else fewest
            if n < fewest:
                best, fewest = is_wide, n
    if best is None:
        return None
    return _moved_last(best.reshape(-1), counts.reshape(-1) > 0)


# ---- wide queries


def wide_queries(blocks: BlockList, frame: Frame) -> Array | None:
    """The order of the queries that moves wide ones to the end; None if the others then read about as many keys."""
    n_rows, n_ids = frame.n_rows, len(blocks.bitmasks) + 1
    row = blocks.keys // frame.n_cols % n_rows
    codes, n_alike = np.unique(row * n_ids + blocks.ids + 1, return_counts=True)
    row_of_kind, id_of_kind = codes // n_ids, codes % n_ids - 1
    # keys that each query attends to: (n_rows, 128)
    n_keys = np.concatenate([np.full((1, TILE), TILE), np.bitwise_count(blocks.bitmasks).sum(axis=2)])
    counts = np.zeros((n_rows, TILE), np.int64)
    first = np.searchsorted(row_of_kind, np.arange(n_rows))
    has_blocks = np.append(first[1:], len(codes)) > first
    if not has_blocks.any():
        return None
    alike = n_keys[id_of_kind + 1] * n_alike[:, None].astype(np.int64)
    counts[has_blocks] = np.add.reduceat(alike, first[has_blocks], axis=0)
    counts.reshape(-1)[frame.q_len :] = 0
    usual = np.median(counts, axis=1, keepdims=True)
    # keys that some query attends to, over all blocks; rows without wide queries keep theirs
    n_read = _n_read(blocks.bitmasks)[id_of_kind + 1] * n_alike
    total = int(n_read.sum())
    best, fewest, seen = None, WORTH * total, {0}
    for factor in _FACTORS:
        is_wide = counts > factor * usual
        n_wide = int(is_wide.sum())
        changes = np.flatnonzero(is_wide.any(axis=1)[row_of_kind])
        if n_wide in seen or n_wide > counts.size // 2 or total - n_read[changes].sum() > fewest:
            continue
        seen.add(n_wide)
        stays = ~is_wide[row_of_kind[changes]]
        n_saved = n_read[changes] - _n_read_by(blocks.bitmasks, id_of_kind[changes], stays) * n_alike[changes]
        # as if each tile row of wide queries read all keys
        n = total - int(n_saved.sum()) + -(-n_wide // TILE) * frame.batch_heads * frame.kv_len
        if n < fewest:
            best, fewest = is_wide, n
    if best is None:
        return None
    is_wide = best.reshape(-1)
    # all tiles stay, also those without keys: their queries have outputs
    staying = np.append(np.arange(frame.q_len), np.full(-frame.q_len % TILE, NONE))
    return np.concatenate([np.where(is_wide, NONE, staying), np.flatnonzero(is_wide)])


def _n_read(bitmasks: Array) -> Array:
    """Keys that some query of a block attends to: of a full block, then of each bitmask, int64."""
    return np.append(TILE, np.bitwise_count(np.bitwise_or.reduce(bitmasks, axis=1)).sum(axis=1, dtype=np.int64))


def _n_read_by(bitmasks: Array, ids: Array, stays: Array) -> Array:
    """Keys that some of the queries that stay attend to, int64 (blocks,).

    ids    of the blocks
    stays  bool (blocks, 128)
    """
    counts = np.where(stays.any(axis=1), TILE, 0)
    partial = np.flatnonzero(ids >= 0)
    for part in block_list.chunks(len(partial), TILE * TILE // 8):
        chosen = partial[part]
        words = bitmasks[ids[chosen]] * stays[chosen, :, None]
        counts[chosen] = np.bitwise_count(np.bitwise_or.reduce(words, axis=1)).sum(axis=1)
    return counts


# ---- periodic orders


def periodic(blocks: BlockList, frame: Frame) -> Iterator[tuple[Array, Array]]:
    """Orders of (queries, keys) that make tokens at distance `period` neighbors, if they look faster; one at most.

    A tile has `near` consecutive tokens of each of 128 / near periods. Queries and keys are aligned bottom-right, as
    in a causal mask.
    """
    period = period_of(blocks, frame)
    if not period:
        return
    shift = frame.kv_len - frame.q_len
    kv_pos, q_pos = np.arange(frame.kv_len), np.arange(frame.q_len) + shift
    best, fewest = None, WORTH * len(blocks.keys)
    is_read = _read_by_any(blocks, frame)
    rows = np.unique(np.linspace(0, frame.n_rows - 1, _SAMPLED_ROWS).astype(np.int64))
    for near in (1, 8, 16, 32):
        if near > period:
            break
        orders = _periodic(q_pos, period, near), _periodic(kv_pos, period, near)
        read = [_read_by(blocks, frame, orders[0][row * TILE : (row + 1) * TILE]) for row in rows]
        places = np.stack(read)[:, :, orders[1]]
        missing = -frame.kv_len % TILE
        tiles = np.pad(places, ((0, 0), (0, 0), (0, missing))).reshape(*places.shape[:2], -1, TILE).any(axis=3)
        n = tiles.sum() / len(rows) * frame.n_rows
        if n < fewest:
            best, fewest = orders, n
    if best is not None:
        yield best[0], np.where(is_read[best[1]], best[1], NONE)


def _periodic(positions: Array, period: int, near: int) -> Array:
    """Indices of positions, ordered by groups of 128 / near periods, then by `near` places in the period."""
    step, place = positions // period, positions % period
    far = TILE // near
    return np.lexsort((place % near, step % far, place // near, step // far))


def _read_by_any(blocks: BlockList, frame: Frame) -> Array:
    """Keys that some query of some head attends to: bool (kv_len,)."""
    read = np.append(np.bitwise_or.reduce(blocks.bitmasks, axis=1), _ALL, axis=0)
    words = np.zeros((frame.n_cols, TILE // 32), np.uint32)
    np.bitwise_or.at(words, blocks.keys % frame.n_cols, read[blocks.ids])
    return block_list.unpack(words, TILE).reshape(-1)[: frame.kv_len]


def _read_by(blocks: BlockList, frame: Frame, queries: Array) -> Array:
    """Keys that some of the queries attend to: bool (batch_heads, kv_len)."""
    found = np.zeros((frame.batch_heads, frame.n_cols, TILE // 32), np.uint32)
    by_row = queries // TILE
    for batch_head in range(frame.batch_heads):
        for row in np.unique(by_row):
            begin, end = np.searchsorted(blocks.keys, (batch_head * frame.n_rows + row + np.arange(2)) * frame.n_cols)
            cols, ids = blocks.keys[begin:end] % frame.n_cols, blocks.ids[begin:end]
            words = np.full((end - begin, TILE // 32), 0xFFFFFFFF, np.uint32)
            partial, kinds = ids >= 0, np.maximum(ids, 0)
            if partial.any():
                used, which = np.unique(kinds[partial], return_inverse=True)
                of_queries = blocks.bitmasks[used][:, queries[by_row == row] % TILE]
                words[partial] = np.bitwise_or.reduce(of_queries, axis=1)[which]
            found[batch_head, cols] |= words
    return block_list.unpack(found, TILE).reshape(frame.batch_heads, -1)[:, : frame.kv_len]


def period_of(blocks: BlockList, frame: Frame) -> int:
    """The distance at which the keys of most queries repeat: between the starts of runs of keys. 0 if there is none."""
    queries = np.linspace(frame.q_len // 2, frame.q_len - 1, _SAMPLED_QUERIES).astype(np.int64)
    periods = []
    for query in queries:
        reads = _read_by(blocks, frame, query[None])
        for keys_read in reads:
            starts = np.flatnonzero(keys_read & ~np.append(False, keys_read[:-1]))
            steps = np.diff(starts)
            if len(steps) < 4:
                return 0
            values, counts = np.unique(steps, return_counts=True)
            if 2 * counts.max() < len(steps):
                return 0
            periods.append(int(values[counts.argmax()]))
    common = max(set(periods), key=periods.count)
    return common if 2 * periods.count(common) > len(periods) else 0
