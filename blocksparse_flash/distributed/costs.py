"""What does each scheme move, and which one moves least?

Knows pairs of tiles, owners and numbers of heads. Must not know torch, layouts or process groups.

The unit is a number: one feature of one head of one token, keys and values having the same head_dim. Bytes are
numbers * head_dim * element size. All counts are of what a rank receives in one forward of one layer of one batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..blocks import Array
from ..plan import TILE
from . import traffic
from .ownership import Pairs


@dataclass(frozen=True)
class Costs:
    """Of each rank, int64 (n_ranks,): heads * tokens that it receives, to be multiplied by head_dim.

    bound     what no scheme can go below while queries stay where they are: the needed keys and values of others
    exchange  what "exchange" receives: the bound, or less where rows are shipped (their lse not counted)
    ulysses   what "ulysses" receives; None where ranks do not divide the key heads
    all_gather  all keys and values of others
    tiles     tiles that the rank computes under "exchange", for one batch and head, whichever needs them
    shipped   rows of tiles whose queries travel under "exchange"
    scheme, reason  the one taken
    """

    bound: Array
    exchange: Array
    ulysses: Array | None
    all_gather: Array
    tiles: Array
    shipped: Array
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


def _shipped(pairs: Pairs, owner: Array, length: int, heads: tuple[int, int], n_ranks: int) -> tuple[Array, Array]:
    """Which rows to ship, and what ranks then receive: those that reach most tiles, if the busiest rank receives less."""
    nothing = np.zeros(len(owner), np.bool_)
    reaches_most = 2 * np.bincount(pairs.row, minlength=len(owner)) > len(owner)
    stays, ships = (_received(pairs, rows, owner, length, heads, n_ranks) for rows in (nothing, reaches_most))
    return (reaches_most, ships) if ships.max() < stays.max() else (nothing, stays)


def costs_of(
    pairs: Pairs, owner: Array, length: int, heads: tuple[int, int], n_ranks: int, *, asked: str, whole_rows: bool
) -> Costs:
    """What a layer costs, and the scheme for it: asked, or the cheaper one for "auto". whole_rows: none is shipped."""
    q_heads, kv_heads = heads
    held = traffic.tokens_by(owner, np.arange(len(owner)), length, n_ranks)
    is_shipped = np.zeros(len(owner), np.bool_)
    bound = exchange = _received(pairs, is_shipped, owner, length, heads, n_ranks)
    if not whole_rows:
        is_shipped, exchange = _shipped(pairs, owner, length, heads, n_ranks)
    ulysses = None
    if kv_heads % n_ranks == 0:
        # q, k and v of others' tokens for own heads, out of others' heads for own tokens
        ulysses = ((length - held) * (q_heads + 2 * kv_heads) + held * q_heads * (n_ranks - 1)) // n_ranks
    scheme, reason = asked, "asked for by name"
    if asked == "auto":
        scheme, reason = _cheaper(int(exchange.max()), None if ulysses is None else int(ulysses.max()), heads, n_ranks)
    tiles = np.bincount(owner[np.where(is_shipped[pairs.row], pairs.col, pairs.row)], minlength=n_ranks)
    all_gather = 2 * kv_heads * (length - held)
    return Costs(bound, exchange, ulysses, all_gather, tiles, np.flatnonzero(is_shipped), scheme, reason)


def _cheaper(exchange: int, ulysses: int | None, heads: tuple[int, int], n_ranks: int) -> tuple[str, str]:
    if ulysses is None:
        return "exchange", f"{n_ranks} ranks do not divide {heads[1]} key heads, which ulysses needs"
    if exchange <= ulysses:
        return "exchange", f"its busiest rank receives {exchange / max(ulysses, 1):.3g} of what ulysses would"
    return "ulysses", f"its busiest rank receives {ulysses / exchange:.3g} of what exchange would"


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
