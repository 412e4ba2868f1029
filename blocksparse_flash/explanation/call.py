"""Call: a checked call of attention with its backend, options and sizes."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from ..dispatch import can_reorder, fastest_tile, has_fine_tiles, has_gradient, misaligned
from ..layout import BlockLayout
from ..plan.layout_plans import Reordered
from ..plan.tile_choice import Shares
from ..plan_format import N_LONG, TILE, Plan, side_of
from ..validation import ScoreOptions
from . import scheduling


@dataclass(frozen=True)
class Call:
    """A checked call. dtype: of the products, autocast's where it is on.

    q_len, kv_len and plan are those of the reordered tokens, if the call reorders them.
    keeps_order  describes the call as if it did not reorder tokens
    """

    q: Tensor
    k: Tensor
    v: Tensor
    layout: BlockLayout | None
    causal: bool
    has_kv_lengths: bool
    dropout_p: float
    deterministic: bool
    dtype: torch.dtype
    backend: str
    scores: ScoreOptions | None = None
    keeps_order: bool = False

    @property
    def batch(self) -> int:
        return self.q.shape[0]

    @property
    def heads(self) -> int:
        return self.q.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.k.shape[1]

    @property
    def q_len(self) -> int:
        return self.q_shape[2]

    @property
    def kv_len(self) -> int:
        return self.k_shape[2]

    @property
    def q_shape(self) -> tuple[int, ...]:
        """Of the queries as kernels read them."""
        by = self.reordered and self.reordered.q
        return tuple(self.q.shape) if by is None else (*self.q.shape[:2], by.order.shape[2], self.head_dim)

    @property
    def k_shape(self) -> tuple[int, ...]:
        by = self.reordered and self.reordered.kv
        return tuple(self.k.shape) if by is None else (*self.k.shape[:2], by.order.shape[2], self.head_dim)

    @property
    def head_dim(self) -> int:
        """Of q and k."""
        return self.q.shape[3]

    @property
    def v_dim(self) -> int:
        return self.v.shape[3]

    @property
    def mods(self) -> ScoreOptions:
        """The score mods; all None if the call has none."""
        return self.scores or ScoreOptions()

    @property
    def has_slopes_gradient(self) -> bool:
        return has_gradient(self.mods.alibi_slopes)

    @property
    def has_sinks_gradient(self) -> bool:
        """Whether a backward will compute the gradient of sinks."""
        return has_gradient(self.mods.sinks)

    @property
    def has_bias_gradient(self) -> bool:
        """Whether a backward will compute the gradient of block_bias."""
        return has_gradient(self.mods.block_bias)

    @property
    def is_empty(self) -> bool:
        """Whether the call has no pairs."""
        return 0 in (self.batch, self.heads, self.q.shape[2], self.k.shape[2])

    @property
    def is_half(self) -> bool:
        return self.dtype in (torch.float16, torch.bfloat16)

    @property
    def has_kernels(self) -> bool:
        """Whether `triton` or `hopper` kernels run on a GPU, not in an interpreter."""
        return self.q.device.type == "cuda" and self.backend in ("triton", "hopper")

    @property
    def n_sms(self) -> int:
        """SMs of the GPU; 1 on another device, as in the launchers."""
        if self.q.device.type != "cuda":
            return 1
        return torch.cuda.get_device_properties(self.q.device).multi_processor_count

    @property
    def is_fine(self) -> bool:
        """Whether a step has 64 x 64 pairs."""
        return self.tile < TILE

    @property
    def side(self) -> int:
        """Queries and keys of a step: a tile, or the tiles that a gathered plan puts together."""
        return side_of(self.tile)

    @property
    def kernels(self) -> str:
        """The backend as the calibrations name it: with the suffix "-64" for tiles of 64 x 64, "-16" for 64 x 16."""
        return f"{self.backend}-{self.tile}" if self.is_fine else self.backend

    @property
    def unreadable(self) -> tuple[str, ...]:
        """Which of q, k, v TMA cannot load in place. It can load autocast's and reordered copies."""
        named = {"q": self.q, "k": self.k, "v": self.v}
        strided = misaligned(tuple(named.values()), self.dtype)
        if self.reordered is not None:
            by_q, by_kv = self.reordered.q, self.reordered.kv
            strided = [name for name in strided if (by_q if name == "q" else by_kv) is None]
        return tuple(name for name, tensor in named.items() if tensor.shape[3] % 8 or name in strided)

    @functools.cached_property
    def plan(self) -> Plan | None:
        """The plan of the layout; None without a layout or without pairs."""
        if self.layout is None or self.is_empty:
            return None
        if self.reordered is not None:
            return self.reordered.layout.plan(self._plan_device, tile=self.tile)
        return self.layout.plan(self._plan_device, causal=self.causal, tile=self.tile)

    @property
    def _plan_device(self) -> torch.device:
        # meta tensors have no plan on their device
        return torch.device("cpu") if self.q.device.type == "meta" else self.q.device

    @functools.cached_property
    def reordered(self) -> Reordered | None:
        """The order of tokens in which the call runs; None for their own."""
        return None if self.keeps_order or self.why_not_reordered else self.best_order

    @functools.cached_property
    def best_order(self) -> Reordered | None:
        """The order of tokens in which the kernels of the call would have fewest tiles; None for their own."""
        if self.layout is None or self.is_empty or self.backend not in ("hopper", "triton"):
            return None
        return self.layout._reordered(self._plan_device, self.causal, self.kv_heads)

    @property
    def why_not_reordered(self) -> str:
        """The option that rules out reordering; empty if there is none."""
        has_dropout, has_positions = self.dropout_p > 0, self.mods.has_positions
        if can_reorder(
            self.backend,
            has_dropout=has_dropout,
            has_kv_lengths=self.has_kv_lengths,
            has_positions=has_positions,
        ):
            return ""
        if has_dropout:
            return "dropout_p"
        if self.has_kv_lengths:
            return "kv_lengths"
        mods = "alibi_slopes", "block_bias", "pair_bias"
        return next((name for name in mods if getattr(self.mods, name) is not None), self.backend)

    @functools.cached_property
    def tile(self) -> int:
        """The `Plan.tile`."""
        if self.layout is None or self.is_empty:
            return TILE
        if not has_fine_tiles(self.backend, self.head_dim, self.v_dim, has_block_bias=self.mods.block_bias is not None):
            return TILE
        is_trained = self.has_slopes_gradient
        return fastest_tile(self.backend, self.shares, self.head_dim, self.v_dim, has_slopes_gradient=is_trained)

    @property
    def shares(self) -> Shares:
        """The shares by which the tile of a call with a layout is chosen."""
        assert self.layout is not None
        if self.reordered is not None:
            return self.reordered.layout._tile_shares(self.q.device, False)
        return self.layout._tile_shares(self.q.device, self.causal)

    @functools.cached_property
    def sides(self) -> scheduling.Sides:
        """Tiles per tile row and tile column. Reads the plan's records on the host."""
        if self.plan is None:
            return self.dense_sides
        group = self.heads // self.kv_heads
        rows, cols = (records.cpu().numpy() for records in (self.plan.row_records, self.plan.col_records))
        return scheduling.Sides(
            scheduling.of_records(rows, batch=self.batch, heads=self.heads),
            scheduling.of_records(cols, batch=self.batch, heads=self.heads, group=group),
        )

    @functools.cached_property
    def cols_of_query_heads(self) -> scheduling.Lines:
        """Tiles per tile column of each query head, which `sides` sums over the heads of a group."""
        if self.plan is None:
            return self._without_layout(n_kv_batch_heads=self.batch * self.heads).cols
        return scheduling.of_records(self.plan.col_records.cpu().numpy(), batch=self.batch, heads=self.heads)

    def n_long(self, first: int) -> int:
        """Tile rows (first = ROW_LISTS) or columns (COL_LISTS) of each head that kernels take before all others."""
        if self.plan is None or not self.plan[first].numel():
            return 0
        return int(self.plan[first][0, 0, 0, N_LONG])

    @functools.cached_property
    def dense_sides(self) -> scheduling.Sides:
        """The same without the layout, but with `causal`."""
        return self._without_layout(n_kv_batch_heads=self.batch * self.kv_heads)

    def _without_layout(self, *, n_kv_batch_heads: int) -> scheduling.Sides:
        return scheduling.without_layout(
            self.q.shape[2],
            self.k.shape[2],
            causal=self.causal,
            n_batch_heads=self.batch * self.heads,
            n_kv_batch_heads=n_kv_batch_heads,
        )
