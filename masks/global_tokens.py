"""Global tokens, which attend to every token and to which every token attends."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from blocksparse_flash import BlockLayout

from .canvas import BlockSize, Length, check_nnz, read_canvas
from .checks import read_integer, read_integers
from .kinds import kinds_of_sides
from .public import public

Tokens = int | Sequence[int] | np.ndarray | torch.Tensor


def read_tokens(name: str, tokens: Tokens, kv_len: int) -> np.ndarray:
    """bool (kv_len,): the global keys. name: the argument, for messages."""
    is_global = np.zeros(kv_len, dtype=bool)
    if isinstance(tokens, Sequence | np.ndarray | torch.Tensor):
        positions = read_integers(name, tokens)
        is_outside = (positions < 0) | (positions >= kv_len)
        if is_outside.any():
            raise ValueError(
                f"{name}: expected positions from 0 to {kv_len - 1}, got {positions[is_outside][0]} "
                f"at index {np.flatnonzero(is_outside)[0]}"
            )
        is_global[positions] = True
    else:
        is_global[: read_integer(name, tokens, at_least=0, at_most=kv_len, unit="tokens")] = True
    return is_global


@public
def global_tokens(length: Length, *, tokens: Tokens, block_size: BlockSize = 128) -> BlockLayout:
    """Global tokens attend to every token, and every token attends to them; no other pair attends.

    Tokens are given by their position among the keys. Query i is at key position i + kv_len - q_len, as with
    causal=True, so the query of a decoding step is global only if its token is.

    tokens=1 and tokens=[2] on 4 tokens:
        1 1 1 1     0 0 1 0
        1 0 0 0     0 0 1 0
        1 0 0 0     1 1 1 1
        1 0 0 0     0 0 1 0

    length      tokens, or (q_len, kv_len)
    tokens      number of leading tokens, 0 to kv_len, or positions, 0 to kv_len - 1, in any order (sequence, array or
                tensor of ints; repeats have no effect)
    block_size  tokens per side of a block, a multiple of 16, or (block_q, block_kv)
    returns     BlockLayout of shape (1, 1, q_len, kv_len), shared by every head, exact to the token
    raises      ValueError if a number is out of range; TypeError unless all are ints

    Beltagy et al., "Longformer", arXiv:2004.05150, section 3.1 (global attention).

    >>> global_tokens(1024, tokens=1).density
    0.234375
    """
    canvas = read_canvas(length, block_size)
    is_global_key = read_tokens("tokens", tokens, canvas.kv_len)
    # query i is the token at key position i + shift; queries before the first key are not global
    is_global_query = np.zeros(canvas.q_len, dtype=bool)
    shared = min(canvas.q_len, canvas.kv_len)
    is_global_query[canvas.q_len - shared :] = is_global_key[canvas.kv_len - shared :]

    global_queries, global_keys = torch.from_numpy(is_global_query), torch.from_numpy(is_global_key)

    def attends(q_pos: torch.Tensor, kv_pos: torch.Tensor) -> torch.Tensor:
        return global_queries[q_pos] | global_keys[kv_pos]

    row_kinds = kinds_of_sides(is_global_query, canvas.block_q)
    col_kinds = kinds_of_sides(is_global_key, canvas.block_kv)
    n_col_kinds = int(col_kinds.max(initial=0)) + 1

    def dedup_key(row: np.ndarray, col: np.ndarray) -> np.ndarray:
        return row_kinds[row] * n_col_kinds + col_kinds[col]

    global_rows, other_rows = np.flatnonzero(row_kinds), np.flatnonzero(row_kinds == 0)
    cols, global_cols = np.arange(canvas.n_cols), np.flatnonzero(col_kinds)
    check_nnz(global_rows.size * cols.size + other_rows.size * global_cols.size)
    within = canvas.from_blocks(
        np.concatenate([np.repeat(global_rows, cols.size), np.repeat(other_rows, global_cols.size)]),
        np.concatenate([np.tile(cols, global_rows.size), np.tile(global_cols, other_rows.size)]),
    )
    return canvas.from_predicate(attends, within=within, dedup_key=dedup_key)
