"""`plan` and ContextPlan: which tokens each rank holds, and what the ranks exchange for each layer."""

from __future__ import annotations

import hashlib
import socket
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..blocks import checks
from ..blocks.block_list import Array
from ..layout import BlockLayout
from ..plan_format import TILE
from ..runtime import tracing
from . import ownership, routing, time_model
from .agreement import agreed, gather_objects, refuse_compiled_calls
from .communication import group_now, redistribute, refuse_transforms
from .cost_model import Costs, costs_of, report, slower_than_one
from .exchange_plan import all_gather_plan, pass_kv_plan
from .ownership import ORDERS, Pairs
from .routing import Shards

SCHEMES = ("auto", "exchange", "ulysses", "all_gather")


@dataclass(frozen=True)
class LayerPlan:
    """What one layer exchanges.

    batch    of the layout
    tensors, counts  arguments of the operators, see pass_kv.PassKV and ulysses.Ulysses
    costs    of every scheme, and why this one was chosen
    cache    schemes of earlier calls, see operators.py
    """

    batch: int
    tensors: list[Tensor]
    counts: list[int]
    costs: Costs
    cache: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def scheme(self) -> str:
        return self.costs.scheme

    def __getstate__(self) -> dict[str, Any]:
        # schemes hold the process group
        return self.__dict__ | {"cache": {}}


@dataclass(frozen=True, eq=False)
class ContextPlan:
    """Which tokens this rank holds, and what it exchanges with the others to attend. Prints as a report.

    group, group_name  the ranks that share a sequence
    rank, n_ranks  of this process in the group, and how many there are
    length     tokens of the whole sequence
    heads      (query heads, KV heads) on this rank: all of them, or its share under tensor parallelism
    order      assignment of tokens to ranks: "contiguous", "zigzag", "balanced", "tuned" or "as given"
    positions  int64 (local tokens,): the global position of each token here, for rotary embeddings, masks and labels
    rearrange  int64 (length,): tokens of the sequence in rank order; None if they are in order
    restore    int64 (length,): position of each token in the concatenated shards; None if they are in order
    sizes      tokens of each rank
    is_deterministic, keeps_received, checks_calls  the arguments deterministic, keep_received and check_calls of `plan`
    layers     one for each layout
    unfitted   why no speed-up over one GPU is predicted; empty if the time model was fitted to these GPUs
    digest     of the arguments of `plan`, on which the ranks agree

    A plan can be pickled, and loaded by the same rank of a process group of the same name and members, also in another
    run; elsewhere that raises a ValueError. So does every use of a plan whose group was destroyed: make another plan.
    """

    group: Any
    group_name: str
    rank: int
    n_ranks: int
    length: int
    heads: tuple[int, int]
    order: str
    positions: Tensor
    restore: Tensor | None
    rearrange: Tensor | None
    sizes: list[int]
    is_deterministic: bool
    keeps_received: bool
    checks_calls: bool
    layers: tuple[LayerPlan, ...]
    unfitted: str
    digest: str

    def __getstate__(self) -> dict[str, Any]:
        """The fields, with the global ranks of the group instead of the group."""
        check_plan(self)
        return self.__dict__ | {"group": dist.get_process_group_ranks(self.group)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state | {"group": _reached(state["group_name"], state["rank"], state["group"])})

    def __deepcopy__(self, memo: dict[int, Any]) -> ContextPlan:
        """The plan itself: it never changes, and belongs to a process group, which cannot be copied."""
        return self

    @property
    def local_length(self) -> int:
        """Tokens of this rank."""
        return self.sizes[self.rank]

    @property
    def device(self) -> torch.device:
        """The device of q, k and v."""
        return self.positions.device

    @property
    def speedups(self) -> tuple[float | None, ...]:
        """Predicted speed-up of each layer's step over one GPU; None on one rank or on other GPUs than the
        model was fitted to. For one sequence in bf16 with heads of 128, forward and backward.
        """
        if self.unfitted or self.n_ranks == 1:
            return (None,) * len(self.layers)
        return tuple(layer.costs.speedup for layer in self.layers)

    def shard(self, x: Tensor, dim: int) -> Tensor:
        """This rank's tokens of x, which holds the whole sequence along dim. Also for ids, labels and masks."""
        check_plan(self)
        _check_tokens(x, dim, self.length, "the whole sequence has", "x.full_tensor() has the whole sequence")
        return x.index_select(dim, self.positions.to(x.device))

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """The whole sequence on every rank, from x, each rank's tokens along dim: the inverse of `shard`.

        Every rank must call it. The gradient is the sum over the copies of all ranks, so a loss that every rank
        computes from the gathered sequence counts n_ranks times.
        """
        check_plan(self)
        if self.checks_calls:
            refuse_compiled_calls()
            agreed(lambda: (True, self._facts_of_gather(x, dim)), self.group, "gather")
        else:
            self._check_gather(x, dim)
        message = torch.cat([x.movedim(dim, 0)] * self.n_ranks)
        send = [self.local_length] * self.n_ranks
        found = redistribute(message, send, self.sizes, self.group_name)
        if self.restore is not None:
            found = found.index_select(0, self.restore.to(x.device))
        return found.movedim(0, dim)

    def _check_gather(self, x: Tensor, dim: int) -> None:
        _check_tokens(x, dim, self.local_length, f"rank {self.rank} holds", "x.to_local() has the part of this rank")
        refuse_transforms(x)

    def _facts_of_gather(self, x: Tensor, dim: int) -> dict[str, str]:
        """On which all ranks must agree."""
        self._check_gather(x, dim)
        axis = dim % x.dim()
        return {
            "plan": self.digest,
            "dim": str(axis),
            "shape without dim": str((*x.shape[:axis], *x.shape[axis + 1 :])),
            "dtype": str(x.dtype),
            "requires_grad": str(x.requires_grad),
        }

    def __str__(self) -> str:
        return report(self)

    def __repr__(self) -> str:
        schemes = ", ".join(
            layer.scheme if speedup is None else f"{layer.scheme} ({speedup:.2f} times one GPU predicted)"
            for layer, speedup in zip(self.layers, self.speedups, strict=True)
        )
        return (
            f"ContextPlan({self.length} tokens, rank {self.rank} of {self.n_ranks} holds {self.local_length}, "
            f'heads={self.heads}, order="{self.order}", layers: {schemes})'
        )


