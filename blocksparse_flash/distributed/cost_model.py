"""Cost model: what each scheme moves and computes for a layer, and the choice of the fastest.

Received amounts are heads * tokens of one forward of one sequence, with keys and values of the same head_dim. Bytes and
times are for one sequence with heads of 128 in two bytes; times come from time_model.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..blocks.block_list import Array
from ..plan_format import TILE
from . import routing, time_model
from .ownership import Pairs
from .time_model import Call, Work

# the scheme is chosen and reported for these sizes
HEAD_DIM, ELEMENT_BYTES = 128, 2
# rows that reach most keys are few if they are at most this share of all rows
MAX_FEW_SHARE = 1 / 8


@dataclass(frozen=True)
class Costs:
    """Costs of one layer. Arrays are int64 (n_ranks,); received amounts are heads * tokens of each rank.

    bound     lower bound of any scheme whose queries stay in place: the keys and values needed from other ranks
    received  by each scheme. "exchange": the bound, or less with pass-Q rows (their lse is not counted); "all_gather":
              all keys and values of other ranks; "ulysses" only if the number of ranks divides the KV heads
    tiles     tiles that each rank computes, over all batches and heads; for "ulysses" those of "exchange"
    pass_q_rows  tile rows that use pass-Q under "exchange"; empty for other schemes
    work      work of the busiest rank without pass-Q rows; under "ulysses" that of every rank
    seconds   predicted time of a step for each scheme, on H200s; None if it cannot run or was never timed
    one_gpu   predicted seconds of a step on one GPU
    scheme, reason  the chosen scheme, and why
    """

    bound: Array
    received: dict[str, Array]
    tiles: Array
    pass_q_rows: Array
    work: Work
    seconds: dict[str, float | None]
    one_gpu: float
    scheme: str
    reason: str

    @property
    def speedup(self) -> float | None:
        """Predicted speed-up of a step over one GPU, on H200s; None if the scheme was never timed."""
        seconds = self.seconds[self.scheme]
        return None if seconds is None else self.one_gpu / seconds


def _longest(rank: Array, line: Array, n_tiles: int) -> int:
    """The most tiles of one row, or column, on one rank."""
    return int(np.bincount(rank * n_tiles + line).max(initial=0))


def _work(pairs: Pairs, rank: Array, received: int) -> Work:
    """The work of the busiest rank if rank[i] computes pair i."""
    n_tiles = int(max(pairs.row.max(initial=0), pairs.col.max(initial=0))) + 1
    tiles = int(np.bincount(rank).max(initial=0))
    return Work(received, tiles, _longest(rank, pairs.row, n_tiles), _longest(rank, pairs.col, n_tiles))


def _exchange(
    pairs: Pairs, is_pass_q: Array, owner: Array, length: int, call: Call, n_ranks: int
) -> tuple[float, Work, Array]:
    """With these pass-Q rows: seconds of a step, work of the other rows, what each rank receives."""
    kv_heads = call.q_heads // call.group
    stay, travel = (pairs.where(is_pass_q[pairs.row] == travels) for travels in (False, True))
    keys = routing.transfers(owner[stay.row], stay.col, owner)
    queries = routing.transfers(owner[travel.col], travel.row, owner)
    # keys and values, queries of others, and outputs of own queries
    received = 2 * kv_heads * routing.tokens_by(keys.receiver, keys.tile, length, n_ranks)
    for rank in (queries.receiver, queries.sender):
        received += call.q_heads * routing.tokens_by(rank, queries.tile, length, n_ranks)
    work = _work(stay, owner[stay.row], int(received.max()))
    seconds = time_model.pass_kv(work, call, time_model.best_chunks(work, call, kv_heads))
    if len(travel.row):
        seconds += time_model.pass_q(_work(travel, owner[travel.col], 0), call)
    return seconds, work, received


def costs_of(
    pairs: Pairs,
    owner: Array,
    length: int,
    heads: tuple[int, int],
    n_ranks: int,
    *,
    requested: str,
    without_pass_q: bool,
) -> Costs:
    """Costs of a layer, and its scheme: `requested`, or the fastest one for "auto".

    Tile rows that reach more than half of all tiles use pass-Q if that is faster, unless without_pass_q.
    """
    q_heads, kv_heads = heads
    call = Call(1, q_heads, q_heads // kv_heads, HEAD_DIM, ELEMENT_BYTES)
    is_pass_q = np.zeros(len(owner), np.bool_)
    exchanged, work, bound = _exchange(pairs, is_pass_q, owner, length, call, n_ranks)
    received = {"exchange": bound}
    reaches_most = 2 * np.bincount(pairs.row, minlength=len(owner)) > len(owner)
    if not without_pass_q and reaches_most.any():
        found = _exchange(pairs, reaches_most, owner, length, call, n_ranks)
        if found[0] < exchanged:
            is_pass_q, (exchanged, work, received["exchange"]) = reaches_most, found
    if not is_pass_q.any():
        exchanged += time_model.HOST_OVERHEAD
    few_reach_most = 0 < reaches_most.sum() <= MAX_FEW_SHARE * len(owner)
    was_timed = not few_reach_most or n_ranks >= time_model.TIMED_RANKS or n_ranks == 1

    held = routing.tokens_by(owner, np.arange(len(owner)), length, n_ranks)
    received["all_gather"] = 2 * kv_heads * (length - held)
    work_of = {"exchange": work, "all_gather": _work(pairs, owner[pairs.row], int(received["all_gather"].max()))}
    gather = time_model.HOST_OVERHEAD + time_model.all_gather(work_of["all_gather"], call, 2 * kv_heads * length)
    seconds = {"exchange": exchanged if was_timed else None, "ulysses": None, "all_gather": gather}
    whole = _work(pairs, np.zeros(len(pairs.row), np.int64), 0)
    if kv_heads % n_ranks == 0:
        # q, k and v of own heads from other ranks, and out of own tokens from other heads
        amounts = (length - held) * (q_heads + 2 * kv_heads) + held * q_heads * (n_ranks - 1)
        received["ulysses"] = amounts // n_ranks
        work_of["ulysses"] = whole._replace(received=int(received["ulysses"].max()))
        seconds["ulysses"] = _ulysses(work_of["ulysses"], owner, length, call, n_ranks)

    known = {name: found for name, found in seconds.items() if found is not None}
    scheme = min(known, key=lambda name: known[name]) if requested == "auto" else requested
    reason = ("" if requested == "auto" else "requested by name; ") + _reason(seconds, scheme, kv_heads, n_ranks)
    is_pass_q &= scheme == "exchange"
    return Costs(
        bound=bound,
        received=received,
        tiles=np.bincount(owner[np.where(is_pass_q[pairs.row], pairs.col, pairs.row)], minlength=n_ranks),
        pass_q_rows=np.flatnonzero(is_pass_q),
        work=work_of[scheme],
        seconds=seconds,
        one_gpu=sum(time_model.attention(whole, call, q_heads)),
        scheme=scheme,
        reason=reason,
    )


def _ulysses(whole: Work, owner: Array, length: int, call: Call, n_ranks: int) -> float:
    """Seconds of a step of Ulysses: direct if possible and timed on this many ranks, otherwise packed."""
    is_long = time_model.sends_heads_directly(length // n_ranks, HEAD_DIM, ELEMENT_BYTES)
    if not (is_long and np.all(np.diff(owner) >= 0) and n_ranks >= time_model.TIMED_RANKS):
        return time_model.packed_ulysses(whole, call, n_ranks)
    of_rank = call._replace(q_heads=call.q_heads // n_ranks)
    n_chunks = time_model.best_chunks(whole, of_rank, of_rank.q_heads // call.group, time_model.direct_ulysses)
    return time_model.direct_ulysses(whole, of_rank, n_chunks)


def _reason(seconds: dict[str, float | None], scheme: str, kv_heads: int, n_ranks: int) -> str:
    """Predicted times of all schemes, the chosen one first."""
    names = sorted(seconds, key=lambda name: name != scheme)
    said = [f"{1e3 * found:.3g} ms by {name}" for name in names if (found := seconds[name]) is not None]
    reason = f"a step on H200s should take {', '.join(said)}"
    if seconds["ulysses"] is None:
        reason += f"; {n_ranks} ranks do not divide {kv_heads} KV heads, which ulysses needs"
    if seconds["exchange"] is None:
        reason += f"; exchange was not timed on {n_ranks} ranks for layouts in which a few rows reach most keys"
    return reason


def _against_one(plan: Any, costs: Costs) -> str:
    """The predicted speed-up of a layer over one GPU, in words; "" on one rank."""
    if plan.n_ranks == 1:
        return ""
    if plan.unfitted:
        return f"no speed-up over one GPU is predicted: {plan.unfitted}"
    if costs.speedup is None:
        timed = f'"{costs.scheme}" was not timed on {plan.n_ranks} ranks for such a layout'
        return f"no speed-up over one GPU is predicted: {timed}"
    least, most = time_model.TIMED_TOKENS
    far = "" if least <= plan.length <= most else f"; {least} to {most} tokens were timed"
    one_gpu = f"one {time_model.GPU}, {1e3 * costs.one_gpu:.3g} ms a step"
    return f"predicted {costs.speedup:.2f} times as fast as {one_gpu}{far}"


def slower_than_one(plan: Any) -> str:
    """A warning for layers predicted to be slower than on one GPU; "" if there are none."""
    slow = [
        (f'layer {i_layer} ("{layer.scheme}") {speedup:.2f} times', layer.costs)
        for i_layer, (layer, speedup) in enumerate(zip(plan.layers, plan.speedups, strict=True))
        if speedup is not None and speedup < 1
    ]
    if not slow:
        return ""
    is_fastest = all(costs.seconds[costs.scheme] == min(filter(None, costs.seconds.values())) for _, costs in slow)
    schemes = "" if is_fastest else ', scheme="auto", which is faster here'
    orders = "" if plan.order == "tuned" else ', order="tuned", which usually moves less'
    return (
        f"attention shared by {plan.n_ranks} ranks is predicted to be slower than on one {time_model.GPU}: "
        f"{', '.join(said for said, _ in slow)} as fast. Fewer ranks, a longer sequence, fewer KV heads{orders}"
        f"{schemes}, or a mask whose blocks lie nearer to the diagonal may help; print(plan) shows what each scheme "
        "should take"
    )


def _mebibytes(amount: int) -> str:
    """Received bytes, from heads * tokens."""
    n_bytes = int(amount) * HEAD_DIM * ELEMENT_BYTES
    return f"{n_bytes / 2**20:.4g} MiB" if n_bytes else "0"


def report(plan: Any) -> str:
    """A ContextPlan as text."""
    q_heads, kv_heads = plan.heads
    sizes = f"head_dim={HEAD_DIM}, element_bytes={ELEMENT_BYTES}"
    lines = [
        f"{plan.length} tokens in tiles of {TILE}, {plan.n_ranks} ranks, {q_heads} query heads, {kv_heads} KV heads",
        f'order "{plan.order}"; bytes received in a forward of one sequence, {sizes}:',
    ]
    for i_layer, layer in enumerate(plan.layers):
        costs = layer.costs
        travels = f"; {len(costs.pass_q_rows)} tiles of queries travel" if len(costs.pass_q_rows) else ""
        lines += [f'layer {i_layer}: "{layer.scheme}": {costs.reason}{travels}']
        lines += filter(None, [_against_one(plan, costs)])
        columns: dict[str, Any] = {"rank": range(plan.n_ranks), "tokens": plan.sizes, "tiles": costs.tiles}
        amounts = {**costs.received, "lower bound": costs.bound}
        for name in ("exchange", "lower bound", "ulysses", "all_gather"):
            found = map(_mebibytes, amounts[name]) if name in amounts else ["-"] * plan.n_ranks
            columns[name.replace("_", "-")] = found
        texts = [[name, *map(str, cells)] for name, cells in columns.items()]
        aligned = [[cell.rjust(max(map(len, column))) for cell in column] for column in texts]
        lines += ["  ".join(row) for row in zip(*aligned, strict=True)]
    return "\n".join(lines)
