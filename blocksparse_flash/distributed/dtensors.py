"""Conversion of DTensors to the local tensors of a plan, and back.

The shards of a DTensor are equal and in rank order, so only a plan with the same shards accepts DTensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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


def to_local(name: str, tensor: Any, plan: ContextPlan) -> Tensor:
    """This rank's tokens of a DTensor that is sharded along the length as the plan is."""
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
        seen |= is_context
    if not seen:
        raise ValueError(f"{name} must be on a mesh that has the plan's group as a dimension, got {mesh}")
    return tensor.to_local()


def like(local: Tensor, tensor: Any) -> Tensor:
    """A DTensor with this local part, and the mesh and placements of `tensor`."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(local.contiguous(), tensor.device_mesh, tensor.placements, run_check=False)
