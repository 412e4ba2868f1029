"""Sizes of the launches for a SelectedPlan, from the shapes of its tensors."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..plan_format import ITEM_ROWS, SelectedPlan, axes_of_round
from ..runtime.tensor_spec import TensorSpec


class Round(NamedTuple):
    """One round: its number, its first line, and its lists."""

    i_round: int
    first_line: int
    first_list: int
    end_list: int


class SelectedShapes(NamedTuple):
    """Sizes of a SelectedPlan, and of its rounds.

    axes            batch * heads
    n_rows, n_cols  query blocks and key blocks of a head
    query_rows, rows_per_token, keys, round_lines  see SelectedPlan.sizes
    of_line         most entries of a line
    n_tokens        tokens of a head
    has_batches     whether each batch has its own ranges
    """

    axes: int
    n_rows: int
    n_cols: int
    query_rows: int
    rows_per_token: int
    keys: int
    round_lines: int
    of_line: int
    n_tokens: int
    has_batches: bool

    @property
    def n_lines(self) -> int:
        """Query blocks of all heads."""
        return self.axes * self.n_rows

    @property
    def _round_axes(self) -> int:
        """Number of heads that may have lines in a round."""
        return axes_of_round(self.axes, self.n_rows, self.round_lines)

    @property
    def rounds(self) -> tuple[Round, ...]:
        """The rounds, in order."""
        lists, n_rounds = self._round_axes * self.n_cols, -(-self.n_lines // self.round_lines)
        return tuple(Round(i, i * self.round_lines, i * lists, (i + 1) * lists) for i in range(n_rounds))

    @property
    def slots(self) -> int:
        """The most partial results of a round."""
        return self.round_lines * self.of_line

    @property
    def items(self) -> int:
        """Upper bound of the work items of a round: the full ones, and one partly filled item per list."""
        return self._round_axes * self.n_cols + self.slots * self.query_rows // ITEM_ROWS

    def arguments(self, heads: int) -> dict[str, int]:
        """The arguments of the Hopper kernels that follow; heads: see `Rows`."""
        return {
            "n_heads": heads,
            "n_rows": self.n_rows,
            "n_tokens": self.n_tokens,
            "range_batches": self.n_tokens if self.has_batches else 0,
            "n_slots": self.slots,
            "ROWS_PER_TOKEN": self.rows_per_token,
        }


class Rows(NamedTuple):
    """Where the rows of query blocks lie in q and in tensors of its shape.

    heads        selections per batch: the heads of q, or one for each `query_rows` of them
    query_rows   rows of a query block
    n_queries    rows of a selection, without padding
    is_of_heads  whether the rows of a query block are heads of one token; otherwise they are queries of one head
    """

    heads: int
    query_rows: int
    n_queries: int
    is_of_heads: bool

    def strides(self, strides: tuple[int, ...]) -> tuple[int, int, int, int]:
        """(batch, selection, query block, row) strides, from those of (batch, heads, queries)."""
        batch, head, query = strides[:3]
        if self.is_of_heads:
            return batch, self.query_rows * head, query, head
        return batch, head, self.query_rows * query, query

    def by_block(self, spec: TensorSpec) -> TensorSpec:
        """The spec of a (batch, heads, queries, columns) tensor with the rows of a query block along dimension 2."""
        if not self.is_of_heads:
            return spec
        (batch, heads, queries, columns), (s_batch, s_head, s_query, s_column) = spec.shape, spec.strides
        return spec._replace(shape=(batch, queries, heads, columns), strides=(s_batch, s_query, s_head, s_column))


def rows_of(shapes: SelectedShapes, q_shape: Sequence[int]) -> Rows:
    """The Rows of a q of (batch, heads, queries, columns): its heads are those that select, or query_rows for each."""
    batch, heads, queries, _ = q_shape
    rows = shapes.query_rows
    if shapes.axes == batch * heads:
        return Rows(heads, rows, queries, False)
    assert shapes.axes * rows == batch * heads and shapes.n_rows == queries, "q has other heads than the plan"
    return Rows(heads // rows, rows, queries * rows, True)


@functools.lru_cache(maxsize=1024)
def _of(tensors: tuple[Sequence[int], ...], kv_len: int) -> SelectedShapes:
    (axes, n_ends), (capacity,), (batches, n_tokens, _), (_, query_rows, rows_per_token, keys, round_lines) = tensors
    n_rows = n_ends - 1
    return SelectedShapes(
        axes=axes,
        n_rows=n_rows,
        n_cols=-(-kv_len // keys),
        query_rows=query_rows,
        rows_per_token=rows_per_token,
        keys=keys,
        round_lines=round_lines,
        of_line=capacity // (axes * n_rows),
        n_tokens=n_tokens,
        has_batches=batches > 1,
    )


def shapes_of(plan: Sequence[torch.Tensor], kv_len: int) -> SelectedShapes:
    """The sizes of the tensors of a SelectedPlan."""
    made = SelectedPlan(*plan)
    return _of((made.indptr.shape, made.cols.shape, made.ranges.shape, made.sizes.shape), kv_len)
