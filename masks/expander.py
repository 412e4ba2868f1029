"""Random regular graphs of blocks: unions of Hamiltonian cycles, plus a perfect matching for an odd degree.

The draws come from the hash of random.py: generator streams of NumPy and torch may change between versions.
"""

from __future__ import annotations

import numpy as np

from blocksparse_flash import BlockLayout

from .canvas import BlockSize, Length, check_nnz, read_square_canvas
from .checks import read_integer
from .random import MAX_SEED, below, draw_words, permutation, stream_keys


class _Graph:
    """A graph on n blocks that grows by a cycle or a matching at a time and never draws an edge twice.

    partners  int64 (n, degree): the neighbours of each block, those drawn so far first
    """

    def __init__(self, n: int, degree: int, seed: int) -> None:
        self.n = n
        self.partners = np.empty((n, degree), dtype=np.int64)
        self._seed = seed
        self._n_partners = self._n_orders = self._n_choices = 0

    def random_order(self) -> np.ndarray:
        """All blocks; order number i is that of stream i + 1."""
        self._n_orders += 1
        return permutation(stream_keys(self._seed, np.array([self._n_orders])), self.n)

    def choose(self, is_possible: np.ndarray) -> int:
        """One place where is_possible; choice number i reads word i of stream 0."""
        word = draw_words(stream_keys(self._seed, np.array([0])), np.array([self._n_choices]))
        self._n_choices += 1
        places = np.flatnonzero(is_possible)
        return int(places[below(word, places.size)[0]])

    def are_joined(self, some: np.ndarray, others: np.ndarray) -> np.ndarray:
        """bool: whether some[i] and others[i] are neighbours already."""
        return (self.partners[some, : self._n_partners] == others[:, None]).any(axis=1)

    def is_free(self, block: int) -> np.ndarray:
        """bool (n,): which blocks may become its neighbours."""
        free = np.ones(self.n, dtype=bool)
        free[self.partners[block, : self._n_partners]] = False
        free[block] = False
        return free

    def join(self, some: np.ndarray, others: np.ndarray) -> None:
        """One neighbour more for every block: others[i] for some[i]; both are all blocks in some order."""
        self.partners[some, self._n_partners] = others
        self._n_partners += 1


def _add_cycle(graph: _Graph) -> None:
    """Join the blocks around a random cycle.

    Where an edge (a, b) of the cycle is there already, the stretch from b to some c is turned around, so that (a, b)
    and (c, d) become (a, c) and (b, d). With fewer than n / 2 neighbours each, a and b leave such a c (the argument of
    Dirac's theorem), and every turn leaves fewer edges drawn twice.
    """
    cycle = graph.random_order()
    is_again = graph.are_joined(cycle, np.roll(cycle, -1))
    for a, b in zip(cycle[is_again].tolist(), np.roll(cycle, -1)[is_again].tolist(), strict=True):
        # so that b is first; turned stretches run the other way
        cycle = np.roll(cycle, -int(np.flatnonzero(cycle == b)[0]))
        if cycle[1] == a:
            cycle = np.roll(cycle[::-1], 1)
        # an edge (c, d) of a turn before may have been this one
        if cycle[-1] == a:
            place = graph.choose(graph.is_free(a)[cycle[:-1]] & graph.is_free(b)[cycle[1:]])
            cycle[: place + 1] = cycle[place::-1].copy()
    graph.join(cycle, np.roll(cycle, -1))
    graph.join(cycle, np.roll(cycle, 1))


def _add_matching(graph: _Graph) -> None:
    """Join the blocks two by two. Pairs (a, b) that are joined already exchange partners with some (c, d)."""
    order = graph.random_order()
    mates = np.empty(graph.n, dtype=np.int64)
    mates[order[::2]], mates[order[1::2]] = order[1::2], order[::2]
    for a in order[::2][graph.are_joined(order[::2], order[1::2])].tolist():
        b = int(mates[a])
        if graph.are_joined(np.array([a]), np.array([b]))[0]:
            c = graph.choose(graph.is_free(a) & graph.is_free(b)[mates])
            d = int(mates[c])
            mates[[a, c, b, d]] = [c, a, d, b]
    graph.join(np.arange(graph.n), mates)


def expander(length: Length, *, degree: int, seed: int, block_size: BlockSize = 128) -> BlockLayout:
    """Each block attends to `degree` other blocks, which attend to it: a random regular graph.

    Such a graph has no bottleneck: whatever `degree` is, a few layers carry a word from every block to every other one,
    with high probability about as few as any graph of that degree needs. It is the union of random Hamiltonian cycles
    (of degree // 2 of them), and for an odd degree of a random perfect matching; edges that would be drawn twice are
    exchanged within their cycle, so that every row has exactly `degree` blocks. Beyond half of the blocks the graph is
    what another one leaves out. The diagonal is not added: `expander(...) | local(...)` adds it.

    The graph is a function of (seed, degree, number of blocks) alone: random orders sort the blocks by the words of
    `masks.random`'s streams 1, 2, ..., exchanges read stream 0.

    length      tokens; (q_len, kv_len) if both have equally many blocks
    degree      blocks in every row, 0 to blocks - 1; even if the number of blocks is odd
    seed        0 to 2**64 - 1
    block_size  tokens per side of a block, a multiple of 16
    returns     BlockLayout of shape (1, 1, q_len, kv_len), shared by every head, of full blocks only; symmetric
    raises      ValueError if the block counts of queries and keys differ, degree and blocks are both odd, or a number
                is out of range

    Shirzad et al., "Exphormer", arXiv:2303.06147, section 3.2 (expander graphs as attention), there of permutations.

    >>> expander(2048, degree=4, seed=0).density
    0.25
    """
    canvas = read_square_canvas(length, block_size)
    n_blocks = canvas.n_rows
    degree = read_integer("degree", degree, at_least=0, at_most=max(0, n_blocks - 1), unit="blocks")
    seed = read_integer("seed", seed, at_least=0, at_most=MAX_SEED)
    if degree % 2 and n_blocks % 2:
        raise ValueError(
            f"degree: expected an even number, as there are {n_blocks} blocks, an odd number, and every edge has two "
            f"ends; got {degree}"
        )
    check_nnz(n_blocks * degree)
    is_complement = 2 * degree > max(0, n_blocks - 1)
    n_drawn = n_blocks - 1 - degree if is_complement else degree
    graph = _Graph(n_blocks, n_drawn, seed)
    for _ in range(n_drawn // 2):
        _add_cycle(graph)
    if n_drawn % 2:
        _add_matching(graph)
    rows, cols = np.repeat(np.arange(n_blocks), n_drawn), graph.partners.reshape(-1)
    if is_complement:
        is_kept = ~np.eye(n_blocks, dtype=bool)
        is_kept[rows, cols] = False
        rows, cols = np.nonzero(is_kept)
    return canvas.from_blocks(rows, cols)
