"""Plan construction on a GPU from the bits of selected blocks, in two launches.

    count   tiles and partial tiles of every tile row and tile column; every bitmask that a tile can have, or, where
            tiles have many blocks, the bitmask of each tile; the bitmasks of tiles that packed documents cut
    list    records in launch order, and the tiles of each tile row and tile column, partial ones first

A program handles some tile rows or tile columns of a head. It derives the offsets of its lists and its launch order
from the counts of all: nothing is sorted, and the order is deterministic. Takes O(tiles of the grid) time.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ... import plan_format
from ...runtime.launch import Launch, Memory, allocator, contiguous
from .block_selection import CHUNK, BlockGrid, fill_tail, sums_before
from .tile import BEGIN, N_LONG, N_PARTIAL, N_TILES, NUMBER, PARTIAL, POSITION, RECORD

# tile rows (or columns) of a program, tiles of a step; with 128 tiles list_kernel spills on sm80
LINES, MINORS = 8, 64
# heads of a step in max_long_lines
HEADS = 16
# bitmask words of a program; words of each query in a step of write_cut_bitmasks
WORDS, CUT_WORDS = 1024, 16
# up to MAX_BLOCKS_PER_TILE blocks per tile, every subset of blocks has a bitmask (up to ALL_EDGES blocks, with every
# ragged edge); beyond that each tile of the grid has its own
MAX_BLOCKS_PER_TILE, ALL_EDGES = 16, 4
# for EDGES: ragged edges with bitmasks of their own (1 right, 2 bottom, 3 both), or OWN
RIGHT, BOTTOM, OWN = 1, 2, tl.constexpr(4)
# by how much the bitmask ids of a list are longer than its indices
ROW_IDS, COL_IDS = (
    tl.constexpr(n_ids - n_indices)
    for n_indices, n_ids in (plan_format.list_lengths(0, 0, of_rows=of_rows) for of_rows in (True, False))
)


class DocumentSizes(NamedTuple):
    """Sizes of packed documents.

    batch        sequences with their own boundaries; 1 if all share one list
    n_documents  documents per sequence, at most
    """

    batch: int
    n_documents: int


class Grid(NamedTuple):
    """The tile grid of a block grid.

    tile  queries and keys per side of a tile
    rows_per_token  consecutive queries at the position of one token, a power of two; q_len is a multiple
    documents  None: every sequence is one document
    """

    blocks: BlockGrid
    causal: bool
    tile: int = plan_format.TILE
    rows_per_token: int = 1
    documents: DocumentSizes | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Tile rows and tile columns."""
        return -(-self.blocks.q_len // self.tile), -(-self.blocks.kv_len // self.tile)

    @property
    def blocks_per_tile(self) -> tuple[int, int]:
        """Blocks per tile along each dimension, at least 1."""
        return max(1, self.tile // self.blocks.block_size[0]), max(1, self.tile // self.blocks.block_size[1])

    @property
    def n_patterns(self) -> int:
        """Number of subsets of the blocks of a tile."""
        return 1 << self.blocks_per_tile[0] * self.blocks_per_tile[1]

    @property
    def n_diagonals(self) -> int:
        """Distances of a tile from the diagonal, if it crosses the tile: 2 if each query is a token."""
        return min(self.tile, self.rows_per_token) + 1 if self.causal else 0

    @property
    def edges(self) -> int:
        """EDGES of the kernels. With many patterns, edges that the patterns or the diagonal contain are left out."""
        n_blocks, (q_len, kv_len) = self.blocks_per_tile[0] * self.blocks_per_tile[1], self.blocks[3:5]
        if n_blocks <= ALL_EDGES:
            return RIGHT + BOTTOM
        right = kv_len % self.tile != 0 and not self.causal
        bottom = q_len % self.tile != 0 and q_len % self.blocks.block_size[0] != 0
        n_edges = (1 + right) * (1 + bottom)
        if n_blocks > MAX_BLOCKS_PER_TILE or self.n_tiles < self.n_patterns * n_edges * (1 + self.n_diagonals):
            return OWN.value
        return RIGHT * right + BOTTOM * bottom

    @property
    def n_tiles(self) -> int:
        """Tiles of all heads."""
        return self.blocks.n_batch_heads * self.shape[0] * self.shape[1]

    @property
    def n_shared(self) -> int:
        """Bitmasks that tiles share: patterns x edges x (1 + diagonals); or one per tile of the grid."""
        edges = self.edges
        if edges == OWN.value:
            return max(1, self.n_tiles)
        n_edges = (1 + (edges & RIGHT)) * (1 + edges // BOTTOM)
        return self.n_patterns * n_edges * (1 + self.n_diagonals)

    @property
    def n_mixed(self) -> int:
        """Upper bound of the number of tile rows of a head with tokens of several documents."""
        return 0 if self.documents is None else min(self.documents.n_documents, self.shape[0])

    @property
    def has_cuts(self) -> bool:
        """Whether tiles that documents cut have their own bitmasks, after the shared ones."""
        return self.documents is not None and self.edges != OWN.value

    @property
    def n_bitmasks(self) -> int:
        """Number of bitmasks: `n_shared`, and those of the tiles that documents cut, see `tile_kinds`."""
        n_cut = self.n_mixed * self.shape[1] + 2 * self.shape[0] if self.has_cuts else 0
        return self.n_shared + self.blocks.n_batch_heads * n_cut

    @property
    def words_of_bitmask(self) -> int:
        """int32 words of a bitmask."""
        return self.tile * (self.tile // 32)

    def sizes(self) -> dict[str, Any]:
        """The size arguments of the kernels."""
        blocks, (q_tiles, kv_tiles) = self.blocks, self.shape
        return {
            "n_batch_heads": blocks.n_batch_heads,
            "n_rows": blocks.n_rows,
            "n_cols": blocks.n_cols,
            "n_words": blocks.n_words,
            "q_len": blocks.q_len,
            "kv_len": blocks.kv_len,
            "q_tiles": q_tiles,
            "kv_tiles": kv_tiles,
            "heads_of_documents": 1 if self.documents is None else blocks.n_batch_heads // self.documents.batch,
            "n_mixed": self.n_mixed,
            "BLOCK_Q": blocks.block_size[0],
            "BLOCK_KV": blocks.block_size[1],
            "ROWS_PER_TOKEN": self.rows_per_token,
            "EDGES": self.edges,
            "CAUSAL": self.causal,
            "TILE": self.tile,
        }


SIZES = ["n_batch_heads", "n_rows", "n_cols", "n_words", "q_len", "kv_len", "q_tiles", "kv_tiles"]
SIZES += ["heads_of_documents", "n_mixed"]


# fmt: off
@triton.jit
def number_of_mixed(b_document, o_row, n_mixed, q_tiles):
    """The index, below n_mixed, of a tile row with tokens of several documents, the last of them b_document."""
    return tl.where(n_mixed < q_tiles, b_document - 1, o_row)


@triton.jit
def tile_kinds(
    bits_ptr, documents_ptr, batch_head, o_row, o_col, n_rows, n_cols, n_words, q_len, kv_len, q_tiles, kv_tiles,
    heads_of_documents, n_mixed,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, ROWS_PER_TOKEN: tl.constexpr, EDGES: tl.constexpr,
    CAUSAL: tl.constexpr, TILE: tl.constexpr,
):
    """int32 (is stored, is full, bitmask id) of the tiles (o_row, o_col), which broadcast.

    Documents limit the keys of each query to a range. In a tile row within one document, the range cuts at most two
    tiles, at its ends. In a tile row with several documents, it may cut every tile; there are at most as many such rows
    as documents. The bitmasks of these tiles follow the shared ones, head by head, see `write_cut_bitmasks`.
    """
    PARTS_Q: tl.constexpr = TILE // BLOCK_Q if BLOCK_Q < TILE else 1
    PARTS_KV: tl.constexpr = TILE // BLOCK_KV if BLOCK_KV < TILE else 1
    PART_Q: tl.constexpr = TILE // PARTS_Q
    PART_KV: tl.constexpr = TILE // PARTS_KV
    # tokens of a tile row, and tile rows that start within TILE tokens
    TOKENS: tl.constexpr = TILE // ROWS_PER_TOKEN if ROWS_PER_TOKEN < TILE else 1
    STEPS: tl.constexpr = TILE // TOKENS
    p_bits = bits_ptr + batch_head.to(tl.int64) * n_rows * n_words
    m_tile = (o_row < q_tiles) & (o_col < kv_tiles)
    ahead = kv_len - q_len // ROWS_PER_TOKEN
    HAS_DOCUMENTS: tl.constexpr = documents_ptr is not None
    if HAS_DOCUMENTS:
        n_tokens = q_len // ROWS_PER_TOKEN
        p_number = documents_ptr + (batch_head // heads_of_documents).to(tl.int64) * (3 * n_tokens)
        p_first, p_stop = p_number + n_tokens, p_number + 2 * n_tokens
    b_pattern = tl.where(m_tile, 0, 0)
    b_left = b_pattern
    b_all = m_tile.to(tl.int32)
    # a loop: there may be too many parts to unroll
    for part_q in range(PARTS_Q):
        o_block_row = (o_row * TILE + part_q * PART_Q) // BLOCK_Q
        # the last query of the block sees its first key
        last_q = tl.minimum(o_row * TILE + (part_q + 1) * PART_Q, q_len) - 1
        if HAS_DOCUMENTS:
            # the documents of the block's queries are consecutive
            first_q = tl.minimum(o_row * TILE + part_q * PART_Q, q_len - 1)
            b_first, b_stop = tl.load(p_first + first_q // ROWS_PER_TOKEN), tl.load(p_stop + last_q // ROWS_PER_TOKEN)
        for part_kv in tl.static_range(PARTS_KV):
            first_kv = o_col * TILE + part_kv * PART_KV
            o_block_col = first_kv // BLOCK_KV
            m_block = m_tile & (o_block_row < n_rows) & (o_block_col < n_cols)
            p_word = p_bits + o_block_row.to(tl.int64) * n_words + o_block_col // 32
            b_bit = (tl.load(p_word, mask=m_block, other=0) >> (o_block_col % 32)) & 1
            if EDGES == OWN:
                b_all &= b_bit
            else:
                b_pattern |= b_bit << (part_q * PARTS_KV + part_kv)
            if CAUSAL:
                b_bit &= (last_q // ROWS_PER_TOKEN + ahead >= first_kv).to(tl.int32)
            if HAS_DOCUMENTS:
                b_bit &= (tl.maximum(b_first, first_kv) < tl.minimum(b_stop, first_kv + PART_KV)).to(tl.int32)
            b_left |= b_bit
    # ragged edges, then where the diagonal crosses the tile
    b_right = ((o_col == kv_tiles - 1) & (kv_len % TILE != 0)).to(tl.int32)
    b_bottom = ((o_row == q_tiles - 1) & (q_len % TILE != 0)).to(tl.int32)
    b_diagonal = tl.where(m_tile, 0, 0)
    if CAUSAL:
        # tokens by which query 0 is past key 0: from TILE - 1 on every pair attends
        behind = o_row * TILE // ROWS_PER_TOKEN + ahead - o_col * TILE
        steps = (behind - (ahead & (TOKENS - 1))) // TOKENS
        b_diagonal += tl.where(behind < TILE - 1, tl.minimum(STEPS - steps, STEPS + 1), 0)
    if EDGES == OWN:
        b_full = b_all & (b_right + b_bottom + b_diagonal == 0).to(tl.int32)
        b_id = (batch_head * q_tiles + o_row) * kv_tiles + o_col
    else:
        N_PATTERNS: tl.constexpr = 1 << (PARTS_Q * PARTS_KV)
        N_RIGHT: tl.constexpr = 1 + EDGES % 2
        N_EDGES: tl.constexpr = N_RIGHT * (1 + EDGES // 2)
        b_kind = b_diagonal * N_EDGES
        if N_RIGHT == 2:
            b_kind += b_right
        if N_EDGES > N_RIGHT:
            b_kind += b_bottom * N_RIGHT
        b_id = b_pattern + b_kind * N_PATTERNS
        b_full = (b_id == N_PATTERNS - 1).to(tl.int32)
    if HAS_DOCUMENTS:
        first_token = tl.minimum(o_row * TILE, q_len - 1) // ROWS_PER_TOKEN
        last_token = (tl.minimum((o_row + 1) * TILE, q_len) - 1) // ROWS_PER_TOKEN
        # the keys in the documents of all queries of the tile
        b_first, b_stop = tl.load(p_first + last_token), tl.load(p_stop + first_token)
        b_cut = (b_first > o_col * TILE) | (b_stop < tl.minimum((o_col + 1) * TILE, kv_len))
        b_full = tl.where(b_cut, 0, b_full)
        if EDGES != OWN:
            b_last = tl.load(p_number + last_token)
            b_line = number_of_mixed(b_last, o_row, n_mixed, q_tiles)
            b_own = tl.where(
                tl.load(p_number + first_token) != b_last,
                b_line * kv_tiles + o_col,
                n_mixed * kv_tiles + 2 * o_row + (o_col != b_first // TILE).to(tl.int32),
            )
            # causal tiles have one kind for each diagonal from 0 to STEPS + 1, other tiles have one kind
            N_SHARED: tl.constexpr = N_PATTERNS * N_EDGES * (STEPS + 2 if CAUSAL else 1)
            b_own += N_SHARED + batch_head * (n_mixed * kv_tiles + 2 * q_tiles)
            b_id = tl.where(b_cut, b_own, b_id)
    return (b_left != 0).to(tl.int32), b_full, b_id


@triton.jit
def tile_kinds_along(
    bits_ptr, documents_ptr, batch_head, o_line, o_minor, n_rows, n_cols, n_words, q_len, kv_len, q_tiles, kv_tiles,
    heads_of_documents, n_mixed,
    OF_ROWS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, ROWS_PER_TOKEN: tl.constexpr,
    EDGES: tl.constexpr, CAUSAL: tl.constexpr, TILE: tl.constexpr,
):
    """`tile_kinds` as [lines, minors]: tile rows and tile columns if OF_ROWS, else the reverse."""
    if OF_ROWS:
        o_row, o_col = o_line[:, None], o_minor[None, :]
    else:
        o_row, o_col = o_minor[None, :], o_line[:, None]
    return tile_kinds(
        bits_ptr, documents_ptr, batch_head, o_row, o_col, n_rows, n_cols, n_words, q_len, kv_len, q_tiles, kv_tiles,
        heads_of_documents, n_mixed, BLOCK_Q, BLOCK_KV, ROWS_PER_TOKEN, EDGES, CAUSAL, TILE,
    )


@triton.jit
def count_lines(
    bits_ptr, documents_ptr, counts_ptr, i_program, n_major, n_minor,
    n_batch_heads, n_rows, n_cols, n_words, q_len, kv_len, q_tiles, kv_tiles, heads_of_documents, n_mixed,
    OF_ROWS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, ROWS_PER_TOKEN: tl.constexpr,
    EDGES: tl.constexpr, CAUSAL: tl.constexpr, TILE: tl.constexpr,
    LINES: tl.constexpr, MINORS: tl.constexpr,
):
    """Counts of some lines: (2, n_batch_heads, n_major) tiles and partial tiles."""
    n_groups = tl.cdiv(n_major, LINES)
    batch_head = i_program // n_groups
    o_line = (i_program % n_groups) * LINES + tl.arange(0, LINES)
    b_tiles, b_partial = tl.zeros([LINES], tl.int32), tl.zeros([LINES], tl.int32)
    for first in range(0, n_minor, MINORS):
        b_stored, b_full, _ = tile_kinds_along(
            bits_ptr, documents_ptr, batch_head, o_line, first + tl.arange(0, MINORS),
            n_rows, n_cols, n_words, q_len, kv_len, q_tiles, kv_tiles, heads_of_documents, n_mixed,
            OF_ROWS, BLOCK_Q, BLOCK_KV, ROWS_PER_TOKEN, EDGES, CAUSAL, TILE,
        )
        b_tiles += tl.sum(b_stored, 1)
        b_partial += tl.sum(b_stored & (1 - b_full), 1)
    p_count = counts_ptr + batch_head * n_major + o_line
    tl.store(p_count, b_tiles, mask=o_line < n_major)
    tl.store(p_count + n_batch_heads * n_major, b_partial, mask=o_line < n_major)


@triton.jit
def first_bits(count):
    """A word with its lowest `count` bits set; count is clamped to 0 .. 32."""
    wide = tl.minimum(tl.maximum(count, 0), 32).to(tl.int64)
    return (((wide * 0 + 1) << wide) - 1).to(tl.int32)


@triton.jit
def write_bitmasks(
    words_ptr, i_program, n_words_of_all, q_len, kv_len,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, ROWS_PER_TOKEN: tl.constexpr, EDGES: tl.constexpr,
    TILE: tl.constexpr, WORDS: tl.constexpr,
):
    """Some words of all bitmasks, ordered by diagonal, edge and pattern (fastest)."""
    PARTS_Q: tl.constexpr = TILE // BLOCK_Q if BLOCK_Q < TILE else 1
    PARTS_KV: tl.constexpr = TILE // BLOCK_KV if BLOCK_KV < TILE else 1
    TOKENS: tl.constexpr = TILE // ROWS_PER_TOKEN if ROWS_PER_TOKEN < TILE else 1
    STEPS: tl.constexpr = TILE // TOKENS
    N_PATTERNS: tl.constexpr = 1 << (PARTS_Q * PARTS_KV)
    N_RIGHT: tl.constexpr = 1 + EDGES % 2
    N_EDGES: tl.constexpr = N_RIGHT * (1 + EDGES // 2)
    WORDS_OF_TILE: tl.constexpr = TILE // 32
    # keys of a block in a tile
    PART_KV: tl.constexpr = TILE // PARTS_KV
    o_word = i_program * WORDS + tl.arange(0, WORDS)
    b_start = o_word % WORDS_OF_TILE * 32
    b_query = o_word // WORDS_OF_TILE % TILE
    b_code = o_word // (WORDS_OF_TILE * TILE)
    b_pattern, b_edge = b_code % N_PATTERNS, b_code // N_PATTERNS % N_EDGES
    b_diagonal = b_code // (N_EDGES * N_PATTERNS)
    b_part = b_query // (TILE // PARTS_Q) * PARTS_KV + b_start // PART_KV
    b_bits = tl.where(((b_pattern >> b_part) & 1) == 1, -1, 0)
    if PART_KV == 16:
        # a word has the keys of two blocks
        b_high = tl.where(((b_pattern >> (b_part + 1)) & 1) == 1, -1, 0)
        b_bits = (b_bits & 0xFFFF) | (b_high << 16)
    last_q, last_kv = (q_len - 1) % TILE + 1, (kv_len - 1) % TILE + 1
    if N_RIGHT == 2:
        b_bits &= tl.where(b_edge % 2 == 1, first_bits(last_kv - b_start), -1)
    if N_EDGES > N_RIGHT:
        b_bits = tl.where((b_edge // N_RIGHT == 1) & (b_query >= last_q), 0, b_bits)
    # last key of the tile that a query sees
    b_last = b_query // ROWS_PER_TOKEN + ((kv_len - q_len // ROWS_PER_TOKEN) & (TOKENS - 1))
    b_last = b_last - TOKENS * (b_diagonal - STEPS)
    b_bits &= tl.where(b_diagonal > 0, first_bits(b_last + 1 - b_start), -1)
    tl.store(words_ptr + o_word, b_bits, mask=o_word < n_words_of_all)


@triton.jit
def words_of_pairs(
    p_row, m_row, b_q, b_kv, b_first, b_stop, n_cols, q_len, kv_len,
    BLOCK_KV: tl.constexpr, ROWS_PER_TOKEN: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, CAUSAL: tl.constexpr,
):
    """Words of bitmasks: query b_q and the 32 keys from b_kv on; only keys b_first .. b_stop - 1 may be set.

    p_row  the bits of the blocks that the query selects; none where masked out
    """
    b_col = b_kv // BLOCK_KV
    b_bits = -((tl.load(p_row + b_col // 32, mask=m_row & (b_col < n_cols), other=0) >> (b_col % 32)) & 1)
    if BLOCK_KV == 16:
        # a word has the keys of two blocks; the first one's number is even
        b_word = tl.load(p_row + b_col // 32, mask=m_row & (b_col + 1 < n_cols), other=0)
        b_bits = (b_bits & 0xFFFF) | (-((b_word >> (b_col % 32 + 1)) & 1) << 16)
    b_bits &= first_bits(kv_len - b_kv)
    if CAUSAL:
        b_bits &= first_bits(b_q // ROWS_PER_TOKEN + kv_len - q_len // ROWS_PER_TOKEN + 1 - b_kv)
    if HAS_DOCUMENTS:
        b_bits &= first_bits(b_stop - b_kv) & ~first_bits(b_first - b_kv)
    return b_bits


@triton.jit
def write_own_bitmasks(
    bits_ptr, documents_ptr, words_ptr, i_program, n_words_of_all, n_rows, n_cols, n_words, q_len, kv_len, q_tiles,
    kv_tiles, heads_of_documents,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, ROWS_PER_TOKEN: tl.constexpr,
    CAUSAL: tl.constexpr, TILE: tl.constexpr, WORDS: tl.constexpr,
):
    """Some words of the bitmasks of all tiles, ordered by head, tile row and tile column (fastest)."""
    WORDS_OF_TILE: tl.constexpr = TILE // 32
    o_word = i_program * WORDS + tl.arange(0, WORDS)
    b_tile = o_word // (WORDS_OF_TILE * TILE)
    b_kv = b_tile % kv_tiles * TILE + o_word % WORDS_OF_TILE * 32
    b_q = b_tile // kv_tiles % q_tiles * TILE + o_word // WORDS_OF_TILE % TILE
    b_batch_head = b_tile // (kv_tiles * q_tiles)
    p_row = bits_ptr + (b_batch_head.to(tl.int64) * n_rows + b_q // BLOCK_Q) * n_words
    m_row = (o_word < n_words_of_all) & (b_q < q_len)
    HAS_DOCUMENTS: tl.constexpr = documents_ptr is not None
    b_first, b_stop = b_kv, b_kv
    if HAS_DOCUMENTS:
        n_tokens = q_len // ROWS_PER_TOKEN
        b_document_list = b_batch_head // heads_of_documents
        p_first = documents_ptr + (b_document_list * 3 + 1).to(tl.int64) * n_tokens + b_q // ROWS_PER_TOKEN
        b_first, b_stop = tl.load(p_first, mask=m_row, other=0), tl.load(p_first + n_tokens, mask=m_row, other=0)
    b_bits = words_of_pairs(
        p_row, m_row, b_q, b_kv, b_first, b_stop, n_cols, q_len, kv_len, BLOCK_KV, ROWS_PER_TOKEN, HAS_DOCUMENTS, CAUSAL
    )
    tl.store(words_ptr + o_word, b_bits, mask=o_word < n_words_of_all)


@triton.jit
def write_cut_bitmasks(
    bits_ptr, documents_ptr, words_ptr, i_program, n_shared, n_rows, n_cols, n_words, q_len, kv_len, q_tiles, kv_tiles,
    heads_of_documents, n_mixed,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, ROWS_PER_TOKEN: tl.constexpr,
    CAUSAL: tl.constexpr, TILE: tl.constexpr, CUT_WORDS: tl.constexpr,
):
    """The bitmasks of the tiles of a tile row that documents may cut.

    A head has kv_tiles bitmasks for each tile row with several documents, then two for each tile row, whether it has
    one document or several: for the tiles in which its one document begins and ends.
    """
    WORDS_OF_TILE: tl.constexpr = TILE // 32
    batch_head, i_row = i_program // q_tiles, i_program % q_tiles
    n_tokens = q_len // ROWS_PER_TOKEN
    p_number = documents_ptr + (batch_head // heads_of_documents).to(tl.int64) * (3 * n_tokens)
    first_token = i_row * TILE // ROWS_PER_TOKEN
    last_token = (tl.minimum((i_row + 1) * TILE, q_len) - 1) // ROWS_PER_TOKEN
    last = tl.load(p_number + last_token)
    # keys from the beginning of the first document to the end of the last one
    first, stop = tl.load(p_number + n_tokens + first_token), tl.load(p_number + 2 * n_tokens + last_token)
    is_mixed = tl.load(p_number + first_token) != last
    if CAUSAL:
        stop = tl.minimum(stop, last_token + kv_len - n_tokens + 1)
    first_col = first // TILE
    line = number_of_mixed(last, i_row, n_mixed, q_tiles)
    place = tl.where(is_mixed, line * kv_tiles + first_col, n_mixed * kv_tiles + 2 * i_row)
    place += n_shared + batch_head * (n_mixed * kv_tiles + 2 * q_tiles)
    n_places = tl.where(is_mixed, tl.cdiv(stop, TILE) - first_col, tl.where(first < stop, 2, 0))

    b_q = (i_row * TILE + tl.arange(0, TILE))[:, None]
    m_row = b_q < q_len
    p_row = bits_ptr + (batch_head.to(tl.int64) * n_rows + b_q // BLOCK_Q) * n_words
    p_first = p_number + n_tokens + b_q // ROWS_PER_TOKEN
    b_first, b_stop = tl.load(p_first, mask=m_row, other=0), tl.load(p_first + n_tokens, mask=m_row, other=0)
    for begin in range(0, n_places * WORDS_OF_TILE, CUT_WORDS):
        o_word = (begin + tl.arange(0, CUT_WORDS))[None, :]
        o_place = o_word // WORDS_OF_TILE
        o_col = tl.where(is_mixed | (o_place == 0), first_col + o_place, stop // TILE)
        b_bits = words_of_pairs(
            p_row, m_row, b_q, o_col * TILE + o_word % WORDS_OF_TILE * 32, b_first, b_stop, n_cols, q_len, kv_len,
            BLOCK_KV, ROWS_PER_TOKEN, True, CAUSAL,
        )
        o_bitmask = (place + o_place) * TILE + tl.arange(0, TILE)[:, None]
        p_word = words_ptr + o_bitmask * WORDS_OF_TILE + o_word % WORDS_OF_TILE
        tl.store(p_word, b_bits, mask=(o_place < n_places) & (b_q >= 0))


@triton.jit(do_not_specialize=[*SIZES, "n_words_of_all"])
def count_kernel(
    # inputs: int32 (n_batch_heads, n_rows, n_words); (batch, 3, tokens), see plan/block_selection.py, or None
    bits_ptr, documents_ptr,
    # outputs: counts, int32 (2 * n_batch_heads * (q_tiles + kv_tiles),) of rows, then of columns, see count_lines;
    # bitmasks
    counts_ptr, words_ptr,
    n_batch_heads, n_rows, n_cols, n_words, q_len, kv_len, q_tiles, kv_tiles, heads_of_documents, n_mixed,
    # words of the shared bitmasks
    n_words_of_all,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, ROWS_PER_TOKEN: tl.constexpr, EDGES: tl.constexpr,
    CAUSAL: tl.constexpr, TILE: tl.constexpr,
    LINES: tl.constexpr, MINORS: tl.constexpr, WORDS: tl.constexpr, CUT_WORDS: tl.constexpr,
):
    i_program = tl.program_id(0)
    # of those that write shared bitmasks
    i_words = i_program - n_batch_heads * (tl.cdiv(q_tiles, LINES) + tl.cdiv(kv_tiles, LINES))
    n_of_rows, n_of_cols = n_batch_heads * tl.cdiv(q_tiles, LINES), n_batch_heads * tl.cdiv(kv_tiles, LINES)
    if i_program < n_of_rows:
        count_lines(
            bits_ptr, documents_ptr, counts_ptr, i_program, q_tiles, kv_tiles,
            n_batch_heads, n_rows, n_cols, n_words, q_len, kv_len, q_tiles, kv_tiles, heads_of_documents, n_mixed,
            True, BLOCK_Q, BLOCK_KV, ROWS_PER_TOKEN, EDGES, CAUSAL, TILE, LINES, MINORS,
        )
    elif i_program < n_of_rows + n_of_cols:
        count_lines(
            bits_ptr, documents_ptr, counts_ptr + 2 * n_batch_heads * q_tiles, i_program - n_of_rows, kv_tiles, q_tiles,
            n_batch_heads, n_rows, n_cols, n_words, q_len, kv_len, q_tiles, kv_tiles, heads_of_documents, n_mixed,
            False, BLOCK_Q, BLOCK_KV, ROWS_PER_TOKEN, EDGES, CAUSAL, TILE, LINES, MINORS,
        )
    elif EDGES == OWN:
        write_own_bitmasks(
            bits_ptr, documents_ptr, words_ptr, i_words, n_words_of_all,
            n_rows, n_cols, n_words, q_len, kv_len, q_tiles, kv_tiles, heads_of_documents,
            BLOCK_Q, BLOCK_KV, ROWS_PER_TOKEN, CAUSAL, TILE, WORDS,
        )
    elif i_words < tl.cdiv(n_words_of_all, WORDS):
        write_bitmasks(
            words_ptr, i_words, n_words_of_all, q_len, kv_len, BLOCK_Q, BLOCK_KV, ROWS_PER_TOKEN, EDGES, TILE, WORDS
        )
    elif documents_ptr is not None:
        write_cut_bitmasks(
            bits_ptr, documents_ptr, words_ptr, i_words - tl.cdiv(n_words_of_all, WORDS),
            n_words_of_all // (TILE * (TILE // 32)),
            n_rows, n_cols, n_words, q_len, kv_len, q_tiles, kv_tiles, heads_of_documents, n_mixed,
            BLOCK_Q, BLOCK_KV, ROWS_PER_TOKEN, CAUSAL, TILE, CUT_WORDS,
        )


@triton.jit
def max_long_lines(counts_ptr, n_batch_heads, n_major, limit, HEADS: tl.constexpr, MINORS: tl.constexpr):
    """The largest number of lines with more than `limit` tiles, over all heads."""
    b_most = tl.zeros([HEADS], tl.int32)
    for first_head in range(0, n_batch_heads, HEADS):
        o_head = (first_head + tl.arange(0, HEADS))[:, None]
        b_long = tl.zeros([HEADS], tl.int32)
        for first in range(0, n_major, MINORS):
            o_line = (first + tl.arange(0, MINORS))[None, :]
            m_line = (o_head < n_batch_heads) & (o_line < n_major)
            b_count = tl.load(counts_ptr + o_head * n_major + o_line, mask=m_line, other=0)
            b_long += tl.sum((b_count > limit).to(tl.int32), 1)
        b_most = tl.maximum(b_most, b_long)
    return tl.max(b_most, 0)


@triton.jit
def launch_positions(counts_ptr, o_line, b_tiles, n_major, LINES: tl.constexpr, MINORS: tl.constexpr):
    """Positions of some lines of a head in the launch order: longest first, then by index.

    counts_ptr  tiles of each line of the head
    """
    b_position = tl.zeros([LINES], tl.int32)
    for first in range(0, n_major, MINORS):
        o_other = first + tl.arange(0, MINORS)
        b_other = tl.load(counts_ptr + o_other, mask=o_other < n_major, other=-1)[None, :]
        b_sooner = (b_other > b_tiles[:, None]) | ((b_other == b_tiles[:, None]) & (o_other[None, :] < o_line[:, None]))
        b_position += tl.sum(b_sooner.to(tl.int32), 1)
    return b_position


@triton.jit
def write_records(records_ptr, o_line, b_position, b_begin, b_tiles, b_partial, n_long, n_major):
    """Writes the records of some lines of a head.

    records_ptr  of the head
    b_begin, b_tiles, b_partial  of each line: first entry of its list, tiles, partial tiles
    """
    m_line = o_line < n_major
    p_record = records_ptr + b_position * RECORD
    tl.store(p_record + NUMBER, o_line, mask=m_line)
    tl.store(p_record + BEGIN, b_begin, mask=m_line)
    tl.store(p_record + N_TILES, b_tiles, mask=m_line)
    tl.store(p_record + N_PARTIAL, b_partial, mask=m_line)
    tl.store(records_ptr + o_line * RECORD + POSITION, b_position, mask=m_line)
    # never all lines: see find_work_record
    tl.store(p_record + N_LONG, o_line * 0 + tl.minimum(n_long, n_major - 1), mask=m_line)
    for word in tl.static_range(N_LONG + 1, RECORD):
        tl.store(p_record + word, o_line * 0, mask=m_line)


@triton.jit
def list_lines(
    bits_ptr, documents_ptr, counts_ptr, records_ptr, indices_ptr, ids_ptr, i_program, n_indices, n_ids,
    n_batch_heads, n_rows, n_cols, n_words, q_len, kv_len, q_tiles, kv_tiles, heads_of_documents, n_mixed,
    OF_ROWS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, ROWS_PER_TOKEN: tl.constexpr,
    EDGES: tl.constexpr, CAUSAL: tl.constexpr, TILE: tl.constexpr,
    LINES: tl.constexpr, MINORS: tl.constexpr, HEADS: tl.constexpr, CHUNK: tl.constexpr,
):
    """Writes the records and tiles of some lines of one direction, and a share of the padding zeros."""
    n_major = q_tiles if OF_ROWS else kv_tiles
    n_minor = kv_tiles if OF_ROWS else q_tiles
    n_groups = tl.cdiv(n_major, LINES)
    n_programs = n_batch_heads * n_groups
    batch_head = i_program // n_groups
    first_line = (i_program % n_groups) * LINES
    o_line = first_line + tl.arange(0, LINES)
    m_line = o_line < n_major
    n_tiles, before = sums_before(counts_ptr, n_batch_heads * n_major, batch_head * n_major + first_line, CHUNK)
    # twice the mean
    limit = ((2 * n_tiles.to(tl.int64)) // (n_batch_heads * n_major)).to(tl.int32)
    n_long = max_long_lines(counts_ptr, n_batch_heads, n_major, limit, HEADS, MINORS)

    p_tiles = counts_ptr + batch_head * n_major
    b_tiles = tl.load(p_tiles + o_line, mask=m_line, other=0)
    b_partial = tl.load(p_tiles + n_batch_heads * n_major + o_line, mask=m_line, other=0)
    b_begin = before + tl.cumsum(b_tiles, 0) - b_tiles
    b_position = launch_positions(p_tiles, o_line, b_tiles, n_major, LINES, MINORS)
    p_records = records_ptr + batch_head.to(tl.int64) * n_major * RECORD
    write_records(p_records, o_line, b_position, b_begin, b_tiles, b_partial, n_long, n_major)

    b_next_partial, b_next_full = b_begin, b_begin + b_partial
    for first in range(0, n_minor, MINORS):
        o_minor = first + tl.arange(0, MINORS)
        b_stored, b_full, b_id = tile_kinds_along(
            bits_ptr, documents_ptr, batch_head, o_line, o_minor,
            n_rows, n_cols, n_words, q_len, kv_len, q_tiles, kv_tiles, heads_of_documents, n_mixed,
            OF_ROWS, BLOCK_Q, BLOCK_KV, ROWS_PER_TOKEN, EDGES, CAUSAL, TILE,
        )
        b_is_full, b_is_partial = b_stored & b_full, b_stored & (1 - b_full)
        b_place = tl.where(
            b_full == 1,
            b_next_full[:, None] + tl.cumsum(b_is_full, 1),
            b_next_partial[:, None] + tl.cumsum(b_is_partial, 1),
        )
        tl.store(indices_ptr + b_place - 1, o_minor[None, :] - PARTIAL * b_is_partial, mask=b_stored == 1)
        tl.store(ids_ptr + b_place - 1, b_id * b_is_partial, mask=b_stored == 1)
        b_next_full += tl.sum(b_is_full, 1)
        b_next_partial += tl.sum(b_is_partial, 1)
    fill_tail(indices_ptr, n_tiles, n_indices, 0, i_program, n_programs, CHUNK)
    fill_tail(ids_ptr, n_tiles, n_ids, 0, i_program, n_programs, CHUNK)


@triton.jit(do_not_specialize=[*SIZES, "n_indices"])
def list_kernel(
    # inputs: those of count_kernel, and its counts
    bits_ptr, documents_ptr, counts_ptr,
    # outputs: the tensors of a Plan
    row_records_ptr, row_indices_ptr, row_ids_ptr, col_records_ptr, col_indices_ptr, col_ids_ptr,
    # length of the indices
    n_indices,
    n_batch_heads, n_rows, n_cols, n_words, q_len, kv_len, q_tiles, kv_tiles, heads_of_documents, n_mixed,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, ROWS_PER_TOKEN: tl.constexpr, EDGES: tl.constexpr,
    CAUSAL: tl.constexpr, TILE: tl.constexpr,
    LINES: tl.constexpr, MINORS: tl.constexpr, HEADS: tl.constexpr, CHUNK: tl.constexpr,
):
    i_program = tl.program_id(0)
    n_of_rows = n_batch_heads * tl.cdiv(q_tiles, LINES)
    if i_program < n_of_rows:
        list_lines(
            bits_ptr, documents_ptr, counts_ptr, row_records_ptr, row_indices_ptr, row_ids_ptr, i_program,
            n_indices, n_indices + ROW_IDS,
            n_batch_heads, n_rows, n_cols, n_words, q_len, kv_len, q_tiles, kv_tiles, heads_of_documents, n_mixed,
            True, BLOCK_Q, BLOCK_KV, ROWS_PER_TOKEN, EDGES, CAUSAL, TILE, LINES, MINORS, HEADS, CHUNK,
        )
    else:
        list_lines(
            bits_ptr, documents_ptr, counts_ptr + 2 * n_batch_heads * q_tiles, col_records_ptr, col_indices_ptr,
            col_ids_ptr, i_program - n_of_rows, n_indices, n_indices + COL_IDS,
            n_batch_heads, n_rows, n_cols, n_words, q_len, kv_len, q_tiles, kv_tiles, heads_of_documents, n_mixed,
            False, BLOCK_Q, BLOCK_KV, ROWS_PER_TOKEN, EDGES, CAUSAL, TILE, LINES, MINORS, HEADS, CHUNK,
        )
# fmt: on


class PlanLaunches(NamedTuple):
    """The two launches, and memory for counts and bitmasks."""

    counts: Launch
    lists: Launch
    counted: Memory
    words: Memory


@functools.lru_cache(maxsize=256)
def plan_launches(grid: Grid, device: torch.device) -> PlanLaunches:  # noqa: ARG001  part of the cache key
    """The launches, for lists of any length."""
    sizes, n_words = grid.sizes(), grid.n_shared * grid.words_of_bitmask
    n_lines = grid.blocks.n_batch_heads * sum(-(-side // LINES) for side in grid.shape)
    lines = {"LINES": LINES, "MINORS": MINORS, "num_warps": 8}
    count = {**sizes, "n_words_of_all": n_words, **lines, "WORDS": WORDS, "CUT_WORDS": CUT_WORDS}
    n_cut_rows = grid.blocks.n_batch_heads * grid.shape[0] if grid.has_cuts else 0
    fill = {**sizes, **lines, "HEADS": HEADS, "CHUNK": CHUNK}
    return PlanLaunches(
        Launch(count_kernel, (n_lines + -(-n_words // WORDS) + n_cut_rows,), count),
        Launch(list_kernel, (n_lines,), fill),
        contiguous(torch.int32, 2 * grid.blocks.n_batch_heads * sum(grid.shape)),
        contiguous(torch.int32, grid.n_bitmasks, grid.tile, grid.tile // 32),
    )


def build_from_bits(
    bits: torch.Tensor,
    grid: Grid,
    batch_heads: tuple[int, int],
    lengths: tuple[int, int, int],
    documents: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """The tensors of a Plan.

    bits     int32 (n_batch_heads, n_rows, n_words), see block_selection.py
    batch_heads  (batch | 1, heads | 1)
    lengths  of the lists: indices, ids of rows, ids of columns
    documents  int32 (batch, 3, tokens) if the grid has documents, see plan/block_selection.py
    """
    new = allocator(bits)

    def empty(*shape: int) -> torch.Tensor:
        return new(*contiguous(torch.int32, *shape))

    n_indices, *n_ids = lengths
    sides = [
        (empty(*batch_heads, n_lines, RECORD.value), empty(n_indices), empty(n))
        for n_lines, n in zip(grid.shape, n_ids, strict=True)
    ]
    launches = plan_launches(grid, bits.device)
    counts, words = new(*launches.counted), new(*launches.words)
    launches.counts(bits, documents, counts, words)
    launches.lists(bits, documents, counts, *sides[0], *sides[1], n_indices)
    return [*sides[0], *sides[1], words]
