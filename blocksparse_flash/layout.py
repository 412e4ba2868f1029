"""Which query attends to which key? BlockLayout: frozen data, its constructors and its algebra.

Knows tensors, lengths, block lists, and that a plan can be made of it.
Must not know patterns (they are functions that return one), attention, backends or kernels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from . import arguments, blocks
from .arguments import TENSORS
from .blocks import FULL, Array, BlockList, Size
from .plan import Plan, build_plan
from .predicate import Looks, Predicate, evaluate

_NUMBERS = ("q_len", "kv_len", "block_size")

# characters across and down in the picture that repr draws
_DRAWN = 32


def _check_same(a: BlockLayout, b: BlockLayout, name: str) -> None:
    """Refuse two layouts that do not describe the same pairs in the same blocks."""
    if a.shape[2:] != b.shape[2:]:
        raise ValueError(f"{name}: lengths must be equal, got {a.q_len} x {a.kv_len} and {b.q_len} x {b.kv_len}")
    if a.block_size != b.block_size:
        raise ValueError(f"{name}: block_size must be equal, got {a.block_size} and {b.block_size}")


def _resolved(device: torch.device | str | int) -> torch.device:
    """The device with its index, as tensors report it."""
    device = torch.device(device)
    return device if device.type == "cpu" or device.index is not None else torch.empty(0, device=device).device


@dataclass(frozen=True, init=False, repr=False, eq=False)
class BlockLayout:
    """Which query attends to which key, token-exact, stored as blocks: frozen data.

    indptr       int32 (batch | 1, heads | 1, n_rows + 1): offsets into indices; an axis of size 1 is shared by all
    indices      int32 (nnz,): col of each stored block, ascending in a row
    bitmask_ids  int32 (nnz,): -1 if every existing pair of the block attends, otherwise which bitmask
    bitmasks     int32 (distinct, block_q, ceil(block_kv / 32)): bit j of word w of row i is the pair (query i, key
                 32 w + j) of the block, True attends; no two are equal
    q_len, kv_len  tokens; a ragged last block is allowed
    block_size   tokens, multiples of 16 from 16 to 256: an int, or (block_q, block_kv)

    Called directly it checks every tensor (rows must be sorted) and copies what it needs. It is canonical whatever it
    was built from: equal masks over equal batch and head axes give equal layouts and equal hashes.

    raises  ValueError naming the argument; TypeError if it is of another type

    >>> layout = BlockLayout.from_predicate(lambda q_pos, kv_pos: q_pos >= kv_pos, 256, 256, block_size=64)
    >>> layout.nnz, layout.density, len(layout.bitmasks)
    (10, 0.625, 1)
    """

    indptr: torch.Tensor
    indices: torch.Tensor
    bitmask_ids: torch.Tensor
    bitmasks: torch.Tensor
    q_len: int
    kv_len: int
    block_size: Size
    if TYPE_CHECKING:
        # plans by (device, causal), sizes of the axes, and the hash; not part of the value, so not a field
        _cache: dict[str, Any]

    def __init__(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        bitmask_ids: torch.Tensor,
        bitmasks: torch.Tensor,
        *,
        q_len: int,
        kv_len: int,
        block_size: int | Size,
    ) -> None:
        q_len, kv_len, sides = (
            arguments.length(q_len, "q_len"),
            arguments.length(kv_len, "kv_len"),
            arguments.sides(block_size),
        )
        tensors = (indptr, indices, bitmask_ids, bitmasks)
        arguments.check_tensors(tensors, blocks.grid(q_len, kv_len, sides), sides)
        found = blocks.canonical(
            *_block_list(tensors, blocks.grid(q_len, kv_len, sides)), q_len=q_len, kv_len=kv_len, block_size=sides
        )
        batch, heads = indptr.shape[:2]
        self._set(*_tensors(found, (batch, heads), q_len, kv_len, sides, indptr.device), q_len, kv_len, sides)

    # ------------------------------------------------------------------------------------------------- constructors

    @classmethod
    def from_dense(cls, mask: torch.Tensor | Array, *, block_size: int | Size) -> BlockLayout:
        """The layout of a bool mask, True attends. Time and memory O(mask); built on the host.

        mask     (q_len, kv_len), (heads, q_len, kv_len) or (batch, heads, q_len, kv_len)
        returns  BlockLayout of shape (batch | 1, heads | 1, q_len, kv_len)
        """
        array, sides = arguments.bools(mask, "mask"), arguments.sides(block_size)
        batch, heads, q_len, kv_len = array.shape
        found = blocks.from_mask(array.reshape(batch * heads, q_len, kv_len), sides)
        return cls._from_block_list(found, (batch, heads), q_len, kv_len, sides)

    @classmethod
    def from_predicate(
        cls,
        fn: Predicate,
        q_len: int,
        kv_len: int,
        *,
        block_size: int | Size,
        within: BlockLayout | None = None,
        looks: Looks | None = None,
        heads: int | None = None,
        batch: int | None = None,
    ) -> BlockLayout:
        """The layout of the pairs for which fn is true, on the host (on within's device, if it is given).

        fn       fn(q_pos, kv_pos) -> bool tensor; int64 tensors that broadcast. With heads or batch given,
                 fn(batch, head, q_pos, kv_pos). Called with some 4 M pairs at a time
        within   equals from_predicate(fn) & within, but only the blocks of `within` are evaluated: O(nnz) at any length
        looks    looks(row, col) -> int64, arrays of the same shape: a promise that blocks with equal numbers look the
                 same under fn (but for the ragged edges), so that only one of them is evaluated
        heads, batch  None: one layout shared by all

        >>> window = lambda q_pos, kv_pos: (q_pos - kv_pos).abs() <= 64
        >>> BlockLayout.from_predicate(window, 256, 256, block_size=64).density
        0.625
        """
        q_len, kv_len, sides = (
            arguments.length(q_len, "q_len"),
            arguments.length(kv_len, "kv_len"),
            arguments.sides(block_size),
        )
        axes = arguments.axis(batch, "batch"), arguments.axis(heads, "heads")
        if not callable(fn):
            raise TypeError(f"fn must be a function of positions, got {type(fn).__name__}")
        if looks is not None and not callable(looks):
            raise TypeError(f"looks must be a function of rows and cols, got {type(looks).__name__}")
        n_rows, n_cols = blocks.grid(q_len, kv_len, sides)
        if within is None:
            arguments.check_nnz(axes[0] * axes[1] * n_rows * n_cols)
            keys = np.arange(axes[0] * axes[1] * n_rows * n_cols)
        else:
            if not isinstance(within, BlockLayout):
                raise TypeError(f"within must be a BlockLayout, got {type(within).__name__}")
            if within.shape[2:] != (q_len, kv_len) or within.block_size != sides:
                raise ValueError(
                    f"within must describe {q_len} x {kv_len} tokens in blocks of {sides}, "
                    f"got {within.q_len} x {within.kv_len} in blocks of {within.block_size}"
                )
            arguments.joint(axes, within.shape[:2], "within")
            keys = _keys_for(within._block_list().keys, within.shape[:2], axes, n_rows * n_cols)
        by_head = heads is not None or batch is not None
        found = evaluate(
            fn, keys, heads=axes[1], by_head=by_head, looks=looks, q_len=q_len, kv_len=kv_len, block_size=sides
        )
        if within is None:
            return cls._from_block_list(found, axes, q_len, kv_len, sides)
        return cls._from_block_list(found, axes, q_len, kv_len, sides, device=within.device) & within

    @classmethod
    def from_blocks(
        cls,
        rows: torch.Tensor | Array | list[int],
        cols: torch.Tensor | Array | list[int],
        q_len: int,
        kv_len: int,
        *,
        block_size: int | Size,
    ) -> BlockLayout:
        """The layout of full blocks (rows[i], cols[i]), in any order. A block named twice is refused.

        >>> BlockLayout.from_blocks([0, 1, 1], [0, 0, 1], 256, 256, block_size=128).nnz
        3
        """
        q_len, kv_len, sides = (
            arguments.length(q_len, "q_len"),
            arguments.length(kv_len, "kv_len"),
            arguments.sides(block_size),
        )
        n_rows, n_cols = blocks.grid(q_len, kv_len, sides)
        row, col = arguments.integers(rows, "rows"), arguments.integers(cols, "cols")
        if len(row) != len(col):
            raise ValueError(f"rows and cols must have one entry for each block, got {len(row)} and {len(col)}")
        arguments.check_range(row, n_rows, "rows", "n_rows")
        arguments.check_range(col, n_cols, "cols", "n_cols")
        keys = row * n_cols + col
        keys.sort(kind="stable")
        twice = keys[1:] == keys[:-1]
        if twice.any():
            again = divmod(int(keys[twice.argmax()]), n_cols)
            raise ValueError(f"rows and cols must name every block once, but block {again} comes again")
        return cls._from_block_list(blocks.full_list(keys, sides), (1, 1), q_len, kv_len, sides)

    @classmethod
    def from_ranges(
        cls,
        first: torch.Tensor | Array | list[int],
        stop: torch.Tensor | Array | list[int],
        q_len: int,
        kv_len: int,
        *,
        block_size: int | Size,
    ) -> BlockLayout:
        """The layout of full blocks first[row] <= col < stop[row] of every row; stop <= first is an empty row.

        >>> BlockLayout.from_ranges([0, 0], [1, 2], 256, 256, block_size=128).nnz
        3
        """
        q_len, kv_len, sides = (
            arguments.length(q_len, "q_len"),
            arguments.length(kv_len, "kv_len"),
            arguments.sides(block_size),
        )
        n_rows, n_cols = blocks.grid(q_len, kv_len, sides)
        begin, end = arguments.integers(first, "first"), arguments.integers(stop, "stop")
        for values, name in ((begin, "first"), (end, "stop")):
            if len(values) != n_rows:
                raise ValueError(f"{name} must have one entry for each of {n_rows} rows, got {len(values)}")
            arguments.check_range(values, n_cols + 1, name, "(n_cols + 1)")
        counts = np.maximum(end - begin, 0)
        arguments.check_nnz(int(counts.sum()))
        keys = blocks.ranges(np.arange(n_rows) * n_cols + begin, counts)
        return cls._from_block_list(blocks.full_list(keys, sides), (1, 1), q_len, kv_len, sides)

    @classmethod
    def from_block_mask(
        cls, mask: torch.Tensor | Array, q_len: int, kv_len: int, *, block_size: int | Size
    ) -> BlockLayout:
        """The layout whose full blocks are the True entries of mask, bool ([[batch,] heads,] n_rows, n_cols)."""
        q_len, kv_len, sides = (
            arguments.length(q_len, "q_len"),
            arguments.length(kv_len, "kv_len"),
            arguments.sides(block_size),
        )
        array = arguments.bools(mask, "mask")
        if array.shape[2:] != blocks.grid(q_len, kv_len, sides):
            n_rows, n_cols = blocks.grid(q_len, kv_len, sides)
            raise ValueError(f"mask must end in (n_rows, n_cols) = ({n_rows}, {n_cols}), got shape {tuple(mask.shape)}")
        arguments.check_nnz(int(np.count_nonzero(array)))
        keys = np.flatnonzero(array)
        return cls._from_block_list(blocks.full_list(keys, sides), array.shape[:2], q_len, kv_len, sides)

    @classmethod
    def from_scipy(cls, matrix: Any, q_len: int, kv_len: int, *, block_size: int | Size) -> BlockLayout:
        """The layout whose full blocks are the nonzeros of a scipy.sparse matrix (n_rows, n_cols).

        A value 2 is refused: `to_scipy` marks partial blocks by it, and their pairs are not in the matrix.
        """
        import scipy.sparse

        q_len, kv_len, sides = (
            arguments.length(q_len, "q_len"),
            arguments.length(kv_len, "kv_len"),
            arguments.sides(block_size),
        )
        if not scipy.sparse.issparse(matrix):
            raise TypeError(f"matrix must be a scipy.sparse matrix or array, got {type(matrix).__name__}")
        n_rows, n_cols = blocks.grid(q_len, kv_len, sides)
        if matrix.shape != (n_rows, n_cols):
            raise ValueError(f"matrix must have shape (n_rows, n_cols) = ({n_rows}, {n_cols}), got {matrix.shape}")
        # a copy: summing duplicates would change the caller's
        csr = matrix.tocsr(copy=True)
        csr.sum_duplicates()
        if (csr.data == 2).any():
            raise ValueError("matrix has a value 2 (after adding duplicates): a partial block cannot be known from it")
        row = np.repeat(np.arange(n_rows), np.diff(csr.indptr))
        stored = csr.data != 0
        return cls.from_blocks(row[stored], csr.indices[stored], q_len, kv_len, block_size=sides)

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> BlockLayout:
        """The layout that gave this `state_dict`, checked as a direct call is."""
        if not isinstance(state, Mapping):
            raise TypeError(f"state must be what state_dict() gave, got {type(state).__name__}")
        expected = {*TENSORS, *_NUMBERS}
        if set(state) != expected:
            raise ValueError(
                f"state must have the keys of state_dict(): missing {sorted(expected - set(state))}, "
                f"unexpected {sorted(set(state) - expected, key=str)}"
            )
        return cls(*(state[name] for name in TENSORS), **{name: state[name] for name in _NUMBERS})

    # -------------------------------------------------------------------------------------------------------- facts

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch | 1, heads | 1, q_len, kv_len)."""
        batch, heads = self._cache["axes"]
        return batch, heads, self.q_len, self.kv_len

    @property
    def n_rows(self) -> int:
        """Block rows, a ragged last one counted."""
        return blocks.grid(self.q_len, self.kv_len, self.block_size)[0]

    @property
    def n_cols(self) -> int:
        """Block columns, a ragged last one counted."""
        return blocks.grid(self.q_len, self.kv_len, self.block_size)[1]

    @property
    def nnz(self) -> int:
        """Stored blocks, full and partial, over all batches and heads of the layout."""
        return int(self.indptr[-1, -1, -1])

    @property
    def capacity(self) -> int:
        """Entries of indices; at least nnz."""
        return self.indices.shape[0]

    @property
    def density(self) -> float:
        """Stored blocks / all blocks; 0.0 if there are none."""
        n_blocks = self.shape[0] * self.shape[1] * self.n_rows * self.n_cols
        return self.nnz / n_blocks if n_blocks else 0.0

    @property
    def device(self) -> torch.device:
        return self.indptr.device

    # ------------------------------------------------------------------------------------------------------ algebra

    @property
    def T(self) -> BlockLayout:
        """Queries and keys exchanged: shape (batch, heads, kv_len, q_len), block size (block_kv, block_q)."""
        found = blocks.transpose(*self._block_list(), **self._sizes())
        return self._from_block_list(
            found, self.shape[:2], self.kv_len, self.q_len, self.block_size[::-1], device=self.device
        )

    def __or__(self, other: BlockLayout) -> BlockLayout:
        return self._with(other, "|")

    def __and__(self, other: BlockLayout) -> BlockLayout:
        return self._with(other, "&")

    def __sub__(self, other: BlockLayout) -> BlockLayout:
        return self._with(other, "-")

    def __invert__(self) -> BlockLayout:
        leads = self.shape[0] * self.shape[1]
        n_full = int((self._block_list().ids == FULL).sum())
        arguments.check_nnz(leads * self.n_rows * self.n_cols - n_full)
        found = blocks.complement(self._block_list(), leads=leads, **self._sizes())
        return self._like(found, self.shape[:2])

    def __eq__(self, other: object) -> bool:
        """The same pairs in the same blocks over the same batch and head axes, on whatever device."""
        if not isinstance(other, BlockLayout):
            return NotImplemented
        if self is other:
            return True
        if self.shape != other.shape or self.block_size != other.block_size:
            return False
        return all(map(np.array_equal, self._block_list(), other._block_list()))

    def __hash__(self) -> int:
        if "hash" not in self._cache:
            digest = hashlib.blake2b(repr((self.shape, self.block_size)).encode(), digest_size=8)
            for array in self._block_list():
                digest.update(np.ascontiguousarray(array).data)
            self._cache["hash"] = int.from_bytes(digest.digest(), "little")
        # 60 bits, which hash() returns unchanged
        return int(self._cache["hash"]) >> 4

    # -------------------------------------------------------------------------------------------------- other forms

    def to_dense(self) -> torch.Tensor:
        """bool (batch | 1, heads | 1, q_len, kv_len), True attends, on the layout's device."""
        mask = blocks.to_mask(self._block_list(), leads=self.shape[0] * self.shape[1], **self._sizes())
        return torch.from_numpy(mask.reshape(self.shape)).to(self.device)

    def to_scipy(self, batch: int = 0, head: int = 0) -> Any:
        """The blocks of one batch and head as scipy.sparse.csr_array (n_rows, n_cols), int8: 1 full, 2 partial."""
        import scipy.sparse

        for value, size, name in ((batch, self.shape[0], "batch"), (head, self.shape[1], "head")):
            if not 0 <= arguments.integer(value, name) < size:
                raise ValueError(f"{name} must be in 0 .. {size - 1}, the layout has shape {self.shape}, got {value}")
        indptr = self.indptr[batch, head].cpu().numpy()
        stored = slice(int(indptr[0]), int(indptr[-1]))
        values = np.where(self.bitmask_ids[stored].cpu().numpy() == FULL, 1, 2).astype(np.int8)
        cols = self.indices[stored].cpu().numpy().copy()
        return scipy.sparse.csr_array((values, cols, indptr - indptr[0]), shape=(self.n_rows, self.n_cols))

    def state_dict(self) -> dict[str, Any]:
        """Plain tensors and numbers, which torch.load(weights_only=True) accepts."""
        return {name: getattr(self, name).clone() for name in TENSORS} | {
            name: getattr(self, name) for name in _NUMBERS
        }

    def to(self, device: torch.device | str | int) -> BlockLayout:
        """The same layout on a device, with the plan that the kernels walk there."""
        device = _resolved(device)
        self.plan(device)
        if device == self.device:
            return self
        moved = self._bare(*(getattr(self, name).to(device) for name in TENSORS), *self._numbers())
        moved._cache["plans"].update({key: plan for key, plan in self._cache["plans"].items() if key[0] == device})
        return moved

    def plan(self, device: torch.device | str | int, *, causal: bool = False) -> Plan:
        """What kernels walk on a device: the layout in tiles, both directions. Made once, then cached.

        causal  True: the plan of the pairs with kv_pos <= q_pos + (kv_len - q_len) only
        raises  ValueError while torch.compile traces, if it is not cached yet
        """
        device = _resolved(device)
        plans: dict[tuple[torch.device, bool], Plan] = self._cache["plans"]
        if (device, causal) not in plans:
            if torch.compiler.is_compiling():
                raise ValueError(
                    f"layout has no plan for {device} and torch.compile cannot make one: "
                    f"call layout.to(q.device) before" + (", and layout.plan(q.device, causal=True)" if causal else "")
                )
            elsewhere = [plan for (_, is_causal), plan in plans.items() if is_causal == causal]
            plans[device, causal] = elsewhere[0].to(device) if elsewhere else self._new_plan(device, causal)
        return plans[device, causal]

    def __repr__(self) -> str:
        return _picture(self)

    def __reduce__(self) -> tuple[Callable[..., BlockLayout], tuple[Any, ...]]:
        return type(self)._bare, (*(getattr(self, name) for name in TENSORS), *self._numbers())

    # ------------------------------------------------------------------------------------------------------ private

    def _set(self, *fields: Any) -> None:
        for name, value in zip((*TENSORS, *_NUMBERS), fields, strict=True):
            object.__setattr__(self, name, value)
        # the sizes of the axes as numbers: torch.compile guards the whole shape of a tensor that it meets
        axes = self.indptr.shape[0], self.indptr.shape[1]
        object.__setattr__(self, "_cache", {"plans": {}, "axes": axes})

    @classmethod
    def _bare(cls, *fields: Any) -> BlockLayout:
        """A layout of these fields as they are, unchecked."""
        layout = object.__new__(cls)
        layout._set(*fields)
        return layout

    @classmethod
    def _from_block_list(
        cls,
        found: BlockList,
        axes: Size,
        q_len: int,
        kv_len: int,
        sides: Size,
        *,
        device: torch.device | str = "cpu",
    ) -> BlockLayout:
        """The layout of a canonical block list, unchecked."""
        arguments.check_nnz(len(found.keys))
        return cls._bare(*_tensors(found, axes, q_len, kv_len, sides, device), q_len, kv_len, sides)

    def _like(self, found: BlockList, axes: Size) -> BlockLayout:
        return self._from_block_list(found, axes, *self._numbers(), device=self.device)

    def _numbers(self) -> tuple[int, int, Size]:
        return self.q_len, self.kv_len, self.block_size

    def _sizes(self) -> dict[str, Any]:
        return dict(zip(_NUMBERS, self._numbers(), strict=True))

    def _block_list(self) -> BlockList:
        return _block_list([getattr(self, name) for name in TENSORS], (self.n_rows, self.n_cols))

    def _with(self, other: BlockLayout, op: Literal["|", "&", "-"]) -> BlockLayout:
        if not isinstance(other, BlockLayout):
            return NotImplemented
        name = f"layout {op} other"
        _check_same(self, other, name)
        axes = arguments.joint(self.shape[:2], other.shape[:2], name)
        if self.device != other.device:
            raise ValueError(
                f"{name}: both must be on one device, got {self.device} and {other.device}: use .to(device)"
            )
        ours, theirs = self._over(axes), other._over(axes)
        return self._like(blocks.combine(ours, theirs, op, **self._sizes()), axes)

    def _over(self, axes: Size) -> BlockList:
        """The block list with axes of size 1 repeated."""
        arguments.check_nnz(self.nnz * (axes[0] // self.shape[0]) * (axes[1] // self.shape[1]))
        return blocks.broadcast(self._block_list(), self.shape[:2], axes, self.n_rows * self.n_cols)

    def _new_plan(self, device: torch.device, causal: bool) -> Plan:
        if causal:
            restricted = self._causal()
            return self.plan(device) if restricted == self else restricted._new_plan(device, False)
        batch, heads = self.shape[:2]
        return build_plan(*self._block_list(), batch=batch, heads=heads, **self._sizes(), device=device)

    def _causal(self) -> BlockLayout:
        """The pairs with kv_pos <= q_pos + (kv_len - q_len), aligned bottom-right."""
        ahead = self.kv_len - self.q_len
        block_q, block_kv = self.block_size
        return self.from_predicate(
            lambda q_pos, kv_pos: kv_pos <= q_pos + ahead,
            self.q_len,
            self.kv_len,
            block_size=self.block_size,
            within=self,
            # how far the first query of a block sees past its first key; beyond the sides a block is empty or full
            looks=lambda row, col: np.clip(row * block_q + ahead - col * block_kv, -block_q, block_kv),
        )


# ---------------------------------------------------------------------------------------------- tensors and block lists


def _tensors(
    found: BlockList, axes: Size, q_len: int, kv_len: int, sides: Size, device: torch.device | str
) -> tuple[torch.Tensor, ...]:
    """indptr, indices, bitmask_ids, bitmasks of a canonical block list."""
    n_rows, n_cols = blocks.grid(q_len, kv_len, sides)
    # keys are ascending, so the offset of a row is where its first key would stand
    ends = np.searchsorted(found.keys, np.arange(1, axes[0] * axes[1] * n_rows + 1) * n_cols)
    indptr = np.zeros((axes[0] * axes[1], n_rows + 1), np.int32)
    indptr[:, 1:] = ends.reshape(len(indptr), n_rows)
    indptr[1:, 0] = indptr[:-1, -1]
    arrays = (
        indptr.reshape(*axes, n_rows + 1),
        (found.keys % max(n_cols, 1)).astype(np.int32),
        found.ids.astype(np.int32),
        found.bitmasks.view(np.int32),
    )
    return tuple(torch.from_numpy(np.ascontiguousarray(array)).to(device) for array in arrays)


def _block_list(tensors: Any, grid: Size) -> BlockList:
    """The block list of a layout's tensors, copied to the host if they are elsewhere."""
    indptr, indices, ids, bitmasks = (tensor.detach().cpu().numpy() for tensor in tensors)
    flat = indptr.reshape(-1, grid[0] + 1).astype(np.int64)
    nnz = int(flat[-1, -1])
    rows = np.repeat(np.arange(flat.shape[0] * grid[0]), (flat[:, 1:] - flat[:, :-1]).reshape(-1))
    return BlockList(rows * grid[1] + indices[:nnz], ids[:nnz], bitmasks.view(np.uint32))


def _keys_for(keys: Array, old: Size, new: Size, n_blocks: int) -> Array:
    """The keys over other (batch, heads) axes: those of size 1 in new are merged, those of size 1 in old repeated."""
    if old == new or not len(keys):
        return keys
    batch, head = np.divmod(keys // n_blocks, old[1])
    merged = old[0] if new[0] > 1 else 1, old[1] if new[1] > 1 else 1
    lead = (batch if merged[0] > 1 else 0) * merged[1] + (head if merged[1] > 1 else 0)
    keys = np.unique(lead * n_blocks + keys % n_blocks)
    flags = BlockList(keys, np.full(len(keys), FULL, np.int32), np.zeros((0, 16, 1), np.uint32))
    return blocks.broadcast(flags, merged, new, n_blocks).keys


# ---------------------------------------------------------------------------------------------------------------- repr


def _picture(layout: BlockLayout) -> str:
    """The sizes of a layout, and its first head drawn in text."""
    batch, heads = layout.shape[:2]
    n_rows, n_cols, n_distinct = layout.n_rows, layout.n_cols, len(layout.bitmasks)
    lines = [
        f"BlockLayout({layout.q_len} x {layout.kv_len} tokens, block_size={layout.block_size}, {batch=}, {heads=})",
        f"{n_rows} x {n_cols} blocks, nnz={layout.nnz}, density={layout.density:.4g}, {n_distinct} distinct bitmasks",
    ]
    keys, ids, _ = layout._block_list()
    first = keys < n_rows * n_cols
    if n_rows * n_cols == 0:
        return "\n".join(lines)
    rows, cols, is_full = keys[first] // n_cols, keys[first] % n_cols, ids[first] == FULL
    # blocks behind one character
    down, across = -(-n_rows // _DRAWN), -(-n_cols // _DRAWN)
    height, width = -(-n_rows // down), -(-n_cols // across)
    place = rows // down * width + cols // across
    n_all = np.outer(
        np.bincount(np.arange(n_rows) // down, minlength=height),
        np.bincount(np.arange(n_cols) // across, minlength=width),
    )
    n_stored = np.bincount(place, minlength=height * width).reshape(height, width)
    n_full = np.bincount(place[is_full], minlength=height * width).reshape(height, width)
    drawn = np.where(n_full == n_all, "#", np.where(n_stored > 0, "+", "."))
    key = "# full, + partial, . empty"
    if down * across > 1:
        key += f"; a character is {down} x {across} blocks"
    if batch * heads > 1:
        key += "; batch 0, head 0"
    return "\n".join([*lines, key, *("".join(row) for row in drawn)])
