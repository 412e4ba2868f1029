"""Assignment of tiles to ranks: every order gives each rank its share, and "tuned" transfers no more than its start."""

from __future__ import annotations

import numpy as np
import pytest

from blocksparse_flash.distributed.ownership import ORDERS, Pairs, owners, received


def pairs_of(mask: np.ndarray) -> Pairs:
    return Pairs(*np.nonzero(mask))


def masks_of(n_tiles: int) -> dict[str, np.ndarray]:
    row, col = np.arange(n_tiles)[:, None], np.arange(n_tiles)
    far = row ^ col
    return {
        "nothing": np.zeros((n_tiles, n_tiles), bool),
        "causal": col <= row,
        "butterfly": far & (far - 1) == 0,
        "random": np.random.default_rng(1).random((n_tiles, n_tiles)) < 0.2,
    }


def counted(masks: list[np.ndarray], owner: np.ndarray, rank: int) -> int:
    """Tiles that a rank receives, counted one by one."""
    found = 0
    for mask in masks:
        for col in range(len(owner)):
            found += owner[col] != rank and any(mask[row, col] for row in range(len(owner)) if owner[row] == rank)
    return found


def volume(layers: list[Pairs], owner: np.ndarray) -> int:
    return int(received(layers, owner).sum())


# fewer tiles than ranks, as many, and numbers that do not divide
@pytest.mark.parametrize("n_tiles", [0, 1, 2, 7, 16])
@pytest.mark.parametrize("n_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("order", ORDERS)
def test_every_rank_holds_its_share(order: str, n_ranks: int, n_tiles: int) -> None:
    for mask in masks_of(n_tiles).values():
        owner = owners(order, [pairs_of(mask)], n_tiles, n_ranks)
        assert owner.shape == (n_tiles,) and owner.dtype == np.int64
        counts = np.bincount(owner, minlength=n_ranks)
        assert len(counts) == n_ranks and counts.max() - counts.min() <= (2 if order == "zigzag" else 1)


def test_contiguous_and_zigzag_are_what_they_say() -> None:
    assert owners("contiguous", [], 8, 3).tolist() == [0, 0, 0, 1, 1, 1, 2, 2]
    assert owners("zigzag", [], 8, 2).tolist() == [0, 0, 1, 1, 1, 1, 0, 0]


def test_balanced_and_zigzag_even_out_a_causal_mask() -> None:
    causal = pairs_of(masks_of(16)["causal"])

    def most(order: str) -> float:
        work = np.bincount(owners(order, [causal], 16, 4)[causal.row], minlength=4)
        return work.max() / work.mean()

    assert most("contiguous") > 1.7
    assert most("zigzag") < 1.01 and most("balanced") < 1.1


@pytest.mark.parametrize("name", ["nothing", "causal", "butterfly", "random"])
@pytest.mark.parametrize("n_ranks", [2, 3])
def test_received_is_what_a_loop_counts(name: str, n_ranks: int) -> None:
    found = masks_of(13)
    layers = [found[name], found["causal"]]
    for order in ORDERS:
        owner = owners(order, [pairs_of(mask) for mask in layers], 13, n_ranks)
        expected = [counted(layers, owner, rank) for rank in range(n_ranks)]
        assert received([pairs_of(mask) for mask in layers], owner).tolist() == expected


@pytest.mark.thorough
def test_tuned_moves_less() -> None:
    """A butterfly of 64 tiles on two ranks: contiguous halves exchange everything, 64 tiles; Hamming balls 40."""
    layers = [pairs_of(masks_of(64)["butterfly"])]
    assert volume(layers, owners("contiguous", layers, 64, 2)) == 64
    tuned = owners("tuned", layers, 64, 2)
    assert volume(layers, tuned) <= 40
    assert np.array_equal(tuned, owners("tuned", layers, 64, 2))
    # several layers share one order: their sum counts
    both = [*layers, pairs_of(abs(np.arange(64)[:, None] - np.arange(64)) <= 1)]
    assert volume(both, owners("tuned", both, 64, 2)) <= volume(both, owners("contiguous", both, 64, 2))


def test_tuned_burdens_no_rank() -> None:
    """Rows that reach every tile are not counted, since they need every tile in any order."""
    mask = masks_of(48)["random"]
    mask[:2] = True
    layers = [pairs_of(mask)]
    rest = [Pairs(layers[0].row[layers[0].row > 1], layers[0].col[layers[0].row > 1])]
    start, tuned = (received(rest, owners(order, layers, 48, 4)).max() for order in ("contiguous", "tuned"))
    assert tuned <= start


def test_tuned_leaves_the_work_spread() -> None:
    causal = pairs_of(masks_of(32)["causal"])
    start, tuned = (owners(order, [causal], 32, 4) for order in ("contiguous", "tuned"))
    before, after = (np.bincount(owner[causal.row], minlength=4).max() for owner in (start, tuned))
    assert after <= before
