"""Which queries and keys were hashed into the same bucket?

Knows bucket numbers of queries and of keys.
Must not know how tokens are hashed, nor how bitmasks are packed or shared.
"""

from __future__ import annotations

import numpy as np
import torch

from blocksparse_flash import BlockLayout

from .canvas import BlockSize, Canvas, distinct_blocks, read_canvas, spread
from .checks import read_integers, specs_of
from .heads import by_head

Buckets = np.ndarray | torch.Tensor


def _read_buckets(name: str, buckets: Buckets) -> list[np.ndarray]:
    """int64 (length,) of every head, or of one for all."""
    if not isinstance(buckets, np.ndarray | torch.Tensor):
        raise TypeError(f"{name}: expected ints in an array or tensor, got {specs_of(buckets)}")
    if buckets.ndim not in (1, 2) or (buckets.ndim == 2 and not len(buckets)):
        raise ValueError(f"{name}: expected shape (length,) or (heads, length), got {tuple(buckets.shape)}")
    return [read_integers(name, head) for head in (buckets if buckets.ndim == 2 else [buckets])]


def _sides_of(buckets: np.ndarray, side: int) -> tuple[np.ndarray, np.ndarray]:
    """(buckets, blocks), every bucket with every block row (or col) that has a token in it, ascending."""
    n_blocks = -(-buckets.size // side)
    pairs = np.unique(buckets * n_blocks + np.arange(buckets.size) // side)
    return pairs // max(1, n_blocks), pairs % max(1, n_blocks)


def _is_single(buckets: np.ndarray, side: int) -> np.ndarray:
    """bool (blocks,): whether all tokens of a block row (or col) are in one bucket."""
    if not buckets.size:
        return np.empty(0, dtype=bool)
    begins = np.arange(0, buckets.size, side)
    return np.minimum.reduceat(buckets, begins) == np.maximum.reduceat(buckets, begins)


def _one_head(canvas: Canvas, query_buckets: np.ndarray, key_buckets: np.ndarray) -> BlockLayout:
    # small numbers for whatever the hash gave
    _, numbers = np.unique(np.append(query_buckets, key_buckets), return_inverse=True)
    query_buckets, key_buckets = numbers[: canvas.q_len], numbers[canvas.q_len :]
    of_rows, rows = _sides_of(query_buckets, canvas.block_q)
    of_cols, cols = _sides_of(key_buckets, canvas.block_kv)
    # every row of a bucket meets every col of it
    begin, end = (np.searchsorted(of_cols, of_rows, side=side) for side in ("left", "right"))
    places, met = spread(begin, end)
    rows, cols = distinct_blocks(canvas, rows[places], cols[met])

    queries, keys = torch.from_numpy(query_buckets), torch.from_numpy(key_buckets)
    is_single_row, is_single_col = _is_single(query_buckets, canvas.block_q), _is_single(key_buckets, canvas.block_kv)

    def attends(q_pos: torch.Tensor, kv_pos: torch.Tensor) -> torch.Tensor:
        return queries[q_pos] == keys[kv_pos]

    def looks(row: np.ndarray, col: np.ndarray) -> np.ndarray:
        # blocks that have a pair, in one bucket on either side, are full; no two others need look the same
        return np.where(is_single_row[row] & is_single_col[col], -1, row * canvas.n_cols + col)

    within = BlockLayout.from_blocks(rows, cols, canvas.q_len, canvas.kv_len, block_size=canvas.block_size)
    return BlockLayout.from_predicate(
        attends, canvas.q_len, canvas.kv_len, block_size=canvas.block_size, within=within, dedup_key=looks
    )


def lsh(q_buckets: Buckets, kv_buckets: Buckets | None = None, *, block_size: BlockSize = 128) -> BlockLayout:
    """Each query attends to the keys of its own bucket.

    Buckets are numbers from a locality-sensitive hash of queries and keys, which the caller computes: near vectors get
    equal numbers with high probability. In the order of the text every bucket is scattered, so that most blocks have
    some pair and a bitmask of their own. Sort the tokens by bucket first, and the mask becomes blocks along the
    diagonal:

        order = buckets.argsort(stable=True)
        layout = lsh(buckets[order])
        out = attention(q[:, :, order], k[:, :, order], v[:, :, order], layout)[:, :, order.argsort()]

    q_buckets=[0, 1, 0, 2] and kv_buckets=[0, 0, 1, 3]:
        1 1 0 0
        0 0 1 0
        1 1 0 0
        0 0 0 0

    q_buckets   int (q_len,), or (heads, q_len): any ints, array or tensor
    kv_buckets  int (kv_len,), or (heads, kv_len); None: those of the queries, as in Reformer
    block_size  tokens per side of a block, a multiple of 16, or (block_q, block_kv)
    returns     BlockLayout of shape (1, heads | 1, q_len, kv_len), exact to the token; one head, shared by all, unless
                one of the two has an axis of heads. A query alone in its bucket attends to nothing
    raises      ValueError if a shape is another or the numbers of heads differ, TypeError unless the buckets are ints

    Kitaev et al., "Reformer", arXiv:2001.04451, section 2 (one round of hashing, not sorted into chunks); sorted:
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
    # one list is that of every head
    return by_head(lambda head: _one_head(canvas, queries[head % len(queries)], keys[head % len(keys)]), range(heads))
