"""Base class of BlockLayout: what kernels read of a layout, made when it is first used and cached."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from ..blocks import block_list
from ..blocks.block_list import BlockList, Frame, Size
from ..blocks.storage import Tensors
from ..blocks.stored_blocks import StoredBlocks
from ..blocks.transfer import resolved, to_device
from ..plan_format import BY_KEY_BLOCK, FINE_TILE, GATHERED_TILE, PARTIAL, TILE, Plan, SelectedPlan
from ..runtime import tracing
from . import block_bias, block_selection, device_builder, reordering, selected_builder, tile_choice
from .block_bias import BiasIndex
from .gathered_builder import build_gathered_plan
from .host_builder import build_plan
from .reordering import TokenOrder
from .tile_choice import Shares

if TYPE_CHECKING:
    from typing_extensions import Self


class Reordered(NamedTuple):
    """A layout in another order of its tokens, in which it has fewer tiles.

    layout  BlockLayout of the reordered tokens; if made for causal=True, with the causal pairs only
    q, kv   orders of the queries and of the keys; None keeps their order
    """

    layout: Any
    q: TokenOrder | None
    kv: TokenOrder | None

    def to(self, device: torch.device) -> Reordered:
        """The same, with the orders on a device."""
        q, kv = (None if order is None else order.to(device) for order in (self.q, self.kv))
        return self._replace(q=q, kv=kv)


class LayoutPlans(StoredBlocks):
    """Plans by (device, causal, tile), orders by (device, causal, groups), tile shares and indices of a BlockLayout.

    `_new_plan`, `_counted_shares` and `_new_order` make them; layouts whose blocks are on a device have their own.
    """

    if TYPE_CHECKING:
        # of BlockLayout
        plan: Callable[..., Plan]

    # ---- selected blocks, and layouts on other devices

    @classmethod
    def _from_selection(cls, found: block_selection.Selection, frame: Frame) -> Self:
        """The layout of selected blocks, which plans itself on its device."""
        block_q, block_kv = frame.block_size
        bitmasks = found.indptr.new_empty(0, block_q, block_list.words_per_query(block_kv))
        layout = cls._bare(found.indptr, found.indices, found.bitmask_ids, bitmasks, *frame[2:])
        layout._cache["selection"] = found
        return layout

    @classmethod
    def _from_selected_tensors(cls, tensors: Tensors, frame: Frame) -> Self:
        """`_from_selection` of copies of a layout's tensors, checked."""
        block_selection.check_selected(tensors, frame)
        indptr, indices, bitmask_ids = (tensor.clone() for tensor in tensors[:3])
        return cls._from_selection(block_selection.Selection(indptr, indices, bitmask_ids, None), frame)

    def _moved(self, device: torch.device, *, non_blocking: bool) -> Self:
        """The layout on another device, with the plans and orders that it has for it."""
        found: block_selection.Selection | None = self._cache.get("selection")
        more = [] if found is None or found.bits is None else [found.bits]
        moving = to_device([*self._tensors, *more], device, non_blocking=non_blocking)
        if found is None:
            moved = self._bare(*moving, *self._frame[2:])
        else:
            indptr, indices, bitmask_ids = moving[:3]
            bits = moving[4] if more else None
            selection = found._replace(indptr=indptr, indices=indices, bitmask_ids=bitmask_ids, bits=bits)
            moved = self._from_selection(selection, self._frame)
        if "shares" in self._cache:
            moved._cache["shares"] = self._cache["shares"]
        for name in ("plans", "orders"):
            moved._cache[name].update({key: made for key, made in [*self._cache[name].items()] if key[0] == device})
        return moved

    # ---- plans

    def _check_plan(self, device: torch.device | str | int, causal: bool, tile: int) -> None:
        """Refuses tiles that no plan has and, while torch.compile traces, plans that were not made before."""
        device = resolved(device)
        if not isinstance(tile, (int, np.integer)) or tile not in (TILE, FINE_TILE, GATHERED_TILE):
            raise ValueError(f"tile must be {TILE}, {FINE_TILE} or {GATHERED_TILE} tokens, got {tile!r}")
        # list entries of tiles of 64 x 64 have 24 bits for a tile index
        if tile != TILE and max(self.q_len, self.kv_len) > PARTIAL * FINE_TILE:
            raise ValueError(
                f"tile must be {TILE} for more than 2**30 tokens, got {tile} for {self.q_len} x {self.kv_len} tokens"
            )
        if torch.compiler.is_compiling() and (device, causal, tile) not in self._cache["plans"]:
            which, options = (f" with tile={tile}", f", tile={tile}") if tile != TILE else ("", "")
            call, causality = f"plan(q.device{options}" if options else "to(q.device", ", causal=True" if causal else ""
            raise ValueError(
                f"layout has no plan{which} for {device} and torch.compile cannot make one: call "
                f"layout.{call}{causality}) before"
            )

    def _planned(
        self, device: torch.device | str | int, causal: bool = False, tile: int = TILE, non_blocking: bool = False
    ) -> Plan:
        """`plan`, without its checks."""
        device = resolved(device)
        plans: dict[tuple[Any, bool, int], Plan] = self._cache["plans"]
        key = device, causal, tile
        if key not in plans:
            # a plan on the meta device has shapes alone; a copy, since other threads may add plans
            elsewhere = [plan for at, plan in [*plans.items()] if at[1:] == key[1:] and at[0].type != "meta"]
            with tracing.outside_transforms(self._anchor):
                if elsewhere:
                    plans[key] = elsewhere[0].to(device, non_blocking=non_blocking)
                else:
                    plans[key] = self._new_plan(device, causal, tile, non_blocking)
        return plans[key]

    def _plan_all(self, device: torch.device | str | int, *, causal: bool = False, non_blocking: bool = False) -> None:
        """Makes the plans that calls on a device may use; torch.compile uses those that were made before."""
        device = resolved(device)
        self.plan(device, causal=causal, non_blocking=non_blocking)
        if device.type != "cuda":
            return
        has_gathered = torch.cuda.get_device_capability(device) == (9, 0)
        for tile in self._tile_shares(device, causal).tiles:
            if tile != GATHERED_TILE or has_gathered:
                self.plan(device, causal=causal, tile=tile, non_blocking=non_blocking)
        reordered = self._reordered(device, causal, self._frame.heads)
        if reordered is not None:
            reordered.layout._plan_all(device, non_blocking=non_blocking)

    def _has_selected_plan(self, device: torch.device, batch_heads: Sequence[int]) -> bool:
        """Whether the blocks are selected by token and a SelectedPlan on this device suits them.

        batch_heads  batch and heads of q. If several of them share a selection, there is no SelectedPlan
        """
        selection: block_selection.Selection | None = self._cache.get("selection")
        if selection is None or not selection.may_have_selected_plan or device != self._anchor.device:
            return False
        if self._frame[:2] != tuple(batch_heads):
            return False
        n_query_blocks, total_query_blocks = self._frame.n_rows, self._frame.batch_heads * self._frame.n_rows
        n_selected = len(selection.indices) // max(1, total_query_blocks)
        return selected_builder.can_build(self.block_size, n_query_blocks, n_selected) and selected_builder.is_faster(
            self.block_size, total_query_blocks, self.kv_len, n_selected
        )

    def _selected_plan(self, causal: bool) -> SelectedPlan:
        """The SelectedPlan of a layout that `_has_selected_plan`, on its device. Cached."""
        plans, key = self._cache["plans"], (self._anchor.device, causal, BY_KEY_BLOCK)
        if key not in plans:
            with tracing.outside_transforms(self._anchor):
                plans[key] = selected_builder.build(self._cache["selection"], **self._frame.sizes, causal=causal)
        found: SelectedPlan = plans[key]
        return found

    def _new_plan(self, device: torch.device, causal: bool, tile: int, non_blocking: bool = False) -> Plan:
        if "selection" in self._cache and device == self._anchor.device and tile != GATHERED_TILE:
            selection: block_selection.Selection = self._cache["selection"]
            return block_selection.plan_of_selection(selection, **self._frame.sizes, causal=causal, tile=tile)
        return self._host_plan(device, causal, tile, non_blocking)

    @tracing.untraced
    def _host_plan(self, device: torch.device, causal: bool, tile: int, non_blocking: bool) -> Plan:
        if causal:
            restricted = self._causal()
            if restricted == self:
                return self._planned(device, False, tile, non_blocking)
            return restricted._new_plan(device, False, tile, non_blocking)
        frame, (_, indices, _, bitmasks) = self._frame, self._tensors
        if tile == TILE and indices.is_cpu and device_builder.suits(frame, len(indices), len(bitmasks), device):
            return device_builder.build_plan_on_device(self._rows(), frame, device, non_blocking=non_blocking)
        if tile == GATHERED_TILE:
            return build_gathered_plan(self._block_list(), frame, device, non_blocking=non_blocking)
        tiles = frame._replace(block_size=(tile, tile))
        rows = self._rows() if frame == tiles else block_list.by_rows(self._tiled(tile), tiles)
        return build_plan(rows, tiles, device, non_blocking=non_blocking)

    def _tiled(self, tile: int) -> BlockList:
        """The same pairs in blocks of tile x tile."""
        return block_list.regroup(self._block_list(), self._frame, (tile, tile))

    # ---- choices between plans

    def _tile_shares(self, device: torch.device, causal: bool) -> Shares:
        """The `Shares` of the whole layout, by which kernels choose their plan. Cached.

        While torch.compile traces they are 1 for tile sizes without a plan for this device and `causal`, which are not
        used otherwise.
        """
        fine, gathered = True, True
        if torch.compiler.is_compiling():
            fine, gathered = ((device, causal, tile) in self._cache["plans"] for tile in (FINE_TILE, GATHERED_TILE))
        if not fine and not gathered:
            return tile_choice.WHOLE
        found: Shares | None = self._cache.get("shares")
        if found is None:
            with tracing.outside_transforms(self._anchor):
                found = self._cache["shares"] = self._counted_shares()
        return Shares(found.fine if fine else 1.0, found.gathered if gathered else 1.0)

    @tracing.untraced
    def _counted_shares(self) -> Shares:
        if "selection" in self._cache:
            return tile_choice.WHOLE if min(self.block_size) >= TILE else tile_choice.SELECTED
        return tile_choice.shares_of(self._rows(), self._frame)

    def _reordered(self, device: torch.device, causal: bool, kv_heads: int) -> Reordered | None:
        """The order of tokens in which kernels compute the layout with fewer tiles; None for its own. Cached.

        kv_heads  of the call: query heads that share keys have one order

        While torch.compile traces it is None unless it was made before, with its plan.
        """
        # others are made anew in each step
        if not self._is_constant:
            return None
        found: dict[tuple[torch.device, bool, int], Reordered | None] = self._cache["orders"]
        key = device, causal, 1 if self._cache["axes"][1] == 1 else kv_heads
        if torch.compiler.is_compiling():
            known = found.get(key)
            plans = {} if known is None else known.layout._cache["plans"]
            return known if any((device, False, tile) in plans for tile in (TILE, FINE_TILE, GATHERED_TILE)) else None
        if key not in found:
            elsewhere = [order for at, order in [*found.items()] if at[1:] == key[1:]]
            with tracing.outside_transforms(self._anchor):
                host = elsewhere[0] if elsewhere else self._new_order(*key[1:])
                found[key] = None if host is None else host.to(device)
        return found[key]

    @tracing.untraced
    def _new_order(self, causal: bool, n_groups: int) -> Reordered | None:
        """`_reordered` on the host."""
        frame, (_, indices, _, bitmasks) = self._frame, self._tensors
        if not reordering.can_pay(frame, len(indices), len(bitmasks)) or reordering.is_mostly_full(self._rows()):
            return None
        layout = self._causal() if causal else self
        found = reordering.find(layout._tiled(TILE), frame._replace(block_size=(TILE, TILE)), n_groups)
        if found is None:
            return None
        orders = TokenOrder.of(found.q, self.q_len), TokenOrder.of(found.kv, self.kv_len)
        return Reordered(self._from_block_list(found.blocks, found.frame), *orders)

    # ---- biases of blocks

    def _bias_index(self, device: torch.device, causal: bool) -> BiasIndex:
        found: dict[tuple[torch.device, bool], BiasIndex] = self._cache["bias_indices"]
        if (device, causal) not in found:
            if torch.compiler.is_compiling():
                raise ValueError(
                    f"layout has no index for block_bias on {device} and torch.compile cannot make one: "
                    f"call layout.bias_index(q.device{', causal=True' if causal else ''}) before"
                )
            plan = self.plan(device, causal=causal)
            with tracing.outside_transforms(self._anchor):
                found[device, causal] = block_bias.build(*self._tensors[:2], plan, **self._frame.sizes, device=device)
        return found[device, causal]

    def _gathered_scores(self, block_scores: torch.Tensor) -> torch.Tensor:
        frame = self._frame
        block_bias.check_scores(block_scores, frame[:2], (frame.n_rows, frame.n_cols))
        if self._tensors.indptr.is_meta and not block_scores.is_meta:
            raise ValueError("layout is on the meta device, which holds no data; gather with a layout that has data")
        is_shared = frame.batch_heads == 1
        batch_heads = (1, 1) if is_shared else (block_scores.shape[0], block_scores.shape[1])
        index, is_used = self._entries(block_scores, batch_heads)
        if not block_scores.numel():
            # no blocks, but perhaps unused entries: a sum of nothing, which has a gradient
            values = (
                block_scores.sum()
                .to(block_scores.dtype)
                .expand(*(block_scores.shape[:2] if is_shared else ()), len(index))
            )
        elif is_shared:
            values = block_scores.flatten(2).index_select(2, index)
        else:
            values = block_scores.flatten().index_select(0, index)
        return values if is_used is None else torch.where(is_used, values, values.new_zeros(()))

    def _entries(self, block_scores: torch.Tensor, batch_heads: Size) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(index, whether an entry is used) of `gather` on the device of block_scores; None if all are used."""
        device, n_cols, is_selected = block_scores.device, self._frame.n_cols, "selection" in self._cache
        if torch.compiler.is_compiling():
            index, is_used = block_bias.index_of_entries(*self._tensors[:2], n_cols, batch_heads)
            return index.to(device), is_used.to(device) if is_selected else None
        found: dict[Any, tuple[torch.Tensor, torch.Tensor]] = self._cache["gather_indices"]
        entries = found.get((device, batch_heads))
        if entries is None:
            with tracing.outside_transforms(self._anchor):
                index, is_used = block_bias.index_of_entries(*self._tensors[:2], n_cols, batch_heads)
                entries = index.to(device), is_used.to(device)
            if self._is_constant:
                found[device, batch_heads] = entries
        index, is_used = tracing.as_graph_constants(entries, block_scores)
        return index, is_used if is_selected else None
