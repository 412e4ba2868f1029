"""Packed documents: their layouts, with boundaries on a GPU (`masks.documents` makes those), and jagged tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from .blocks import checks, storage
from .blocks.block_list import Array, Frame, Size
from .blocks.key_runs import blocks_of_runs, merged
from .blocks.transfer import resolved
from .layout import BlockLayout
from .plan.layout_plans import Reordered
from .plan.packed_builder import INVALID, Documents, build_packed_plan, can_build, shares_of
from .plan.tile_choice import Shares
from .plan_format import GATHERED_TILE, TILE, Plan
from .runtime import tracing


def layout_on_host(documents: Documents, block_size: Size, *, is_causal: bool = False) -> BlockLayout:
    """The BlockLayout of packed documents, made on the CPU from boundaries there.

    is_causal  drops kv_pos > q_pos + kv_len - q_len
    """
    q_pos, (batch, q_len, kv_len) = np.arange(documents.q_len), (documents.batch, documents.q_len, documents.kv_len)
    cu_q, cu_kv = (cu.cpu().numpy().astype(np.int64) for cu in documents.boundaries)
    for cu, length in ((cu_q, q_len), (cu_kv, kv_len)):
        sizes = np.diff(cu, axis=1)
        is_too_long = documents.max_seqlen is not None and sizes.max(initial=0) > documents.max_seqlen
        if cu[:, 0].any() or (sizes < 0).any() or (cu[:, -1] > length).any() or is_too_long:
            raise ValueError(f"{INVALID}, got {cu.tolist() if cu.size < 20 else cu} for {length} tokens")
    shape = batch, documents.number
    prefix = np.zeros(shape, np.int64) if documents.prefix is None else documents.prefix.cpu().numpy().astype(np.int64)
    ranges = [_key_ranges(q_pos, *each, documents) for each in zip(cu_q, cu_kv, prefix, strict=True)]
    first, stop = (np.stack(side) for side in zip(*ranges, strict=True))
    if is_causal:
        stop = np.minimum(stop, q_pos + kv_len - q_len + 1)
    frame = Frame(batch, 1, q_len, kv_len, block_size)
    runs = merged(np.arange(batch * q_len), first.reshape(-1), stop.reshape(-1), kv_len)
    return BlockLayout._from_block_list(blocks_of_runs(runs, frame), frame)


def _key_ranges(q_pos: Array, cu_q: Array, cu_kv: Array, prefix: Array, documents: Documents) -> tuple[Array, Array]:
    """(first, stop) of the keys of each query of a sequence with these boundaries, int64; none if stop <= first."""
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
    if documents.prefix is not None and documents.number:
        seen = np.minimum(cu_kv[document] + np.clip(prefix[document], 0, documents.kv_len), cu_kv[ends])
        stop = np.where(is_inside, np.maximum(stop, seen), stop)
    return first, stop


class PackedLayout(BlockLayout):
    """The layout of packed documents whose boundaries are on a GPU.

    Kernels' plans are made there, from the boundaries as they are when a plan is first used, and nothing waits for the
    GPU. The layout does not copy the boundaries: change them only for a new layout. A CUDA graph can capture it: build
    the layout in the graph, and each replay uses the boundaries in their tensors at that time.

    All else that a layout can do copies the boundaries to the host, each time, and gives ordinary layouts.
    """

    _documents: Documents

    @classmethod
    def of(cls, documents: Documents, block_size: Size) -> PackedLayout:
        """The layout of documents; block_size is that of its tensors, plans have tiles."""
        layout = object.__new__(cls)
        object.__setattr__(layout, "_documents", documents)
        layout._set_sizes((documents.q_len, documents.kv_len, block_size), (documents.batch, 1))
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

    @tracing.untraced
    def _new_plan(self, device: torch.device, causal: bool, tile: int, non_blocking: bool = False) -> Plan:
        if device != self.device or tile == GATHERED_TILE:
            return self._on_host()._new_plan(device, causal, tile, non_blocking)
        return build_packed_plan(self._documents, causal=causal, tile=tile)

    @tracing.untraced
    def _counted_shares(self) -> Shares:
        return shares_of(self._documents)

    def _new_order(self, causal: bool, n_groups: int) -> Reordered | None:  # noqa: ARG002
        return None

    # ---- all else, on the host

    @tracing.untraced
    def _on_host(self) -> BlockLayout:
        """The layout of the boundaries as they are now."""
        return layout_on_host(self._documents, self.block_size)

    @property
    @tracing.untraced
    def _tensors(self) -> storage.Tensors:
        return storage.Tensors(*(tensor.to(self.device) for tensor in self._on_host()._tensors))

    @classmethod
    def _bare(cls, *fields: Any) -> BlockLayout:  # type: ignore[override]
        """Layouts made from this one are ordinary ones."""
        return BlockLayout._bare(*fields)

    def to(self, device: torch.device | str | int, *, causal: bool = False, non_blocking: bool = False) -> BlockLayout:
        """This layout with its plans, or on another device an ordinary layout of the same pairs."""
        if resolved(device) == self.device:
            checks.boolean(causal, "causal")
            self._plan_all(self.device, causal=causal, non_blocking=non_blocking)
            return self
        return self._on_host().to(device, causal=causal, non_blocking=non_blocking)

    def __reduce__(self) -> tuple[Callable[..., BlockLayout], tuple[Any, ...]]:
        """As an ordinary layout on the same device."""
        return BlockLayout._bare(*self._tensors, *self._frame[2:]).__reduce__()


def packed_layout(documents: Documents, block_size: Size) -> BlockLayout:
    """The layout of documents: on their GPU if kernels can build its plans there, otherwise made on the host."""
    return PackedLayout.of(documents, block_size) if can_build(documents) else layout_on_host(documents, block_size)


def checked_boundaries(cu_seqlens: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The boundaries of packed documents, checked, as integers (batch | 1, documents + 1).

    cu_seqlens  (documents + 1,) or (batch, documents + 1), on the device of q
    q, k        (batch, heads, length, head_dim), with the same documents
    raises      TypeError, ValueError. On a GPU, the host does not read the values: wrong ones trigger a device-side
                assert, which PyTorch reports later as a RuntimeError
    """
    checks.check_tensor("cu_seqlens", cu_seqlens, "; torch.tensor(cu_seqlens, device=q.device) makes one")
    tracing.check_dense("cu_seqlens", cu_seqlens, q)
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(
            f"cu_seqlens must be int32 or int64, got {cu_seqlens.dtype}; cu_seqlens.to(torch.int32) makes it"
        )
    if cu_seqlens.device != q.device:
        raise ValueError(f"cu_seqlens must be on q's device {q.device}, got {cu_seqlens.device}; use .to(q.device)")
    batch, length = q.shape[0], q.shape[2]
    if length != k.shape[2]:
        raise ValueError(
            f"cu_seqlens gives the documents of queries and keys alike, so q must have as many tokens as k, got "
            f"{length} and {k.shape[2]}"
        )
    rows = torch.atleast_2d(cu_seqlens)
    if cu_seqlens.dim() not in (1, 2) or not rows.shape[1] or len(rows) not in (1, batch):
        raise ValueError(
            f"cu_seqlens must have shape (documents + 1,) or (batch = {batch}, documents + 1), got "
            f"{tuple(cu_seqlens.shape)}; boundaries that all sequences share are one row, others have a row for each"
        )
    if rows.is_meta:
        return rows
    is_valid = (rows[:, 0] == 0).all() & (rows.diff() >= 0).all() & (rows[:, -1] <= length).all()
    if rows.is_cpu:
        if tracing.has_values(rows) and not is_valid:
            got = rows.tolist() if rows.numel() < 20 else rows
            raise ValueError(f"cu_seqlens must start at 0, never decrease, and end within {length} tokens, got {got}")
    else:
        # on a GPU a device-side assert, after which the process cannot use the GPU any more
        torch._assert_async(is_valid, INVALID)
    return rows


