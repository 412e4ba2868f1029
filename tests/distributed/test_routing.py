"""Transfers contain the needed tiles and no others, and both ends of a message agree on every token."""

from __future__ import annotations

import numpy as np
import pytest

from blocksparse_flash.distributed import routing

TILE = 128


@pytest.mark.parametrize("seed", range(12))
def test_messages_fit_and_bring_what_is_needed(seed: int) -> None:
    """Tokens sent by the index lists arrive in their slots."""
    random = np.random.default_rng(seed)
    n_ranks, n_tiles = int(random.integers(1, 5)), int(random.integers(1, 12))
    length = TILE * n_tiles - int(random.integers(0, TILE))
    owner = random.integers(0, n_ranks, n_tiles)
    mask = random.random((n_tiles, n_tiles)) < 0.3
    row, col = np.nonzero(mask)
    moves = routing.transfers(owner[row], col, owner)
    found = [
        routing.token_indices(col[owner[row] == rank], moves, routing.Shards(owner, length, rank, n_ranks))
        for rank in range(n_ranks)
    ]

    tokens = [
        np.array([token for token in range(length) if owner[token // TILE] == rank], np.int64)
        for rank in range(n_ranks)
    ]
    for rank, lists in enumerate(found):
        needed = {int(c) for r, c in zip(row, col, strict=True) if owner[r] == rank}
        assert lists.tiles.tolist() == sorted(needed)
        wanted = [token for token in range(length) if token // TILE in needed]
        slots = np.full(len(wanted), -1)
        slots[lists.own_slots] = tokens[rank][lists.own]
        received = []
        for sender, other in enumerate(found):
            assert lists.receive_counts[sender] == other.send_counts[rank]
            begin = sum(other.send_counts[:rank])
            received.append(tokens[sender][other.sent[begin : begin + other.send_counts[rank]]])
        slots[lists.slots] = np.concatenate(received)
        assert slots.tolist() == wanted
        # nothing but what others own and this rank needs
        assert sum(lists.receive_counts) == sum(owner[token // TILE] != rank for token in wanted)
        assert lists.receive_counts[rank] == lists.send_counts[rank] == 0


def test_positions_of_a_ragged_tile() -> None:
    assert routing.tokens_of(np.array([0, 1]), 130).tolist() == [128, 2]
    assert routing.positions(np.array([1, 0]), 130).tolist() == [128, 129, *range(128)]


def test_no_tiles() -> None:
    nothing = np.zeros(0, np.int64)
    moves = routing.transfers(nothing, nothing, nothing)
    lists = routing.token_indices(nothing, moves, routing.Shards(nothing, 0, 0, 2))
    assert lists.send_counts == [0, 0] and not len(lists.tiles)
