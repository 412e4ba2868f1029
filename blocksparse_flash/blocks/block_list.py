"""Block lists, the NumPy form of layouts: canonical form, equality of bitmasks, regrouping to another block size.

A block list is three arrays:
    keys      int64 (nnz,), strictly ascending: (batch_head * n_rows + row) * n_cols + col, where
              batch_head = batch * heads + head
    ids       int32 (nnz,): FULL, or index of the bitmask
    bitmasks  uint32 (distinct, block_q, ceil(block_kv / 32)), key 0 of the block in the lowest bit

It is canonical if no stored block is empty, a block is FULL exactly when all its existing pairs attend (a ragged last
block has only the pairs inside the lengths), bits of pairs that do not exist are 0, and bitmasks are distinct, used,
and numbered by first appearance. Equal masks then have equal lists.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Size = tuple[int, int]
Axis = Literal["batch", "heads"]

FULL = -1
# id of a block in which no pair attends; never stored
EMPTY = -2

# every side of a block is a multiple of this, so bitmasks are cut and joined in pieces of 16 bits
SIDE_UNIT = 16

# bytes of a temporary array that would otherwise grow with (distinct bitmasks x pairs)
_CHUNK_BYTES = 1 << 26


class BlockList(NamedTuple):
    keys: Array
    ids: Array
    bitmasks: Array


class BlockRows(NamedTuple):
    """A block list in CSR form, as layouts store it.

    indptr   int32 (batch_heads, n_rows + 1): offsets into cols; each batch_head begins where the one before ends
    cols     int32 (nnz,)
    ids, bitmasks  as of a BlockList
    """

    indptr: Array
    cols: Array
    ids: Array
    bitmasks: Array


class Frame(NamedTuple):
    """Sizes of the layout that a block list belongs to."""

    batch: int
    heads: int
    q_len: int
    kv_len: int
    block_size: Size

    @property
    def batch_heads(self) -> int:
        return self.batch * self.heads

    @property
    def n_rows(self) -> int:
        return -(-self.q_len // self.block_size[0])

    @property
    def n_cols(self) -> int:
        return -(-self.kv_len // self.block_size[1])

    @property
    def blocks_per_batch_head(self) -> int:
        """Number of blocks of one head of one batch, stored or not."""
        return self.n_rows * self.n_cols

    @property
    def n_blocks(self) -> int:
        """Number of blocks of all heads of all batches, stored or not."""
        return self.batch_heads * self.blocks_per_batch_head

    def density(self, nnz: int) -> float:
        """Stored blocks / all blocks; 0.0 if there are none."""
        return nnz / self.n_blocks if self.n_blocks else 0.0

    @property
    def sizes(self) -> dict[str, Any]:
        """Keyword arguments of the constructors of a layout."""
        return {"q_len": self.q_len, "kv_len": self.kv_len, "block_size": self.block_size}

    @property
    def transposed(self) -> Frame:
        return Frame(self.batch, self.heads, self.kv_len, self.q_len, self.block_size[::-1])

    def positions(self, keys: Array) -> tuple[Array, Array, Array]:
        """(batch_heads, rows, cols) of the blocks with these keys."""
        lines, cols = np.divmod(keys, max(self.n_cols, 1))
        if self.batch_heads == 1:
            # most layouts have one batch and one head; a division takes longer than the rest of many functions
            return np.zeros_like(lines), lines, cols
        return *np.divmod(lines, max(self.n_rows, 1)), cols


# --------------------------------------------------------------------------------------------------------------- arrays


def words_per_query(block_kv: int) -> int:
    """32-bit words in one row of a bitmask."""
    return -(-block_kv // 32)


def no_bitmasks(block_size: Size) -> Array:
    """Bitmasks of a list without partial blocks, (0, block_q, words)."""
    return np.zeros((0, block_size[0], words_per_query(block_size[1])), np.uint32)


def pack(bits: Array) -> Array:
    """bool (..., block_q, block_kv) -> uint32 (..., block_q, ceil(block_kv / 32)), the first key in the lowest bit."""
    octets = np.packbits(bits, axis=-1, bitorder="little")
    missing = -octets.shape[-1] % 4
    if missing:
        octets = np.concatenate([octets, np.zeros((*octets.shape[:-1], missing), np.uint8)], axis=-1)
    return np.ascontiguousarray(octets).view(np.uint32)


def unpack(words: Array, block_kv: int) -> Array:
    """uint32 (..., block_q, words) -> bool (..., block_q, block_kv); the inverse of `pack`."""
    octets = np.ascontiguousarray(words).view(np.uint8)
    return np.unpackbits(octets, axis=-1, count=block_kv, bitorder="little").view(np.bool_)


def in_bounds_bitmasks(frame: Frame) -> Array:
    """Bitmasks of the in-bounds pairs of a block, by edge kind, uint32 (4, block_q, words).

    Edge kinds: 0 interior, 1 ragged last col, 2 ragged last row, 3 both. Kinds that do not occur equal the interior.
    """
    block_q, block_kv = frame.block_size
    bits = np.ones((4, block_q, block_kv), np.bool_)
    bits[2:, (frame.q_len % block_q or block_q) :] = False
    bits[1::2, :, (frame.kv_len % block_kv or block_kv) :] = False
    return pack(bits)


def edge_kinds(keys: Array, frame: Frame) -> Array:
    """Edge kind (see `in_bounds_bitmasks`) of each block, int64 (nnz,).

    A last row or col that is not ragged is interior.
    """
    n_rows, n_cols = frame.n_rows, frame.n_cols
    kinds = np.zeros(keys.shape, np.int64)
    if frame.kv_len % frame.block_size[1]:
        kinds += keys % n_cols == n_cols - 1
    if frame.q_len % frame.block_size[0]:
        kinds += 2 * (keys // n_cols % n_rows == n_rows - 1)
    return kinds


def full_list(keys: Array, block_size: Size) -> BlockList:
    """The list of full blocks at the ascending keys."""
    return BlockList(keys, np.full(len(keys), FULL, np.int32), no_bitmasks(block_size))


def by_rows(found: BlockList, frame: Frame) -> BlockRows:
    """The list in CSR form; shares only the bitmasks with it."""
    n_rows, batch_heads = frame.n_rows, frame.batch_heads
    first = frame.n_cols * np.arange(batch_heads * n_rows + 1)
    offsets = found.keys.searchsorted(first)
    cols = (found.keys - first[:-1].repeat(offsets[1:] - offsets[:-1])).astype(np.int32)
    # each batch_head ends where the next begins, so their offsets overlap by one
    step = offsets.itemsize
    indptr = np.ndarray((batch_heads, n_rows + 1), offsets.dtype, offsets, strides=(step * n_rows, step)).astype(
        np.int32
    )
    return BlockRows(indptr, cols, found.ids.astype(np.int32), np.ascontiguousarray(found.bitmasks))


def by_keys(rows: BlockRows, frame: Frame) -> BlockList:
    """The inverse of `by_rows`."""
    indptr, cols, ids, bitmasks = rows
    first = frame.n_cols * np.arange(frame.batch_heads * frame.n_rows)
    return BlockList(first.repeat((indptr[:, 1:] - indptr[:, :-1]).reshape(-1)) + cols, ids, bitmasks)


def ranges(starts: Array, counts: Array) -> Array:
    """start, ..., start + count - 1 of each range, concatenated, int64."""
    ends = np.cumsum(counts)
    values: Array = np.repeat(starts - (ends - counts), counts)
    values += np.arange(len(values))
    return values


def run_lengths(*columns: Array) -> tuple[Array, Array]:
    """(starts, lengths) of the runs of equal values; with several columns, of equal values in each."""
    begins = np.zeros(len(columns[0]), np.bool_)
    begins[:1] = True
    for values in columns:
        begins[1:] |= values[1:] != values[:-1]
    starts = np.flatnonzero(begins)
    return starts, np.diff(starts, append=len(begins))


def items_per_chunk(bytes_each: int) -> int:
    """Number of items that fill about _CHUNK_BYTES; at least 1."""
    return max(1, _CHUNK_BYTES // max(1, bytes_each))


def chunks(count: int, bytes_each: int) -> Iterator[slice]:
    """Slices that cover range(count), each of about _CHUNK_BYTES."""
    step = items_per_chunk(bytes_each)
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


# ------------------------------------------------------------------------------------------------------------- equality


def distinct(codes: Array, limit: int) -> tuple[Array, Array]:
    """np.unique(codes, return_inverse=True) of int64 codes in [0, limit), without a sort if they are dense."""
    if limit > 4 * len(codes) + 65536:
        values, inverse = np.unique(codes, return_inverse=True)
        return values, inverse.reshape(-1)
    seen = np.zeros(limit, np.bool_)
    seen[codes] = True
    return np.flatnonzero(seen), (np.cumsum(seen) - 1)[codes]


def _first_equal_bitmask(words: Array) -> Array:
    """Index of the first equal bitmask, for each bitmask, int64."""
    width = words.shape[1] * words.shape[2]
    # as bytes, which Python hashes and compares
    each = np.ascontiguousarray(words).reshape(len(words), width).view(f"V{4 * width}").reshape(-1).tolist()
    first: dict[bytes, int] = {}
    return np.fromiter(map(first.setdefault, each, range(len(each))), np.int64, len(each))


def _mix(values: Array, seed: int) -> Array:
    """A 64-bit hash of each element (splitmix64's finalizer), uint64; another seed gives an unrelated hash."""
    mixed = values.astype(np.uint64)
    mixed += np.uint64((0x9E3779B97F4A7C15 * (seed + 1)) & 0xFFFFFFFFFFFFFFFF)
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def first_equal_run(codes: Array, starts: Array, counts: Array, kinds: Array) -> Array:
    """Index of the first run with the same codes and the same kind, for each run of counts[i] codes at starts[i].

    Found by hash, then verified code by code.
    """
    if not len(starts):
        return starts
    for seed in itertools.count():
        hashes = np.add.reduceat(_mix(codes, seed), starts) + _mix(kinds, seed + 1)
        _, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
        first = first[inverse]
        if np.array_equal(counts[first], counts) and np.array_equal(kinds[first], kinds):
            twins = np.arange(len(codes)) + np.repeat(starts[first] - starts, counts)
            if np.array_equal(codes[twins], codes):
                return first
    raise AssertionError


# ------------------------------------------------------------------------------------------------------- canonical form


def _mapped(ids: Array, outcome: Array) -> Array:
    """outcome[id] of each id; FULL and EMPTY stay."""
    # negative indices: EMPTY is -2, FULL -1
    return np.append(outcome, [EMPTY, FULL])[ids]


def renumber(keys: Array, ids: Array, bitmasks: Array) -> BlockList:
    """Drop EMPTY blocks and unused bitmasks, and number the bitmasks by first appearance."""
    stored = ids != EMPTY
    if not stored.all():
        keys, ids = keys[stored], ids[stored]
    partial = np.flatnonzero(ids >= 0)
    first = np.full(len(bitmasks), len(ids))
    # NumPy keeps the last of repeated assignments, so assign in reverse to keep the first appearance
    first[ids[partial[::-1]]] = partial[::-1]
    used = np.flatnonzero(first < len(ids))
    order = used[np.argsort(first[used], kind="stable")]
    if len(order) == len(bitmasks) and np.array_equal(order, np.arange(len(order))):
        return BlockList(keys, ids.astype(np.int32, copy=False), bitmasks)
    number = np.empty(len(bitmasks), np.int64)
    number[order] = np.arange(len(order))
    return BlockList(keys, _mapped(ids, number).astype(np.int32), bitmasks[order])


def _classify(words: Array, kinds: Array, in_bounds: Array) -> Array:
    """EMPTY, FULL or the index of the first equal bitmask, for each bitmask.

    words  uint32 (n, block_q, words), 0 for pairs that do not exist
    kinds  (n,): edge kind of the blocks with this bitmask
    in_bounds  `in_bounds_bitmasks` of the frame
    """
    outcome = _first_equal_bitmask(words)
    for part in chunks(len(words), in_bounds[0].nbytes):
        outcome[part][(words[part] == in_bounds[kinds[part]]).all(axis=(1, 2))] = FULL
    outcome[~words.any(axis=(1, 2))] = EMPTY
    return outcome


def canonical_from_bitmasks(keys: Array, ids: Array, words: Array, kinds: Array, in_bounds: Array) -> BlockList:
    """The canonical list of blocks with these bitmasks.

    keys  ascending
    ids   (nnz,): index into words, FULL or EMPTY
    words, kinds, in_bounds  as in `_classify`
    """
    return renumber(keys, _mapped(ids, _classify(words, kinds, in_bounds)), words)


class BitmaskCollector:
    """`canonical_from_bitmasks` of bitmasks added in chunks, so that only one chunk with duplicates is in memory."""

    def __init__(self, in_bounds: Array) -> None:
        self.in_bounds = in_bounds
        self._ids: list[Array] = []
        self._words: list[Array] = [in_bounds[:0]]
        self._n_words = 0

    def add(self, words: Array, kinds: Array) -> None:
        ids = _classify(words, kinds, self.in_bounds)
        used, number = distinct(ids[ids >= 0], len(words))
        ids[ids >= 0] = number + self._n_words
        self._ids.append(ids)
        self._words.append(words[used])
        self._n_words += len(used)

    def canonical(self, keys: Array, ids: Array) -> BlockList:
        """The canonical list of blocks with the ids FULL, EMPTY or the number of a bitmask, in the order added."""
        words = np.concatenate(self._words)
        outcome = np.concatenate([*self._ids, np.zeros(0, np.int64)])
        return renumber(keys, _mapped(ids, _mapped(outcome, _first_equal_bitmask(words))), words)


def canonical(found: BlockList, frame: Frame) -> BlockList:
    """The canonical list of the same mask; keys must be ascending, bits beyond the lengths are dropped."""
    keys, ids, bitmasks = found
    if not len(bitmasks):
        return full_list(keys, frame.block_size)
    in_bounds, is_partial = in_bounds_bitmasks(frame), ids >= 0
    kinds = edge_kinds(keys[is_partial], frame)
    values, number = distinct(4 * ids[is_partial].astype(np.int64) + kinds, 4 * len(bitmasks))
    new_ids = np.full(len(ids), FULL, np.int64)
    new_ids[is_partial] = number
    return canonical_from_bitmasks(keys, new_ids, bitmasks[values // 4] & in_bounds[values % 4], values % 4, in_bounds)


# -------------------------------------------------------------------------------------------------------------- regroup


def _pieces(rows: Array, old: int, new: int, length: int) -> tuple[Array, Array]:
    """(first tile that each block overlaps along one axis, number of tiles it overlaps)."""
    first = rows * old // new
    return first, (np.minimum((rows + 1) * old, length) - 1) // new - first + 1


def regroup(found: BlockList, frame: Frame, new: Size) -> BlockList:
    """The same mask in blocks of another size, exact for any two sizes; canonical if the list is.

    Blocks are cut along the borders of the new blocks (here: tiles). Tiles of equal pieces at equal places have equal
    bitmasks, so one bitmask is built per distinct set of pieces. O(nnz log nnz).
    """
    old, tiled = frame.block_size, frame._replace(block_size=new)
    if old == new:
        return found
    keys, ids, bitmasks = found
    if not len(keys):
        return full_list(keys, new)
    batch_heads, rows, cols = frame.positions(keys)
    tile_rows, n_down = _pieces(rows, old[0], new[0], frame.q_len)
    tile_cols, n_across = _pieces(cols, old[1], new[1], frame.kv_len)
    if (n_down > 1).any() or (n_across > 1).any():
        n_pieces = n_down * n_across
        source = np.repeat(np.arange(len(keys)), n_pieces)
        piece = ranges(np.zeros(len(keys), np.int64), n_pieces)
        rows, cols, batch_heads, ids, n_across = (each[source] for each in (rows, cols, batch_heads, ids, n_across))
        tile_rows, tile_cols = tile_rows[source] + piece // n_across, tile_cols[source] + piece % n_across
    tile_keys = (batch_heads * tiled.n_rows + tile_rows) * tiled.n_cols + tile_cols
    # place of a block relative to its tile, in units of 16 tokens: -old < place < new
    down = (rows * old[0] - tile_rows * new[0]) // SIDE_UNIT
    across = (cols * old[1] - tile_cols * new[1]) // SIDE_UNIT
    n_places = (old[0] + new[0]) // SIDE_UNIT, (old[1] + new[1]) // SIDE_UNIT
    places = (down + old[0] // SIDE_UNIT) * n_places[1] + across + old[1] // SIDE_UNIT
    codes = (ids.astype(np.int64) + 1) * (n_places[0] * n_places[1]) + places

    if (tile_keys[1:] < tile_keys[:-1]).any():
        order = np.argsort(tile_keys, kind="stable")
        tile_keys, codes = tile_keys[order], codes[order]
    starts, counts = run_lengths(tile_keys)
    tile_keys = tile_keys[starts]
    kinds = edge_kinds(tile_keys, tiled)
    first, which = distinct(first_equal_run(codes, starts, counts, kinds), len(starts))

    in_bounds = in_bounds_bitmasks(tiled)
    words = _join(codes[ranges(starts[first], counts[first])], counts[first], bitmasks, n_places[1], old, new)
    words &= in_bounds[kinds[first]]
    return canonical_from_bitmasks(tile_keys, which, words, kinds[first], in_bounds)


def _join(codes: Array, counts: Array, bitmasks: Array, n_across: int, old: Size, new: Size) -> Array:
    """Bitmasks of tiles, uint32 (len(counts), new block_q, words), from the codes of their pieces, tile by tile."""
    n_all_places = n_across * ((old[0] + new[0]) // SIDE_UNIT)
    tiles = np.repeat(np.arange(len(counts)), counts)
    ones = np.full((1, *bitmasks.shape[1:]), 0xFFFFFFFF, np.uint32)
    # row 0 is a full block: codes hold id + 1
    source = np.concatenate([ones, bitmasks]).view(np.uint16)
    joined = np.zeros((len(counts), new[0], words_per_query(new[1])), np.uint32)
    target = joined.view(np.uint16)
    ids, places = np.divmod(codes, n_all_places)
    # pieces at one place are copied together: the loop is over places, at most 32 x 32, not over blocks
    order = np.argsort(places, kind="stable")
    for pieces in np.split(order, run_lengths(places[order])[0][1:]):
        place = int(places[pieces[0]])
        down = place // n_across * SIDE_UNIT - old[0]
        # in units of 16 keys, which is one uint16
        across = place % n_across - old[1] // SIDE_UNIT
        q_begin, q_end = max(0, down), min(new[0], down + old[0])
        kv_begin, kv_end = max(0, across), min(new[1] // SIDE_UNIT, across + old[1] // SIDE_UNIT)
        piece = source[ids[pieces], q_begin - down : q_end - down, kv_begin - across : kv_end - across]
        target[tiles[pieces], q_begin:q_end, kv_begin:kv_end] = piece
    return joined


# ---------------------------------------------------------------------------------------------------------------- dense


def from_mask(mask: Array, frame: Frame) -> BlockList:
    """The canonical list of a bool mask (batch_heads, q_len, kv_len). Time and memory O(mask)."""
    (block_q, block_kv), n_rows, n_cols = frame.block_size, frame.n_rows, frame.n_cols
    missing = n_rows * block_q - frame.q_len, n_cols * block_kv - frame.kv_len
    if any(missing):
        mask = np.pad(mask, ((0, 0), (0, missing[0]), (0, missing[1])))
    lines = mask.reshape(frame.batch_heads * n_rows, block_q, n_cols, block_kv)
    collector = BitmaskCollector(in_bounds_bitmasks(frame))
    for part in chunks(len(lines), n_cols * block_q * block_kv):
        words = pack(lines[part].swapaxes(1, 2)).reshape(-1, *collector.in_bounds.shape[1:])
        collector.add(words, edge_kinds(np.arange(part.start * n_cols, part.stop * n_cols), frame))
    keys = np.arange(frame.n_blocks)
    return collector.canonical(keys, keys)


def to_mask(found: BlockList, frame: Frame) -> Array:
    """The bool mask (batch_heads, q_len, kv_len) of a list; the inverse of `from_mask`."""
    (block_q, block_kv), n_rows, n_cols = frame.block_size, frame.n_rows, frame.n_cols
    padded = np.zeros((frame.batch_heads, n_rows, block_q, n_cols, block_kv), np.bool_)
    batch_head, row, col = frame.positions(found.keys)
    is_full = found.ids == FULL
    if is_full.any():
        padded[batch_head[is_full], row[is_full], :, col[is_full]] = True
    partial = np.flatnonzero(~is_full)
    for part in chunks(len(partial), block_q * block_kv):
        chosen = partial[part]
        padded[batch_head[chosen], row[chosen], :, col[chosen]] = unpack(found.bitmasks[found.ids[chosen]], block_kv)
    dense = padded.reshape(frame.batch_heads, n_rows * block_q, n_cols * block_kv)
    return np.ascontiguousarray(dense[:, : frame.q_len, : frame.kv_len])