# ---- jagged tensors


def is_jagged(*tensors: object) -> bool:
    """Whether all of them are nested tensors of layout torch.jagged."""
    return all(isinstance(t, torch.Tensor) and t.is_nested and t.layout is torch.jagged for t in tensors)


def check_jagged(name: str, tensor: torch.Tensor, *, sizes: str, ragged: int) -> None:
    """Refuse jagged tensors of other dimensions, or whose sequences leave gaps between them.

    sizes, ragged  the dimensions in words, and which of them differs between sequences
    """
    # private, and the one thing that torch.compile knows too
    if tensor.dim() != sizes.count(",") + 1 or tensor._ragged_idx != ragged:  # type: ignore[attr-defined]
        raise ValueError(
            f"{name} must have the dimensions ({sizes}), of which dimension {ragged} is jagged, got "
            f"{tuple(tensor.shape)}: transpose() exchanges two dimensions"
        )
    # missing in PyTorch's stubs
    if tensor.lengths() is not None:  # type: ignore[attr-defined]
        raise ValueError(f"{name} must be without gaps between its sequences; {name}.contiguous() has none")


def offsets_of(tensor: torch.Tensor) -> torch.Tensor:
    """int64 (batch + 1,): where the sequences of a jagged tensor begin and end."""
    # missing in PyTorch's stubs
    return tensor.offsets()  # type: ignore[attr-defined]


