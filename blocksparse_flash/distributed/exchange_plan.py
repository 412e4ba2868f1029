"""ExchangePlan: index lists and kernel plan of one rank's exchange, and their flat form for operators.

The flat form has the tensors in the order of the fields, those of the kernel plan last, and the counts send + receive.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..blocks.block_list import Array
from ..layout import BlockLayout
from ..plan_format import TILE, Plan
from . import routing, time_model
from .cost_model import ELEMENT_BYTES, HEAD_DIM
from .ownership import Pairs
from .routing import Shards, TokenIndices

# tensors of a kernel plan, and of a flattened ExchangePlan: seven lists and a kernel plan
N_PLAN = len(Plan._fields)
WIDTH = 7 + N_PLAN
# local rows (no received keys) are computed separately if they hold more than this share of a rank's tiles
MIN_LOCAL_SHARE = 0.5
# gradients are summed in place if at most this share of a rank's tokens gets gradients from other ranks
MAX_SHARED_SHARE = 0.5

# tensors and counts of flattened plans
Flat = tuple[list[Tensor], list[int]]


class ExchangePlan(NamedTuple):
    """What one rank sends and receives, and the kernel plan over its own and received tokens.

    own, own_slots, sent, slots  see routing.TokenIndices
    rows          this rank's tokens whose queries the kernel plan covers
    touched       this rank's tokens whose result is a sum or merge over ranks
    table         int32 (ranks, touched): index of each touched token in a rank's result, a slot for this rank and a
                  position in the message for another; -1 if the rank contributes nothing
    plan          the tensors of a plan_format.Plan
    send, receive  number of tokens to and from each rank
    """

    own: Tensor
    own_slots: Tensor
    sent: Tensor
    slots: Tensor
    rows: Tensor
    touched: Tensor
    table: Tensor
    plan: list[Tensor]
    send: list[int]
    receive: list[int]

    def empty(self, x: Tensor) -> Tensor:
        """Buffer for the own and received tokens of a tensor: (batch, heads, slots, features)."""
        return x.new_empty(*x.shape[:2], self.own_slots.shape[0] + self.slots.shape[0], x.shape[3])


def unflatten(tensors: list[Tensor], counts: list[int], n_ranks: int) -> tuple[list[ExchangePlan], list[Tensor]]:
    """The plans of concatenated flat plans, and the tensors after them. One more count at the end is ignored."""
    n_plans = len(counts) // (2 * n_ranks)
    found = []
    for i in range(n_plans):
        own, own_slots, sent, slots, rows, touched, table, *plan = tensors[i * WIDTH : (i + 1) * WIDTH]
        send, receive = (counts[(2 * i + j) * n_ranks : (2 * i + j + 1) * n_ranks] for j in (0, 1))
        found.append(ExchangePlan(own, own_slots, sent, slots, rows, touched, table, plan, send, receive))
    return found, tensors[n_plans * WIDTH :]


# ---- construction ----


def _flat_plan(
    tiles: BlockLayout, indices: TokenIndices, tokens: Array, touched: Array, rows: Array, cols: Array, shards: Shards,
    device: torch.device,
) -> Flat:  # fmt: skip
    """The flat plan of messages with these indices; its kernels compute rows x cols of a layout of tiles.

    tokens, touched  `rows` and `touched` of ExchangePlan
    """
    table = _table(indices, touched, shards)
    arrays = indices.own, indices.own_slots, indices.sent, indices.slots, tokens, touched, table
    lists = [torch.from_numpy(np.ascontiguousarray(array)).to(device) for array in arrays]
    kernel_plan = tiles.select(rows=rows, cols=cols).plan(device)
    return [*lists, *kernel_plan], indices.send_counts + indices.receive_counts


def _table(found: TokenIndices, touched: Array, shards: Shards) -> Array:
    """ExchangePlan.table for these touched tokens."""
    place: Array = np.full(shards.n_tokens, -1, np.int64)
    place[touched] = np.arange(len(touched))
    table: Array = np.full((shards.n_ranks, len(touched)), -1, np.int32)
    is_touched = place[found.own] >= 0
    table[shards.rank, place[found.own[is_touched]]] = found.own_slots[is_touched]
    bounds = np.cumsum([0, *found.send_counts])
    for other, (begin, end) in enumerate(itertools.pairwise(bounds.tolist())):
        table[other, place[found.sent[begin:end]]] = np.arange(begin, end)
    return table


def _only(tiles: BlockLayout, pairs: Pairs) -> BlockLayout:
    """The blocks of a layout of tiles at these rows and columns."""
    return tiles & BlockLayout.from_blocks(*pairs, tiles.q_len, tiles.kv_len, block_size=TILE)


def _remote_rows(pairs: Pairs, shards: Shards, kv_heads: int) -> Array:
    """Tile rows of a rank to compute after its messages arrive: those that need received keys, or all.

    Rows that need no received keys can overlap with the messages. That pays off only if there is much work and they are
    a large part of it.
    """
    (row, col), owner, rank, held = pairs, shards.owner, shards.rank, shards.held
    mine = owner[row] == rank
    needs = np.zeros(len(owner), np.bool_)
    needs[row[mine & (owner[col] != rank)]] = True
    is_local = ~needs[row[mine]]
    pays = time_model.splitting_pays(shards.n_tokens, kv_heads, HEAD_DIM, ELEMENT_BYTES)
    return held[needs[held]] if pays and is_local.sum() > MIN_LOCAL_SHARE * len(is_local) else held


def _in_place_slot(found: TokenIndices, n_tokens: int) -> int:
    """The slot of a rank's first token if its gradients are summed in place, otherwise -1.

    That needs tokens in consecutive slots, and few gradients from other ranks.
    """
    if not 0 < len(found.own) == n_tokens or len(np.unique(found.sent)) > MAX_SHARED_SHARE * n_tokens:
        return -1
    first = int(found.own_slots[0])
    return first if np.array_equal(found.own_slots, first + np.arange(n_tokens)) else -1


def all_gather_plan(tiles: BlockLayout, shards: Shards, device: torch.device) -> Flat:
    """The flat plan of a rank that receives all keys. Every token gets gradients, none is summed in place."""
    n_tiles, n_ranks, tokens = len(shards.owner), shards.n_ranks, np.arange(shards.n_tokens)
    every = np.arange(n_tiles)
    keys = routing.transfers(np.repeat(np.arange(n_ranks), n_tiles), np.tile(every, n_ranks), shards.owner)
    indices = routing.token_indices(every, keys, shards)
    tensors, counts = _flat_plan(tiles, indices, tokens, tokens, shards.held, every, shards, device)
    return tensors, [*counts, -1]


def pass_kv_plan(
    tiles: BlockLayout, pairs: Pairs, pass_q_rows: Array, shards: Shards, kv_heads: int, device: torch.device
) -> Flat:
    """The flat plans of a rank.

    They are the exchange of keys; then, where present, the exchange of pass-Q queries and the kernel plan of local
    rows. The last count is the slot of the first own token if gradients are summed in place, otherwise -1.
    """
    owner, rank, held, tokens = shards.owner, shards.rank, shards.held, np.arange(shards.n_tokens)
    is_pass_q = np.isin(pairs.row, pass_q_rows)
    stay = pairs.where(~is_pass_q)
    remote = _remote_rows(stay, shards, kv_heads)
    is_split, has_pass_q = len(remote) < len(held), len(pass_q_rows) > 0
    keys = routing.transfers(owner[stay.row], stay.col, owner)
    found = routing.token_indices(stay.col[np.isin(stay.row, remote)], keys, shards)
    first = -1 if is_split or has_pass_q else _in_place_slot(found, len(tokens))
    # every token may get gradients from other ranks
    touched = tokens
    if first >= 0:
        touched = np.unique(found.sent)
    elif is_split and not has_pass_q:
        touched = np.union1d(found.own, found.sent)
    rows = routing.places(remote, held, shards.length)
    layout = _only(tiles, stay) if has_pass_q else tiles
    tensors, counts = _flat_plan(layout, found, rows, touched, remote, found.tiles, shards, device)
    if has_pass_q:
        row, col = pairs.where(is_pass_q)
        queries = routing.transfers(owner[col], row, owner)
        # own queries even if they need no key of this rank, since they are merged here
        wanted = np.append(row[owner[col] == rank], pass_q_rows[owner[pass_q_rows] == rank])
        found = routing.token_indices(wanted, queries, shards)
        more = _flat_plan(tiles, found, found.own, found.own, found.tiles, held, shards, device)
        tensors, counts = tensors + more[0], counts + more[1]
    if is_split:
        local = stay.where((owner[stay.row] == rank) & ~np.isin(stay.row, remote))
        tensors = tensors + list(_only(tiles, local).select(rows=held, cols=held).plan(device))
    return tensors, [*counts, first]
