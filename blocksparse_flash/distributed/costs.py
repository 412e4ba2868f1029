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

from ..blocks.block_list import Array
from ..kernels.plan_format import TILE
from . import times, traffic
from .ownership import Pairs
from .times import Call, Work

# what a plan is chosen for
HEAD_DIM, ELEMENT_BYTES = 128, 2
# share of the rows up to which those that reach most keys are few
FEW = 1 / 8


@dataclass(frozen=True)
class Costs:
    """Of each rank, int64 (n_ranks,): heads * tokens that it receives, to be multiplied by head_dim.

    bound     what no scheme can go below while queries stay where they are: the needed keys and values of others
    exchange  what "exchange" receives: the bound, or less where rows are shipped (their lse not counted)
    ulysses   what "ulysses" receives; None where ranks do not divide the key heads
    all_gather  what "all_gather" receives: all keys and values of others
    tiles     tiles that the rank computes, for one batch and head, whichever needs them; for "ulysses" those of "exchange"
    shipped   rows of tiles whose queries travel under "exchange"; none where another scheme is taken
    work      what the rank with most of it does, shipped rows apart; under "ulysses" every rank, of its heads
    seconds   of a step by each scheme, on H200s; None where it cannot run, or was never timed as it would run
    one       seconds of a step on one GPU
    scheme, reason  the one taken
    """

    bound: Array
    exchange: Array
    ulysses: Array | None
    all_gather: Array
    tiles: Array
    shipped: Array
    work: Work
    seconds: dict[str, float | None]
    one: float
    scheme: str
    reason: str

    @property
    def speedup(self) -> float | None:
        """How many times as fast as one GPU a step should be, on H200s; None where that was never timed."""
        seconds = self.seconds[self.scheme]
        return None if seconds is None else self.one / seconds


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
    """What a layer costs, and the scheme for it: asked, or the fastest one for "auto". whole_rows: none is shipped.

    Rows that reach most tiles are shipped if that is faster than sending every rank the keys it needs.
    """
    q_heads, kv_heads = heads
    held = traffic.tokens_by(owner, np.arange(len(owner)), length, n_ranks)
    is_shipped = np.zeros(len(owner), np.bool_)
    exchanged, work, bound = _exchange(pairs, is_shipped, owner, length, heads, n_ranks)
    exchange, gathered = bound, 2 * kv_heads * (length - held)
    reaches_most = 2 * np.bincount(pairs.row, minlength=len(owner)) > len(owner)
    if not whole_rows and reaches_most.any():
        found = _exchange(pairs, reaches_most, owner, length, heads, n_ranks)
        if found[0] < exchanged:
            is_shipped, (exchanged, work, exchange) = reaches_most, found
    if not is_shipped.any():
        exchanged += times.HOST
    few_reach_most = 0 < reaches_most.sum() <= FEW * len(owner)
    was_timed = not few_reach_most or n_ranks >= times.TIMED_RANKS or n_ranks == 1
    work_of = {"exchange": work, "all_gather": _work(pairs, owner[pairs.row], int(gathered.max()))}
    gather = times.HOST + times.all_gather(work_of["all_gather"], _call(heads), 2 * kv_heads * length)
    seconds = {"exchange": exchanged if was_timed else None, "ulysses": None, "all_gather": gather}
    ulysses, whole = None, _work(pairs, np.zeros(len(pairs.row), np.int64), 0)
    one = sum(times.attention(whole, _call(heads), q_heads))
    if kv_heads % n_ranks == 0:
        # q, k and v of others' tokens for own heads, out of others' heads for own tokens
        ulysses = ((length - held) * (q_heads + 2 * kv_heads) + held * q_heads * (n_ranks - 1)) // n_ranks
        work_of["ulysses"] = whole = whole._replace(received=int(ulysses.max()))
        seconds["ulysses"] = _whole_heads(whole, owner, length, heads, n_ranks)
    known = {name: found for name, found in seconds.items() if found is not None}
    # the first of equals
    scheme = min(known, key=lambda name: known[name]) if asked == "auto" else asked
    reason = ("" if asked == "auto" else "asked for by name; ") + _reason(seconds, scheme, kv_heads, n_ranks)
    if scheme != "exchange":
        is_shipped = np.zeros(len(owner), np.bool_)
    tiles = np.bincount(owner[np.where(is_shipped[pairs.row], pairs.col, pairs.row)], minlength=n_ranks)
    return Costs(
        bound,
        exchange,
        ulysses,
        gathered,
        tiles,
        np.flatnonzero(is_shipped),
        work_of[scheme],
        seconds,
        one,
        scheme,
        reason,
    )