@tracing.untraced
def jagged_layout(
    q: torch.Tensor, k: torch.Tensor, q_len: int, kv_len: int, *, causal: bool, names: tuple[str, str] = ("q", "k")
) -> BlockLayout:
    """The layout of the sequences of jagged tensors; each sequence attends to itself.

    q_len, kv_len  tokens of all sequences
    causal         aligned at the end of each sequence
    names          of q and k in errors
    raises         ValueError for offsets that do not fit. On a GPU they trigger a device-side assert
    """
    cu_q, cu_kv = offsets_of(q), offsets_of(k)
    # known if the tensor was made of a list
    longest = getattr(q, "_maybe_max_seqlen", None) if cu_q is cu_kv else None
    _check_offsets(names[0], cu_q, q_len, longest)
    _check_offsets(names[1], cu_kv, kv_len, None)
    rows_q, rows_kv = cu_q.contiguous()[None], None if cu_q is cu_kv else cu_kv.contiguous()[None]
    documents = Documents(rows_q, rows_kv, q_len, kv_len, None, 0 if causal else None, longest)
    return packed_layout(documents, (TILE, TILE))


def _check_offsets(name: str, offsets: torch.Tensor, length: int, longest: int | None) -> None:
    """Refuses offsets of a jagged tensor that PyTorch accepts unseen. On a GPU the kernels check them."""
    if not offsets.is_cpu or not tracing.has_values(offsets):
        return
    sizes, got = offsets.diff(), offsets.tolist() if offsets.numel() < 20 else offsets
    if offsets[0] != 0 or bool((sizes < 0).any()) or offsets[-1] > length:
        raise ValueError(
            f"{name} must have offsets that start at 0, never decrease, and end within its {length} tokens, got {got}: "
            "torch.nested.nested_tensor_from_jagged(values, offsets) makes such a tensor"
        )
    if longest is not None and sizes.numel() and int(sizes.max()) > longest:
        raise ValueError(
            f"{name} must have a max_seqlen that is that of its longest sequence, {int(sizes.max())} tokens, or more, "
            f"got {longest}: nested_tensor_from_jagged needs no max_seqlen="
        )


def _values_by_head(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a jagged tensor (batch, heads, tokens, head_dim), (heads, tokens of all sequences, head_dim)."""
    if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled() and not tensor.is_inference():
        # PyTorch makes no views here of jagged tensors from outside the mode; its stubs take _values for a method
        return tensor._values  # type: ignore[return-value]
    return tensor.transpose(1, 2).values().transpose(0, 1)


class Jagged(NamedTuple):
    """Jagged tensors as one packed sequence.

    q, k, v    (1, heads, tokens of all sequences, head_dim)
    layout     of the sequences, with the causal pairs only if the call is causal
    is_square  whether queries and keys have the same sequences, and as many tokens after the last one
    offsets    int64 (batch + 1,): where the sequences of the queries begin and end
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    layout: BlockLayout
    is_square: bool
    offsets: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v."""
        return self.q, self.k, self.v

    @classmethod
    def of(cls, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> Jagged:
        """The packed sequence of jagged tensors (batch, heads, tokens of each sequence, head_dim)."""
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            check_jagged(name, tensor, sizes="batch, heads, tokens, head_dim", ragged=2)
        if q.size(0) != k.size(0):
            raise ValueError(f"k must have as many sequences as q, {q.size(0)}, got {k.size(0)}")
        if k.size(2) != v.size(2):
            raise ValueError(
                "v must have the sequences of k: make both with the same offsets, as "
                "torch.nested.nested_tensor_from_jagged(values, k.offsets()) does"
            )
        packed_q, packed_k, packed_v = (_values_by_head(t)[None] for t in (q, k, v))
        if packed_k.shape[2] != packed_v.shape[2]:
            raise ValueError(
                f"v must have as many values as k, {packed_k.shape[2]} tokens in all, got {packed_v.shape[2]}: those "
                "after the last sequence count too"
            )
        layout = jagged_layout(q, k, packed_q.shape[2], packed_k.shape[2], causal=causal)
        offsets = offsets_of(q)
        is_square = offsets is offsets_of(k) and packed_q.shape[2] == packed_k.shape[2]
        return cls(packed_q, packed_k, packed_v, layout, is_square, offsets)

    def unpacked(self, result: torch.Tensor) -> torch.Tensor:
        """A result (1, heads, tokens of all sequences, ...) as a jagged tensor (batch, heads, tokens, ...)."""
        return torch.nested.nested_tensor_from_jagged(result[0].transpose(0, 1), self.offsets).transpose(1, 2)


def jagged_positions(offsets: torch.Tensor, n_tokens: int) -> torch.Tensor:
    """int64 (n_tokens,): position of each token in its sequence, without waiting for the device.

    Tokens beyond the last sequence count on from its end.
    """
    tokens = torch.arange(n_tokens, device=offsets.device)
    return tokens - offsets[torch.searchsorted(offsets, tokens, right=True) - 1]
