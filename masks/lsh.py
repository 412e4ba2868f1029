"""Masks from bucket numbers, as locality-sensitive hashing of queries and keys gives them."""

from __future__ import annotations

import numpy as np
import torch

from blocksparse_flash import BlockLayout

from .canvas import BlockSize, Canvas, distinct_blocks, read_canvas, spread
from .checks import check_dense, read_integers, type_name
from .heads import by_head
from .public import public

Buckets = np.ndarray | torch.Tensor


def _read_buckets(name: str, buckets: Buckets) -> list[np.ndarray]:
    """int64 (length,) for each head, or a single one for all."""
    if not isinstance(buckets, np.ndarray | torch.Tensor):
        raise TypeError(f"{name}: expected ints in an array or tensor, got {type_name(buckets)}")
    if isinstance(buckets, torch.Tensor):
        check_dense(name, buckets)
    if buckets.ndim not in (1, 2) or (buckets.ndim == 2 and not len(buckets)):
        raise ValueError(f"{name}: expected shape (length,) or (heads, length), got {tuple(buckets.shape)}")
    return [read_integers(name, head) for head in (buckets if buckets.ndim == 2 else [buckets])]


def _sides_of(buckets: np.ndarray, side: int) -> tuple[np.ndarray, np.ndarray]:
    """(buckets, blocks): the distinct pairs of a bucket and a block row (or col) with a token in it, ascending."""
    n_blocks = -(-buckets.size // side)
    pairs = np.unique(buckets * n_blocks + np.arange(buckets.size) // side)
    return pairs // max(1, n_blocks), pairs % max(1, n_blocks)


def _is_single(buckets: np.ndarray, side: int) -> np.ndarray:
    """bool (blocks,): all tokens of the block row (or col) are in one bucket."""
    if not buckets.size:
        return np.empty(0, dtype=bool)
    begins = np.arange(0, buckets.size, side)
    return np.minimum.reduceat(buckets, begins) == np.maximum.reduceat(buckets, begins)


def _one_head(canvas: Canvas, query_buckets: np.ndarray, key_buckets: np.ndarray) -> BlockLayout:
    # renumber the buckets from 0
    _, numbers = np.unique(np.append(query_buckets, key_buckets), return_inverse=True)
    query_buckets, key_buckets = numbers[: canvas.q_len], numbers[canvas.q_len :]
    of_rows, rows = _sides_of(query_buckets, canvas.block_q)
    of_cols, cols = _sides_of(key_buckets, canvas.block_kv)
    # every row of a bucket meets every col of the bucket
    begin, end = (np.searchsorted(of_cols, of_rows, side=side) for side in ("left", "right"))
    places, met = spread(begin, end)
    rows, cols = distinct_blocks(canvas, rows[places], cols[met])

    queries, keys = torch.from_numpy(query_buckets), torch.from_numpy(key_buckets)
    is_single_row, is_single_col = _is_single(query_buckets, canvas.block_q), _is_single(key_buckets, canvas.block_kv)

    def attends(q_pos: torch.Tensor, kv_pos: torch.Tensor) -> torch.Tensor:
        return queries[q_pos] == keys[kv_pos]

    def dedup_key(row: np.ndarray, col: np.ndarray) -> np.ndarray:
        # a candidate with one bucket on each side is full; the other blocks get unique keys
        return np.where(is_single_row[row] & is_single_col[col], -1, row * canvas.n_cols + col)

    return canvas.from_predicate(attends, within=canvas.from_blocks(rows, cols), dedup_key=dedup_key)


@public
def lsh(q_buckets: Buckets, kv_buckets: Buckets | None = None, *, block_size: BlockSize = 128) -> BlockLayout:
    """Each query attends to the keys of its own bucket.

    The caller computes the buckets with a locality-sensitive hash, which gives nearby vectors equal numbers with high
    probability. In text order buckets are scattered, and most blocks hold some pair and need a bitmask. Sort the tokens
    by bucket first, and the mask becomes blocks along the diagonal:

        order = buckets.argsort(stable=True)
        layout = lsh(buckets[order])
        out = attention(q[:, :, order], k[:, :, order], v[:, :, order], layout)[:, :, order.argsort()]

    q_buckets=[0, 1, 0, 2] and kv_buckets=[0, 0, 1, 3]:
        1 1 0 0
        0 0 1 0
        1 1 0 0
        0 0 0 0

    q_buckets   int (q_len,) or (heads, q_len), array or tensor, of any values
    kv_buckets  int (kv_len,) or (heads, kv_len); None uses q_buckets, as Reformer does
    block_size  tokens per side of a block, a multiple of 16, or (block_q, block_kv)
    returns     BlockLayout of shape (1, heads | 1, q_len, kv_len), exact to the token; one head, shared by all, unless
                an argument has a head axis. A query whose bucket holds no key attends to nothing
    raises      ValueError if a shape is wrong or the numbers of heads differ; TypeError unless the buckets are ints

    Kitaev et al., "Reformer", arXiv:2001.04451, section 2 (one round of hashing, without chunks); sorting:
    Han et al., "HyperAttention", arXiv:2310.05869, section 3.1.

    >>> lsh(np.arange(512) // 128).nnz
    4
    """
    queries = _read_buckets("q_buckets", q_buckets)
    keys = queries if kv_buckets is None else _read_buckets("kv_buckets", kv_buckets)
    canvas = read_canvas((queries[0].size, keys[0].size), block_size)
    heads = max(len(queries), len(keys))
    if not {len(queries), len(keys)} <= {1, heads}:
        raise ValueError(
            f"q_buckets, kv_buckets: expected equally many heads, or one for all, got {len(queries)} and {len(keys)}"
        )
    # a single list is shared by every head
    return by_head(lambda head: _one_head(canvas, queries[head % len(queries)], keys[head % len(keys)]), range(heads))