def _whole_heads(whole: Work, owner: Array, length: int, heads: tuple[int, int], n_ranks: int) -> float:
    """Seconds of a step of Ulysses: from where heads lie if they do and that was timed on so many ranks, else packed."""
    goes_direct = np.all(np.diff(owner) >= 0) and times.goes_by_itself(length // n_ranks, HEAD_DIM, ELEMENT_BYTES)
    if not goes_direct or n_ranks < times.TIMED_RANKS:
        return times.ulysses(whole, _call(heads), n_ranks)
    of_rank = _call((heads[0] // n_ranks, heads[1] // n_ranks))
    n_chunks = times.best_chunks(whole, of_rank, heads[1] // n_ranks, times.whole_heads)
    return times.whole_heads(whole, of_rank, n_chunks)


def _reason(seconds: dict[str, float | None], scheme: str, kv_heads: int, n_ranks: int) -> str:
    """What each scheme should take, the one that is taken first."""
    told = sorted(seconds, key=lambda name: name != scheme)
    said = [f"{1e3 * found:.3g} ms by {name}" for name in told if (found := seconds[name]) is not None]
    reason = f"a step on H200s should take {', '.join(said)}"
    if seconds["ulysses"] is None:
        reason += f"; {n_ranks} ranks do not divide {kv_heads} key heads, which ulysses needs"
    if seconds["exchange"] is None:
        reason += f"; exchange of few rows that reach most keys was not timed on {n_ranks} ranks as it is today"
    return reason


def _against_one(plan: Any, costs: Costs) -> str:
    """What a layer's step should be to that of one GPU, in words; "" on one rank."""
    if plan.n_ranks == 1:
        return ""
    if plan.unfitted:
        return f"no speed-up over one GPU is predicted: {plan.unfitted}"
    if costs.speedup is None:
        return f'no speed-up over one GPU is predicted: "{costs.scheme}" was not timed on {plan.n_ranks} ranks for such a layout'
    least, most = times.TIMED_TOKENS
    is_far = "" if least <= plan.length <= most else f"; timed were {least} to {most} tokens"
    return f"predicted {costs.speedup:.2f} times as fast as one {times.GPU}, {1e3 * costs.one:.3g} ms a step{is_far}"


def slower_than_one(plan: Any) -> str:
    """Which layers of a plan should be slower than on one GPU, and what may help; "" if none is, or nothing is predicted."""
    slow = [
        (f'layer {i_layer} ("{layer.scheme}") {speedup:.2f} times', layer.costs)
        for i_layer, (layer, speedup) in enumerate(zip(plan.layers, plan.speedups, strict=True))
        if speedup is not None and speedup < 1
    ]
    if not slow:
        return ""
    known = [[found for found in costs.seconds.values() if found is not None] for _, costs in slow]
    is_fastest = all(costs.seconds[costs.scheme] == min(found) for (_, costs), found in zip(slow, known, strict=True))
    schemes = "" if is_fastest else ', scheme="auto", which is faster here'
    orders = "" if plan.order == "tuned" else ', order="tuned", which moves least'
    return (
        f"attention shared by {plan.n_ranks} ranks is predicted to be slower than on one {times.GPU}: "
        f"{', '.join(said for said, _ in slow)} as fast. Fewer ranks, a longer sequence, fewer key heads{orders}{schemes}, or a mask whose "
        "blocks lie nearer to the diagonal may help; print(plan) shows what each scheme should take"
    )


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
        lines += filter(None, [_against_one(plan, costs)])
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