def check_plan(plan: Any) -> None:
    """Raises unless plan is a ContextPlan whose process group still exists."""
    if not isinstance(plan, ContextPlan):
        raise TypeError(f"plan must be a ContextPlan, as distributed.plan makes it, got {type(plan).__name__}")
    # torch.compile cannot trace it
    if torch.compiler.is_compiling():
        return
    now = group_now(plan.group_name)
    if now is not plan.group:
        replaced = "" if now is None else ", and another group has this name now"
        raise ValueError(
            f'plan must belong to a process group that exists, got one whose group "{plan.group_name}" was '
            f"destroyed{replaced}; make it again with distributed.plan, on every rank of a group"
        )


def _reached(name: str, rank: int, ranks: list[int]) -> Any:
    """The process group of an unpickled plan; ValueError unless this process has that rank in it.

    ranks  the global ranks of the group
    """
    group = group_now(name)
    found = None if group is None else (dist.get_rank(group), dist.get_process_group_ranks(group))
    if found != (rank, ranks):
        got = "no group of this name" if found is None else f"rank {found[0]} of the global ranks {found[1]}"
        raise ValueError(
            f'a pickled plan must be loaded by rank {rank} of process group "{name}" of the global ranks {ranks}, got '
            f"{got}; make a plan with distributed.plan here, and save and load layers by their state_dict"
        )
    return group


def check_layer(plan: ContextPlan, layer: Any) -> None:
    if not isinstance(layer, int) or isinstance(layer, bool) or not 0 <= layer < len(plan.layers):
        raise ValueError(f"layer must be 0 .. {len(plan.layers) - 1}, one of the plan's layouts, got {layer!r}")


