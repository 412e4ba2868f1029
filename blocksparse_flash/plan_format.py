"""Format of the plan that kernels iterate over: its tensors, the encoding of their entries, and every constant."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .blocks.transfer import to_device

# tokens per side of a tile: of the default plans, and of the finer ones
TILE = 128
FINE_TILE = 64
# tokens of the short side of the tiles of a gathered plan, whose long side is FINE_TILE; tiles per step
GATHERED_TILE = 16
TILES_PER_STEP = FINE_TILE // GATHERED_TILE
# index of the first of the three tensors of tile rows in a Plan, and of those of tile columns
ROW_LISTS, COL_LISTS = 0, 3
# int32 words of a record; positions of its fields (the last two words are 0)
RECORD = 8
NUMBER, BEGIN, N_TILES, N_PARTIAL, POSITION, N_LONG = range(6)
# subtracted from the entry of a partial tile; greater than every tile index: lengths are below 2^31, and plans of
# 64 x 64 tiles are refused above PARTIAL tiles
PARTIAL = 1 << 24
# value of tile_of for a SelectedPlan, whose kernels have no tiles
BY_KEY_BLOCK = 0
# rows of the query blocks of a work item of a SelectedPlan, at most
MAX_ITEM_ROWS = 2048
# a tile row is worth splitting only if it has more than 1 / SPLIT_SHARE of the tiles of its head, so that fewer than
# SPLIT_SHARE rows of a head are
SPLIT_SHARE = 64


class Plan(NamedTuple):
    """The tiles of a layout, by tile row (for out and dQ) and by tile column (for dK and dV). All int32.

    A tile has 128 x 128 pairs, or 64 x 64: `tile` is its side. Sizes below are those of 128 x 128 tiles.

    row_records      (batch | 1, heads | 1, tile rows, 8)  one record per tile row, longest first
    row_indices      (nnz + padding,)    list entries of all tile rows; record: begin, n_tiles
    row_bitmask_ids  (nnz + padding,)    bitmask of each entry; 0 and not read for a full tile
    col_*            the same by tile column; their entries hold tile rows
    bitmasks         (distinct, 128, 4)  bit j of word w of row i is the pair (query i, key 32 w + j)

    Record
        NUMBER     tile row of this record
        BEGIN      its first entry in row_indices
        N_TILES    its entries
        N_PARTIAL  partial tiles among them
        POSITION   of record i: where the record of tile row i is, to find a given tile row
        N_LONG     number of records at the front with over twice the mean number of tiles, never all records; the
                   same number in every record. A launch starts the long ones of all heads first

    List entries of a tile row: partial tiles, then full tiles, each ascending
        partial  tile column - 2^24, hence negative; bits 0-23 are the tile column
        full     tile column

    All 128 x 128 pairs of a full tile exist and attend, so kernels neither mask nor bounds-check it. Tiles on a ragged
    edge are partial, with zeros past the end.

    A plan of 64 x 64 tiles has the same tensors, in tile rows, tile columns and list entries of 64 tokens, and bitmasks
    (distinct, 64, 2).

    A gathered plan is for scattered small blocks. Its tiles have 64 queries x 16 keys in the lists of tile rows, and
    16 queries x 64 keys in those of tile columns. Kernels compute four of them per step, from anywhere in the sequence:

    *_indices    (steps + padding, 4)  index of the 16 tokens of each tile; -1 for an empty tile, which fills up the
                 first step of a tile row. If steps of four neighbors (aligned to 64 tokens) are not many more, the
                 list has those instead: (steps + padding, 1), index of their 64 tokens
    *_bitmask_ids  (steps + padding, 4)  bitmask of each tile; 0, which has no bits, for an empty one
    records      BEGIN, N_TILES and N_PARTIAL count steps; steps with a partial or an empty tile come first
    bitmasks     (distinct, 64)  one word for each token of the long side, in tiles of both kinds: bits 0-15 are its
                 pairs with the 16 tokens of the short side, and bits 16-31 repeat them

    n_split_rows, n_split_cols and is_lower_triangular are read from tensor shapes: no call waits for the device.
    """

    row_records: Tensor
    row_indices: Tensor
    row_bitmask_ids: Tensor
    col_records: Tensor
    col_indices: Tensor
    col_bitmask_ids: Tensor
    bitmasks: Tensor

    @property
    def tile(self) -> int:
        """Tokens per side of a tile: 128 or 64; for a gathered plan 16, the short side."""
        return tile_of(self)

    @property
    def n_split_rows(self) -> int:
        """Tile rows worth splitting, of the head that has most.

        They have over 1 / SPLIT_SHARE of its tiles, and over twice the mean.
        """
        return n_split_of(self.row_indices.shape[0], self.row_bitmask_ids.shape[0])

    @property
    def n_split_cols(self) -> int:
        """Tile columns worth splitting, of the head that has most."""
        return n_split_of(self.col_indices.shape[0], self.col_bitmask_ids.shape[0])

    @property
    def is_lower_triangular(self) -> bool:
        """Whether all tiles are known to lie on the diagonal or below it, as those of causal masks."""
        return is_lower_of(self.row_indices.shape[0], self.row_bitmask_ids.shape[0])

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Plan:
        """The same plan on another device."""
        return with_dynamic_lengths(Plan(*to_device(self, device, non_blocking=non_blocking)))


class SelectedPlan(NamedTuple):
    """The key blocks that each query block selects, by query block (CSR) and by key block (CSC). All int32.

    Heads are those that select: query heads that share a selection count once. They are numbered over all batches
    (batch_head), and query blocks over all heads: batch_head * n_query_blocks + number within the head.

    An entry is a query block and a key block that it selects. A round is a range of query_blocks_per_round query
    blocks, whose partial results fit into the workspace; each kernel is launched once per round. A list has the entries
    of one head and one key block in one round. Each round has lists for heads_per_round heads (SelectedSizes), from the
    head of its first query block on: list = (round * heads_per_round + head of the round) * n_key_blocks + key block.
    Lists may be empty. A work item is a chunk of a list with at most MAX_ITEM_ROWS rows of q.

    By query block, to combine partial results
        indptr      (batch * heads, n_query_blocks + 1)  entries of query block i of a head: indptr[i] to
                    indptr[i + 1] - 1
        key_blocks  (capacity,)  key block of each entry; -1 if unused, or not within the keys of the query block's
                    tokens

    By key block, to compute them
        entries     (capacity + padding, 2)  in the order of the lists: index into key_blocks; query block within its
                    head, minus PARTIAL if some pair does not attend
        work_item_offsets  (lists + 1,)  first work item of each list
        work_items  (bound + padding, 4)  batch_head; key block; first of `entries`; one past the last

    For both
        ranges      (batch | 1, tokens, 2)  keys of each token: first, one past the last; neither decreases along the
                    tokens
        sizes       (0, rows of a query block, rows of a token, keys of a key block, query blocks of a round): no
                    values, since operators take only tensors, and reading values would wait for the device
    """

    indptr: Tensor
    key_blocks: Tensor
    entries: Tensor
    work_item_offsets: Tensor
    work_items: Tensor
    ranges: Tensor
    sizes: Tensor


class Round(NamedTuple):
    """One round of a SelectedPlan: its number, its first query block, and its lists."""

    i_round: int
    first_query_block: int
    first_list: int
    end_list: int


class SelectedSizes(NamedTuple):
    """Sizes of a SelectedPlan, and of its rounds.

    n_batch_heads   heads that select, of all batches
    n_query_blocks, n_key_blocks  of a head
    query_rows, rows_per_token, keys, query_blocks_per_round  see SelectedPlan.sizes
    max_key_blocks  entries of a query block, at most
    n_tokens        tokens of a head
    has_batches     whether each batch has its own ranges
    """

    n_batch_heads: int
    n_query_blocks: int
    n_key_blocks: int
    query_rows: int
    rows_per_token: int
    keys: int
    query_blocks_per_round: int
    max_key_blocks: int
    n_tokens: int
    has_batches: bool

    @property
    def total_query_blocks(self) -> int:
        """Query blocks of all heads."""
        return self.n_batch_heads * self.n_query_blocks

    @property
    def capacity(self) -> int:
        """Entries of all query blocks, at most."""
        return self.total_query_blocks * self.max_key_blocks

    @property
    def heads_per_round(self) -> int:
        """Heads that may have query blocks in a round."""
        return min(self.n_batch_heads, (self.query_blocks_per_round - 1) // self.n_query_blocks + 2)

    @property
    def lists_per_round(self) -> int:
        return self.heads_per_round * self.n_key_blocks

    @property
    def n_rounds(self) -> int:
        return -(-self.total_query_blocks // self.query_blocks_per_round)

    @property
    def n_lists(self) -> int:
        """Lists of all rounds."""
        return self.n_rounds * self.lists_per_round

    @property
    def rounds(self) -> tuple[Round, ...]:
        """The rounds, in order."""
        blocks, lists = self.query_blocks_per_round, self.lists_per_round
        return tuple(Round(i, i * blocks, i * lists, (i + 1) * lists) for i in range(self.n_rounds))

    @property
    def max_slots(self) -> int:
        """Entries of a round, at most."""
        return self.query_blocks_per_round * self.max_key_blocks

    @property
    def max_item_blocks(self) -> int:
        """Query blocks of a work item, at most."""
        return MAX_ITEM_ROWS // self.query_rows

    @property
    def max_work_items(self) -> int:
        """Upper bound of the work items of a round: the full ones, and one partly filled item per list."""
        return self.lists_per_round + self.max_slots * self.query_rows // MAX_ITEM_ROWS

    @property
    def max_total_work_items(self) -> int:
        """Upper bound of the work items of all rounds."""
        return min(self.n_lists, self.capacity) + self.capacity // self.max_item_blocks


def tile_of(plan: Sequence[Tensor]) -> int:
    """`Plan.tile` of the tensors of a plan; TILE without one."""
    if not plan:
        return TILE
    # bitmasks, or the `sizes` of a SelectedPlan; distinguished by dimensions: 3 for bitmasks of tiles, 2 for gathered
    # ones, 5 for `sizes`
    last = plan[-1]
    if last.dim() == 3:
        return last.shape[1]
    return GATHERED_TILE if last.dim() == 2 else BY_KEY_BLOCK


def loads_per_step(plan: Sequence[Tensor]) -> tuple[int, int]:
    """Loads per step of tile rows and of tile columns: 4, or 1 for four neighbors; 0 if the plan is not gathered."""
    if tile_of(plan) != GATHERED_TILE:
        return 0, 0
    return plan[ROW_LISTS + 1].shape[1], plan[COL_LISTS + 1].shape[1]


def side_of(tile: int) -> int:
    """Tokens per tile row and per tile column of plans with this `Plan.tile`."""
    return max(tile, FINE_TILE)


def list_lengths(n_tiles: int, n_split: int, *, of_rows: bool, is_lower: bool = False) -> tuple[int, int]:
    """(length of indices, length of bitmask_ids) of a list of n_tiles entries.

    n_split   records at the front that are worth splitting: fewer than SPLIT_SHARE
    is_lower  `Plan.is_lower_triangular`

    At least one entry of padding: kernels read one index ahead. The lengths of indices, of bitmask_ids of rows and of
    those of columns are 1, 3 and 5 mod 8: torch.compile takes equal lengths for one symbol, and would recompile for the
    next layout, where they differ. Indices of rows and of columns are equally many, except of gathered tiles.
    """
    # 1 mod 8, and at least 9
    n_indices = 8 * max(1, -(-n_tiles // 8)) + 1
    return n_indices, n_indices + 8 * (n_split + SPLIT_SHARE * is_lower) + (2 if of_rows else 4)


def n_split_of(n_indices: int, n_bitmask_ids: int) -> int:
    """`n_split` of `list_lengths`."""
    return (n_bitmask_ids - n_indices) // 8 % SPLIT_SHARE


def is_lower_of(n_indices: int, n_bitmask_ids: int) -> bool:
    """`is_lower` of `list_lengths`."""
    return (n_bitmask_ids - n_indices) // 8 >= SPLIT_SHARE


def mark_dynamic(tensors: Iterable[Tensor]) -> None:
    """Mark the first dimension as dynamic, so that torch.compile does not recompile for another layout.

    Does what torch._dynamo.maybe_mark_dynamic does, whose import takes 3 s.
    """
    for tensor in tensors:
        tensor._dynamo_weak_dynamic_indices = {0}  # type: ignore[attr-defined]


def with_dynamic_lengths(plan: Plan) -> Plan:
    """The plan, with the lengths of its lists marked as dynamic."""
    mark_dynamic((plan.row_indices, plan.row_bitmask_ids, plan.col_indices, plan.col_bitmask_ids, plan.bitmasks))
    return plan
