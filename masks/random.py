"""Random blocks drawn by a counter-based hash.

The hash is used instead of the generators of NumPy and torch, whose streams may change between versions.
"""

from __future__ import annotations

import math

import numpy as np

from blocksparse_flash import BlockLayout

from .canvas import BlockSize, Length, check_nnz, read_canvas
from .checks import read_fraction, read_integer
from .public import public

# splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014)
GAMMA = np.uint64(0x9E3779B97F4A7C15)
MULTIPLIERS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
HALF_WORD = np.uint64(32)
MAX_SEED = 2**64 - 1

# draws beyond the expected number, in standard deviations; a row that needs more is drawn again
DEVIATIONS = 4

# draws per step, to bound memory: 8 MiB per array
DRAWS_AT_ONCE = 2**20


def _mix(words: np.ndarray) -> np.ndarray:
    """One step of splitmix64 on uint64 arrays, modulo 2**64; a bijection."""
    words = words + GAMMA
    words = (words ^ (words >> np.uint64(30))) * MULTIPLIERS[0]
    words = (words ^ (words >> np.uint64(27))) * MULTIPLIERS[1]
    return words ^ (words >> np.uint64(31))


def stream_keys(seed: int, streams: np.ndarray) -> np.ndarray:
    """uint64 (n,): the key of each stream, for draw_words. streams (n,), 0 to 2**63 - 1."""
    return _mix(_mix(np.array([seed], dtype=np.uint64)) ^ streams.astype(np.uint64))