def _check_tokens(x: Tensor, dim: int, length: int, whose: str, hint: str) -> None:
    """Raises unless x is a dense tensor of length tokens along dim. hint: what to pass instead of a DTensor."""
    checks.check_tensor("x", x)
    unsupported = tracing.unsupported_tensor("x", x)
    if unsupported is not None:
        what, remedy = unsupported
        raise ValueError(f"x must be a dense, strided tensor, got {what}; {hint if what == 'a DTensor' else remedy}")
    if not -x.dim() <= checks.integer(dim, "dim") < x.dim():
        raise ValueError(f"dim must be an axis of x, {-x.dim()} .. {x.dim() - 1}, got {dim}")
    if x.shape[dim] != length:
        raise ValueError(f"x must have {length} tokens along dim {dim}, as {whose}, got shape {tuple(x.shape)}")


def _members(group: Any) -> tuple[Any, torch.device]:
    """The process group, and the device of its tensors."""
    device_type = None
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            names = group.mesh_dim_names or group.ndim
            raise ValueError(
                f"group must be a mesh of one dimension, got {names}; pass one dimension of it, mesh[name]"
            )
        if group.get_coordinate() is None:
            raise ValueError(
                f"group must be a mesh that has this process, global rank {dist.get_rank()}, got one of the ranks "
                f"{group.mesh.tolist()}; call plan on these only"
            )
        device_type, group = group.device_type, _group_of(group)
    elif not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"group must be a ProcessGroup or a DeviceMesh of one dimension, got {type(group).__name__}; "
            "dist.group.WORLD is one after init_process_group, and new_group returns one to its members only"
        )
    if group is None or group_now(group.group_name) is not group:
        raise ValueError("group must be a process group that exists, got one that was destroyed; make a new one")
    if device_type is None:
        # get_backend returns "undefined" for a group without an explicit backend
        device_type = "cuda" if "nccl" in str(dist.get_backend_config(group)) else "cpu"
    return group, torch.device("cuda", torch.cuda.current_device()) if device_type == "cuda" else torch.device("cpu")


def _group_of(mesh: DeviceMesh) -> Any:
    """The process group of a mesh of one dimension, None if it was destroyed."""
    try:
        return mesh.get_group()
    except RuntimeError:
        return None


def _listed(layouts: object) -> list[BlockLayout]:
    found = [layouts] if isinstance(layouts, BlockLayout) else checks.listed(layouts, BlockLayout, "layouts")
    length = found[0].q_len
    for layout in found:
        if layout.q_len != layout.kv_len:
            raise ValueError(
                f"layouts must have as many queries as keys, got {layout.q_len} x {layout.kv_len}: only self-attention "
                "is shared between ranks"
            )
        if layout.q_len != length:
            raise ValueError(f"layouts must be of one length, got {length} and {layout.q_len}")
    return found


def _heads(heads: object) -> tuple[int, int]:
    sides = tuple(heads) if isinstance(heads, (tuple, list)) else (heads, heads)
    if len(sides) != 2:
        raise ValueError(f"heads must be an int or (query heads, KV heads), got {heads!r}")
    q_heads, kv_heads = (checks.integer(side, "heads") for side in sides)
    if q_heads < 1 or kv_heads < 1 or q_heads % kv_heads:
        raise ValueError(f"heads: query heads must be a multiple of KV heads, both at least 1, got {heads!r}")
    return q_heads, kv_heads


def _owner(order: object, layers: Sequence[Pairs], n_tiles: int, n_ranks: int) -> tuple[Array, str]:
    """The owner list, and the name of the order."""
    if isinstance(order, str):
        if order not in ORDERS:
            raise ValueError(f'order must be one of {ORDERS} or the rank of each tile, got "{order}"')
        return ownership.owners(order, layers, n_tiles, n_ranks), order
    owner = checks.integers(order, "order")
    if len(owner) != n_tiles:
        raise ValueError(f"order must name a rank for each of {n_tiles} tiles of {TILE} tokens, got {len(owner)}")
    checks.check_range(owner, n_ranks, "order", "ranks")
    return owner, "as given"


