"""What does each scheme move and compute, and which one takes least time?

Knows pairs of tiles, owners and numbers of heads. Must not know torch, layouts or process groups.

The unit is a number: one feature of one head of one token, keys and values having the same head_dim. Bytes are
numbers * head_dim * element size. All counts are of what a rank receives in one forward of one layer of one batch. Times are
those of times.py, for one sequence of heads of 128 in two bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..blocks import Array
from ..plan import TILE
from . import times, traffic
from .ownership import Pairs
from .times import Call, Work

# what a plan is chosen for
HEAD_DIM, ELEMENT_BYTES = 128, 2


@dataclass(frozen=True)
class Costs:
    """Of each rank, int64 (n_ranks,): heads * tokens that it receives, to be multiplied by head_dim.

    bound     what no scheme can go below while queries stay where they are: the needed keys and values of others
    exchange  what "exchange" receives: the bound, or less where rows are shipped (their lse not counted)
    ulysses   what "ulysses" receives; None where ranks do not divide the key heads
    all_gather  all keys and values of others
    tiles     tiles that the rank computes under "exchange", for one batch and head, whichever needs them
    shipped   rows of tiles whose queries travel under "exchange"
    work      what the rank with most of it does under "exchange", shipped rows apart; under "ulysses" every rank, of its heads
    scheme, reason  the one taken
    """

    bound: Array
    exchange: Array
    ulysses: Array | None
    all_gather: Array
    tiles: Array
    shipped: Array
    work: Work
    scheme: str
    reason: str


def _received(
    pairs: Pairs, is_shipped: Array, owner: Array, length: int, heads: tuple[int, int], n_ranks: int
) -> Array:
    """What each rank receives when these rows are shipped: keys and values, queries, and outputs of its own queries."""
    ships = is_shipped[pairs.row]
    row, col = pairs.row[~ships], pairs.col[~ships]
    keys = traffic.moves(owner[row], col, owner)
    queries = traffic.moves(owner[pairs.col[ships]], pairs.row[ships], owner)
    received = 2 * heads[1] * traffic.tokens_by(keys.receiver, keys.tile, length, n_ranks)
    for rank in (queries.receiver, queries.sender):
        received += heads[0] * traffic.tokens_by(rank, queries.tile, length, n_ranks)
    return received


def _longest(rank: Array, line: Array, n_tiles: int) -> int:
    """The most tiles of one row, or column, that one rank computes."""
    return int(np.bincount(rank * n_tiles + line).max(initial=0))


def _work(pairs: Pairs, rank: Array, received: int) -> Work:
    """What the busiest rank does when rank[i] computes pair i."""
    n_tiles = int(max(pairs.row.max(initial=0), pairs.col.max(initial=0))) + 1
    tiles = int(np.bincount(rank).max(initial=0))
    return Work(received, tiles, _longest(rank, pairs.row, n_tiles), _longest(rank, pairs.col, n_tiles))


def _exchange(
    pairs: Pairs, is_shipped: Array, owner: Array, length: int, heads: tuple[int, int], n_ranks: int
) -> tuple[float, Work, Array]:
    """Seconds of a step when these rows are shipped; the work without them; what each rank receives."""
    received = _received(pairs, is_shipped, owner, length, heads, n_ranks)
    ships = is_shipped[pairs.row]
    stay, travel = Pairs(pairs.row[~ships], pairs.col[~ships]), Pairs(pairs.row[ships], pairs.col[ships])
    call = _call(heads)
    work = _work(stay, owner[stay.row], int(received.max()))
    seconds = times.exchange(work, call, times.best_chunks(work, call, heads[1]))
    if len(travel.row):
        seconds += times.shipping(_work(travel, owner[travel.col], 0), call)
    return seconds, work, received


def _call(heads: tuple[int, int]) -> Call:
    return Call(1, heads[0], heads[0] // heads[1], HEAD_DIM, ELEMENT_BYTES)


def costs_of(
    pairs: Pairs, owner: Array, length: int, heads: tuple[int, int], n_ranks: int, *, asked: str, whole_rows: bool
) -> Costs:
    """What a layer costs, and the scheme for it: asked, or the faster one for "auto". whole_rows: none is shipped.

    Rows that reach most tiles are shipped if that is faster than sending every rank the keys it needs.
    """
    q_heads, kv_heads = heads
    held = traffic.tokens_by(owner, np.arange(len(owner)), length, n_ranks)
    is_shipped = np.zeros(len(owner), np.bool_)
    seconds, work, bound = _exchange(pairs, is_shipped, owner, length, heads, n_ranks)
    exchange = bound
    reaches_most = 2 * np.bincount(pairs.row, minlength=len(owner)) > len(owner)
    if not whole_rows and reaches_most.any():
        found = _exchange(pairs, reaches_most, owner, length, heads, n_ranks)
        if found[0] < seconds:
            is_shipped, (seconds, work, exchange) = reaches_most, found
    ulysses, whole = None, None
    if kv_heads % n_ranks == 0:
        # q, k and v of others' tokens for own heads, out of others' heads for own tokens
        ulysses = ((length - held) * (q_heads + 2 * kv_heads) + held * q_heads * (n_ranks - 1)) // n_ranks
        whole = _work(pairs, np.zeros(len(pairs.row), np.int64), int(ulysses.max()))
    scheme, reason = asked, "asked for by name"
    if asked == "auto":
        other = None
        if whole is not None:
            if np.all(np.diff(owner) >= 0) and times.goes_by_itself(length // n_ranks, HEAD_DIM, ELEMENT_BYTES):
                of_rank = _call((q_heads // n_ranks, kv_heads // n_ranks))
                n_chunks = times.best_chunks(whole, of_rank, kv_heads // n_ranks, times.whole_heads)
                other = times.whole_heads(whole, of_rank, n_chunks)
            else:
                other = times.ulysses(whole, _call(heads), n_ranks)
        scheme, reason = _faster(seconds, other, heads, n_ranks)
    tiles = np.bincount(owner[np.where(is_shipped[pairs.row], pairs.col, pairs.row)], minlength=n_ranks)
    all_gather = 2 * kv_heads * (length - held)
    if scheme == "ulysses" and whole is not None:
        work = whole
    return Costs(bound, exchange, ulysses, all_gather, tiles, np.flatnonzero(is_shipped), work, scheme, reason)


def _faster(exchange: float, ulysses: float | None, heads: tuple[int, int], n_ranks: int) -> tuple[str, str]:
    if ulysses is None:
        return "exchange", f"{n_ranks} ranks do not divide {heads[1]} key heads, which ulysses needs"
    said = "a step on H200s should take {:.3g} ms, of {} {:.3g}"
    if exchange <= ulysses:
        return "exchange", said.format(1e3 * exchange, "ulysses", 1e3 * ulysses)
    return "ulysses", said.format(1e3 * ulysses, "exchange", 1e3 * exchange)


def report(plan: Any, head_dim: int = 128, element_bytes: int = 2) -> str:
    """A ContextPlan in words and numbers."""

    def size(numbers: Any) -> str:
        n_bytes = int(numbers) * head_dim * element_bytes
        return f"{n_bytes / 2**20:.4g} MiB" if n_bytes else "0"

    q_heads, kv_heads = plan.heads
    lines = [
        f"{plan.length} tokens in tiles of {TILE}, {plan.n_ranks} ranks, {q_heads} query heads, {kv_heads} key heads",
        f'order "{plan.order}"; bytes received in a forward of one sequence, {head_dim=}, {element_bytes=}:',
    ]
    for i_layer, layer in enumerate(plan.layers):
        costs = layer.costs
        ulysses = [None] * plan.n_ranks if costs.ulysses is None else costs.ulysses
        travels = f"; {len(costs.shipped)} tiles of queries travel" if len(costs.shipped) else ""
        lines += [f'layer {i_layer}: "{layer.scheme}": {costs.reason}{travels}']
        rows = [("rank", "tokens", "tiles", "exchange", "lower bound", "ulysses", "all-gather")]
        for rank in range(plan.n_ranks):
            rows.append(
                (
                    str(rank), str(plan.sizes[rank]), str(costs.tiles[rank]), size(costs.exchange[rank]),
                    size(costs.bound[rank]), "-" if ulysses[rank] is None else size(ulysses[rank]),
                    size(costs.all_gather[rank]),
                )
            )  # fmt: skip
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines += ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(lines)
