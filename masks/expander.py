"""Random regular graphs of blocks: unions of Hamiltonian cycles, plus a perfect matching for an odd degree.

The draws come from the hash of random.py: generator streams of NumPy and torch may change between versions.
"""

from __future__ import annotations

import numpy as np

from blocksparse_flash import BlockLayout

from .canvas import BlockSize, Length, check_nnz, read_square_canvas
from .checks import read_integer
from .public import public
from .random import MAX_SEED, below, draw_words, permutation, stream_keys


class _Graph:
    """A graph on n blocks that grows by a cycle or a matching at a time, without repeated edges.

    partners  int64 (n, degree): the neighbors of each block; the first columns are filled
    """

    def __init__(self, n: int, degree: int, seed: int) -> None:
        self.n = n
        self.partners = np.empty((n, degree), dtype=np.int64)
        self._seed = seed
        self._n_partners = self._n_orders = self._n_choices = 0

    def random_order(self) -> np.ndarray:
        """All blocks in random order; order i reads stream i + 1."""
        self._n_orders += 1
        return permutation(stream_keys(self._seed, np.array([self._n_orders])), self.n)

    def choose(self, is_possible: np.ndarray) -> int:
        """A random index at which is_possible; choice i reads word i of stream 0."""
        word = draw_words(stream_keys(self._seed, np.array([0])), np.array([self._n_choices]))
        self._n_choices += 1
        places = np.flatnonzero(is_possible)
        return int(places[below(word, places.size)[0]])

    def are_joined(self, some: np.ndarray, others: np.ndarray) -> np.ndarray:
        """bool: some[i] and others[i] are neighbors already."""
        return (self.partners[some, : self._n_partners] == others[:, None]).any(axis=1)

    def is_free(self, block: int) -> np.ndarray:
        """bool (n,): the blocks that may become its neighbors."""
        free = np.ones(self.n, dtype=bool)
        free[self.partners[block, : self._n_partners]] = False
        free[block] = False
        return free

    def join(self, some: np.ndarray, others: np.ndarray) -> None:
        """Give every block some[i] the neighbor others[i]; both arguments are permutations of the blocks."""
        self.partners[some, self._n_partners] = others
        self._n_partners += 1


def _add_cycle(graph: _Graph) -> None:
    """Join the blocks around a random cycle.

    If an edge (a, b) of the cycle exists already, the section from b to some c is reversed, which replaces (a, b) and
    (c, d) by (a, c) and (b, d). Such a c exists, since a and b have fewer than n / 2 neighbors each (the argument of
    Dirac's theorem), and every reversal reduces the number of repeated edges.
    """
    cycle = graph.random_order()
    is_repeated = graph.are_joined(cycle, np.roll(cycle, -1))
    for a, b in zip(cycle[is_repeated].tolist(), np.roll(cycle, -1)[is_repeated].tolist(), strict=True):
        # b first; reversed sections run the other way
        cycle = np.roll(cycle, -int(np.flatnonzero(cycle == b)[0]))
        if cycle[1] == a:
            cycle = np.roll(cycle[::-1], 1)
        # an earlier reversal may have removed this edge
        if cycle[-1] == a:
            place = graph.choose(graph.is_free(a)[cycle[:-1]] & graph.is_free(b)[cycle[1:]])
            cycle[: place + 1] = cycle[place::-1].copy()
    graph.join(cycle, np.roll(cycle, -1))
    graph.join(cycle, np.roll(cycle, 1))


def _add_matching(graph: _Graph) -> None:
    """Join the blocks in random pairs. A pair (a, b) that is joined already swaps partners with some (c, d)."""
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


@public
def expander(length: Length, *, degree: int, seed: int, block_size: BlockSize = 128) -> BlockLayout:
    """Each block attends to `degree` other blocks, and they attend to it: a random regular graph.

    Such a graph has no bottleneck: with high probability, any two blocks are connected within a number of layers close
    to the minimum for this degree. It is the union of degree // 2 random Hamiltonian cycles and, for an odd degree, a
    random perfect matching. Repeated edges are exchanged within their cycle, so every row has exactly `degree` blocks.
    If degree exceeds half of the blocks, the graph is the complement of a sparser one. The diagonal is not added: use
    `expander(...) | local(...)`.

    The graph depends on (seed, degree, number of blocks) only: random orders sort the blocks by the words of streams
    1, 2, ... of `masks.random`, and exchanges read stream 0.

    length      tokens, or (q_len, kv_len) with equal numbers of blocks
    degree      blocks in every row, 0 to n_blocks - 1; even if n_blocks is odd
    seed        0 to 2**64 - 1
    block_size  tokens per side of a block, a multiple of 16, or (block_q, block_kv)
    returns     BlockLayout of shape (1, 1, q_len, kv_len), shared by every head, of full blocks only; symmetric
    raises      ValueError if the block counts of queries and keys differ, if degree and n_blocks are both odd, or if a
                number is out of range

    Shirzad et al., "Exphormer", arXiv:2303.06147, section 3.2 (expander graphs as attention), which builds them
    from permutations.

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