def _scheme(scheme: object, kv_heads: int, n_ranks: int) -> str:
    if scheme not in SCHEMES:
        raise ValueError(f"scheme must be one of {SCHEMES}, got {scheme!r}")
    if scheme == "ulysses" and kv_heads % n_ranks:
        raise ValueError(
            f'scheme="ulysses" gives each rank whole heads, so {n_ranks} ranks must divide the {kv_heads} KV heads; '
            'scheme="exchange" and "all_gather" take any number'
        )
    return str(scheme)


def _pairs(tiles: BlockLayout) -> Pairs:
    """The tiles of a layout with 128 x 128 blocks, over all batches and heads."""
    counts, n_tiles = tiles.indptr.diff(dim=2).flatten().numpy(), max(tiles.n_rows, 1)
    row = np.repeat(np.arange(len(counts)), counts) % n_tiles
    return Pairs(*np.divmod(np.unique(row * n_tiles + tiles.indices.numpy()), n_tiles))


def _heads_of(layout: BlockLayout, q_heads: int, rank: int, n_ranks: int) -> BlockLayout:
    """The layout of the heads that a rank computes."""
    if layout.shape[1] == 1:
        return layout
    share = q_heads // n_ranks
    return BlockLayout.stack_heads(layout.head(head) for head in range(rank * share, (rank + 1) * share))


def _layer(
    layout: BlockLayout, tiles: BlockLayout, pairs: Pairs, costs: Costs, shards: Shards, heads: tuple[int, int],
    orders: list[Tensor], device: torch.device,
) -> LayerPlan:  # fmt: skip
    """orders: restore and rearrange of ContextPlan, unless tokens are in order."""
    if costs.scheme == "ulysses":
        kernel_plan = _heads_of(layout, heads[0], shards.rank, shards.n_ranks).plan(device)
        flat = [*kernel_plan, *orders], shards.sizes
    elif costs.scheme == "all_gather":
        flat = all_gather_plan(tiles, shards, device)
    else:
        flat = pass_kv_plan(tiles, pairs, costs.pass_q_rows, shards, heads[1], device)
    return LayerPlan(layout.shape[0], *flat, costs)


def _build(
    layouts: object, members: Any, device: torch.device, heads: object, order: object, scheme: object,
    flags: dict[str, bool], no_prediction_reason: str,
) -> tuple[ContextPlan, dict[str, str]]:  # fmt: skip
    """The plan of this rank, and the facts on which all ranks must agree."""
    rank, n_ranks = dist.get_rank(members), dist.get_world_size(members)
    found, sides = _listed(layouts), _heads(heads)
    length = found[0].q_len
    for layout in found:
        if layout.shape[1] not in (1, sides[0]):
            raise ValueError(
                f"layouts must have 1 head or as many as there are query heads, {sides[0]}, got {layout.shape[1]}"
            )
    asked = _scheme(scheme, sides[1], n_ranks)
    for name, flag in flags.items():
        checks.boolean(flag, name)
    tiles = [layout.to("cpu").with_block_size(TILE) for layout in found]
    pairs = [_pairs(layout) for layout in tiles]
    owner, name_of_order = _owner(order, pairs, tiles[0].n_rows, n_ranks)
    facts = {
        "layouts": " ".join(f"{layout.shape} {hash(layout):015x}" for layout in found),
        "heads": str(sides),
        "order": f"{name_of_order} {hashlib.sha256(owner.astype(np.int64).tobytes()).hexdigest()[:16]}",
        "scheme": asked,
        **{name: str(flag) for name, flag in flags.items()},
    }
    shards = Shards(owner, length, rank, n_ranks)
    tokens = routing.positions(np.argsort(owner, kind="stable"), length)
    orders: list[Tensor] = []
    if not np.array_equal(tokens, np.arange(length)):
        rearrange = torch.from_numpy(tokens).to(device)
        orders = [rearrange.argsort(), rearrange]
    layers = []
    for layout, tile, pair in zip(found, tiles, pairs, strict=True):
        costs = costs_of(pair, owner, length, sides, n_ranks, requested=asked, without_pass_q=flags["deterministic"])
        layers.append(_layer(layout, tile, pair, costs, shards, sides, orders, device))
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    plan = ContextPlan(
        group=members,
        group_name=members.group_name,
        rank=rank,
        n_ranks=n_ranks,
        length=length,
        heads=sides,
        order=name_of_order,
        positions=torch.from_numpy(routing.positions(shards.held, length)).to(device),
        restore=orders[0] if orders else None,
        rearrange=orders[1] if orders else None,
        sizes=shards.sizes,
        is_deterministic=flags["deterministic"],
        keeps_received=flags["keep_received"],
        checks_calls=flags["check_calls"],
        layers=tuple(layers),
        unfitted=no_prediction_reason,
        digest=digest,
    )
    return plan, facts


