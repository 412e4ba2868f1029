"""Comparison of a layout with a predicate, by a literal double loop over positions in plain Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from hypothesis import strategies as st

from blocksparse_flash import BlockLayout

# lengths (q_len, kv_len) and block sizes: one block; ragged ends; no ragged end; a decoding step; fewer and more
# queries than keys, by no multiple of a block; rectangular blocks; a side that is not a power of two; 14 and 15 more
# keys than queries, where the diagonal masks one pair of a block, or none
SQUARE_GRIDS = [(1, 16), (96, 16), (130, 64), (192, 48), (203, 48)]
GRIDS = [((length, length), block_size) for length, block_size in SQUARE_GRIDS] + [
    ((1, 113), 16),
    ((70, 203), 64),
    ((203, 70), 48),
    ((128, 128), (32, 64)),
    ((113, 203), (32, 64)),
    ((150, 90), (64, 32)),
    ((50, 64), 16),
    ((49, 64), 16),
]

# numbers of tokens near 16, 48 and 64, and grids of blocks of these sizes
EDGES = [16 * k + more for k in (1, 3, 4) for more in (-2, -1, 0, 1)]
EDGE_GRIDS = [(80, 16), (110, 48), (130, 64)]

# strategies for (length, block_size): mostly several blocks, often ragged
_SIDES = st.sampled_from([16, 48, 64, 128])
_LENGTHS = st.integers(1, 300)
ANY_SQUARE_GRID = st.tuples(_LENGTHS, _SIDES | st.tuples(_SIDES, _SIDES))
ANY_GRID = ANY_SQUARE_GRID | st.tuples(st.tuples(_LENGTHS, _LENGTHS), _SIDES | st.tuples(_SIDES, _SIDES))


def both(length: int | tuple[int, int]) -> tuple[int, int]:
    """(q_len, kv_len) of the length argument of a mask builder."""
    return length if isinstance(length, tuple) else (length, length)


def mask_of(attends: Callable[[int, int], bool], q_len: int, kv_len: int) -> torch.Tensor:
    """bool (q_len, kv_len): attends(q_pos, kv_pos) for every pair, one pair at a time."""
    rows = [[bool(attends(q_pos, kv_pos)) for kv_pos in range(kv_len)] for q_pos in range(q_len)]
    return torch.tensor(rows, dtype=torch.bool).reshape(q_len, kv_len)


def assert_attends(layout: BlockLayout, attends: Callable[[int, int], bool]) -> None:
    """Raises unless `layout` holds exactly the pairs for which attends(q_pos, kv_pos), in canonical form."""
    assert layout.shape[:2] == (1, 1), f"one mask for all batches and heads expected, got shape {layout.shape}"
    assert_heads_attend(layout, [attends])


def assert_heads_attend(layout: BlockLayout, heads: Sequence[Callable[[int, int], bool]]) -> None:
    """Raises unless head h of `layout` holds exactly the pairs for which heads[h](q_pos, kv_pos), in canonical form."""
    assert layout.shape[:2] == (1, len(heads)), f"{len(heads)} heads expected, got shape {layout.shape}"
    q_len, kv_len = layout.shape[2:]
    expected = torch.stack([mask_of(attends, q_len, kv_len) for attends in heads])
    differing = (layout.to_dense()[0] != expected).nonzero()
    if len(differing):
        head, q_pos, kv_pos = differing[0].tolist()
        raise AssertionError(
            f"{len(differing)} pairs differ; the first is query {q_pos}, key {kv_pos}, "
            f"{f'of head {head}, ' if len(heads) > 1 else ''}which should"
            f"{'' if expected[head, q_pos, kv_pos] else ' not'} attend"
        )
    # canonical form: full blocks are stored as full, empty blocks are not stored
    assert layout == BlockLayout.from_dense(expected, block_size=layout.block_size)
