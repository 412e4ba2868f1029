"""The sparsity configurations of DeepSpeed (deepspeed.ops.sparse_attention), by the same names and arguments.

DeepSpeed need not be installed.

    from masks.deepspeed import FixedSparsityConfig

    config = FixedSparsityConfig(num_heads=16, block=64, attention="unidirectional")
    config.make_layout(4096)  # int64 (heads, rows, cols), 1 where a block is kept, as in DeepSpeed
    config.layout(4096)       # BlockLayout: no dense rows x cols tensor, and exact to the token when unidirectional

`block` is the side of a block in tokens, and all other counts are in blocks. different_layout_per_head gives every head
its own layout where the pattern has more than one to offer (random blocks, global patterns).

Differences from DeepSpeed, in every configuration:
- attention="unidirectional" attends to nothing in the future. DeepSpeed keeps the blocks on the diagonal whole, and
  their upper half is the future unless the caller masks it; `layout` keeps only kv_pos <= q_pos of them.
- Random blocks are drawn by the hash of `masks.random` from `seed`, a last argument that is required if there are any.
  DeepSpeed draws them from the global generator of Python's random module.
- The length need not be a multiple of the block.
- Wrong arguments raise a ValueError or a TypeError at construction, except counts of blocks that exceed those of a row,
  which raise when a layout is made.
Further differences are in the docstring of each configuration.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from blocksparse_flash import BlockLayout

from .canvas import MAX_TOKENS, Canvas, distinct_blocks, read_canvas, spread
from .checks import read_integer, read_integers, read_switch
from .heads import by_head
from .local import past_of
from .random import MAX_SEED, draw_distinct

# streams per head, more than any grid has rows
ROWS_OF_A_HEAD = 2**32

Blocks = tuple[np.ndarray, np.ndarray]


# ------------------------------------------------------------------------------------------------------------- patterns


def _sliding(n_blocks: int, num_sliding_window_blocks: int) -> Blocks:
    rows, side = np.arange(n_blocks), num_sliding_window_blocks // 2
    return spread(np.maximum(rows - side, 0), np.minimum(rows + side + 1, n_blocks))


def _windows(n_blocks: int, sizes: Sequence[int]) -> Blocks:
    """Consecutive windows of these sizes; the last size repeats."""
    sizes = [min(size, max(1, n_blocks)) for size in sizes]
    bounds = np.cumsum([0, *sizes])
    bounds = np.append(bounds, np.arange(bounds[-1] + sizes[-1], n_blocks + sizes[-1], sizes[-1]))
    rows = np.arange(n_blocks)
    window = np.searchsorted(bounds, rows, side="right")
    return spread(bounds[window - 1], np.minimum(bounds[window], n_blocks))


def _global(n_blocks: int, starts: np.ndarray, stops: np.ndarray, *, horizontal: bool) -> Blocks:
    """Cols starts[i] .. stops[i] - 1 of all rows; with `horizontal` also these rows with all cols."""
    _, lines = spread(np.minimum(starts, n_blocks), np.minimum(stops, n_blocks))
    blocks = np.arange(n_blocks)
    down, across = np.tile(blocks, lines.size), np.repeat(lines, n_blocks)
    return (np.append(down, across), np.append(across, down)) if horizontal else (down, across)


def _random(n_blocks: int, count: int, seed: int | None, head: int, *, past_only: bool) -> Blocks:
    """`count` cols of every row, drawn among all, or with past_only among those up to the diagonal (at most all)."""
    rows = np.arange(n_blocks if count else 0)
    sizes = rows + 1 if past_only else np.full_like(rows, n_blocks)
    # _check_random requires a seed if count > 0
    places, cols = draw_distinct(
        0 if seed is None else seed, head * ROWS_OF_A_HEAD + rows, sizes=sizes, counts=np.minimum(count, sizes)
    )
    return rows[places], cols


# --------------------------------------------------------------------------------------------------------------- checks


def _check_direction(attention: str, horizontal_global_attention: bool = False) -> None:
    if not isinstance(attention, str) or attention not in ("bidirectional", "unidirectional"):
        raise ValueError(f'attention: expected "bidirectional" or "unidirectional", got {attention!r}')
    if read_switch("horizontal_global_attention", horizontal_global_attention) and attention == "unidirectional":
        raise ValueError(
            'horizontal_global_attention: global rows see the future, expected False with attention="unidirectional", '
            "got True"
        )


def _check_random(num_random_blocks: int, seed: int | None) -> None:
    count = read_integer("num_random_blocks", num_random_blocks, at_least=0, unit="blocks")
    if seed is not None:
        read_integer("seed", seed, at_least=0, at_most=MAX_SEED)
    elif count:
        raise ValueError(f"seed: expected an int, as num_random_blocks is {count}, got None")


def _check_fits(name: str, count: int, n_blocks: int) -> None:
    if count > n_blocks:
        raise ValueError(f"{name}: expected at most the blocks of a row, {n_blocks}, got {count}")


def _read_global(indices: Sequence[int], ends: Sequence[int] | None) -> tuple[np.ndarray, np.ndarray]:
    starts = read_integers("global_block_indices", indices)
    stops = starts + 1 if ends is None else read_integers("global_block_end_indices", ends)
    if starts.size != stops.size:
        raise ValueError(
            f"global_block_end_indices: expected one for each of {starts.size} global_block_indices, got {stops.size}"
        )
    if (starts < 0).any() or (stops <= starts).any():
        where = int(np.flatnonzero((starts < 0) | (stops <= starts))[0])
        raise ValueError(
            f"global_block_indices, global_block_end_indices: expected 0 <= index < end index, "
            f"got {starts[where]} and {stops[where]} at index {where}"
        )
    return starts, stops


def _keep_tuples(config: SparsityConfig, *names: str) -> None:
    """Replace sequences by tuples, which the caller cannot change and which have a hash."""
    for name in names:
        values = getattr(config, name)
        if values is not None:
            object.__setattr__(config, name, tuple(read_integers(name, values).tolist()))


# ------------------------------------------------------------------------------------------------------- configurations


@dataclass(frozen=True)
class SparsityConfig(ABC):
    """Base class of the configurations.

    num_heads                  heads of the layer
    block                      tokens per side of a block, a multiple of 16 from 16 to 256
    different_layout_per_head  True gives every head its own layout
    """

    num_heads: int
    block: int = 16
    different_layout_per_head: bool = False

    def __post_init__(self) -> None:
        read_integer("num_heads", self.num_heads, at_least=1, unit="heads")
        read_integer("block", self.block, at_least=16, at_most=256, unit="tokens")
        read_canvas(0, self.block)
        read_switch("different_layout_per_head", self.different_layout_per_head)

    @property
    def num_layout_heads(self) -> int:
        """Heads of `layout`: num_heads if their layouts differ, else 1."""
        return self.num_heads if self.different_layout_per_head else 1

    @property
    def _is_unidirectional(self) -> bool:
        return getattr(self, "attention", "bidirectional") == "unidirectional"

    @abstractmethod
    def _blocks(self, n_blocks: int, head: int) -> list[Blocks]:
        """(rows, cols) of the blocks that a head keeps, in parts; with repeats, and before the future is removed."""

    def layout(self, seq_len: int) -> BlockLayout:
        """The BlockLayout for seq_len tokens, shape (1, num_layout_heads, seq_len, seq_len).

        Full blocks only if bidirectional; if unidirectional, exact to the token on the diagonal.
        """
        canvas = read_canvas(read_integer("seq_len", seq_len, at_least=0, unit="tokens"), self.block)
        stacked = by_head(lambda head: self._head(canvas, head), range(self.num_layout_heads))
        return past_of(stacked) if self._is_unidirectional else stacked

    def make_layout(self, seq_len: int) -> torch.Tensor:
        """int64 (num_heads, rows, cols) for seq_len tokens: 1 where a block is kept, full or partial."""
        layout = self.layout(seq_len)
        # [heads * rows]
        counts = layout.indptr[0].diff(dim=-1).reshape(-1)
        rows = torch.repeat_interleave(torch.arange(counts.numel(), device=counts.device), counts)
        kept = torch.zeros(counts.numel(), layout.n_cols, dtype=torch.int64, device=counts.device)
        kept[rows, layout.indices.long()] = 1
        return kept.reshape(self.num_layout_heads, layout.n_rows, layout.n_cols).repeat(
            self.num_heads // self.num_layout_heads, 1, 1
        )

    def _head(self, canvas: Canvas, head: int) -> BlockLayout:
        parts = self._blocks(canvas.n_rows, head)
        rows, cols = (np.concatenate(side) for side in zip(*parts, strict=True))
        rows, cols = distinct_blocks(canvas, rows, cols)
        return BlockLayout.from_blocks(rows, cols, canvas.q_len, canvas.kv_len, block_size=self.block)


@dataclass(frozen=True)
class DenseSparsityConfig(SparsityConfig):
    """Every block.

    num_heads, block, different_layout_per_head  as SparsityConfig

    >>> DenseSparsityConfig(num_heads=2).layout(64).density
    1.0
    """

    def _blocks(self, n_blocks: int, head: int) -> list[Blocks]:
        return [_windows(n_blocks, [max(1, n_blocks)])]


@dataclass(frozen=True)
class FixedSparsityConfig(SparsityConfig):
    """Windows of num_local_blocks, each with global blocks that all rows see.

    num_heads, block, different_layout_per_head  as SparsityConfig
    num_local_blocks    blocks of a window; each row sees its own window
    num_global_blocks   global blocks of a window, its last ones for head 0. Divides num_local_blocks
    attention           "bidirectional", or "unidirectional": a row sees the cols up to its own
    horizontal_global_attention    True: rows of global blocks see all cols; bidirectional only
    num_different_global_patterns  number of places that heads use for the global blocks: head h uses group
                        1 + h % num_different_global_patterns, counted from the end of a window. At most
                        num_local_blocks / num_global_blocks; more than 1 needs different_layout_per_head

    If the last window is cut short, its global blocks stay at their place, or move to the end of the sequence if that
    place lies beyond it.

    Differs from DeepSpeed: a unidirectional row sees global blocks up to its own. In DeepSpeed the rows from the first
    global block of a window on see all of them, up to num_global_blocks - 1 blocks of the future.

    Child et al., "Sparse Transformers", arXiv:1904.10509, section 4.3 (fixed attention), customized by DeepSpeed.

    >>> FixedSparsityConfig(num_heads=1).make_layout(128)[0, 0].tolist()
    [1, 1, 1, 1, 0, 0, 0, 1]
    """

    num_local_blocks: int = 4
    num_global_blocks: int = 1
    attention: str = "bidirectional"
    horizontal_global_attention: bool = False
    num_different_global_patterns: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        n_local = read_integer("num_local_blocks", self.num_local_blocks, at_least=1, at_most=MAX_TOKENS, unit="blocks")
        n_global = read_integer("num_global_blocks", self.num_global_blocks, at_least=1, unit="blocks")
        if n_local % n_global:
            raise ValueError(f"num_global_blocks: expected a divisor of num_local_blocks, {n_local}, got {n_global}")
        _check_direction(self.attention, self.horizontal_global_attention)
        n_patterns = read_integer(
            "num_different_global_patterns", self.num_different_global_patterns, at_least=1, at_most=n_local // n_global
        )
        if n_patterns > 1 and not self.different_layout_per_head:
            raise ValueError(
                f"num_different_global_patterns: expected 1 when all heads share a layout, got {n_patterns}. "
                "different_layout_per_head=True gives every head its own"
            )

    def _blocks(self, n_blocks: int, head: int) -> list[Blocks]:
        n_local, n_global = self.num_local_blocks, self.num_global_blocks
        offset = n_local - (1 + head % self.num_different_global_patterns) * n_global
        end = n_blocks // n_local * n_local
        starts = np.arange(offset, end, n_local)
        if end < n_blocks:
            starts = np.append(starts, max(0, min(end + offset, n_blocks - n_global)))
        everywhere = _global(n_blocks, starts, starts + n_global, horizontal=self.horizontal_global_attention)
        return [_windows(n_blocks, [n_local]), everywhere]


@dataclass(frozen=True)
class VariableSparsityConfig(SparsityConfig):
    """Windows of given sizes, given global blocks, and random blocks in every row.

    num_heads, block, different_layout_per_head  as SparsityConfig
    num_random_blocks         random cols per row, drawn among all, or if unidirectional among those up to its own
    local_window_blocks       sizes of the first windows; the last size repeats to the end
    global_block_indices      cols that all rows see
    global_block_end_indices  None, or an end for each index: all rows see cols index .. end - 1, as far as they exist
    attention                 "bidirectional", or "unidirectional": a row sees the cols up to its own
    horizontal_global_attention  True: rows of global blocks see all cols; bidirectional only
    seed                      0 to 2**64 - 1, required if num_random_blocks > 0

    Differs from DeepSpeed: unidirectional random blocks are drawn from the past, all of it in rows with too few blocks.
    DeepSpeed draws from all cols. In a unidirectional global range a row sees the blocks up to its own; in
    DeepSpeed rows inside the range see its future blocks.

    >>> VariableSparsityConfig(num_heads=1, local_window_blocks=[1, 2]).make_layout(80)[0, 4].tolist()
    [1, 0, 0, 1, 1]
    """

    num_random_blocks: int = 0
    local_window_blocks: Sequence[int] = (4,)
    global_block_indices: Sequence[int] = (0,)
    global_block_end_indices: Sequence[int] | None = None
    attention: str = "bidirectional"
    horizontal_global_attention: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_random(self.num_random_blocks, self.seed)
        sizes = read_integers("local_window_blocks", self.local_window_blocks)
        if not sizes.size or (sizes < 1).any():
            raise ValueError(f"local_window_blocks: expected sizes of at least 1, got {self.local_window_blocks!r}")
        _read_global(self.global_block_indices, self.global_block_end_indices)
        _keep_tuples(self, "local_window_blocks", "global_block_indices", "global_block_end_indices")
        _check_direction(self.attention, self.horizontal_global_attention)

    def _blocks(self, n_blocks: int, head: int) -> list[Blocks]:
        _check_fits("num_random_blocks", self.num_random_blocks, n_blocks)
        starts, stops = _read_global(self.global_block_indices, self.global_block_end_indices)
        return [
            _random(n_blocks, self.num_random_blocks, self.seed, head, past_only=self._is_unidirectional),
            _windows(n_blocks, list(self.local_window_blocks)),
            _global(n_blocks, starts, stops, horizontal=self.horizontal_global_attention),
        ]


@dataclass(frozen=True)
class BigBirdSparsityConfig(SparsityConfig):
    """A sliding window, random blocks in every row, and the first blocks as global blocks.

    num_heads, block, different_layout_per_head  as SparsityConfig
    num_random_blocks          random cols per row, drawn among all, or if unidirectional among those up to its own;
                               they may coincide with window or global blocks
    num_sliding_window_blocks  width of the window: |row - col| <= this // 2
    num_global_blocks          number of leading rows and cols that are kept whole
    attention                  "bidirectional", or "unidirectional": a row sees the cols up to its own
    seed                       0 to 2**64 - 1, required if num_random_blocks > 0

    Differs from DeepSpeed: unidirectional rows with fewer than num_random_blocks blocks take all of them; in DeepSpeed
    more than one random block raises an error. `masks.bigbird` draws random blocks outside window and global blocks.

    Zaheer et al., "Big Bird", arXiv:2007.14062, section 2 (internal transformer construction).

    >>> BigBirdSparsityConfig(num_heads=1, num_random_blocks=0).make_layout(96)[0, 3].tolist()
    [1, 0, 1, 1, 1, 0]
    """

    num_random_blocks: int = 1
    num_sliding_window_blocks: int = 3
    num_global_blocks: int = 1
    attention: str = "bidirectional"
    seed: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_random(self.num_random_blocks, self.seed)
        read_integer("num_sliding_window_blocks", self.num_sliding_window_blocks, at_least=1, unit="blocks")
        read_integer("num_global_blocks", self.num_global_blocks, at_least=0, unit="blocks")
        _check_direction(self.attention)

    def _blocks(self, n_blocks: int, head: int) -> list[Blocks]:
        for name in ("num_random_blocks", "num_sliding_window_blocks", "num_global_blocks"):
            _check_fits(name, getattr(self, name), n_blocks)
        return [
            _random(n_blocks, self.num_random_blocks, self.seed, head, past_only=self._is_unidirectional),
            _sliding(n_blocks, self.num_sliding_window_blocks),
            _global(n_blocks, np.array([0]), np.array([self.num_global_blocks]), horizontal=True),
        ]


@dataclass(frozen=True)
class BSLongformerSparsityConfig(SparsityConfig):
    """A sliding window, and given global blocks that see all blocks and are seen by all.

    num_heads, block, different_layout_per_head  as SparsityConfig
    num_sliding_window_blocks  width of the window: |row - col| <= this // 2
    global_block_indices, global_block_end_indices  as VariableSparsityConfig, rows and cols
    attention                  "bidirectional", or "unidirectional": a row sees the cols up to its own

    Beltagy et al., "Longformer", arXiv:2004.05150, section 3.1, in blocks.

    >>> BSLongformerSparsityConfig(num_heads=1).make_layout(96)[0, 3].tolist()
    [1, 0, 1, 1, 1, 0]
    """

    num_sliding_window_blocks: int = 3
    global_block_indices: Sequence[int] = (0,)
    global_block_end_indices: Sequence[int] | None = None
    attention: str = "bidirectional"

    def __post_init__(self) -> None:
        super().__post_init__()
        read_integer("num_sliding_window_blocks", self.num_sliding_window_blocks, at_least=1, unit="blocks")
        _read_global(self.global_block_indices, self.global_block_end_indices)
        _keep_tuples(self, "global_block_indices", "global_block_end_indices")
        _check_direction(self.attention)

    def _blocks(self, n_blocks: int, head: int) -> list[Blocks]:
        _check_fits("num_sliding_window_blocks", self.num_sliding_window_blocks, n_blocks)
        starts, stops = _read_global(self.global_block_indices, self.global_block_end_indices)
        return [
            _sliding(n_blocks, self.num_sliding_window_blocks),
            _global(n_blocks, starts, stops, horizontal=True),
        ]


@dataclass(frozen=True)
class LocalSlidingWindowSparsityConfig(SparsityConfig):
    """A sliding window only.

    num_heads, block  as SparsityConfig
    num_sliding_window_blocks  width of the window: |row - col| <= this // 2; if unidirectional only the half up to the
                               diagonal, two blocks per row for a width of 3
    attention                  "unidirectional" (the default here), or "bidirectional"

    Beltagy et al., "Longformer", arXiv:2004.05150, section 3.1, in blocks.

    >>> LocalSlidingWindowSparsityConfig(num_heads=1).make_layout(96)[0, 3].tolist()
    [0, 0, 1, 1, 0, 0]
    """

    different_layout_per_head: bool = field(default=False, init=False)
    num_sliding_window_blocks: int = 3
    attention: str = "unidirectional"

    def __post_init__(self) -> None:
        super().__post_init__()
        read_integer("num_sliding_window_blocks", self.num_sliding_window_blocks, at_least=1, unit="blocks")
        _check_direction(self.attention)

    def _blocks(self, n_blocks: int, head: int) -> list[Blocks]:
        _check_fits("num_sliding_window_blocks", self.num_sliding_window_blocks, n_blocks)
        return [_sliding(n_blocks, self.num_sliding_window_blocks)]
