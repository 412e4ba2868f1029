"""Which tiles move between ranks, and the position of each token in a message.

A tile has 128 tokens; the last one may be shorter.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..blocks.block_list import Array, ranges
from ..plan_format import TILE


class Shards(NamedTuple):
    """How a sequence is distributed, from the view of one rank.

    owner   int64 (n_tiles,): the rank that holds each tile, see ownership.py
    length  tokens of the sequence
    """

    owner: Array
    length: int
    rank: int
    n_ranks: int

    @property
    def held(self) -> Array:
        """The tiles of this rank."""
        return np.flatnonzero(self.owner == self.rank)

    @property
    def sizes(self) -> list[int]:
        """Tokens of each rank."""
        return tokens_by(self.owner, np.arange(len(self.owner)), self.length, self.n_ranks).tolist()

    @property
    def n_tokens(self) -> int:
        """Tokens of this rank."""
        return self.sizes[self.rank]


class Transfers(NamedTuple):
    """Tiles to transfer, ordered by receiver, sender and tile, so that both ends agree on the order."""

    receiver: Array
    sender: Array
    tile: Array


class TokenIndices(NamedTuple):
    """Token indices of one rank's messages, all int64. A slot is a position among the tokens of `tiles`.

    tiles      tiles that this rank computes with, own and received, ascending
    own        own tokens that it computes with, ascending
    own_slots  their slots
    sent       own tokens to send, in the order of receivers
    slots      slots of received tokens, in the order of senders
    send_counts, receive_counts  number of tokens to and from each rank, lists of ints
    """

    tiles: Array
    own: Array
    own_slots: Array
    sent: Array
    slots: Array
    send_counts: list[int]
    receive_counts: list[int]


def tokens_of(tiles: Array, length: int) -> Array:
    """Number of tokens in each tile."""
    return np.minimum(length - tiles * TILE, TILE)


def positions(tiles: Array, length: int) -> Array:
    """Global token positions of tiles, concatenated."""
    return ranges(tiles * TILE, tokens_of(tiles, length))


def transfers(rank: Array, tile: Array, owner: Array) -> Transfers:
    """The transfers needed if rank[i] computes with tile[i] for every i: each tile once to each rank without it.

    This is the minimum while owners stay fixed, since a rank needs every tile it computes with.
    """
    wanted = np.unique(rank * len(owner) + tile) if len(tile) else np.zeros(0, np.int64)
    receiver, tile = np.divmod(wanted, max(len(owner), 1))
    sender = owner[tile]
    is_moved = sender != receiver
    receiver, sender, tile = receiver[is_moved], sender[is_moved], tile[is_moved]
    order = np.lexsort((tile, sender, receiver))
    return Transfers(receiver[order], sender[order], tile[order])


def token_indices(wanted: Array, found: Transfers, shards: Shards) -> TokenIndices:
    """The indices of one rank. wanted: tiles that it computes with, own and received."""
    owner, length, rank, n_ranks = shards
    tiles = np.unique(wanted)
    mine = tiles[owner[tiles] == rank]
    comes, goes = found.receiver == rank, found.sender == rank
    # messages are ordered by receiver for the sender, by sender for the receiver
    received, sent = found.tile[comes], found.tile[goes]
    return TokenIndices(
        tiles,
        places(mine, shards.held, length),
        places(mine, tiles, length),
        places(sent, shards.held, length),
        places(received, tiles, length),
        tokens_by(found.receiver[goes], sent, length, n_ranks).tolist(),
        tokens_by(found.sender[comes], received, length, n_ranks).tolist(),
    )


def tokens_by(rank: Array, tile: Array, length: int, n_ranks: int) -> Array:
    """Number of tokens of tiles, summed by rank, int64 (n_ranks,)."""
    return np.bincount(rank, weights=tokens_of(tile, length), minlength=n_ranks).astype(np.int64)


def places(tiles: Array, among: Array, length: int) -> Array:
    """Positions of the tokens of tiles in the concatenated tokens of `among`, which is ascending."""
    counts = tokens_of(among, length)
    starts = np.cumsum(counts) - counts
    which = np.searchsorted(among, tiles)
    return ranges(starts[which], counts[which])
