"""Sizes and arguments of the launches for a SelectedPlan, from the shapes of its tensors."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..plan_format import SelectedPlan, SelectedSizes
from ..runtime.tensor_spec import TensorSpec


def arguments_of(sizes: SelectedSizes, heads: int) -> dict[str, int]:
    """Keyword arguments of both Hopper kernels. heads: heads that select, per batch, see RowLayout."""
    return {
        "n_heads": heads,
        "n_query_blocks": sizes.n_query_blocks,
        "n_tokens": sizes.n_tokens,
        "range_batch_stride": sizes.n_tokens if sizes.has_batches else 0,
        "n_slots": sizes.max_slots,
        "ROWS_PER_TOKEN": sizes.rows_per_token,
    }


class RowLayout(NamedTuple):
    """How the rows of query blocks lie in q, and in tensors of its shape.

    heads           heads that select, per batch: the heads of q, or one for each `query_rows` of them
    query_rows      rows of a query block
    n_queries       rows per head that selects; the last query block may have fewer than query_rows
    rows_are_heads  True: the rows of a query block are query heads of one token; False: they are queries of one head
    """

    heads: int
    query_rows: int
    n_queries: int
    rows_are_heads: bool

    def strides(self, strides: tuple[int, ...]) -> tuple[int, int, int, int]:
        """(batch, head that selects, query block, row) strides, from those of (batch, heads, queries)."""
        batch, head, query = strides[:3]
        if self.rows_are_heads:
            return batch, self.query_rows * head, query, head
        return batch, head, self.query_rows * query, query

    def by_block(self, spec: TensorSpec) -> TensorSpec:
        """The spec of a (batch, heads, queries, columns) tensor with the rows of a query block along dimension 2."""
        if not self.rows_are_heads:
            return spec
        (batch, heads, queries, columns), (s_batch, s_head, s_query, s_column) = spec.shape, spec.strides
        return spec._replace(shape=(batch, queries, heads, columns), strides=(s_batch, s_query, s_head, s_column))


def row_layout_of(sizes: SelectedSizes, q_shape: Sequence[int]) -> RowLayout:
    """The layout of q (batch, heads, queries, columns), whose heads are those that select, or query_rows for each."""
    batch, heads, queries, _ = q_shape
    rows = sizes.query_rows
    if sizes.n_batch_heads == batch * heads:
        return RowLayout(heads, rows, queries, False)
    has_rows_of_heads = sizes.n_batch_heads * rows == batch * heads and sizes.n_query_blocks == queries
    assert has_rows_of_heads, "q has other heads than the plan"
    return RowLayout(heads // rows, rows, queries * rows, True)


@functools.lru_cache(maxsize=1024)
def _of(tensors: tuple[Sequence[int], ...], kv_len: int) -> SelectedSizes:
    (n_batch_heads, n_ends), (capacity,), (batches, n_tokens, _), sides = tensors
    _, query_rows, rows_per_token, keys, query_blocks_per_round = sides
    n_query_blocks = n_ends - 1
    return SelectedSizes(
        n_batch_heads=n_batch_heads,
        n_query_blocks=n_query_blocks,
        n_key_blocks=-(-kv_len // keys),
        query_rows=query_rows,
        rows_per_token=rows_per_token,
        keys=keys,
        query_blocks_per_round=query_blocks_per_round,
        max_key_blocks=capacity // (n_batch_heads * n_query_blocks),
        n_tokens=n_tokens,
        has_batches=batches > 1,
    )


def sizes_of(plan: Sequence[torch.Tensor], kv_len: int) -> SelectedSizes:
    """The sizes of the tensors of a SelectedPlan."""
    made = SelectedPlan(*plan)
    return _of((made.indptr.shape, made.key_blocks.shape, made.ranges.shape, made.sizes.shape), kv_len)
