"""Small-world graphs of blocks (Watts and Strogatz): a ring with some edges rewired.

The draws come from the hash of random.py: generator streams of NumPy and torch may change between versions.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from blocksparse_flash import BlockLayout

from .canvas import BlockSize, Length, check_nnz, read_square_canvas
from .checks import read_fraction, read_integer
from .public import public
from .random import MAX_SEED, below, chances, draw_words, stream_keys

# far ends tried per step; an edge that finds no free one tries as many again
FAR_ENDS_AT_ONCE = 8


def _far_ends(seed: int, numbers: np.ndarray, begin: int, n_blocks: int) -> list[list[int]]:
    """Far ends `begin` and following that each edge tries, [edges, FAR_ENDS_AT_ONCE]."""
    keys = stream_keys(seed, numbers + 1)
    words = draw_words(keys[:, None], np.arange(begin, begin + FAR_ENDS_AT_ONCE))
    return below(words, n_blocks).tolist()


def _continued(ends: list[int], seed: int, number: int, n_blocks: int) -> Iterator[int]:
    """All far ends that an edge tries: the given ones, then the following ones, without end."""
    yield from ends
    for begin in itertools.count(FAR_ENDS_AT_ONCE, FAR_ENDS_AT_ONCE):
        yield from _far_ends(seed, np.array([number]), begin, n_blocks)[0]


def _edges(n_blocks: int, n_side: int, rewire: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(near, far): both ends of every edge, each edge once."""
    # edge (step - 1) * n_blocks + block joins `block` to the block `step` places further around the ring
    numbers = np.arange(n_side * n_blocks)
    near = numbers % max(1, n_blocks)
    far = (near + numbers // max(1, n_blocks) + 1) % max(1, n_blocks)
    moved = np.flatnonzero(chances(draw_words(stream_keys(seed, np.array([0])), numbers)) < rewire)
    joined = [set[int]() for _ in range(n_blocks)]
    # needed only if edges move
    for one, other in zip(near.tolist(), far.tolist(), strict=True) if moved.size else ():
        joined[one].add(other)
        joined[other].add(one)
    tries = _far_ends(seed, moved, 0, n_blocks)
    for number, ends in zip(moved.tolist(), tries, strict=True):
        one, other = int(near[number]), int(far[number])
        if len(joined[one]) >= n_blocks - 1:
            # joined to all other blocks
            continue
        all_ends = _continued(ends, seed, number, n_blocks)
        end = next(end for end in all_ends if end != one and end not in joined[one])
        joined[one].remove(other)
        joined[other].remove(one)
        joined[one].add(end)
        joined[end].add(one)
        far[number] = end
    return near, far


@public
def small_world(
    length: Length, *, neighbors: int, rewire: float, seed: int, block_size: BlockSize = 128
) -> BlockLayout:
    """Each block attends to its neighbors on a ring, except that some edges are rewired to random blocks.

    The blocks form a ring, and each is joined to neighbors / 2 blocks on either side. Then, for step = 1 to neighbors /
    2 and for every block, the edge from the block to the one `step` places further is rewired with probability
    `rewire`: its far end becomes a random block that the block is not joined to. The number of edges stays the same. A
    little rewiring keeps the neighborhoods and shortens all paths. The diagonal is not added: use `small_world(...) |
    local(...)`.

    The graph depends on (seed, neighbors, rewire, number of blocks) only. Edge e = (step - 1) * n_blocks + block is
    rewired if (w >> 11) * 2**-53 < rewire, where w is word e of stream 0 of `masks.random`. The far ends it tries are
    (w >> 32) * n_blocks >> 32 for the words w of stream e + 1.

    length      tokens, or (q_len, kv_len) with equal numbers of blocks
    neighbors   blocks to which each block is joined before rewiring: even, 0 to n_blocks - 1
    rewire      probability that an edge is rewired, 0 to 1
    seed        0 to 2**64 - 1
    block_size  tokens per side of a block, a multiple of 16, or (block_q, block_kv)
    returns     BlockLayout of shape (1, 1, q_len, kv_len), shared by every head, of full blocks only; symmetric
    raises      ValueError if the block counts of queries and keys differ, neighbors is odd or a number is out of range

    Watts and Strogatz, "Collective dynamics of 'small-world' networks", 1998; as attention: Zaheer et al., "Big Bird",
    arXiv:2007.14062, section 2.

    >>> small_world(2048, neighbors=4, rewire=0.1, seed=0).density
    0.25
    """
    canvas = read_square_canvas(length, block_size)
    n_blocks = canvas.n_rows
    neighbors = read_integer("neighbors", neighbors, at_least=0, at_most=max(0, n_blocks - 1), unit="blocks")
    if neighbors % 2:
        raise ValueError(f"neighbors: expected an even number, as many on either side, got {neighbors}")
    rewire = read_fraction("rewire", rewire)
    seed = read_integer("seed", seed, at_least=0, at_most=MAX_SEED)
    check_nnz(n_blocks * neighbors)
    near, far = _edges(n_blocks, neighbors // 2, rewire, seed)
    return canvas.from_blocks(np.append(near, far), np.append(far, near))
