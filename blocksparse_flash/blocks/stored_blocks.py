"""Base class of BlockLayout: how its blocks are stored, and new layouts of blocks, of predicates and of layouts."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import FrozenInstanceError
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..runtime import tracing
from . import block_list, checks, predicates, reindexing, set_operations, storage
from .block_list import Array, Axis, BlockList, BlockRows, Frame, Size

if TYPE_CHECKING:
    from typing_extensions import Self

# torch.compile guards the id of a layout and passes it to untraced code, which cannot take a layout itself (torch 2.11)
_NUMBERS = itertools.count()
_NUMBERED: weakref.WeakValueDictionary[int, StoredBlocks] = weakref.WeakValueDictionary()


def number_of(layout: StoredBlocks) -> int:
    """The number of a layout, unique in this process."""
    return int(layout._cache["number"])


def numbered(number: int) -> Any:
    """The layout with a number from `number_of`; KeyError once it is deleted."""
    return _NUMBERED[number]


class StoredBlocks:
    """The four tensors and the sizes of a BlockLayout, immutable, and a cache of what is made of them.

    Its methods take checked arguments and canonical block lists. `_bare` makes all layouts that they return.
    """

    if TYPE_CHECKING:
        q_len: int
        kv_len: int
        block_size: Size
        # axes, NumPy arrays, hash, number, Selection, and what LayoutPlans and functional.py make; no part of
        # the value
        _cache: dict[str, Any]

        @property
        def _tensors(self) -> storage.Tensors: ...

    def __setattr__(self, name: str, value: object) -> None:
        raise FrozenInstanceError(f"cannot assign to {name}: a layout is immutable")

    def __delattr__(self, name: str) -> None:
        raise FrozenInstanceError(f"cannot delete {name}: a layout is immutable")

    def _set_canonical(self, tensors: storage.Tensors, frame: Frame) -> None:
        """Sets the tensors of the same mask, canonical and on the same device."""
        found = block_list.by_keys(storage.to_block_rows(tensors, frame), frame)
        rows = block_list.by_rows(block_list.canonical(found, frame), frame)
        with tracing.outside_transforms():
            self._set(*storage.to_tensors(rows, frame, tensors.indptr.device), *frame[2:])

    def _set(self, *fields: Any) -> None:
        tensors = storage.Tensors(*fields[:4])
        object.__setattr__(self, "_tensors", tensors)
        # axes as numbers: torch.compile would guard the whole shape of the tensor
        self._set_sizes(fields[4:], (tensors.indptr.shape[0], tensors.indptr.shape[1]))

    def _set_sizes(self, sizes: Sequence[Any], axes: Size) -> None:
        for name, value in zip(storage.NUMBERS, sizes, strict=True):
            object.__setattr__(self, name, value)
        # no number while torch.compile traces: it cannot follow weak references
        number = -1 if torch.compiler.is_compiling() else next(_NUMBERS)
        cache: dict[str, Any] = {"plans": {}, "bias_indices": {}, "gather_indices": {}, "orders": {}, "calls": {}}
        cache.update(axes=axes, rows=None, number=number)
        object.__setattr__(self, "_cache", cache)
        if number >= 0:
            _NUMBERED[number] = self

    # ---- what is stored

    @property
    def _anchor(self) -> torch.Tensor:
        """A tensor of the layout: others are on its device, and traced and transformed alike."""
        return self._tensors.indptr

    @property
    def _is_constant(self) -> bool:
        """False for layouts made on a device, whose tensors a CUDA graph may change."""
        return "selection" not in self._cache

    @property
    def _frame(self) -> Frame:
        axes: Size = self._cache["axes"]
        return Frame(*axes, self.q_len, self.kv_len, self.block_size)

    def _block_list(self) -> BlockList:
        return block_list.by_keys(self._rows(), self._frame)

    def _rows(self) -> BlockRows:
        """The blocks as arrays on the host."""
        found: BlockRows | None = self._cache["rows"]
        return found or storage.to_block_rows(self._tensors, self._frame)

    def _over(self, axes: Size) -> BlockList:
        """The block list with axes of size 1 repeated."""
        found, frame = self._block_list(), self._frame
        checks.check_nnz(len(found.keys) * (axes[0] // frame.batch) * (axes[1] // frame.heads))
        return set_operations.broadcast(found, frame, axes)

    def _state(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """The state dict whose tensors are these."""
        numbers = {"q_len": self.q_len, "kv_len": self.kv_len, "block_size": self.block_size}
        return {**tensors, **numbers, **({storage.SELECTED: True} if "selection" in self._cache else {})}

    # ---- layouts of blocks

    @classmethod
    def _bare(cls, *fields: Any) -> Self:
        """A layout of these fields, unchecked."""
        layout = object.__new__(cls)
        layout._set(*fields)
        return layout

    @classmethod
    def _from_block_list(cls, found: BlockList, frame: Frame, device: torch.device | str = "cpu") -> Self:
        """The layout of a canonical block list, unchecked."""
        checks.check_nnz(len(found.keys))
        rows = block_list.by_rows(found, frame)
        # layers keep layouts for later calls
        with tracing.outside_transforms():
            layout = cls._bare(*storage.to_tensors(rows, frame, device), *frame[2:])
        if layout._tensors.indptr.is_cpu:
            layout._cache["rows"] = rows
        return layout

    @classmethod
    def _of_full(cls, keys: Array, frame: Frame) -> Self:
        return cls._from_block_list(block_list.full_list(keys, frame.block_size), frame)

    def _like(self, found: BlockList, **changes: Any) -> Self:
        """The layout of a canonical block list, with this layout's frame and these changes."""
        return self._from_block_list(found, self._frame._replace(**changes), self._anchor.device)

    # ---- layouts of predicates

    @classmethod
    @tracing.untraced
    def _evaluated(
        cls,
        fn: predicates.Predicate,
        frame: Frame,
        within: StoredBlocks | None,
        dedup_key: predicates.DedupKey | None,
        *,
        by_head: bool = False,
        shows_progress: bool = False,
    ) -> Self:
        """The layout of `BlockLayout.from_predicate`; by_head: whether fn takes the batch and the head."""
        if within is None:
            keys = np.arange(frame.n_blocks)
        else:
            checks.check_same(frame, within._frame, "within")
            checks.joint(frame[:2], within._frame[:2], "within")
            keys = set_operations.keys_over(within._block_list().keys, within._frame, frame[:2])
        with tracing.outside_transforms():
            found = predicates.evaluate(fn, keys, frame, dedup_key, by_head=by_head, shows_progress=shows_progress)
        if within is None:
            return cls._from_block_list(found, frame)
        return cls._from_block_list(found, frame, within._anchor.device)._with(within, "&")

    def _causal(self) -> Self:
        """The pairs with kv_pos <= q_pos + (kv_len - q_len), aligned bottom-right."""
        fn, key = predicates.causal(self._frame)
        return self._evaluated(fn, self._frame._replace(batch=1, heads=1), self, key)

    def _check_causal(self) -> None:
        found = self._with(self._causal(), "-")._block_list()
        if len(found.keys):
            batch, head, q_pos, kv_pos = set_operations.first_pair(found, self._frame)
            raise ValueError(
                f"layout must be causal, but in batch {batch}, head {head} query {q_pos} attends to key {kv_pos}, "
                f"beyond the last one it may attend to, {q_pos + self.kv_len - self.q_len}: "
                "intersect with masks.causal, or attend with causal=True"
            )

    # ---- layouts of layouts

    def _check_same(self, other: StoredBlocks, name: str) -> None:
        checks.check_same(self._frame, other._frame, name)
        device, of_other = self._anchor.device, other._anchor.device
        if device != of_other:
            raise ValueError(f"{name}: both must be on one device, got {device} and {of_other}: use .to(device)")

    @tracing.untraced
    def _with(self, other: StoredBlocks, op: set_operations.Operation) -> Self:
        if not isinstance(other, StoredBlocks):
            return NotImplemented
        name = f"layout {op} other"
        self._check_same(other, name)
        axes = checks.joint(self._frame[:2], other._frame[:2], name)
        frame = self._frame._replace(batch=axes[0], heads=axes[1])
        found = set_operations.combine(self._over(axes), other._over(axes), op, frame)
        return self._from_block_list(found, frame, self._anchor.device)

    @classmethod
    def _stacked(cls, parts: Sequence[StoredBlocks], axis: Axis) -> Self:
        for part in parts:
            parts[0]._check_same(part, "layouts")
        frames = checks.stackable([part._frame for part in parts], axis)
        lists = [part._over(frame[:2]) for part, frame in zip(parts, frames, strict=True)]
        found, frame = set_operations.stack(lists, frames, axis)
        return cls._from_block_list(found, frame, parts[0]._anchor.device)

    @tracing.untraced
    def _picked(self, axis: Axis, index: int) -> Self:
        frame = self._frame
        checks.position(index, getattr(frame, axis), "index", f"; the layout has shape {frame[:4]}")
        return self._like(set_operations.pick(self._block_list(), frame, axis, index), **{axis: 1})

    @tracing.untraced
    def _gathered(self, q_order: Array, kv_order: Array) -> Self:
        """The pairs of reordered tokens; see token_orders.py."""
        found = reindexing.gather(self._block_list(), self._frame, q_order, kv_order)
        return self._like(found, q_len=len(q_order), kv_len=len(kv_order))

    def _cropped(self, q: Size, kv: Size) -> Self:
        """The pairs of queries q[0] .. q[1] - 1 and keys kv[0] .. kv[1] - 1."""
        block_q = self.block_size[0]
        rows = q[0] // block_q, -(-q[1] // block_q)
        # reads only the rows of the crop: decoding crops once per token
        found, frame = storage.to_rows(self._tensors, self._frame, rows)
        found = reindexing.crop(found, frame, (q[0] - rows[0] * block_q, q[1] - rows[0] * block_q), kv)
        return self._like(found, q_len=q[1] - q[0], kv_len=kv[1] - kv[0])
