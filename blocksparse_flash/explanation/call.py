"""Call: a checked call of attention with its backend, options and sizes."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from ..dispatch import has_fine_tiles, misaligned, tile_of
from ..layout import BlockLayout
from ..plan_format import TILE, Plan, side_of
from . import scheduling


@dataclass(frozen=True)
class Call:
    """A checked call. dtype: of the products, autocast's where it is on."""

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
    has_score_options: bool = False
    has_block_bias: bool = False

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
        return self.q.shape[2]

    @property
    def kv_len(self) -> int:
        return self.k.shape[2]

    @property
    def head_dim(self) -> int:
        """Of q and k."""
        return self.q.shape[3]

    @property
    def v_dim(self) -> int:
        return self.v.shape[3]

    @property
    def is_empty(self) -> bool:
        """Whether the call has no pairs."""
        return 0 in (self.batch, self.heads, self.q_len, self.kv_len)

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
        """Which of q, k, v TMA cannot load in place. It can load autocast's copies."""
        named = {"q": self.q, "k": self.k, "v": self.v}
        strided = misaligned(tuple(named.values()), self.dtype)
        return tuple(name for name, tensor in named.items() if tensor.shape[3] % 8 or name in strided)

    @functools.cached_property
    def plan(self) -> Plan | None:
        """The plan of the layout; None without a layout or without pairs."""
        if self.layout is None or self.is_empty:
            return None
        # meta tensors have no plan on their device
        device = torch.device("cpu") if self.q.device.type == "meta" else self.q.device
        return self.layout.plan(device, causal=self.causal, tile=self.tile)

    @functools.cached_property
    def tile(self) -> int:
        """The `Plan.tile`."""
        if self.layout is None or self.is_empty:
            return TILE
        if not has_fine_tiles(self.backend, self.head_dim, self.v_dim, has_block_bias=self.has_block_bias):
            return TILE
        shares = self.layout._tile_shares(self.q.device, self.causal)
        return tile_of(self.backend, shares, self.head_dim, self.v_dim)

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
    def dense_sides(self) -> scheduling.Sides:
        """The same without the layout, but with `causal`."""
        axes, kv_axes = self.batch * self.heads, self.batch * self.kv_heads
        return scheduling.without_layout(self.q_len, self.kv_len, causal=self.causal, axes=axes, kv_axes=kv_axes)