def plan(
    layouts: BlockLayout | Sequence[BlockLayout],
    group: Any,
    *,
    heads: int | tuple[int, int],
    order: str | Sequence[int] | Array | Tensor = "contiguous",
    scheme: str = "auto",
    deterministic: bool = False,
    keep_received: bool = True,
    check_calls: bool = False,
) -> ContextPlan:
    """A plan to share attention over one sequence between the ranks of a group. Every rank must pass equal arguments.

    layouts  BlockLayout (length x length), or one for each of several layers that share the order of tokens
    group    ProcessGroup, or DeviceMesh of one dimension such as mesh["context"]
    heads    (query heads, KV heads) of q and k, or an int for both
    order    assignment of tiles of 128 tokens to ranks: "contiguous", "zigzag" (balances causal masks), "balanced" (by
             work), "tuned" (searched for fewer transfers of the busiest rank, rows that reach nearly all tiles left
             out; takes seconds), or the rank of each tile. A rank may hold no tile. All orders but "contiguous" leave
             gaps between a rank's tokens: use `positions`
    scheme   "exchange" sends the needed keys (pass-KV), "all_gather" sends all keys to every rank, "ulysses" sends
             whole heads (the number of ranks must divide the KV heads); "auto" chooses the fastest for each layer, by
             the rates of H200s
    deterministic  True: no row is split between ranks, and out and dq are bitwise identical to those of one process in
             tiles of 128 x 128 without reordered tokens, except for layouts with rows that backend="hopper" splits
             within a GPU, such as global ones. False: queries that reach most keys may travel instead of the keys
             (pass-Q); runs still repeat bitwise, except on backend="hopper" up to head_dim 128: dq, and with grouped
             heads and few, long tile columns dk and dv
    keep_received  True keeps received keys and values for the backward; False receives them again, which costs time
    check_calls  True: before each call of attention and of plan.gather the ranks compare their arguments, and all raise
             if one differs. For development: it waits for the device, and cannot be compiled
    returns  ContextPlan. Printing it shows the predicted speed-up over one GPU; if a layer is predicted to be slower,
             the first rank issues a UserWarning
    raises   TypeError, ValueError, on every rank alike, naming the ranks that differ; ValueError on the other ranks for
             any other error of a rank. RuntimeError if a rank does not call within the group's timeout

    "ulysses": Jacobs et al., "DeepSpeed Ulysses", arXiv:2309.14509, section 3.
    """
    members, device = _members(group)
    flags = {"deterministic": deterministic, "keep_received": keep_received, "check_calls": check_calls}
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type, socket.gethostname()
    reason = time_model.no_prediction_reason(gather_objects(machine, members))
    # the plan outlives them: autograd cannot save tensors of inference mode
    with tracing.outside_transforms():
        made = agreed(lambda: _build(layouts, members, device, heads, order, scheme, flags, reason), members, "plan")
    complaint = slower_than_one(made)
    if complaint and made.rank == 0:
        warnings.warn(complaint, UserWarning, stacklevel=2)
    return made
