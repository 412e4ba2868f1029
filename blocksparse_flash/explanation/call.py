"""What is a call of attention, once a backend is chosen? Its tensors, its options and its sizes in one piece.

Knows tensors and a plan. Must not know what any of it costs.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.plan_format import Plan
from ..layout import BlockLayout
from ..runtime.tensor_spec import is_tma_loadable
from . import dispatch


@dataclass(frozen=True)
class Call:
    """A call that was checked; dtype is that of the products, autocast's where it is on."""

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
        """Of queries and keys."""
        return self.q.shape[3]

    @property
    def v_dim(self) -> int:
        return self.v.shape[3]

    @property
    def is_empty(self) -> bool:
        """Whether there is no pair at all."""
        return 0 in (self.batch, self.heads, self.q_len, self.kv_len)

    @property
    def is_half(self) -> bool:
        return self.dtype in (torch.float16, torch.bfloat16)

    @property
    def has_kernels(self) -> bool:
        """Whether kernels of ours run on a GPU, and not PyTorch's, nor an interpreter."""
        return self.q.device.type == "cuda" and self.backend in ("triton", "hopper")

    @property
    def multiprocessors(self) -> int:
        """Of the GPU; 1 of another device, as the launchers have it."""
        if self.q.device.type != "cuda":
            return 1
        return torch.cuda.get_device_properties(self.q.device).multi_processor_count

    @property
    def unreadable(self) -> tuple[str, ...]:
        """Which of q, k, v the copy engine cannot read where they lie; autocast's copies it can."""
        tensors = {"q": self.q, "k": self.k, "v": self.v}
        return tuple(
            name
            for name, tensor in tensors.items()
            if tensor.shape[3] % 8 or (tensor.dtype == self.dtype and not is_tma_loadable(tensor))
        )

    @functools.cached_property
    def plan(self) -> Plan | None:
        """What the call walks (`reference` walks nothing); None without a layout or without pairs."""
        if self.layout is None or self.is_empty:
            return None
        # tensors of nothing but a shape: their plan is looked at all the same
        device = torch.device("cpu") if self.q.device.type == "meta" else self.q.device
        return self.layout.plan(device, causal=self.causal)

    @functools.cached_property
    def sides(self) -> dispatch.Sides:
        """The lines of tiles of the call. Reads the plan's records on the host."""
        if self.plan is None:
            return self.dense_sides
        group = self.heads // self.kv_heads
        rows, cols = (items.cpu().numpy() for items in (self.plan.row_records, self.plan.col_records))
        return dispatch.Sides(
            dispatch.of_records(rows, batch=self.batch, heads=self.heads),
            dispatch.of_records(cols, batch=self.batch, heads=self.heads, group=group),
        )

    @functools.cached_property
    def dense_sides(self) -> dispatch.Sides:
        """The same without the layout, `causal` kept."""
        axes, kv_axes = self.batch * self.heads, self.batch * self.kv_heads
        return dispatch.without_layout(self.q_len, self.kv_len, causal=self.causal, axes=axes, kv_axes=kv_axes)
