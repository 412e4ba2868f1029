"""Tree attention for speculative decoding: drafted tokens see their ancestors and the prompt."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from blocksparse_flash import BlockLayout

from .canvas import MAX_TOKENS, BlockSize, Canvas, distinct_blocks, read_canvas, spread
from .checks import read_integer, read_integers
from .public import public


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
    """(enters, leaves) of each node in a depth-first walk.

    Node a is b or an ancestor of b if and only if enters[a] <= enters[b] < leaves[a].
    """
    n_nodes, parent_of = parents.size, parents.tolist()
    # one extra entry at the end: roots are children of node -1
    sizes = [1] * (n_nodes + 1)
    for node in range(n_nodes - 1, -1, -1):
        sizes[parent_of[node]] += sizes[node]
    enters = [0] * (n_nodes + 1)
    # entry of the next child of a node
    free = [0] * (n_nodes + 1)
    for node, parent in enumerate(parent_of):
        enters[node] = free[parent]
        free[parent] += sizes[node]
        free[node] = enters[node] + 1
    begin = np.array(enters[:n_nodes], dtype=np.int64)
    return begin, begin + np.array(sizes[:n_nodes], dtype=np.int64)


def _candidates(canvas: Canvas, parents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(rows, cols) of the blocks that hold a pair of nodes, unique and ascending: blocks on the paths to the roots."""
    nodes = np.arange(parents.size)
    cols_of = (nodes + canvas.shift) // canvas.block_kv
    # nearest ancestor in an earlier col, or -1, by pointer doubling
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


@public
def tree(
    parents: Sequence[int] | np.ndarray | torch.Tensor, *, prompt: int = 0, block_size: BlockSize = 128
) -> BlockLayout:
    """Each node attends to itself, to its ancestors, and to the whole prompt.

    The queries are the nodes; the keys are the prompt followed by the nodes, as when drafted tokens are verified
    against a KV cache. There may be several roots, the drafts that follow the prompt directly.

    parents=[-1, 0, 0, 1] and prompt=2:
        1 1 | 1 0 0 0
        1 1 | 1 1 0 0
        1 1 | 1 0 1 0
        1 1 | 1 1 0 1

    parents     int (nodes,): the parent of each node, -1 for a root; parents come before their children
    prompt      tokens of the prompt, at least 0
    block_size  tokens per side of a block, a multiple of 16, or (block_q, block_kv)
    returns     BlockLayout of shape (1, 1, nodes, prompt + nodes), shared by every head, exact to the token
    raises      ValueError if a node comes before its parent; TypeError unless all are ints

    Miao et al., "SpecInfer", arXiv:2305.09781, section 4.2 (tree attention, topology-aware causal mask).

    >>> tree([-1, 0, 0, 1], prompt=256, block_size=64).nnz
    5
    """
    numbers = _read_parents(parents)
    prompt = read_integer("prompt", prompt, at_least=0, at_most=MAX_TOKENS - numbers.size, unit="tokens")
    canvas = read_canvas((numbers.size, prompt + numbers.size), block_size)
    enters, leaves = (torch.from_numpy(array) for array in _walks(numbers))

    def attends(q_pos: torch.Tensor, kv_pos: torch.Tensor) -> torch.Tensor:
        node = (kv_pos - prompt).clamp(min=0)
        is_ancestor = (enters[node] <= enters[q_pos]) & (enters[q_pos] < leaves[node])
        return is_ancestor | (kv_pos < prompt)

    n_full_cols = prompt // canvas.block_kv

    def dedup_key(row: np.ndarray, col: np.ndarray) -> np.ndarray:
        # full prompt blocks share a key; blocks of nodes get unique keys
        return np.where(col < n_full_cols, -1, row * canvas.n_cols + col)

    rows, cols = _candidates(canvas, numbers)
    all_rows = np.arange(canvas.n_rows)
    prompt_rows, prompt_cols = spread(np.zeros_like(all_rows), np.full_like(all_rows, -(-prompt // canvas.block_kv)))
    rows, cols = distinct_blocks(canvas, np.append(rows, prompt_rows), np.append(cols, prompt_cols))
    return canvas.from_predicate(attends, within=canvas.from_blocks(rows, cols), dedup_key=dedup_key)
