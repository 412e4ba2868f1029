"""Block lists, the NumPy form of layouts: canonical form, equality of bitmasks, regrouping to another block size.

A block list is three arrays:
    keys      int64 (nnz,), strictly ascending: (lead * n_rows + row) * n_cols + col, where lead = batch * heads + head
    ids       int32 (nnz,): FULL, or index of the bitmask
    bitmasks  uint32 (distinct, block_q, ceil(block_kv / 32)), key 0 in the lowest bit

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

    indptr   int32 (leads, n_rows + 1): offsets into cols; each lead begins where the one before ends
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
    def leads(self) -> int:
        return self.batch * self.heads

    @property
    def n_rows(self) -> int:
        return -(-self.q_len // self.block_size[0])

    @property
    def n_cols(self) -> int:
        return -(-self.kv_len // self.block_size[1])

    @property
    def sizes(self) -> dict[str, Any]:
        """Keyword arguments of most functions here."""
        return {"q_len": self.q_len, "kv_len": self.kv_len, "block_size": self.block_size}


# ---------------------------------------------------------------------------------------------------------------- sizes


def grid(q_len: int, kv_len: int, block_size: Size) -> Size:
    """(n_rows, n_cols) in blocks, including a ragged last one."""
    return -(-q_len // block_size[0]), -(-kv_len // block_size[1])


def divided(values: Array, by: int) -> tuple[Array, Array]:
    """(quotient, remainder) of non-negative integers; np.divmod handles signs and takes three times as long."""
    quotient = values // max(by, 1)
    return quotient, values - quotient * by


def words_per_query(block_kv: int) -> int:
    """32-bit words in one row of a bitmask."""
    return -(-block_kv // 32)


def no_bitmasks(block_size: Size) -> Array:
    """Bitmasks of a list without partial blocks, (0, block_q, words)."""
    return np.zeros((0, block_size[0], words_per_query(block_size[1])), np.uint32)


def pack(bits: Array) -> Array:
    """bool (..., block_q, block_kv) -> uint32 (..., block_q, ceil(block_kv / 32)), key 0 in the lowest bit."""
    octets = np.packbits(bits, axis=-1, bitorder="little")
    missing = -octets.shape[-1] % 4
    if missing:
        octets = np.concatenate([octets, np.zeros((*octets.shape[:-1], missing), np.uint8)], axis=-1)
    return np.ascontiguousarray(octets).view(np.uint32)


def unpack(words: Array, block_kv: int) -> Array:
    """uint32 (..., block_q, words) -> bool (..., block_q, block_kv); the inverse of `pack`."""
    octets = np.ascontiguousarray(words).view(np.uint8)
    return np.unpackbits(octets, axis=-1, count=block_kv, bitorder="little").view(np.bool_)


def existing(q_len: int, kv_len: int, block_size: Size) -> Array:
    """Bitmasks of the pairs inside the lengths, uint32 (4, block_q, words), by edge kind.

    Edge kinds: 0 interior, 1 ragged last col, 2 ragged last row, 3 both. Kinds that do not occur equal the interior.
    """
    block_q, block_kv = block_size
    bits = np.ones((4, block_q, block_kv), np.bool_)
    bits[2:, (q_len % block_q or block_q) :] = False
    bits[1::2, :, (kv_len % block_kv or block_kv) :] = False
    return pack(bits)


def edge_kinds(keys: Array, *, q_len: int, kv_len: int, block_size: Size) -> Array:
    """Edge kind (see `existing`) of each block, int64 (nnz,). A last row or col that is not ragged is interior."""
    n_rows, n_cols = grid(q_len, kv_len, block_size)
    kinds = np.zeros(keys.shape, np.int64)
    if kv_len % block_size[1]:
        kinds += keys % n_cols == n_cols - 1
    if q_len % block_size[0]:
        kinds += 2 * (keys // n_cols % n_rows == n_rows - 1)
    return kinds


def full_list(keys: Array, block_size: Size) -> BlockList:
    """The list of full blocks at the ascending keys."""
    return BlockList(keys, np.full(len(keys), FULL, np.int32), no_bitmasks(block_size))


def _split(keys: Array, frame: Frame) -> tuple[Array, Array]:
    """indptr and cols of ascending keys, as of BlockRows."""
    n_rows, n_cols, leads = frame.n_rows, frame.n_cols, frame.leads
    first = n_cols * np.arange(leads * n_rows + 1)
    offsets = keys.searchsorted(first)
    cols = (keys - first[:-1].repeat(offsets[1:] - offsets[:-1])).astype(np.int32)
    # each lead ends where the next begins, so their offsets overlap by one
    step = offsets.itemsize
    indptr = np.ndarray((leads, n_rows + 1), offsets.dtype, offsets, strides=(step * n_rows, step)).astype(np.int32)
    return indptr, cols


def by_rows(found: BlockList, frame: Frame) -> BlockRows:
    """The list in CSR form; shares only the bitmasks with it."""
    return BlockRows(*_split(found.keys, frame), found.ids.astype(np.int32), np.ascontiguousarray(found.bitmasks))


def full_rows(keys: Array, frame: Frame) -> BlockRows:
    """The list of full blocks at the ascending keys, in CSR form."""
    ids = np.empty(len(keys), np.int32)
    # twice as fast as np.full
    ids.fill(FULL)
    return BlockRows(*_split(keys, frame), ids, no_bitmasks(frame.block_size))


def by_keys(rows: BlockRows, frame: Frame) -> BlockList:
    """The inverse of `by_rows`."""
    indptr, cols, ids, bitmasks = rows
    first = frame.n_cols * np.arange(frame.leads * frame.n_rows)
    return BlockList(first.repeat((indptr[:, 1:] - indptr[:, :-1]).reshape(-1)) + cols, ids, bitmasks)


def ranges(starts: Array, counts: Array) -> Array:
    """start, ..., start + count - 1 of each range, concatenated, int64."""
    ends = np.cumsum(counts)
    values: Array = np.repeat(starts - (ends - counts), counts)
    values += np.arange(len(values))
    return values


# ------------------------------------------------------------------------------------------------------------- equality


def _mix(values: Array, seed: int) -> Array:
    """A 64-bit hash of each element (splitmix64's finaliser), uint64; another seed gives an unrelated hash."""
    mixed = values.astype(np.uint64)
    mixed += np.uint64((0x9E3779B97F4A7C15 * (seed + 1)) & 0xFFFFFFFFFFFFFFFF)
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def at_once(bytes_each: int) -> int:
    """Number of items that fill about _CHUNK_BYTES; at least 1."""
    return max(1, _CHUNK_BYTES // max(1, bytes_each))


def chunks(count: int, bytes_each: int) -> Iterator[slice]:
    """Slices that cover range(count), each of about _CHUNK_BYTES."""
    step = at_once(bytes_each)
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


def _first_of(hashes: Array) -> Array:
    """Index of the first element with the same hash, for each element."""
    _, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
    return first[inverse]


def _first_equal_bitmask(words: Array) -> Array:
    """Index of the first equal bitmask, for each bitmask, int64. Found by hash, then verified bit by bit."""
    table = np.ascontiguousarray(words).reshape(len(words), words[0].size if len(words) else 2).view(np.uint64)
    for seed in itertools.count():
        # weights by position, so that moved words change the sum
        weights = _mix(np.arange(table.shape[1]), seed) | np.uint64(1)
        hashes = np.empty(len(table), np.uint64)
        for part in chunks(len(table), 8 * table.shape[1]):
            hashes[part] = (_mix(table[part], seed) * weights).sum(axis=1, dtype=np.uint64)
        first = _first_of(hashes)
        copies = np.flatnonzero(first != np.arange(len(first)))
        parts = chunks(len(copies), 8 * table.shape[1])
        if all(np.array_equal(table[copies[part]], table[first[copies[part]]]) for part in parts):
            return first
    raise AssertionError


def distinct(codes: Array, limit: int) -> tuple[Array, Array]:
    """np.unique(codes, return_inverse=True) of int64 codes in [0, limit), without a sort if they are dense."""
    if limit > 4 * len(codes) + 65536:
        values, inverse = np.unique(codes, return_inverse=True)
        return values, inverse.reshape(-1)
    seen = np.zeros(limit, np.bool_)
    seen[codes] = True
    return np.flatnonzero(seen), (np.cumsum(seen) - 1)[codes]


def renumber(keys: Array, ids: Array, bitmasks: Array) -> BlockList:
    """Number the bitmasks by first appearance and drop unused ones."""
    partial = np.flatnonzero(ids >= 0)
    first = np.full(len(bitmasks), len(ids))
    # the last assignment to an index wins: reversed, so that the first appearance does
    first[ids[partial[::-1]]] = partial[::-1]
    used = np.flatnonzero(first < len(ids))
    order = used[np.argsort(first[used], kind="stable")]
    if len(order) == len(bitmasks) and np.array_equal(order, np.arange(len(order))):
        return BlockList(keys, ids.astype(np.int32, copy=False), bitmasks)
    number = np.empty(len(bitmasks), np.int32)
    number[order] = np.arange(len(order), dtype=np.int32)
    new_ids = np.full(len(ids), FULL, np.int32)
    new_ids[partial] = number[ids[partial]]
    return BlockList(keys, new_ids, bitmasks[order])


def classify(words: Array, kinds: Array, there: Array) -> tuple[Array, Array]:
    """(outcome, kept): EMPTY, FULL or an index into kept for each bitmask; the bitmasks in kept are distinct.

    words  uint32 (n, block_q, words), 0 for pairs that do not exist
    kinds  (n,): edge kind of the blocks with this bitmask
    there  from `existing`
    """
    outcome = _first_equal_bitmask(words)
    for kind in range(4):
        of_kind = np.flatnonzero(kinds == kind)
        for part in chunks(len(of_kind), there[0].nbytes):
            chosen = of_kind[part]
            outcome[chosen[(words[chosen] == there[kind]).all(axis=(1, 2))]] = FULL
    outcome[~words.any(axis=(1, 2))] = EMPTY
    is_partial = outcome >= 0
    used, number = distinct(outcome[is_partial], len(words))
    outcome[is_partial] = number
    return outcome, words[used]


def _mapped(ids: Array, outcome: Array) -> Array:
    """outcome[id] of each id; FULL and EMPTY stay."""
    mapped = ids.copy()
    is_partial = ids >= 0
    mapped[is_partial] = outcome[ids[is_partial]]
    return mapped


def settle(keys: Array, ids: Array, words: Array, kinds: Array, there: Array) -> BlockList:
    """The canonical list of blocks with these bitmasks.

    keys  ascending
    ids   (nnz,): index into words, FULL or EMPTY
    words, kinds, there  as in `classify`
    """
    outcome, words = classify(words, kinds, there)
    ids = _mapped(ids, outcome)
    stored = ids != EMPTY
    if not stored.all():
        keys, ids = keys[stored], ids[stored]
    return renumber(keys, ids, words)


class Gathering:
    """Collects blocks chunk by chunk, so that only one chunk of unclassified bitmasks is in memory."""

    def __init__(self, there: Array) -> None:
        self.there = there
        self._ids: list[Array] = []
        self._words: list[Array] = [there[:0]]
        self._n_words = 0

    def add(self, words: Array, kinds: Array) -> None:
        ids, kept = classify(words, kinds, self.there)
        self._ids.append(np.where(ids >= 0, ids + self._n_words, ids))
        self._words.append(kept)
        self._n_words += len(kept)

    def ids(self) -> tuple[Array, Array]:
        """(ids, words): index into words, FULL or EMPTY of every bitmask added; words are distinct."""
        words = np.concatenate(self._words)
        ids = np.concatenate([*self._ids, np.zeros(0, np.int64)])
        used, number = distinct(_first_equal_bitmask(words), len(words))
        return _mapped(ids, number), words[used]


def gathered(keys: Array, ids: Array, words: Array) -> BlockList:
    """The canonical list of blocks with the ids and words of a Gathering."""
    stored = ids != EMPTY
    return renumber(keys[stored], ids[stored], words)


def canonical(keys: Array, ids: Array, bitmasks: Array, *, q_len: int, kv_len: int, block_size: Size) -> BlockList:
    """The canonical list of the same mask; keys must be ascending, bits beyond the lengths are dropped."""
    if not len(bitmasks):
        return full_list(keys, block_size)
    there = existing(q_len, kv_len, block_size)
    kinds = edge_kinds(keys, q_len=q_len, kv_len=kv_len, block_size=block_size)
    codes = np.where(ids >= 0, 4 * ids.astype(np.int64) + kinds + 1, 0)
    values, which = distinct(codes, 4 * len(bitmasks) + 1)
    # value 0 is FULL, if there is one
    n_full = int(len(values) > 0 and values[0] == 0)
    values = values[n_full:] - 1
    words = bitmasks[values // 4] & there[values % 4]
    return settle(keys, which - n_full if n_full else which, words, values % 4, there)


# -------------------------------------------------------------------------------------------------------------- regroup


def first_equal_run(codes: Array, starts: Array, counts: Array, kinds: Array) -> Array:
    """Index of the first tile with the same pieces and edge kind, for each tile; codes (pieces,) are tile by tile."""
    for seed in itertools.count():
        hashes = np.add.reduceat(_mix(codes, seed), starts) + _mix(kinds, seed + 1)
        first = _first_of(hashes)
        if np.array_equal(counts[first], counts) and np.array_equal(kinds[first], kinds):
            twins = np.arange(len(codes)) + np.repeat(starts[first] - starts, counts)
            if np.array_equal(codes[twins], codes):
                return first
    raise AssertionError


def _pieces(rows: Array, old: int, new: int, length: int) -> tuple[Array, Array]:
    """(first tile that each block overlaps along one axis, number of tiles it overlaps)."""
    first = rows * old // new
    return first, (np.minimum((rows + 1) * old, length) - 1) // new - first + 1


def regroup(keys: Array, ids: Array, bitmasks: Array, *, q_len: int, kv_len: int, old: Size, new: Size) -> BlockList:
    """The same mask in blocks of another size, exact for any two sizes; canonical if the list is.

    Blocks are cut along the borders of the new blocks (here: tiles). Tiles of equal pieces at equal places have equal
    bitmasks, so one bitmask is built per distinct set of pieces. O(nnz log nnz).
    """
    if old == new or not len(keys):
        return BlockList(keys, ids, bitmasks) if old == new else full_list(keys, new)
    n_rows, n_cols = grid(q_len, kv_len, old)
    n_tile_rows, n_tile_cols = grid(q_len, kv_len, new)
    rows, cols, leads = keys // n_cols % n_rows, keys % n_cols, keys // (n_rows * n_cols)
    tile_rows, n_down = _pieces(rows, old[0], new[0], q_len)
    tile_cols, n_across = _pieces(cols, old[1], new[1], kv_len)
    if (n_down > 1).any() or (n_across > 1).any():
        n_pieces = n_down * n_across
        source = np.repeat(np.arange(len(keys)), n_pieces)
        piece = ranges(np.zeros(len(keys), np.int64), n_pieces)
        rows, cols, leads, ids, n_across = rows[source], cols[source], leads[source], ids[source], n_across[source]
        tile_rows, tile_cols = tile_rows[source] + piece // n_across, tile_cols[source] + piece % n_across
    tile_keys = (leads * n_tile_rows + tile_rows) * n_tile_cols + tile_cols
    # place of a block relative to its tile, in units of 16 tokens: -old < place < new
    down = (rows * old[0] - tile_rows * new[0]) // SIDE_UNIT
    across = (cols * old[1] - tile_cols * new[1]) // SIDE_UNIT
    n_places = (old[0] + new[0]) // SIDE_UNIT, (old[1] + new[1]) // SIDE_UNIT
    places = (down + old[0] // SIDE_UNIT) * n_places[1] + across + old[1] // SIDE_UNIT
    n_all_places = n_places[0] * n_places[1]
    codes = (ids.astype(np.int64) + 1) * n_all_places + places

    if (tile_keys[1:] < tile_keys[:-1]).any():
        order = np.argsort(tile_keys, kind="stable")
        tile_keys, codes = tile_keys[order], codes[order]
    starts = np.flatnonzero(np.append(True, tile_keys[1:] != tile_keys[:-1]))
    counts = np.diff(np.append(starts, len(codes)))
    tile_keys = tile_keys[starts]
    kinds = edge_kinds(tile_keys, q_len=q_len, kv_len=kv_len, block_size=new)
    first, which = distinct(first_equal_run(codes, starts, counts, kinds), len(starts))

    there = existing(q_len, kv_len, new)
    words = _join(codes[ranges(starts[first], counts[first])], counts[first], bitmasks, n_places[1], old, new)
    words &= there[kinds[first]]
    return settle(tile_keys, which, words, kinds[first], there)


def _join(codes: Array, counts: Array, bitmasks: Array, n_across: int, old: Size, new: Size) -> Array:
    """Bitmasks of tiles, uint32 (len(counts), new block_q, words), from the codes of their pieces, tile by tile."""
    n_all_places = n_across * ((old[0] + new[0]) // SIDE_UNIT)
    tiles = np.repeat(np.arange(len(counts)), counts)
    ones = np.full((1, *bitmasks.shape[1:]), 0xFFFFFFFF, np.uint32)
    # row 0 is a full block: codes hold id + 1
    source = np.concatenate([ones, bitmasks]).view(np.uint16)
    joined = np.zeros((len(counts), new[0], words_per_query(new[1])), np.uint32)
    target = joined.view(np.uint16)
    places, which = distinct(codes % n_all_places, n_all_places)
    # pieces at one place are copied together: the loop is over places, at most 32 x 32, not over blocks
    order = np.argsort(which, kind="stable")
    bounds = np.searchsorted(which[order], np.arange(len(places) + 1))
    for place, begin, end in zip(places.tolist(), bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        pieces = order[begin:end]
        down = place // n_across * SIDE_UNIT - old[0]
        # in units of 16 keys, which is one uint16
        across = place % n_across - old[1] // SIDE_UNIT
        q_begin, q_end = max(0, down), min(new[0], down + old[0])
        kv_begin, kv_end = max(0, across), min(new[1] // SIDE_UNIT, across + old[1] // SIDE_UNIT)
        block = source[
            codes[pieces] // n_all_places, q_begin - down : q_end - down, kv_begin - across : kv_end - across
        ]
        target[tiles[pieces], q_begin:q_end, kv_begin:kv_end] = block
    return joined


# ---------------------------------------------------------------------------------------------------------------- dense


def from_mask(mask: Array, block_size: Size) -> BlockList:
    """The canonical list of a bool mask (leads, q_len, kv_len). Time and memory O(mask)."""
    leads, q_len, kv_len = mask.shape
    block_q, block_kv = block_size
    n_rows, n_cols = grid(q_len, kv_len, block_size)
    gathering = Gathering(existing(q_len, kv_len, block_size))
    # a chunk is a whole number of leads, or of block rows of one lead
    rows_at_once = max(1, min(n_rows, _CHUNK_BYTES // max(1, n_cols * block_q * block_kv)))
    leads_at_once = (
        max(1, _CHUNK_BYTES // max(1, n_rows * n_cols * block_q * block_kv)) if rows_at_once == n_rows else 1
    )
    for lead, row in itertools.product(range(0, leads, leads_at_once), range(0, n_rows, rows_at_once)):
        part = mask[lead : lead + leads_at_once, row * block_q : (row + rows_at_once) * block_q]
        rows_here = -(-part.shape[1] // block_q)
        padded = np.zeros((part.shape[0], rows_here * block_q, n_cols * block_kv), np.bool_)
        padded[:, : part.shape[1], :kv_len] = part
        # words are [leads, rows, cols, block_q, words of a query]
        words = pack(padded.reshape(part.shape[0], rows_here, block_q, n_cols, block_kv).swapaxes(2, 3))
        words = words.reshape(part.shape[0] * rows_here * n_cols, *words.shape[3:])
        keys = (lead * n_rows + row) * n_cols + np.arange(len(words))
        gathering.add(words, edge_kinds(keys, q_len=q_len, kv_len=kv_len, block_size=block_size))
    return gathered(np.arange(leads * n_rows * n_cols), *gathering.ids())


def to_mask(blocks: BlockList, *, leads: int, q_len: int, kv_len: int, block_size: Size) -> Array:
    """The bool mask (leads, q_len, kv_len) of a list; the inverse of `from_mask`."""
    block_q, block_kv = block_size
    n_rows, n_cols = grid(q_len, kv_len, block_size)
    padded = np.zeros((leads, n_rows, block_q, n_cols, block_kv), np.bool_)
    row, col = blocks.keys // max(n_cols, 1), blocks.keys % max(n_cols, 1)
    lead, row = row // max(n_rows, 1), row % max(n_rows, 1)
    is_full = blocks.ids == FULL
    if is_full.any():
        padded[lead[is_full], row[is_full], :, col[is_full]] = True
    partial = np.flatnonzero(~is_full)
    for part in chunks(len(partial), block_q * block_kv):
        chosen = partial[part]
        padded[lead[chosen], row[chosen], :, col[chosen]] = unpack(blocks.bitmasks[blocks.ids[chosen]], block_kv)
    dense = padded.reshape(leads, n_rows * block_q, n_cols * block_kv)
    return np.ascontiguousarray(dense[:, :q_len, :kv_len])
