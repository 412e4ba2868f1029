"""Conversion of DTensors to the local tensors of a plan, and back.

The shards of a DTensor are equal and in rank order, so only a plan with the same shards accepts DTensors.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..runtime import tracing

if TYPE_CHECKING:
    from .context_plan import ContextPlan


def are_dtensors(*tensors: Any) -> bool:
    """Whether all are DTensors; TypeError for a mixture."""
    if all(type(tensor) in tracing.PLAIN_TYPES for tensor in tensors):
        return False
    from torch.distributed.tensor import DTensor

    found = [isinstance(tensor, DTensor) for tensor in tensors]
    if any(found) and not all(found):
        raise TypeError("q, k and v must all be DTensors, or none of them; .to_local() gives the part of this rank")
    return any(found)


def to_local(name: str, tensor: Any, plan: ContextPlan, q: Any) -> Tensor:
    """This rank's tokens of a DTensor that is sharded along the length as the plan is, and otherwise as q is."""
    from torch.distributed.tensor import Replicate, Shard

    if plan.restore is not None or len(set(plan.sizes)) > 1:
        raise ValueError(
            f"{name} is a DTensor, whose shards are equal and in order, but the plan's are not: tokens {plan.sizes}, "
            f'order "{plan.order}"; use plain tensors and plan.shard, or order="contiguous" and a length that is a '
            f"multiple of 128 * {plan.n_ranks}"
        )
    mesh, seen = tensor.device_mesh, False
    for axis, placement in enumerate(tensor.placements):
        is_context = mesh.get_group(axis) == plan.group
        fits = placement == Shard(2) if is_context else placement in (Shard(0), Shard(1), Replicate())
        if not fits:
            raise ValueError(
                f"{name} must be Shard(2) over the plan's group, and Shard(0), Shard(1) or Replicate() over others, "
                f"got {tensor.placements}; .redistribute() changes it"
            )
        # otherwise queries could meet keys of other heads
        if placement == Shard(1) and tensor.shape[1] % mesh.size(axis):
            raise ValueError(
                f"{name} must have a multiple of {mesh.size(axis)} heads, since Shard(1) splits them between so many "
                f"ranks, got {tensor.shape[1]}; repeat the heads of k and v, or redistribute q, k and v to Replicate()"
            )
        seen |= is_context
    if not seen:
        raise ValueError(f"{name} must be on a mesh that has the plan's group as a dimension, got {mesh}")
    # otherwise queries could meet keys of other heads, and each rank would have a part of the gradient of the keys
    if (mesh, tensor.placements) != (q.device_mesh, q.placements):
        raise ValueError(
            f"{name} must have q's placements and mesh, {q.placements} on {q.device_mesh}, got {tensor.placements} on "
            f"{mesh}; {name}.redistribute(q.device_mesh, q.placements) changes them"
        )
    return tensor.to_local()


def like(local: Tensor, tensor: Any) -> Tensor:
    """A DTensor with this local part, and the mesh, placements, batch, heads and length of `tensor`."""
    from torch.distributed.tensor import DTensor

    # by default the local shape times the number of ranks, which is wrong for a batch that they do not divide
    shape = torch.Size((*tensor.shape[:3], *local.shape[3:]))
    stride = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return DTensor.from_local(
        local.contiguous(), tensor.device_mesh, tensor.placements, run_check=False, shape=shape, stride=stride
    )
