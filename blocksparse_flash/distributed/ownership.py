"""Assignment of tiles of the sequence to ranks.

An owner list is int64 (n_tiles,): the rank that holds each tile's queries, keys and values. A rank holds its tiles in
ascending order.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..blocks.block_list import Array

ORDERS = ("contiguous", "zigzag", "balanced", "tuned")
# swaps that "tuned" tries, at most TRIALS_PER_PAIR per pair of tiles: 40,000 take 2 to 4 s, and more change little
TRIALS = 40_000
TRIALS_PER_PAIR = 10
# largest work of a rank over the mean after a swap of "tuned"
MAX_IMBALANCE = 1.1
# a row that reaches more than this share of tiles needs nearly all keys in any order, so no order helps
FAR = 15 / 16


class Pairs(NamedTuple):
    """Tiles that a layer computes, over all batches and heads: row and col, int64 (pairs,), each pair once."""

    row: Array
    col: Array

    def where(self, chosen: Array) -> Pairs:
        """The pairs chosen by a bool array."""
        return Pairs(self.row[chosen], self.col[chosen])


def owners(order: str, layers: Sequence[Pairs], n_tiles: int, n_ranks: int) -> Array:
    """The owner list of a named order, the same on every machine.

    "contiguous"  one contiguous range per rank, equal up to one tile
    "zigzag"      2 * n_ranks contiguous ranges; rank r holds ranges r and 2 * n_ranks - 1 - r, which balances causal
                  masks
    "balanced"    equal numbers of tiles up to one; the tile rows with most work first, each to the least loaded rank
    "tuned"       starts from "contiguous" or reverse Cuthill-McKee and swaps tiles to reduce transfers
    """
    tiles = np.arange(n_tiles)
    if order == "contiguous":
        return tiles * n_ranks // max(n_tiles, 1)
    if order == "zigzag":
        in_range = tiles * 2 * n_ranks // max(n_tiles, 1)
        return np.minimum(in_range, 2 * n_ranks - 1 - in_range)
    if order == "balanced":
        return _longest_first(_work(layers, n_tiles), n_ranks)
    assert order == "tuned", order
    return _tuned(layers, n_tiles, n_ranks)


def received(layers: Sequence[Pairs], owner: Array) -> Array:
    """Tiles of keys that each rank receives, summed over layers, int64 (ranks,).

    The total is the sum over tiles of (ranks that need the tile - 1), the cut of the column-net hypergraph (Catalyurek
    and Aykanat, IEEE TPDS 10(7), 1999, section 3).
    """
    n_tiles = len(owner)
    found = np.zeros(int(owner.max(initial=0)) + 1, np.int64)
    for pairs in layers:
        wanted = np.unique(owner[pairs.row] * n_tiles + pairs.col)
        rank, tile = np.divmod(wanted, max(n_tiles, 1))
        found += np.bincount(rank[owner[tile] != rank], minlength=len(found))
    return found


def _work(layers: Sequence[Pairs], n_tiles: int) -> Array:
    """Tiles to compute in each row, over all layers."""
    work = np.zeros(n_tiles, np.int64)
    for pairs in layers:
        work += np.bincount(pairs.row, minlength=n_tiles)
    return work


def _longest_first(work: Array, n_ranks: int) -> Array:
    """Longest processing time first, among the ranks with room for another tile."""
    n_tiles = len(work)
    room = [(n_tiles + n_ranks - 1 - rank) // n_ranks for rank in range(n_ranks)]
    ranks = [(0, rank) for rank in range(n_ranks) if room[rank]]
    owner = np.zeros(n_tiles, np.int64)
    for tile in np.argsort(-work, kind="stable").tolist():
        load, rank = heapq.heappop(ranks)
        owner[tile] = rank
        room[rank] -= 1
        if room[rank]:
            heapq.heappush(ranks, (load + int(work[tile]), rank))
    return owner


def _cuthill_mckee(layers: Sequence[Pairs], n_tiles: int, n_ranks: int) -> Array:
    """Contiguous ranges of the reverse Cuthill-McKee order of all layers together."""
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import reverse_cuthill_mckee

    row, col = (np.concatenate([getattr(pairs, side) for pairs in layers]) for side in ("row", "col"))
    graph = csr_array((np.ones(2 * len(row), np.int8), (np.append(row, col), np.append(col, row))), (n_tiles, n_tiles))
    owner = np.empty(n_tiles, np.int64)
    owner[reverse_cuthill_mckee(graph, symmetric_mode=True)] = np.arange(n_tiles) * n_ranks // n_tiles
    return owner


def _tuned(layers: Sequence[Pairs], n_tiles: int, n_ranks: int) -> Array:
    start = owners("contiguous", layers, n_tiles, n_ranks)
    layers = [pairs.where((np.bincount(pairs.row) <= FAR * n_tiles)[pairs.row]) for pairs in layers]
    if n_ranks == 1 or not any(len(pairs.row) for pairs in layers):
        return start
    other = _cuthill_mckee(layers, n_tiles, n_ranks)
    found = _swapped(layers, min(start, other, key=lambda owner: received(layers, owner).sum()))

    # a smaller sum may overload one rank, and the others would wait for it
    def burden(owner: Array) -> tuple[int, int]:
        counts = received(layers, owner)
        return int(counts.max()), int(counts.sum())

    return min(start, found, key=burden)


def _swapped(layers: Sequence[Pairs], owner: Array) -> Array:
    """Swaps tiles of different ranks if that transfers no more tiles. Each rank keeps its number of tiles."""
    n_tiles, n_ranks, n_layers = len(owner), int(owner.max()) + 1, len(layers)
    # one column per tile and layer; a tile touches the columns it attends to and its own
    tiles, own = np.arange(n_tiles), np.arange(n_layers) * n_tiles
    row = np.concatenate([*(pairs.row for pairs in layers), np.tile(tiles, n_layers)])
    col = np.concatenate(
        [*(p.col + first for p, first in zip(layers, own, strict=True)), np.arange(n_layers * n_tiles)]
    )
    # a tile that attends to itself touches its column once
    touched = np.unique(row * (n_layers * n_tiles) + col)
    row, col = np.divmod(touched, n_layers * n_tiles)
    bounds = np.searchsorted(row, np.arange(n_tiles + 1))
    columns = [col[begin:end] for begin, end in itertools.pairwise(bounds.tolist())]
    # tiles of each rank that touch each column
    count = np.zeros((n_layers * n_tiles, n_ranks), np.int64)
    np.add.at(count, (col, owner[row]), 1)
    work = _work(layers, n_tiles)
    load = np.bincount(owner, weights=work, minlength=n_ranks)
    most = MAX_IMBALANCE * load.mean()

    owner = owner.copy()
    state = 1
    for _ in range(min(TRIALS, TRIALS_PER_PAIR * n_tiles * n_tiles)):
        # Knuth's linear congruential generator: the same numbers on every machine
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        a, b = (state >> 33) % n_tiles, (state >> 13) % n_tiles
        p, s = int(owner[a]), int(owner[b])
        more = int(work[b]) - int(work[a])
        if p == s or load[p] + more > max(most, load[p]) or load[s] - more > max(most, load[s]):
            continue
        changed = (count[columns[a]] > 0).sum() + (count[columns[b]] > 0).sum()
        both = np.intersect1d(columns[a], columns[b], assume_unique=True)
        # columns that both touch keep their counts
        moves_a, moves_b = np.setdiff1d(columns[a], both, True), np.setdiff1d(columns[b], both, True)
        for columns_of, away, to in ((moves_a, p, s), (moves_b, s, p)):
            count[columns_of, away] -= 1
            count[columns_of, to] += 1
        if (count[columns[a]] > 0).sum() + (count[columns[b]] > 0).sum() <= changed:
            owner[a], owner[b] = s, p
            load[p] += more
            load[s] -= more
            continue
        for columns_of, away, to in ((moves_a, p, s), (moves_b, s, p)):
            count[columns_of, away] += 1
            count[columns_of, to] -= 1
    return owner
