"""Layouts of packed documents whose boundaries are on a GPU; `masks.documents` makes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from .blocks import storage
from .blocks.block_list import Array, Frame, Size
from .interop.key_runs import layout_of_runs, merged
from .layout import BlockLayout, Reordered
from .plan.packed_builder import Documents, build_packed_plan, shares_of
from .plan.tile_choice import Shares
from .plan_format import PIECE, Plan


def layout_on_host(documents: Documents, block_size: Size, *, is_causal: bool = False) -> BlockLayout:
    """The same layout made on the CPU, from boundaries there; is_causal drops kv_pos > q_pos + kv_len - q_len."""
    first, stop = _key_ranges(documents)
    q_pos = np.arange(documents.q_len)
    if is_causal:
        stop = np.minimum(stop, q_pos + documents.kv_len - documents.q_len + 1)
    frame = Frame(1, 1, documents.q_len, documents.kv_len, block_size)
    return layout_of_runs(merged(q_pos, first, stop, documents.kv_len), frame)


def _key_ranges(documents: Documents) -> tuple[Array, Array]:
    """(first, stop) of the keys of each query, int64; none if stop <= first."""
    cu_q, cu_kv = (cu.cpu().numpy().astype(np.int64) for cu in documents[:2])
    q_pos = np.arange(documents.q_len)
    document = np.searchsorted(cu_q, q_pos, side="right") - 1
    is_inside = document < documents.number
    document = np.minimum(document, max(0, documents.number - 1))
    ends = np.minimum(document + 1, documents.number)
    first, stop = cu_kv[document], np.where(is_inside, cu_kv[ends], 0)
    # the key at the query's position, with the ends of the document aligned
    position = cu_kv[ends] - (cu_q[ends] - q_pos)
    if documents.left is not None:
        first = np.maximum(first, position - documents.left)
    if documents.right is not None:
        stop = np.minimum(stop, position + documents.right + 1)
    return first, stop


class PackedLayout(BlockLayout):
    """The layout of packed documents whose boundaries are on a GPU.

    Kernels' plans are made there, from the boundaries as they are then, and nothing waits for the GPU. A CUDA graph can
    capture it: build the layout in the graph, and each replay uses the boundaries in their tensors at that time.

    All else that a layout can do copies the boundaries to the host, each time, and gives ordinary layouts.
    """

    _documents: Documents

    @classmethod
    def of(cls, documents: Documents, block_size: Size) -> PackedLayout:
        """The layout of documents; block_size is that of its tensors, plans have tiles."""
        layout = object.__new__(cls)
        object.__setattr__(layout, "_documents", documents)
        layout._set_sizes((documents.q_len, documents.kv_len, block_size), (1, 1))
        return layout

    # ---- what plans need, without waiting for the device

    @property
    def device(self) -> torch.device:
        """Device of the boundaries."""
        return self._documents.cu_q.device

    @property
    def _anchor(self) -> torch.Tensor:
        return self._documents.cu_q

    @property
    def _is_constant(self) -> bool:
        return False

    def _new_plan(self, device: torch.device, causal: bool, tile: int, non_blocking: bool = False) -> Plan:
        if device != self.device or tile == PIECE:
            return self._on_host()._new_plan(device, causal, tile, non_blocking)
        return build_packed_plan(self._documents, causal=causal, tile=tile)

    def _counted_shares(self) -> Shares:
        return shares_of(self._documents)

    def _new_order(self, causal: bool, n_groups: int) -> Reordered | None:  # noqa: ARG002
        return None

    # ---- all else, on the host

    def _on_host(self) -> BlockLayout:
        """The layout of the boundaries as they are now."""
        return layout_on_host(self._documents, self.block_size)

    @property
    def _tensors(self) -> storage.Tensors:
        return storage.Tensors(*(tensor.to(self.device) for tensor in self._on_host()._tensors))

    @classmethod
    def _bare(cls, *fields: Any) -> BlockLayout:
        """Layouts made from this one are ordinary ones."""
        return BlockLayout._bare(*fields)

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> BlockLayout:
        """This layout with its plans, or on another device an ordinary layout of the same pairs."""
        if torch.device(device) in (self.device, torch.device(self.device.type)):
            self._plan_all(self.device, non_blocking=non_blocking)
            return self
        return self._on_host().to(device, non_blocking=non_blocking)

    def __reduce__(self) -> tuple[Callable[..., BlockLayout], tuple[Any, ...]]:
        return self._on_host().__reduce__()
