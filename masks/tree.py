"""Which nodes of a tree of drafted tokens may see which?

Knows speculative decoding: every node continues its parent, and sees its ancestors and a prompt before them all.
Must not know how drafts are made or verified, nor how bitmasks are packed or shared.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from blocksparse_flash import BlockLayout

from .canvas import BlockSize, Canvas, distinct_blocks, read_canvas, spread
from .checks import read_integer, read_integers


def _read_parents(parents: Sequence[int] | np.ndarray | torch.Tensor) -> np.ndarray:
    numbers = read_integers("parents", parents)
    is_wrong = (numbers < -1) | (numbers >= np.arange(numbers.size))
    if is_wrong.any():
        node = np.flatnonzero(is_wrong)[0]
        raise ValueError(
            f"parents: expected -1 (a root) or an earlier node, 0 to {node - 1}, got {numbers[node]} for node {node}. "
            "List every node after its parent"
        )
    return numbers


def _walks(parents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """When a walk around the tree enters and leaves each node: node a is an ancestor of b, or b itself, if and only if
    enters[a] <= enters[b] < leaves[a]."""
    n_nodes, parent_of = parents.size, parents.tolist()
    # one place more, the last: all roots are children of node -1
    sizes = [1] * (n_nodes + 1)
    for node in range(n_nodes - 1, -1, -1):
        sizes[parent_of[node]] += sizes[node]
    enters = [0] * (n_nodes + 1)
    # where the next child of a node is entered
    free = [0] * (n_nodes + 1)
    for node, parent in enumerate(parent_of):
        enters[node] = free[parent]
        free[parent] += sizes[node]
        free[node] = enters[node] + 1
    begin = np.array(enters[:n_nodes], dtype=np.int64)
    return begin, begin + np.array(sizes[:n_nodes], dtype=np.int64)


def _candidates(canvas: Canvas, parents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(rows, cols) of the blocks that have a pair of nodes, each once, ascending: the blocks on the ways to the roots."""
    nodes = np.arange(parents.size)
    cols_of = (nodes + canvas.shift) // canvas.block_kv
    # the nearest ancestor in an earlier col, -1 if there is none: jumps double until all have left their col
    exits = parents.copy()
    while True:
        stays = np.flatnonzero((exits >= 0) & (cols_of[exits] == cols_of))
        if not stays.size:
            break
        exits[stays] = exits[exits[stays]]
    rows, here = nodes // canvas.block_q, nodes
    found_rows, found_cols = [], []
    while here.size:
        found_rows.append(rows)
        found_cols.append(cols_of[here])
        goes_on = exits[here] >= 0
        keys = np.unique(rows[goes_on] * parents.size + exits[here[goes_on]])
        rows, here = keys // max(1, parents.size), keys % max(1, parents.size)
    none = np.empty(0, dtype=np.int64)
    return distinct_blocks(canvas, np.concatenate([none, *found_rows]), np.concatenate([none, *found_cols]))


def tree(
    parents: Sequence[int] | np.ndarray | torch.Tensor, *, prompt: int = 0, block_size: BlockSize = 128
) -> BlockLayout:
    """Each node attends to itself, to its ancestors, and to the whole prompt.

    The queries are the nodes, the keys the prompt and then the nodes, as when drafted tokens are verified against a
    cache. Several roots are allowed: they are the drafts that follow the prompt directly.

    parents=[-1, 0, 0, 1] and prompt=2:
        1 1 | 1 0 0 0
        1 1 | 1 1 0 0
        1 1 | 1 0 1 0
        1 1 | 1 1 0 1

    parents     int (nodes,): the node that each one continues, -1 for a root; every node comes after its parent
    prompt      tokens of the prompt, at least 0
    block_size  tokens per side of a block, a multiple of 16, or (block_q, block_kv)
    returns     BlockLayout of shape (1, 1, nodes, prompt + nodes), shared by every head, exact to the token
    raises      ValueError if a node does not come after its parent, TypeError unless all are ints

    Miao et al., "SpecInfer", arXiv:2305.09781, section 4.2 (tree attention, topology-aware causal mask).

    >>> tree([-1, 0, 0, 1], prompt=256, block_size=64).nnz
    5
    """
    numbers = _read_parents(parents)
    prompt = read_integer("prompt", prompt, at_least=0, unit="tokens")
    canvas = read_canvas((numbers.size, prompt + numbers.size), block_size)
    enters, leaves = (torch.from_numpy(array) for array in _walks(numbers))

    def attends(q_pos: torch.Tensor, kv_pos: torch.Tensor) -> torch.Tensor:
        node = (kv_pos - prompt).clamp(min=0)
        is_ancestor = (enters[node] <= enters[q_pos]) & (enters[q_pos] < leaves[node])
        return is_ancestor | (kv_pos < prompt)

    n_full_cols = prompt // canvas.block_kv

    def looks(row: np.ndarray, col: np.ndarray) -> np.ndarray:
        # no two blocks of nodes need look the same
        return np.where(col < n_full_cols, -1, row * canvas.n_cols + col)

    rows, cols = _candidates(canvas, numbers)
    all_rows = np.arange(canvas.n_rows)
    prompt_rows, prompt_cols = spread(np.zeros_like(all_rows), np.full_like(all_rows, -(-prompt // canvas.block_kv)))
    rows, cols = distinct_blocks(canvas, np.append(rows, prompt_rows), np.append(cols, prompt_cols))
    within = BlockLayout.from_blocks(rows, cols, canvas.q_len, canvas.kv_len, block_size=canvas.block_size)
    return BlockLayout.from_predicate(
        attends, canvas.q_len, canvas.kv_len, block_size=canvas.block_size, within=within, dedup_key=looks
    )
