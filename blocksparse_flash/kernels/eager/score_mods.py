"""Score mods of the eager backend: their effect on the scores of a span, and their gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...plan_format import TILE
from ...score_mods import LOWEST_BIAS, Scores, sums_shape


class Sizes(NamedTuple):
    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int

    @property
    def n_rows(self) -> int:
        return -(-self.q_len // TILE)

    @property
    def n_cols(self) -> int:
        return -(-self.kv_len // TILE)

    @property
    def q_side(self) -> int:
        """Queries of a tile: q_len if it is less than a tile, as in decoding."""
        return min(TILE, self.q_len)

    @property
    def is_empty(self) -> bool:
        return 0 in (self.batch * self.heads, self.q_len, self.kv_len)


class SpanMods(NamedTuple):
    """The score mods of a span.

    softcap   or 0.0
    slopes    (sharing heads, rows, 1, 1), or None
    distance  (rows, queries, keys), or None
    bias      (sharing heads, rows, queries, keys), or None
    places    (batch, head, list entry) of each tile, broadcast to (sharing heads, rows, tiles); None without a bias
    pair_bias  (sharing heads or 1, rows, queries, keys), or None
    pair_places  flat index of each tile of it, (sharing heads or 1, rows, tiles), or None
    """

    softcap: float
    slopes: Tensor | None
    distance: Tensor | None
    bias: Tensor | None
    places: tuple[Tensor, Tensor, Tensor] | None
    pair_bias: Tensor | None
    pair_places: Tensor | None

    def apply(self, scores: Tensor) -> Tensor | None:
        """Changes scores in place; returns the tanh of a softcap."""
        tanh = None
        if self.softcap > 0:
            tanh = scores.div_(self.softcap).tanh_().clone()
            scores.mul_(self.softcap)
        if self.slopes is not None and self.distance is not None:
            scores.addcmul_(self.slopes, self.distance, value=-1)
        if self.bias is not None:
            scores.add_(self.bias)
        if self.pair_bias is not None:
            scores.add_(torch.threshold(self.pair_bias.to(scores.dtype), LOWEST_BIAS, -torch.inf))
        return tanh


class CallMods:
    """The score mods of a call, and the sums for their gradients.

    distance_sums  (query tiles, queries, 1): of -ds * distance, in float64, since far and near pairs nearly cancel
    bias_sums      see score_mods.sums_shape
    pair_sums      (tiles of pair_bias, queries, keys): of ds
    """

    def __init__(
        self,
        scores: Scores,
        sizes: Sizes,
        plan: list[Tensor],
        *,
        like: Tensor,
        wanted: Sequence[bool] = (False, False, False),
    ) -> None:
        self.scores, self._tables, self._sizes = scores, scores.tables(0, base_2=False), sizes
        # queries of a tile
        self._queries = like.shape[1]
        self.distance_sums = like.new_zeros(len(like), self._queries, 1, dtype=torch.float64) if wanted[0] else None
        self.bias_sums = None
        if wanted[1] and scores.bias_cell is not None:
            batch_heads, n_tiles = (sizes.batch, sizes.heads), len(scores.bias_index[0])
            shape = sums_shape(batch_heads, plan[0].shape, n_tiles, scores.bias_cell, (TILE, TILE))
            self.bias_sums = scores.new_sums(shape)

        self.pair_tiles = self.pair_sums = None
        if scores.pair_bias is not None:
            self.pair_tiles = self._tiles_of_pairs(scores.pair_bias)
            if wanted[2]:
                n_tiles = math.prod(self.pair_tiles.shape[:4])
                self.pair_sums = like.new_zeros(n_tiles, *self.pair_tiles.shape[4:])

    def _tiles_of_pairs(self, bias: Tensor) -> Tensor:
        """(batch | 1, heads | 1, tile rows, tile columns, queries, keys): a view where tiles are whole."""
        sizes = self._sizes
        beyond = sizes.n_cols * TILE - sizes.kv_len, sizes.n_rows * sizes.q_side - sizes.q_len
        if any(beyond):
            bias = F.pad(bias, (0, beyond[0], 0, beyond[1]))
        return bias.unflatten(3, (-1, TILE)).unflatten(2, (-1, sizes.q_side)).transpose(3, 4)

    def of_span(
        self,
        batch_idx: Tensor,
        head_idx: Tensor,
        rows: Tensor,
        cols: Tensor,
        entries: Tensor | None,
        diagonal: Tensor,
        kv_pos: Tensor,
    ) -> SpanMods:
        """The score mods of a span.

        batch_idx, head_idx  (sharing heads, rows)
        rows, cols  (rows,) and (rows, tiles): tile rows and tile columns
        entries  (rows, tiles): places in the lists of the plan, or None
        diagonal, kv_pos  (rows, queries, 1) and (rows, 1, keys)
        """
        slopes = bias = places = distance = pair_bias = pair_places = None
        if self._tables is not None and entries is not None:
            places = batch_idx[:, :, None], head_idx[:, :, None], entries
            bias = self._tables[_within(places, self._tables)]
            down, across = bias.shape[3:]
            # (sharing, rows, tiles, down, across) -> (sharing, rows, down, tokens, tiles, across, tokens)
            bias = bias.transpose(2, 3)[:, :, :, None, :, :, None]
            bias = bias.expand(-1, -1, -1, TILE // down, -1, -1, TILE // across)
            bias = bias.reshape(*batch_idx.shape, TILE, -1)[:, :, : self._queries]
        if self.scores.alibi_slopes is not None:
            slopes = self.scores.alibi_slopes[head_idx][:, :, None, None]
            distance = (diagonal - kv_pos).abs().to(slopes.dtype)
        if self.pair_tiles is not None:
            (n_batch, n_heads, n_rows, n_cols), side = self.pair_tiles.shape[:4], self.pair_tiles.shape[4]
            axes = batch_idx[:, :, None] % n_batch, head_idx[:, :, None] % n_heads
            if n_batch == n_heads == 1:
                axes = axes[0][:1], axes[1][:1]
            tiles = self.pair_tiles[axes[0], axes[1], rows[:, None], cols]
            pair_bias = tiles.transpose(2, 3).reshape(*tiles.shape[:2], side, -1)
            pair_places = ((axes[0] * n_heads + axes[1]) * n_rows + rows[:, None]) * n_cols + cols
        return SpanMods(self.scores.softcap, slopes, distance, bias, places, pair_bias, pair_places)

    def collect(self, mods: SpanMods, dscores: Tensor, index: Tensor) -> None:
        """Adds ds (sharing heads, rows, queries, keys) of the query tiles `index` to the sums."""
        if self.bias_sums is not None and mods.places is not None:
            n_tiles, (down, across) = mods.places[2].shape[1], self.bias_sums.shape[3:]
            whole = F.pad(dscores, (0, 0, 0, TILE - self._queries))
            of_pieces = whole.reshape(*whole.shape[:2], down, TILE // down, n_tiles, across, TILE // across)
            of_tiles = of_pieces.sum(dim=(3, 6)).transpose(2, 3)
            self.bias_sums[_within(mods.places, self.bias_sums)] = of_tiles
        if self.distance_sums is not None and mods.distance is not None:
            # each query tile occurs once per chunk
            sums = (dscores * mods.distance).sum(dim=-1, dtype=torch.float64)
            self.distance_sums[index] -= sums.view(-1, self._queries, 1)
        if self.pair_sums is not None and mods.pair_places is not None:
            if len(mods.pair_places) < len(dscores):
                dscores = dscores.sum(dim=0, keepdim=True)
            of_tiles = dscores.unflatten(3, (-1, TILE)).transpose(2, 3)
            add_tiles(self.pair_sums, mods.pair_places.flatten(), of_tiles.reshape(-1, *self.pair_sums.shape[1:]))

    def pair_bias_gradient(self) -> Tensor | None:
        """The gradient of pair_bias, or None."""
        bias = self.scores.pair_bias
        if self.pair_sums is None or self.pair_tiles is None or bias is None:
            return None
        whole = self.pair_sums.view(self.pair_tiles.shape).transpose(3, 4).flatten(4).flatten(2, 3)
        return whole[:, :, : self._sizes.q_len, : self._sizes.kv_len].to(bias.dtype).contiguous()


def _within(places: tuple[Tensor, Tensor, Tensor], tensor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The index of `places` in a tensor (batch | 1, heads | 1, list entries, ...)."""
    batch_idx, head_idx, entries = places
    if tensor.shape[0] == 1:
        batch_idx = torch.zeros_like(batch_idx)
    if tensor.shape[1] == 1:
        head_idx = torch.zeros_like(head_idx)
    return batch_idx, head_idx, entries


def add_tiles(total: Tensor, index: Tensor, tiles: Tensor) -> None:
    """total[index] += tiles in a fixed order, also where an index repeats.

    index_add_ is sequential on a CPU but uses atomics on a GPU, where index_put_ sorts.
    """
    tiles = tiles.view(len(index), *total.shape[1:])
    if total.device.type == "cpu":
        total.index_add_(0, index, tiles)
    else:
        total.index_put_((index,), tiles, accumulate=True)
