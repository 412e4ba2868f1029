"""Providers of attention over one sequence on several GPUs: our schemes, PyTorch's collectives, and FlexAttention.

exchange    distributed.attention with pass-KV (and pass-Q), in chunks of heads
ulysses     distributed.attention with Ulysses
gathered    distributed.attention with an all-gather of all keys
all_gather  the same with PyTorch's collectives and our kernels
flex        PyTorch's context parallelism: the same gather, FlexAttention with an equivalent mask_mod
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as collectives

from blocksparse_flash import BlockLayout, attention, dispatch, distributed
from blocksparse_flash.distributed import functional as shared
from blocksparse_flash.distributed import gather_scatter
from blocksparse_flash.distributed.local_attention import attend, chunk_heads
from blocksparse_flash.distributed.pass_kv import PassKV

from .patterns import BLOCK, Pattern

PROVIDERS = ("exchange", "ulysses", "gathered", "all_gather", "flex")
# ours -> the scheme
SCHEMES = {"exchange": "exchange", "ulysses": "ulysses", "gathered": "all_gather"}

Call = Callable[[Tensor, Tensor, Tensor], Tensor]


class Provider(NamedTuple):
    """`call` takes this rank's shards; `received` (heads * tokens) and `tiles` are those of the busiest rank."""

    name: str
    call: Call
    plan: distributed.ContextPlan
    received: int
    tiles: int


class NotTimed(Exception):
    """A provider does not support a case, or is wrong; the message says why."""


def table_mask(pattern: Pattern, first_query: int, device: str) -> Callable[..., Tensor]:
    """The mask_mod of a pattern, which looks up the block, for queries starting at first_query."""
    table = torch.from_numpy(pattern.blocks).to(device)

    def attends(batch: Tensor, head: Tensor, q_pos: Tensor, kv_pos: Tensor) -> Tensor:  # noqa: ARG001
        q_pos = q_pos + first_query
        there = table[q_pos // BLOCK, kv_pos // BLOCK]
        return there & (kv_pos <= q_pos) if pattern.causal else there

    return attends


def whole_layout(pattern: Pattern) -> BlockLayout:
    """The layout of a pattern, dense ones included."""
    rows, cols = np.nonzero(pattern.blocks)
    blocks = BlockLayout.from_blocks(rows, cols, pattern.length, pattern.length, block_size=BLOCK)
    if not pattern.causal:
        return blocks
    return BlockLayout.from_predicate(
        lambda q_pos, kv_pos: kv_pos <= q_pos, pattern.length, pattern.length, block_size=BLOCK, within=blocks,
        dedup_key=lambda row, col: (row > col).astype("int64") - (row < col),
    )  # fmt: skip


# renamed in PyTorch 2.13; its gradient is a reduce-scatter in the dtype of the keys
_all_gather = getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd


def gathered(k: Tensor, v: Tensor, group: Any) -> tuple[Tensor, Tensor]:
    """All keys and values, one differentiable collective each, as in PyTorch's context parallelism."""
    return _all_gather(k, gather_dim=2, group=group), _all_gather(v, gather_dim=2, group=group)


def provider(
    name: str, pattern: Pattern, layout: BlockLayout, group: Any, heads: tuple[int, int], order: str,
    chunks: int | None, device: str,
) -> Provider:  # fmt: skip
    """The provider of a case on this rank. Raises NotTimed."""
    rank, n_ranks = dist.get_rank(group), dist.get_world_size(group)
    if name in SCHEMES:
        if name == "ulysses" and heads[1] % n_ranks:
            raise NotTimed(f"cannot run: {n_ranks} ranks do not divide {heads[1]} KV heads")
        plan = distributed.plan(layout, group, heads=heads, scheme=SCHEMES[name], order=order)
        costs = plan.layers[0].costs
        # equal work on every rank
        tiles = costs.tiles.sum() // n_ranks if name == "ulysses" else costs.tiles.max()
        call: Call = partial(distributed.attention, plan=plan, chunks=chunks)
        return Provider(name, call, plan, int(costs.received[SCHEMES[name]].max()), int(tiles))
    if layout.q_len % (n_ranks * BLOCK):
        raise NotTimed(f"cannot run: {n_ranks} ranks do not divide {layout.q_len // BLOCK} blocks")
    plan = distributed.plan(layout, group, heads=heads, scheme="exchange", deterministic=True)
    costs, local = plan.layers[0].costs, layout.q_len // n_ranks
    if name == "all_gather":
        rows = layout.select(rows=slice(rank * local // BLOCK, (rank + 1) * local // BLOCK)).to(device)
        call = lambda q, k, v: attention(q, *gathered(k, v, group), rows)  # noqa: E731
    elif device == "cuda":
        call = _flex(pattern, rank * local, local, layout.kv_len, group)
    else:
        raise NotTimed("cannot run: it needs a GPU")
    return Provider(name, call, plan, int(costs.received["all_gather"].max()), int(costs.tiles.max()))


def _flex(pattern: Pattern, first_query: int, n_queries: int, kv_len: int, group: Any) -> Call:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    # compiles each mask separately
    torch.compiler.reset()
    mask_mod = table_mask(pattern, first_query, "cuda")
    mask = torch.compile(create_block_mask)(mask_mod, None, None, n_queries, kv_len, device="cuda")
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, *gathered(k, v, group), block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


def parts(
    plan: distributed.ContextPlan, chunks: int | None, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The forward of "exchange" in two parts: (messages alone, attention to keys that have arrived)."""
    layer = plan.layers[0]
    backend = dispatch.choose("auto", q.device, q.dtype)
    n_chunks = shared.n_chunks(chunks, plan, 0, k, v, k.dtype)
    options = q.shape[3] ** -0.5, n_chunks, True, False, plan.group_name, backend, False
    scheme = PassKV(layer.tensors, layer.counts, *options)
    keys, near, spec = scheme.keys, scheme.local_plan, scheme.context.spec

    def send_and_wait() -> list[Tensor]:
        return [message.wait() for message in scheme.send_kv(k, v)]

    arrived = send_and_wait()

    def compute() -> None:
        if near:
            attend(q, k, v, near, spec)
        of_q, of_k, of_v = (chunk_heads(x, n_chunks) for x in (q, *scheme.own_kv_in_slots(k, v)))
        for mine, k_all, v_all, plan_of_chunk, part in zip(of_q, of_k, of_v, scheme.plans, arrived, strict=True):
            gather_scatter.unpack(part, [k_all, v_all], keys.slots, backend)
            rows = gather_scatter.picked([mine], keys.rows, backend)[0] if near else mine
            attend(rows, k_all, v_all, plan_of_chunk, spec)

    return send_and_wait, compute
