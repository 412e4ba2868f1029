"""Which tiles must move between ranks, and where does each token of a message go?

Knows tiles by number, their owners (see ownership.py) and tokens. A tile has 128 tokens, the last one what is left.
Must not know torch, layouts, process groups or heads.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..blocks.block_list import Array, ranges
from ..kernels.plan_format import TILE


class Moves(NamedTuple):
    """Tiles that go from rank to rank, ordered by receiver, sender and tile, so that both sides know the order."""

    receiver: Array
    sender: Array
    tile: Array


class Lists(NamedTuple):
    """What one rank does with its tokens and with messages. int64; `tiles` are numbers of tiles, the others of tokens.

    tiles      the tiles that this rank works on, its own and received ones, ascending: slots are counted along them
    own        which of its tokens it works on itself, ascending
    own_slots  where they go
    sent       which of its tokens it sends, receiver after receiver
    slots      where received tokens go, sender after sender
    send_counts, receive_counts  tokens to and from each rank, lists of ints
    """

    tiles: Array
    own: Array
    own_slots: Array
    sent: Array
    slots: Array
    send_counts: list[int]
    receive_counts: list[int]


def tokens_of(tiles: Array, length: int) -> Array:
    """How many tokens each tile has."""
    return np.minimum(length - tiles * TILE, TILE)


def positions(tiles: Array, length: int) -> Array:
    """The tokens of tiles, one tile after another."""
    return ranges(tiles * TILE, tokens_of(tiles, length))


def moves(rank: Array, tile: Array, owner: Array) -> Moves:
    """What moves when rank[i] works on tile[i], for every i: each tile once to each rank that does not own it.

    No set of messages moves less while tiles stay where they are owned: a rank needs every tile it works on.
    """
    wanted = np.unique(rank * len(owner) + tile) if len(tile) else np.zeros(0, np.int64)
    receiver, tile = np.divmod(wanted, max(len(owner), 1))
    sender = owner[tile]
    is_moved = sender != receiver
    receiver, sender, tile = receiver[is_moved], sender[is_moved], tile[is_moved]
    order = np.lexsort((tile, sender, receiver))
    return Moves(receiver[order], sender[order], tile[order])


def lists(wanted: Array, found: Moves, owner: Array, length: int, rank: int, n_ranks: int) -> Lists:
    """The lists of one rank. wanted: the tiles that it works on, its own and received ones."""
    held = np.flatnonzero(owner == rank)
    tiles = np.unique(wanted)
    mine = tiles[owner[tiles] == rank]
    comes, goes = found.receiver == rank, found.sender == rank
    # messages are ordered by receiver for the sender, by sender for the receiver
    received, sent = found.tile[comes], found.tile[goes]
    return Lists(
        tiles,
        places(mine, held, length),
        places(mine, tiles, length),
        places(sent, held, length),
        places(received, tiles, length),
        tokens_by(found.receiver[goes], sent, length, n_ranks).tolist(),
        tokens_by(found.sender[comes], received, length, n_ranks).tolist(),
    )


def tokens_by(rank: Array, tile: Array, length: int, n_ranks: int) -> Array:
    """Tokens of tiles, summed by rank, int64 (n_ranks,)."""
    return np.bincount(rank, weights=tokens_of(tile, length), minlength=n_ranks).astype(np.int64)


def places(tiles: Array, among: Array, length: int) -> Array:
    """Where the tokens of tiles are when those of `among`, ascending, lie one after another."""
    counts = tokens_of(among, length)
    starts = np.cumsum(counts) - counts
    which = np.searchsorted(among, tiles)
    return ranges(starts[which], counts[which])