def draw_words(keys: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """Uniform uint64: word number `draws` of each stream. keys come from stream_keys and broadcast with draws."""
    return _mix(keys ^ draws.astype(np.uint64))


def permutation(key: np.ndarray, size: int) -> np.ndarray:
    """0 .. size - 1 in random order, sorted by the words of one stream; key (1,)."""
    return np.argsort(draw_words(key, np.arange(size)), kind="stable")


def below(words: np.ndarray, size: int) -> np.ndarray:
    """Uniform int64 in 0 .. size - 1, one per word; size below 2**32."""
    return (((words >> HALF_WORD) * np.uint64(size)) >> HALF_WORD).astype(np.int64)


def chances(words: np.ndarray) -> np.ndarray:
    """Uniform float64 in [0, 1), one per word: its upper 53 bits."""
    return (words >> np.uint64(11)) * 2.0**-53


def _try_draws(
    keys: np.ndarray, sizes: np.ndarray, counts: np.ndarray, width: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The first counts[i] distinct numbers of each stream i among its first `width` draws.

    returns  (is_enough, places, numbers): streams with enough distinct numbers, and numbers[j] of stream places[j]
    """
    # [streams, width]
    draws = np.arange(width, dtype=np.uint64)
    numbers = ((draw_words(keys[:, None], draws) >> HALF_WORD) * sizes.astype(np.uint64)[:, None]) >> HALF_WORD
    # sorted by number, then by draw, so the first of equal numbers is the earliest draw
    packed = np.sort((numbers << HALF_WORD) | draws, axis=1)
    numbers = packed >> HALF_WORD
    arrivals = (packed & np.uint64(2**32 - 1)).astype(np.int64)
    is_repeat = np.zeros(arrivals.shape, dtype=bool)
    is_repeat[:, 1:] = numbers[:, 1:] == numbers[:, :-1]
    arrivals[is_repeat] = width
    # the draw that completes the distinct numbers of a stream
    last_arrival = np.take_along_axis(np.sort(arrivals, axis=1), counts[:, None] - 1, axis=1)
    is_enough = last_arrival < width
    places, slots = np.nonzero((arrivals <= last_arrival) & is_enough)
    return is_enough[:, 0], places, numbers[places, slots].astype(np.int64)


def _first_distinct(
    seed: int, rows: np.ndarray, sizes: np.ndarray, counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """As draw_distinct, for counts of at most half of sizes."""
    keys = stream_keys(seed, rows)
    pending = np.flatnonzero(counts)
    found_places, found_numbers = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
    # expected draws until counts distinct numbers are found
    expected = -sizes[pending] * np.log1p(-counts[pending] / sizes[pending])
    width = math.ceil(np.max(expected + DEVIATIONS * np.sqrt(expected), initial=0.0)) + 1
    while pending.size:
        n_rows = max(1, DRAWS_AT_ONCE // width)
        unfinished = []
        for begin in range(0, pending.size, n_rows):
            chunk = pending[begin : begin + n_rows]
            is_enough, places, numbers = _try_draws(keys[chunk], sizes[chunk], counts[chunk], width)
            found_places.append(chunk[places])
            found_numbers.append(numbers)
            unfinished.append(chunk[~is_enough])
        pending = np.concatenate(unfinished)
        width *= 2
    return np.concatenate(found_places), np.concatenate(found_numbers)


def draw_distinct(
    seed: int, rows: np.ndarray, *, sizes: np.ndarray, counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """counts[i] distinct numbers from 0 to sizes[i] - 1, drawn from the stream of rows[i], for every i.

    rows     int64 (n,), numbers of the streams
    sizes    int64 (n,), each below 2**32
    counts   int64 (n,), from 0 to sizes
    returns  (places, numbers), int64 (counts.sum(),): numbers[j] belongs to rows[places[j]]; in any order
    """
    # beyond half of the numbers, most draws repeat: draw the numbers to leave out instead
    is_excluding = 2 * counts > sizes
    drawn = np.where(is_excluding, sizes - counts, counts)
    places, numbers = _first_distinct(seed, rows, sizes, drawn)
    if not is_excluding.any():
        return places, numbers

    # [excluding rows, widest row]
    excluding = np.flatnonzero(is_excluding)
    is_kept = np.arange(sizes[excluding].max(initial=0)) < sizes[excluding, None]
    is_drawn = is_excluding[places]
    is_kept[np.searchsorted(excluding, places[is_drawn]), numbers[is_drawn]] = False
    kept_rows, kept_numbers = np.nonzero(is_kept)
    return np.append(places[~is_drawn], excluding[kept_rows]), np.append(numbers[~is_drawn], kept_numbers)


@public
def random(
    length: Length,
    *,
    blocks_per_row: int | None = None,
    density: float | None = None,
    seed: int,
    block_size: BlockSize = 128,
) -> BlockLayout:
    """Each block row attends to the same number of random blocks, drawn without replacement.

    The blocks depend on (seed, row, number of cols) only: they are the same on every machine and in every version, and
    more queries leave existing rows unchanged. The diagonal is not added: use `random(...) | local(...)`. Row r reads
    the words w(0), w(1), ... with

        w(draw) = mix(mix(mix(seed) ^ r) ^ draw),  mix = splitmix64: add 0x9E3779B97F4A7C15, then finalize
        col     = (w >> 32) * n_cols >> 32

    and keeps the first distinct cols. If a row keeps more than half of its blocks, the drawn cols are those left out.

    length          tokens, or (q_len, kv_len)
    blocks_per_row  blocks in every row, 0 to n_cols
    density         share of the blocks of every row, instead of blocks_per_row: round(density * n_cols) blocks
    seed            0 to 2**64 - 1
    block_size      tokens per side of a block, a multiple of 16, or (block_q, block_kv)
    returns         BlockLayout of shape (1, 1, q_len, kv_len), shared by every head, of full blocks only
    raises          ValueError if both or neither of blocks_per_row and density are given, or a number is out of range

    Zaheer et al., "Big Bird", arXiv:2007.14062, section 2 (random attention), without window and global blocks.

    >>> layout = random(1024, blocks_per_row=2, seed=0)
    >>> layout.nnz, layout.density
    (16, 0.25)
    """
    canvas = read_canvas(length, block_size)
    seed = read_integer("seed", seed, at_least=0, at_most=MAX_SEED)
    if (blocks_per_row is None) == (density is None):
        given = "neither" if density is None else "both"
        raise ValueError(f"blocks_per_row, density: expected exactly one of the two, got {given}")
    if blocks_per_row is not None:
        count = read_integer("blocks_per_row", blocks_per_row, at_least=0, at_most=canvas.n_cols, unit="blocks")
    else:
        count = round(read_fraction("density", density) * canvas.n_cols)

    check_nnz(canvas.n_rows * count)
    rows = np.arange(canvas.n_rows)
    places, cols = draw_distinct(seed, rows, sizes=np.full_like(rows, canvas.n_cols), counts=np.full_like(rows, count))
    return canvas.from_blocks(rows[places], cols)
