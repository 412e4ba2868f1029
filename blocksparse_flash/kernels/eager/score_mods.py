"""Score mods of the eager backend: their effect on the scores of a span, and their gradients."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...plan_format import TILE
from ...score_mods import Scores, sums_shape


class SpanMods(NamedTuple):
    """The score mods of a span.

    softcap   or 0.0
    slopes    (sharing heads, rows, 1, 1), or None
    distance  (rows, queries, keys), or None
    bias      (sharing heads, rows, queries, keys), or None
    places    (batch, head, list entry) of each tile, broadcast to (sharing heads, rows, tiles); None without a bias
    """

    softcap: float
    slopes: Tensor | None
    distance: Tensor | None
    bias: Tensor | None
    places: tuple[Tensor, Tensor, Tensor] | None

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
        return tanh


class CallMods:
    """The score mods of a call, and the sums for their gradients.

    distance_sums  (query tiles, queries, 1): of -ds * distance, in float64, since far and near pairs nearly cancel
    bias_sums      see score_mods.sums_shape
    """

    def __init__(
        self,
        scores: Scores,
        axes: tuple[int, int],
        plan: list[Tensor],
        *,
        like: Tensor,
        wanted: tuple[bool, bool] = (False, False),
    ) -> None:
        self.scores, self._tables = scores, scores.tables(0, base_2=False)
        # queries of a tile
        self._queries = like.shape[1]
        self.distance_sums = like.new_zeros(len(like), self._queries, 1, dtype=torch.float64) if wanted[0] else None
        self.bias_sums = None
        if wanted[1] and scores.bias_cell is not None:
            shared = tuple(size if of_plan == 1 else 1 for size, of_plan in zip(axes, plan[0].shape[:2], strict=True))
            self.bias_sums = scores.new_sums(
                sums_shape((shared[0], shared[1]), len(scores.bias_index[0]), scores.bias_cell, (TILE, TILE))
            )

    def of_span(
        self, batch_idx: Tensor, head_idx: Tensor, entries: Tensor | None, diagonal: Tensor, kv_pos: Tensor
    ) -> SpanMods:
        """The score mods of a span.

        batch_idx, head_idx  (sharing heads, rows)
        entries  (rows, tiles): places in the lists of the plan, or None
        diagonal, kv_pos  (rows, queries, 1) and (rows, 1, keys)
        """
        slopes = bias = places = distance = None
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
        return SpanMods(self.scores.softcap, slopes, distance, bias, places)

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


def _within(places: tuple[Tensor, Tensor, Tensor], tensor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The index of `places` in a tensor (batch | 1, heads | 1, list entries, ...)."""
    batch_idx, head_idx, entries = places
    if tensor.shape[0] == 1:
        batch_idx = torch.zeros_like(batch_idx)
    if tensor.shape[1] == 1:
        head_idx = torch.zeros_like(head_idx)
    return batch_idx, head_idx, entries
