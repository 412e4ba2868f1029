"""Sizes of the launches for a SelectedPlan, from the shapes of its tensors."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..plan_format import MAX_ITEM_ROWS, SelectedPlan, max_heads_per_round
from ..runtime.tensor_spec import TensorSpec


class Round(NamedTuple):
    """One round: its number, its first query block, and its lists."""

    i_round: int
    first_query_block: int
    first_list: int
    end_list: int


class SelectedShapes(NamedTuple):
    """Sizes of a SelectedPlan, and of its rounds.

    n_batch_heads   heads that select, of all batches
    n_query_blocks, n_key_blocks  of a head
    query_rows, rows_per_token, keys, query_blocks_per_round  see SelectedPlan.sizes
    max_key_blocks  entries of a query block, at most
    n_tokens        tokens of a head
    has_batches     whether each batch has its own ranges
    """

    n_batch_heads: int
    n_query_blocks: int
    n_key_blocks: int
    query_rows: int
    rows_per_token: int
    keys: int
    query_blocks_per_round: int
    max_key_blocks: int
    n_tokens: int
    has_batches: bool

    @property
    def total_query_blocks(self) -> int:
        """Query blocks of all heads."""
        return self.n_batch_heads * self.n_query_blocks

    @property
    def heads_per_round(self) -> int:
        """Number of heads that may have query blocks in a round."""
        return max_heads_per_round(self.n_batch_heads, self.n_query_blocks, self.query_blocks_per_round)

    @property
    def rounds(self) -> tuple[Round, ...]:
        """The rounds, in order."""
        blocks, lists = self.query_blocks_per_round, self.heads_per_round * self.n_key_blocks
        n_rounds = -(-self.total_query_blocks // blocks)
        return tuple(Round(i, i * blocks, i * lists, (i + 1) * lists) for i in range(n_rounds))

    @property
    def max_slots(self) -> int:
        """Entries of a round, at most."""
        return self.query_blocks_per_round * self.max_key_blocks

    @property
    def max_work_items(self) -> int:
        """Upper bound of the work items of a round: the full ones, and one partly filled item per list."""
        return self.heads_per_round * self.n_key_blocks + self.max_slots * self.query_rows // MAX_ITEM_ROWS

    def arguments(self, heads: int) -> dict[str, int]:
        """Keyword arguments of both Hopper kernels. heads: heads that select, per batch, see RowLayout."""
        return {
            "n_heads": heads,
            "n_query_blocks": self.n_query_blocks,
            "n_tokens": self.n_tokens,
            "range_batch_stride": self.n_tokens if self.has_batches else 0,
            "n_slots": self.max_slots,
            "ROWS_PER_TOKEN": self.rows_per_token,
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


def row_layout_of(shapes: SelectedShapes, q_shape: Sequence[int]) -> RowLayout:
    """The layout of q (batch, heads, queries, columns), whose heads are those that select, or query_rows for each."""
    batch, heads, queries, _ = q_shape
    rows = shapes.query_rows
    if shapes.n_batch_heads == batch * heads:
        return RowLayout(heads, rows, queries, False)
    has_rows_of_heads = shapes.n_batch_heads * rows == batch * heads and shapes.n_query_blocks == queries
    assert has_rows_of_heads, "q has other heads than the plan"
    return RowLayout(heads // rows, rows, queries * rows, True)


@functools.lru_cache(maxsize=1024)
def _of(tensors: tuple[Sequence[int], ...], kv_len: int) -> SelectedShapes:
    (n_batch_heads, n_ends), (capacity,), (batches, n_tokens, _), sizes = tensors
    _, query_rows, rows_per_token, keys, query_blocks_per_round = sizes
    n_query_blocks = n_ends - 1
    return SelectedShapes(
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


def shapes_of(plan: Sequence[torch.Tensor], kv_len: int) -> SelectedShapes:
    """The sizes of the tensors of a SelectedPlan."""
    made = SelectedPlan(*plan)
    return _of((made.indptr.shape, made.key_blocks.shape, made.ranges.shape, made.sizes.shape), kv_len)
