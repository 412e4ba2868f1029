"""All-to-all and all-gather of token messages between ranks.

A message is contiguous and has tokens first, (tokens, batch, heads, features), with one contiguous range per rank, in
rank order. gather_scatter.py packs and unpacks it. Only `redistribute` is an operator that autograd sees.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad

from ..runtime import tracing

# PyTorch 2.13 renames it
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def refuse_transforms(*tensors: Tensor) -> None:
    """RuntimeError for torch.func and tangents, which the operators between ranks would drop."""
    tracing.refuse_transforms(None, *tensors)
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        raise RuntimeError(
            "functions of several ranks do not support forward-mode differentiation (torch.autograd.forward_ad): "
            "differentiate them by torch.autograd.grad"
        )


class AllToAll:
    """An asynchronous all-to-all: send[r] tokens to each rank r, receive[r] from it. Holds its tensors until `wait`."""

    def __init__(self, message: Tensor, send: list[int], receive: list[int], group: Any) -> None:
        self.message, self.received = message, message.new_empty(sum(receive), *message.shape[1:])
        self.work = dist.all_to_all_single(self.received, message, receive, send, group=group, async_op=True)

    def wait(self) -> Tensor:
        """The received message. On a GPU the current stream waits, not the host."""
        self.work.wait()
        return self.received


class AllGather:
    """An asynchronous all-gather; rank r holds sizes[r] tokens. Holds its tensors until `wait`."""

    def __init__(self, message: Tensor, sizes: list[int], group: Any) -> None:
        self.sizes, self.longest = sizes, max(sizes)
        if len(message) < self.longest:
            # the collective needs messages of equal size; the padding is never read
            padded = message.new_empty(self.longest, *message.shape[1:])
            padded[: len(message)].copy_(message)
            message = padded
        self.message = message
        self.received = message.new_empty(len(sizes) * self.longest, *message.shape[1:])
        self.work = _all_gather(self.received, message, group=group, async_op=True)

    def wait(self) -> Tensor:
        """The tokens of all ranks, in rank order. On a GPU the current stream waits, not the host."""
        self.work.wait()
        if min(self.sizes) == self.longest:
            return self.received
        parts = self.received.split(self.longest)
        return torch.cat([part[:size] for part, size in zip(parts, self.sizes, strict=True)])


class GroupedAllToAll:
    """Several all-to-alls in one launch, without copies: sent[i][r] goes to rank r, received[i][r] comes from it.

    Every tensor is a contiguous part of a larger one. Holds its tensors until `wait`.
    """

    def __init__(self, sent: list[list[Tensor]], received: list[list[Tensor]], group: Any) -> None:
        self.tensors, self.works = (sent, received), []
        if not sent:
            # an empty batch
            return
        device = sent[0][0].device
        if device.type == "cuda":
            # one NCCL launch for all: each separate one would wait for SMs that attention occupies
            with dist.distributed_c10d._coalescing_manager(group, device=device, async_ops=True) as together:
                for mine, theirs in zip(sent, received, strict=True):
                    dist.all_to_all(theirs, mine, group=group, async_op=True)
            self.works.append(together)
            return
        # the all_to_all of gloo needs tensors of equal size
        for mine, theirs in zip(sent, received, strict=True):
            for rank, (to, into) in enumerate(zip(mine, theirs, strict=True)):
                if rank == dist.get_rank(group):
                    into.copy_(to)
                    continue
                if into.numel():
                    self.works.append(dist.irecv(into, group=group, group_src=rank))
                if to.numel():
                    self.works.append(dist.isend(to, group=group, group_dst=rank))

    def wait(self) -> None:
        """On a GPU the current stream waits, not the host."""
        for work in self.works:
            work.wait()


def process_group_of(name: str) -> Any:
    """The process group of this name."""
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]


def group_now(name: str) -> Any:
    """The process group that has this name now, None if it was destroyed."""
    try:
        return process_group_of(name)
    except RuntimeError:
        return None


def exchanged(message: Tensor, send: list[int], receive: list[int], group: Any) -> Tensor:
    """The received message of an all-to-all."""
    return AllToAll(message.contiguous(), send, receive, group).wait()


@torch.library.custom_op("blocksparse_flash::redistribute", mutates_args=())
def redistribute(message: Tensor, send: list[int], receive: list[int], group: str) -> Tensor:
    """Differentiable all-to-all of a message (tokens, ...); the gradient is sent back by the reverse all-to-all."""
    return exchanged(message, send, receive, process_group_of(group))


@redistribute.register_fake
def _(message: Tensor, send: list[int], receive: list[int], group: str) -> Tensor:
    return message.new_empty(sum(receive), *message.shape[1:])


def _save_counts(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.send, ctx.receive, ctx.group = inputs


def _send_back(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    return redistribute(grad, ctx.receive, ctx.send, ctx.group), None, None, None


redistribute.register_autograd(_send_back, setup_context=_save_counts)
