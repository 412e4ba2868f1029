"""Builds plans of packed documents on the GPU that holds their boundaries, without waiting for it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..blocks.block_list import Frame
from ..plan_format import FINE_TILE, TILE, Plan, with_dynamic_lengths
from ..runtime import tracing
from .block_selection import is_on_gpu
from .tile_choice import WHOLE, Shares

# tokens of a side: positions and sums of two of them are int32
MAX_TOKENS = (1 << 30) - 1
INVALID = (
    "cu_seqlens must start at 0, never decrease, and end within the length, with no document longer than max_seqlen"
)
# lists are not sorted by length if there are more than MAX_SORTED and none can have more than MAX_TILES_UNSORTED tiles:
# sorting takes time that grows with the square of their number, and saves at most the time of the longest one
MAX_SORTED, MAX_TILES_UNSORTED = 4096, 8
# entries of the lists, words of the bitmasks: offsets are int32
MAX_ENTRIES = MAX_WORDS = (1 << 31) - (1 << 12)


class Documents(NamedTuple):
    """Packed documents, and which keys of its document a query attends to.

    cu_q         integers (batch, documents + 1), contiguous: where the documents of each sequence begin and end, among
                 its queries
    cu_kv        the same among its keys; None if they are the same. Two fields with one tensor would be an error of
                 torch.compile (torch 2.11)
    left, right  tokens before and after the query's own position, or None for all. Positions are aligned at the end of
                 each document
    max_seqlen   tokens of the longest document, at most; None if not known
    prefix       integers (batch, documents), contiguous: number of keys at the beginning of each document that all of
                 its queries attend to, whatever `right` says; only without `left`. None: no prefixes
    """

    cu_q: Tensor
    cu_kv: Tensor | None
    q_len: int
    kv_len: int
    left: int | None
    right: int | None
    max_seqlen: int | None
    prefix: Tensor | None = None

    @property
    def batch(self) -> int:
        """Sequences."""
        return self.cu_q.shape[0]

    @property
    def number(self) -> int:
        """Documents of a sequence, including empty ones."""
        return self.cu_q.shape[1] - 1

    @property
    def is_square(self) -> bool:
        """Whether queries and keys have the same documents."""
        return self.cu_kv is None

    @property
    def boundaries(self) -> tuple[Tensor, Tensor]:
        """cu_q and cu_kv, equal if `is_square`."""
        return self.cu_q, self.cu_q if self.cu_kv is None else self.cu_kv

    @property
    def longest(self) -> int:
        """Tokens of a document, at most."""
        most = max(self.q_len, self.kv_len)
        return most if self.max_seqlen is None else min(most, self.max_seqlen)

    def reach(self, causal: bool) -> tuple[int, int]:
        """Keys before and after its own position that a query attends to, at most, if `is_square`."""
        most = max(0, self.longest - 1)
        left, right = (most if side is None else min(most, side) for side in (self.left, self.right))
        return left, 0 if causal else right if self.prefix is None else most


def can_build(documents: Documents) -> bool:
    """Whether kernels can be launched on the boundaries: plain GPU tensors, with no tracing active."""
    return is_on_gpu(documents.cu_q) and min(documents.q_len, documents.kv_len) > 0


def shares_of(documents: Documents) -> Shares:
    """The shares of documents of equal lengths, since counting the tiles would wait for the device."""
    # boundaries with room for documents that a sequence does not have say nothing about their length
    if documents.number > documents.q_len // FINE_TILE * 8:
        return WHOLE
    length = documents.q_len / max(1, documents.number)
    left, right = documents.reach(causal=False)
    keys = min(length, left + right + 1)
    waste = [(tokens + FINE_TILE) / (tokens + TILE) for tokens in (length, keys)]
    return Shares(waste[0] * waste[1], 1.0)


def _n_runs(documents: Documents, causal: bool, tile: int) -> int:
    """Runs of a tile row, at most: one less than the tiles whose pairs may differ from those of the tile before.

    A boundary inside a tile makes two such tiles: its own and the next. A limited side of a window has a boundary for
    each query; those of a tile row lie within `tile` consecutive tokens, so in two tiles, which makes three. The end of
    a prefix is one more boundary.
    """
    left = 2 if documents.left is None else 3
    right = 2 if documents.right is None and not causal else 3
    prefix = 0 if documents.prefix is None else 2
    if not documents.is_square:
        # and the boundary after the last document; each query has two boundaries
        return min(4 * tile, min(tile, documents.number) * (left + right + prefix) + 1)
    # documents begin and end in the tile of the queries, but for the begin of the first and the end of the last
    is_causal = causal or documents.right == 0
    return left + 2 + (0 if is_causal else right) + prefix - 1


def _capacity(documents: Documents, causal: bool, tile: int) -> tuple[int, int]:
    """Tiles of a tile row and of a tile column, at most."""
    q_tiles, kv_tiles = -(-documents.q_len // tile), -(-documents.kv_len // tile)
    most = 1 + sum(_reach(documents, causal, tile))
    return min(kv_tiles, most), min(q_tiles, most)


def _reach(documents: Documents, causal: bool, tile: int) -> tuple[int, int]:
    """(before, after): only tile rows c - before to c + after can have a tile in tile column c."""
    if not documents.is_square:
        return -(-documents.kv_len // tile), -(-documents.q_len // tile)
    left, right = documents.reach(causal)
    return -(-right // tile), -(-left // tile)


def build_packed_plan(documents: Documents, *, causal: bool, tile: int) -> Plan:
    """The plan of packed documents; lists have room for the longest documents, and some bitmasks are unused.

    causal  also drops the pairs with kv_pos > q_pos + (kv_len - q_len)
    tile    tokens per side of a tile, TILE or FINE_TILE
    raises  ValueError if the lists or the bitmasks are too long. Later, a device-side assert if the boundaries start
            elsewhere than at 0, decrease or exceed the length, or if a document is longer than max_seqlen
    """
    from ..kernels.triton import packed_plan

    frame = Frame(documents.batch, 1, documents.q_len, documents.kv_len, (tile, tile))
    n_runs, capacity = _n_runs(documents, causal, tile), _capacity(documents, causal, tile)
    most = frame.batch * max(frame.n_rows * capacity[0], frame.n_cols * capacity[1])
    n_words = frame.batch * frame.n_rows * n_runs * tile * (tile // 32)
    if n_words >= MAX_WORDS:
        raise ValueError(
            f"length: expected fewer tokens, or fewer documents with kv_cu_seqlens, got {documents.q_len} tokens and "
            f"{documents.number} documents in each of {documents.batch} sequences, whose bitmasks would have {n_words} "
            "words: give boundaries on the CPU"
        )
    if most >= MAX_ENTRIES:
        raise ValueError(
            f"max_seqlen: expected documents short enough for a plan of {MAX_ENTRIES} tiles, got {documents.longest} "
            f"tokens of {documents.q_len} x {documents.kv_len}: give the length of the longest one (it does not help "
            "with kv_cu_seqlens), or boundaries on the CPU"
        )
    # sums of positions and window have to fit into int32
    side = max(documents.q_len, documents.kv_len)
    packing = packed_plan.Packing(
        batch=documents.batch,
        q_len=documents.q_len,
        kv_len=documents.kv_len,
        n_documents=documents.number,
        left=side if documents.left is None else min(side, documents.left),
        right=side if documents.right is None else min(side, documents.right),
        has_window=documents.left is not None or documents.right is not None,
        has_prefix=documents.prefix is not None,
        max_seqlen=(documents.longest, documents.longest),
        causal=causal,
        tile=tile,
        n_runs=n_runs,
        capacity=capacity,
        reach=_reach(documents, causal, tile),
        is_sorted=min(frame.n_rows, frame.n_cols) <= MAX_SORTED or max(capacity) > MAX_TILES_UNSORTED,
    )
    with tracing.on_device(documents.cu_q.device):
        tensors, is_valid = packed_plan.build(*documents.boundaries, documents.prefix, packing)
        # on a GPU a device-side assert: without it the process would go on with wrong results
        torch._assert_async(is_valid if documents.batch == 1 else is_valid.all(), INVALID)
    return with_dynamic_lengths(Plan._make(tensors))
