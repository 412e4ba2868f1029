"""BlockLayout: a token-exact attention mask stored as blocks, its constructors and its algebra."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch

from .blocks import (
    block_list,
    checks,
    constructors,
    drawing,
    pickling,
    predicates,
    set_operations,
    storage,
    token_orders,
)
from .blocks.block_list import FULL, Array, Frame, Size
from .blocks.checks import TENSORS
from .blocks.statistics import Description, describe
from .blocks.transfer import resolved
from .plan import block_selection
from .plan.block_bias import BiasIndex
from .plan.layout_plans import LayoutPlans
from .plan_format import TILE, Plan
from .runtime import tracing

Integers = torch.Tensor | Array | list[int]

_ALL = slice(None)


# immutable, but not by frozen=True: torch.compile of torch 2.11 reads every field of such a class, and here reading one
# makes a copy
@dataclass(init=False, repr=False, eq=False)
class BlockLayout(LayoutPlans):
    """A token-exact attention mask, stored as blocks. Immutable.

    indptr       int32 (batch | 1, heads | 1, n_rows + 1): offsets into indices; a size of 1 is shared by all batches
                 or heads
    indices      int32 (capacity,): col of each stored block, ascending in a row; capacity equals nnz, except for
                 layouts from `from_topk` and `from_scores`, whose last entries may be unused
    bitmask_ids  int32 (capacity,): -1 if every existing pair of the block attends, otherwise index of its bitmask
    bitmasks     int32 (distinct, block_q, ceil(block_kv / 32)): bit j of word w of row i is the pair (query i, key
                 32 w + j) of the block, True attends; no two are equal
    q_len, kv_len  tokens; a ragged last block is allowed
    block_size   tokens, multiples of 16 from 16 to 256: an int, or (block_q, block_kv)

    The constructor checks every tensor (cols must ascend in each row). Layouts are canonical: equal masks over equal
    batch and head axes give equal layouts and equal hashes.

    A layout shares no tensor with its caller: each access to indptr, indices, bitmask_ids or bitmasks makes a copy.
    Keep the copy to read it often. To change a mask, make another layout, by the algebra or by
    BlockLayout(layout.indptr, changed, ...). `plan` and `bias_index` return the kernels' tensors uncopied: never write
    into those.

    `torch.save(layout, path)` stores a layout; `torch.load(path)` reads it once blocksparse_flash is imported.

    raises  ValueError naming the argument; TypeError if it is of another type

    >>> layout = BlockLayout.from_predicate(lambda q_pos, kv_pos: q_pos >= kv_pos, 256, 256, block_size=64)
    >>> layout.nnz, layout.density, len(layout.bitmasks)
    (10, 0.625, 1)
    """

    # properties that copy `_tensors`, see below
    indptr: torch.Tensor
    indices: torch.Tensor
    bitmask_ids: torch.Tensor
    bitmasks: torch.Tensor
    q_len: int
    kv_len: int
    block_size: Size

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
        frame = checks.frame(q_len, kv_len, block_size)
        tensors = storage.Tensors(indptr, indices, bitmask_ids, bitmasks)
        checks.check_tensors(tensors, frame)
        self._set_canonical(tensors, frame._replace(batch=indptr.shape[0], heads=indptr.shape[1]))

    # ---- constructors

    @classmethod
    @tracing.untraced
    def from_dense(cls, mask: torch.Tensor | Array, *, block_size: int | Size = 128) -> BlockLayout:
        """The layout of a bool mask, True attends. Time and memory O(mask); built on the host.

        mask     (q_len, kv_len), (heads, q_len, kv_len) or (batch, heads, q_len, kv_len)
        block_size  as of the class, here and below
        returns  BlockLayout of shape (batch | 1, heads | 1, q_len, kv_len)
        """
        array, sides = checks.bools(mask), checks.sides(block_size)
        batch, heads, q_len, kv_len = array.shape
        frame = Frame(batch, heads, q_len, kv_len, sides)
        found = block_list.from_mask(array.reshape(frame.batch_heads, q_len, kv_len), frame)
        return cls._from_block_list(found, frame)

    @classmethod
    def from_predicate(
        cls,
        fn: predicates.Predicate,
        q_len: int,
        kv_len: int,
        *,
        block_size: int | Size = 128,
        within: BlockLayout | None = None,
        dedup_key: predicates.DedupKey | None = None,
        heads: int | None = None,
        batch: int | None = None,
    ) -> BlockLayout:
        """The layout of the pairs for which fn is true, evaluated on the CPU; on the device of `within`, if given.

        fn       fn(q_pos, kv_pos) -> bool tensor; int64 tensors on the CPU that broadcast. With heads or batch given,
                 fn(batch, head, q_pos, kv_pos). Called with some 4 M pairs at a time
        q_len, kv_len  tokens
        within   a layout: the result is from_predicate(fn) & within, but only the blocks of `within` are evaluated,
                 in O(nnz)
        dedup_key  dedup_key(row, col) -> int64, NumPy arrays of the same shape: a promise that fn gives equal blocks
                 for equal keys (ragged edges aside), so that only one of them is evaluated
        heads, batch  None: one layout shared by all

        If neither `within` nor `dedup_key` is given, more than 10^8 pairs cause a warning and a progress bar, or, if
        tqdm is not installed, log lines (logger "blocksparse_flash", level INFO).

        >>> window = lambda q_pos, kv_pos: (q_pos - kv_pos).abs() <= 64
        >>> BlockLayout.from_predicate(window, 256, 256, block_size=64).density
        0.625
        """
        frame = checks.frame(q_len, kv_len, block_size)
        frame = frame._replace(batch=checks.axis(batch, "batch"), heads=checks.axis(heads, "heads"))
        predicates.check(fn, dedup_key)
        if within is None:
            checks.check_nnz(frame.n_blocks)
        is_long = within is None and dedup_key is None and predicates.warn_if_long(frame)
        if within is not None and not isinstance(within, BlockLayout):
            raise TypeError(f"within must be a BlockLayout, got {type(within).__name__}")
        by_head = heads is not None or batch is not None
        return cls._evaluated(fn, frame, within, dedup_key, by_head=by_head, shows_progress=is_long)

    @classmethod
    @tracing.untraced
    def from_blocks(
        cls, rows: Integers, cols: Integers, q_len: int, kv_len: int, *, block_size: int | Size = 128
    ) -> BlockLayout:
        """The layout of full blocks (rows[i], cols[i]), in any order. A block named twice is refused.

        q_len, kv_len, block_size  in tokens, as of the class

        >>> BlockLayout.from_blocks([0, 1, 1], [0, 0, 1], 256, 256, block_size=128).nnz
        3
        """
        frame = checks.frame(q_len, kv_len, block_size)
        return cls._of_full(constructors.by_index(rows, cols, frame), frame)

    @classmethod
    @tracing.untraced
    def from_ranges(
        cls, first: Integers, stop: Integers, q_len: int, kv_len: int, *, block_size: int | Size = 128
    ) -> BlockLayout:
        """The layout of full blocks first[row] <= col < stop[row] of every row; stop <= first is an empty row.

        q_len, kv_len, block_size  in tokens, as of the class

        >>> BlockLayout.from_ranges([0, 0], [1, 2], 256, 256, block_size=128).nnz
        3
        """
        frame = checks.frame(q_len, kv_len, block_size)
        return cls._of_full(constructors.by_ranges(first, stop, frame), frame)

    @classmethod
    @tracing.untraced
    def from_block_mask(
        cls, mask: torch.Tensor | Array, q_len: int, kv_len: int, *, block_size: int | Size = 128
    ) -> BlockLayout:
        """The layout whose full blocks are the True entries of mask, bool ([[batch,] heads,] n_rows, n_cols).

        q_len, kv_len, block_size  in tokens, as of the class
        """
        return cls._of_full(*constructors.by_mask(mask, checks.frame(q_len, kv_len, block_size)))

    @classmethod
    @tracing.untraced
    def from_scipy(cls, matrix: Any, q_len: int, kv_len: int, *, block_size: int | Size = 128) -> BlockLayout:
        """The layout whose full blocks are the nonzeros of a scipy.sparse matrix (n_rows, n_cols).

        A value 2 is refused: in `to_scipy` it marks a partial block, whose pairs are not in the matrix.

        q_len, kv_len, block_size  in tokens, as of the class
        """
        frame = checks.frame(q_len, kv_len, block_size)
        return cls._of_full(constructors.by_matrix(matrix, frame), frame)

    @classmethod
    def from_topk(cls, indices: torch.Tensor, q_len: int, kv_len: int, *, block_size: int | Size = 128) -> BlockLayout:
        """The layout of full blocks that a model selects, made on the device of `indices` without waiting for it.

        indices  integers (batch | 1, heads | 1, n_rows, k): the cols of each row, in any order. -1 marks an unused
                 entry; repeated cols are ignored. Other numbers are refused on the CPU and ignored on a GPU
        q_len, kv_len  lengths in tokens
        block_size  sides that divide 128, or 256. Below 64 the plan takes up to 2 KB per selected block
        returns  BlockLayout whose `capacity` is the number of entries of `indices`; `nnz`, `density`, `==`, `hash` and
                 the algebra, such as `layout & masks.documents(...)`, copy it to the host and wait for the device

        A CUDA graph can capture this together with attention. Selecting has no gradient. On a GPU, four fused kernels
        make the layout and its plan, up to 2^20 queries, 8192 cols and n_cols <= 2048 + 128 * k. For larger grids, for
        more than 4 blocks per tile, and under torch.compile, about 60 PyTorch operations do so, which take longer.
        Use `selected_attention` if single query tokens select blocks, or for packed documents.

        >>> layout = BlockLayout.from_topk(torch.tensor([[[[0, -1], [1, 0]]]]), 256, 256, block_size=128)
        >>> layout.nnz, layout.capacity
        (3, 4)
        """
        frame = checks.frame(q_len, kv_len, block_size)
        frame = block_selection.frame_of(indices, "indices", frame, kind="integers")
        block_selection.check_cols(indices, frame)
        return cls._from_selection(block_selection.by_indices(indices, frame), frame)

    @classmethod
    def from_scores(
        cls,
        scores: torch.Tensor,
        q_len: int,
        kv_len: int,
        *,
        k: int,
        causal: bool = False,
        block_size: int | Size = 128,
    ) -> BlockLayout:
        """`from_topk` of the k cols with the highest scores in each row; ties in no particular order.

        scores  floats (batch | 1, heads | 1, n_rows, n_cols); -inf and NaN are never selected
        k       cols per row; fewer if a row has fewer to select
        q_len, kv_len, block_size  as `from_topk`
        causal  True: skips blocks without a pair kv_pos <= q_pos + (kv_len - q_len). Blocks on the diagonal keep their
                later keys; `attention(..., causal=True)` drops those
        """
        frame = block_selection.frame_of(scores, "scores", checks.frame(q_len, kv_len, block_size), kind="floats")
        return cls._from_selection(block_selection.by_scores(scores, frame, k, causal=causal), frame)

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> BlockLayout:
        """The layout of a `state_dict`; its numbers may be tensors.

        state   what `state_dict` returned
        raises  ValueError if the tensors are not those of a canonical layout, or, for a state with "selected": True,
                of a selected one
        """
        tensors, numbers, is_selected = storage.read_state(state)
        frame = checks.frame(**numbers)
        checks.check_fields(tensors, frame)
        frame = frame._replace(batch=tensors.indptr.shape[0], heads=tensors.indptr.shape[1])
        if is_selected:
            return cls._from_selected_tensors(tensors, frame)
        if tensors.indptr.is_meta:
            return cls._bare(*tensors, *frame[2:])
        layout = cls(*tensors, **numbers)
        storage.check_canonical(tensors, layout._tensors)
        return layout

    @classmethod
    @tracing.untraced
    def stack_heads(cls, layouts: Iterable[BlockLayout]) -> BlockLayout:
        """The heads of the layouts, concatenated; a batch axis of size 1 broadcasts.

        >>> diagonal = BlockLayout.from_blocks([0, 1], [0, 1], 128, 128, block_size=64)
        >>> BlockLayout.stack_heads([diagonal, ~diagonal, diagonal | ~diagonal]).shape
        (1, 3, 128, 128)
        """
        return cls._stacked(checks.listed(layouts, BlockLayout, "layouts"), "heads")

    @classmethod
    @tracing.untraced
    def stack_batches(cls, layouts: Iterable[BlockLayout]) -> BlockLayout:
        """The batches of the layouts, concatenated; a head axis of size 1 broadcasts."""
        return cls._stacked(checks.listed(layouts, BlockLayout, "layouts"), "batch")

    # ---- facts

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch | 1, heads | 1, q_len, kv_len)."""
        batch, heads = self._cache["axes"]
        return batch, heads, self.q_len, self.kv_len

    @property
    def n_rows(self) -> int:
        """Block rows, including a ragged last one."""
        return self._frame.n_rows

    @property
    def n_cols(self) -> int:
        """Block columns, including a ragged last one."""
        return self._frame.n_cols

    @property
    def nnz(self) -> int:
        """Stored blocks, full and partial, over all batches and heads of the layout."""
        checks.check_in_memory(self._tensors.indptr, "layout")
        with tracing.outside_transforms(self._anchor):
            return int(self._tensors.indptr[-1, -1, -1])

    @property
    def capacity(self) -> int:
        """Length of indices and bitmask_ids: nnz, and for a layout of `from_topk` or `from_scores` at least nnz."""
        return self._tensors.indices.shape[0]

    @property
    def density(self) -> float:
        """Stored blocks / all blocks; 0.0 if there are none."""
        return self._frame.density(self.nnz)

    @property
    def device(self) -> torch.device:
        """Device of the layout's tensors; its plans may be on others."""
        return self._tensors.indptr.device

    # ---- algebra: of layouts with equal lengths and block sizes; a batch or head axis of size 1 broadcasts

    @property
    @tracing.untraced
    def T(self) -> BlockLayout:
        """Queries and keys exchanged: shape (batch, heads, kv_len, q_len), block size (block_kv, block_q)."""
        found = set_operations.transpose(self._block_list(), self._frame)
        return self._from_block_list(found, self._frame.transposed, self.device)

    def __or__(self, other: BlockLayout) -> BlockLayout:
        return self._with(other, "|")

    def __and__(self, other: BlockLayout) -> BlockLayout:
        return self._with(other, "&")

    def __sub__(self, other: BlockLayout) -> BlockLayout:
        return self._with(other, "-")

    def __xor__(self, other: BlockLayout) -> BlockLayout:
        return self._with(other, "^")

    @tracing.untraced
    def __invert__(self) -> BlockLayout:
        frame, found = self._frame, self._block_list()
        checks.check_nnz(frame.n_blocks - int((found.ids == FULL).sum()))
        return self._like(set_operations.complement(found, frame))

    def __eq__(self, other: object) -> bool:
        """The same pairs in the same blocks over the same batch and head axes, on any device."""
        if not isinstance(other, BlockLayout):
            return NotImplemented
        if self is other:
            return True
        if self.shape != other.shape or self.block_size != other.block_size:
            return False
        return all(map(np.array_equal, self._block_list(), other._block_list()))

    def __hash__(self) -> int:
        found: int | None = self._cache.get("hash")
        if found is None:
            found = storage.hash_of(self._block_list(), self._frame)
            if self._is_constant:
                self._cache["hash"] = found
        return found

    # ---- tokens, blocks and axes moved

    def shift(self, q: int = 0, kv: int = 0) -> BlockLayout:
        """Moves every pair by q queries and kv keys, toward the end if positive; drops pairs beyond the ends.

        Lengths and block size stay. Like all methods of this section: exact to the token, computed on the host in
        O(n log n) for n tokens and overlaps of old blocks with new ones, with the result on the layout's device.
        """
        return self._gathered(token_orders.shifted(self.q_len, q, "q"), token_orders.shifted(self.kv_len, kv, "kv"))

    def permute(self, q_order: Integers | None = None, kv_order: Integers | None = None) -> BlockLayout:
        """The mask of reordered sequences: position i gets query q_order[i] and key kv_order[i]; None keeps the order.

        `attention(q[:, :, order], k[:, :, order], v[:, :, order], layout.permute(order, order))` equals
        `attention(q, k, v, layout)[:, :, order]`. An order that scatters tokens may need up to one block per pair.
        """
        q = token_orders.permuted(self.q_len, q_order, "q_order")
        return self._gathered(q, token_orders.permuted(self.kv_len, kv_order, "kv_order"))

    def select(self, rows: slice | Integers = _ALL, cols: slice | Integers = _ALL) -> BlockLayout:
        """The blocks of some rows and cols, by slice or index, in the given order; rows may repeat.

        Each row contributes block_q tokens; the ragged last row has fewer, so it may only come last.

        >>> layout = BlockLayout.from_blocks([0, 1, 2], [0, 1, 2], 300, 300, block_size=128)
        >>> layout.select(rows=[1, 2]).shape
        (1, 1, 172, 300)
        """
        q = token_orders.selected(self.q_len, self.block_size[0], rows, "rows")
        return self._gathered(q, token_orders.selected(self.kv_len, self.block_size[1], cols, "cols"))

    @tracing.untraced
    def crop(
        self, q_start: int = 0, q_stop: int | None = None, kv_start: int = 0, kv_stop: int | None = None
    ) -> BlockLayout:
        """The pairs of queries q_start .. q_stop - 1 and keys kv_start .. kv_stop - 1, tokens; None is the end.

        A crop that changes kv_len - q_len shifts the diagonal of causal=True; see `assert_causal`.
        """
        q = token_orders.cropped(self.q_len, q_start, q_stop, "q")
        kv = token_orders.cropped(self.kv_len, kv_start, kv_stop, "kv")
        if q == (0, self.q_len) and kv == (0, self.kv_len):
            return self
        return self._cropped(q, kv)

    def pad(self, q: Size = (0, 0), kv: Size = (0, 0)) -> BlockLayout:
        """Adds q = (before, after) queries and kv = (before, after) keys, without pairs."""
        return self._gathered(token_orders.padded(self.q_len, q, "q"), token_orders.padded(self.kv_len, kv, "kv"))

    @tracing.untraced
    def with_block_size(self, block_size: int | Size) -> BlockLayout:
        """The same pairs in blocks of another block_size; any two sizes work."""
        sides = checks.sides(block_size)
        return self._like(block_list.regroup(self._block_list(), self._frame, sides), block_size=sides)

    def refine(self, block_size: int | Size) -> BlockLayout:
        """`with_block_size`, for a block_size that divides this layout's."""
        sides = checks.sides(block_size)
        checks.check_multiple(self.block_size, sides, f"divide {self.block_size} to refine it, got {sides}")
        return self.with_block_size(sides)

    def coarsen(self, block_size: int | Size) -> BlockLayout:
        """`with_block_size`, for a block_size that is a multiple of this layout's."""
        sides = checks.sides(block_size)
        checks.check_multiple(sides, self.block_size, f"be a multiple of {self.block_size} to coarsen it, got {sides}")
        return self.with_block_size(sides)

    def head(self, index: int) -> BlockLayout:
        """The head at index, as a layout (batch | 1, 1, q_len, kv_len)."""
        return self._picked("heads", index)

    def batch(self, index: int) -> BlockLayout:
        """The batch at index, as a layout (1, heads | 1, q_len, kv_len)."""
        return self._picked("batch", index)

    # ---- scores of blocks

    def gather(self, block_scores: torch.Tensor) -> torch.Tensor:
        """The scores of the stored blocks, in the order of `indices`: the `block_bias` of `attention`. Differentiable.

        block_scores  a number for every block, of any dtype and device: (batch | 1, heads | 1, n_rows, n_cols). Its
                 batches and heads are those of the layout, or 1, shared by all; for a layout without batches and
                 heads they are free
        returns  (capacity,) for a layout with batches or heads, otherwise (batch | 1, heads | 1, capacity), on the
                 device of block_scores. Unused entries of a selected layout are 0, without a gradient
        raises   TypeError, ValueError

        Selecting blocks has no gradient. A gate learns if its scores are also the bias of the blocks that it selected:

        >>> q = k = v = torch.randn(1, 2, 256, 16)
        >>> gate = torch.nn.Linear(16, 16)
        >>> pooled = q.unflatten(2, (-1, 64)).mean(3)  # (1, 2, 4 rows, 16)
        >>> block_scores = gate(pooled) @ pooled.mT  # (1, 2, n_rows, n_cols)
        >>> layout = BlockLayout.from_scores(block_scores.detach(), 256, 256, k=2, block_size=64)
        >>> block_bias = layout.gather(block_scores)
        >>> block_bias.shape == (layout.capacity,)
        True

        Then `attention(q, k, v, layout, block_bias=block_bias)` has gradients for q, k, v and gate.
        """
        return self._gathered_scores(block_scores)

    # ---- inspection

    def assert_causal(self) -> None:
        """Checks that kv_pos <= q_pos + (kv_len - q_len) for every pair. O(nnz).

        raises  ValueError naming the first pair (batch, head, q_pos, kv_pos) beyond the diagonal
        """
        self._check_causal()

    def describe(self, *, head_dim: int = 128, element_bytes: int = 2) -> Description:
        """Density, cost compared with dense, balance and connectedness; the `Description` prints as a report.

        head_dim       of q, k and v, for the operation and byte counts
        element_bytes  of q, k and v: 2 for float16 and bfloat16
        """
        return describe(self._block_list(), self._frame, head_dim=head_dim, element_bytes=element_bytes)

    def plot(
        self, ax: Any = None, *, batch: int = 0, head: int | None = None, tokens: tuple[Size, Size] | None = None
    ) -> Any:
        """Draws the layout with matplotlib; save the figure with `.savefig("layout.svg")`.

        ax       Axes for a single panel; None makes a Figure, with bars for the blocks of every row
        batch, head  to draw; head None draws a panel per head if heads differ
        tokens   ((q_start, q_stop), (kv_start, kv_stop)): draws these pairs one by one instead of blocks
        returns  matplotlib.figure.Figure
        raises   ImportError without matplotlib, ValueError for indices out of range
        """
        return drawing.plot(self._block_list(), self._frame, ax=ax, batch=batch, head=head, tokens=tokens)

    # ---- other forms

    def to_dense(self) -> torch.Tensor:
        """bool (batch | 1, heads | 1, q_len, kv_len), True attends, on the layout's device."""
        mask = block_list.to_mask(self._block_list(), self._frame)
        return torch.from_numpy(mask.reshape(self.shape)).to(self.device)

    def to_scipy(self, batch: int = 0, head: int = 0) -> Any:
        """The blocks of one batch and head as scipy.sparse.csr_array (n_rows, n_cols), int8: 1 full, 2 partial."""
        return constructors.to_matrix(self._rows(), self._frame, batch, head)

    def state_dict(self) -> dict[str, Any]:
        """Plain tensors and numbers for any file format, read by `from_state_dict`.

        A selected layout (`from_topk`, `from_scores`) also has "selected": True, since its tensors are not canonical.

        safetensors stores tensors alone, so convert the numbers:
        save_file({name: torch.as_tensor(value) for name, value in layout.state_dict().items()}, path)
        """
        with tracing.outside_transforms(self._anchor):
            return self._state({name: tensor.clone() for name, tensor in self._tensors._asdict().items()})

    def to(self, device: torch.device | str | int, *, causal: bool = False, non_blocking: bool = False) -> BlockLayout:
        """The same layout on a device, with every plan that calls there may use.

        causal        True: the plans of calls with `causal=True` instead of those of calls without it
        non_blocking  as in `plan`
        """
        checks.boolean(causal, "causal")
        device = resolved(device)
        self._plan_all(device, causal=causal, non_blocking=non_blocking)
        return self if device == self.device else self._moved(device, non_blocking=non_blocking)

    def plan(
        self, device: torch.device | str | int, *, causal: bool = False, tile: int = TILE, non_blocking: bool = False
    ) -> Plan:
        """The tiles that kernels iterate over, on a device. Cached.

        causal  True: only the pairs with kv_pos <= q_pos + (kv_len - q_len)
        tile    tokens per side of a tile: 128; or, for lengths up to 2^30, 64, or 16 for a gathered plan (see `Plan`)
        non_blocking  True: the host does not wait for the copy to a GPU. Streams other than the current one must wait
                before they use the plan or the layout: `torch.cuda.Stream.wait_stream`
        raises  ValueError for another tile, and while torch.compile traces, unless cached; TypeError if another option
                is not a bool

        >>> window = BlockLayout.from_predicate(lambda q_pos, kv_pos: (q_pos - kv_pos).abs() <= 32, 256, 256)
        >>> for tile in (128, 64):
        ...     plan = window.plan("cpu", tile=tile)
        ...     print(plan.tile, int(plan.row_records[..., 2].sum()), "tiles")
        128 4 tiles
        64 10 tiles
        """
        if causal is not True and causal is not False:
            checks.boolean(causal, "causal")
        if non_blocking is not True and non_blocking is not False:
            checks.boolean(non_blocking, "non_blocking")
        try:
            # the fast path: the device of a tensor needs no resolving
            found: Plan | None = self._cache["plans"].get((device, causal, tile))
        except TypeError:
            # not hashable: refused below
            found = None
        if found is None:
            self._check_plan(device, causal, tile)
            found = self._planned(device, causal, int(tile), non_blocking)
        return found

    def bias_index(self, device: torch.device | str | int, *, causal: bool = False) -> BiasIndex:
        """Index from stored blocks to the tiles of `plan(device, causal=causal)`, for block_bias. Cached.

        raises  ValueError while torch.compile traces, unless cached
        """
        return self._bias_index(resolved(device), checks.boolean(causal, "causal"))

    def __repr__(self) -> str:
        if self.device.type == "meta":
            return f"{drawing.title(self._frame)} on the meta device"
        return drawing.text(self._block_list(), self._frame)

    def _repr_svg_(self) -> str:
        """The first head as SVG: blue blocks are full, orange ones partial."""
        return drawing.svg(self._block_list(), self._frame)

    def _repr_html_(self) -> str:
        """The sizes, a drawing of the first head and a legend; notebooks show it for a layout at the end of a cell."""
        return drawing.html(self._block_list(), self._frame)

    def __reduce__(self) -> tuple[Callable[..., BlockLayout], tuple[Any, ...]]:
        state = self._state(self._tensors._asdict())
        # the class is named only for subclasses: allowing a class in torch.load also allows unchecked objects of it
        return restored, (state, pickling.checksums(state), *(() if type(self) is BlockLayout else (type(self),)))


def _copied(name: str) -> property:
    return property(lambda layout: getattr(layout._tensors, name).clone(), doc=f"A copy of {name}, see `BlockLayout`.")


# outside the class body, where they are fields to dataclasses and type checkers
for _name in TENSORS:
    setattr(BlockLayout, _name, _copied(_name))


# ---- files and processes


def restored(
    state: Mapping[str, Any], checksums: Mapping[str, int], cls: type[BlockLayout] = BlockLayout
) -> BlockLayout:
    """A pickled or copied layout, checked. Pickles name this function, so its name and module stay.

    state      a `state_dict`
    checksums  of each value when it was pickled: changed lengths could still be valid
    raises     ValueError naming the field that is invalid or was changed
    """
    pickling.check_checksums(state, checksums)
    return cls.from_state_dict(state)


torch.serialization.add_safe_globals([restored])
ForkingPickler.register(BlockLayout, pickling.sent)
