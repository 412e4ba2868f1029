"""Training a layer with a layout in PyTorch's own tools: data parallelism, sharding, checkpoints, autocast, export.

Two processes on the CPU, joined by gloo, are held to one process that sees the whole batch.
"""

from __future__ import annotations

import copy
import functools
import os
from typing import Any

import pytest
import torch
import torch.distributed
import torch.multiprocessing
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from blocksparse_flash import BlockLayout
from blocksparse_flash.nn import SelfAttention

LENGTH = 80
N_PROCESSES = 2
STEPS = 3


class Block(nn.Module):
    """Attention and a linear layer, each with a residual."""

    def __init__(self, layout: BlockLayout) -> None:
        super().__init__()
        self.attention = SelfAttention(32, 4, layout, kv_heads=2, causal=True, rope=100.0)
        self.product = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.product(x).relu()


def model(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """The same in every process."""
    layout = BlockLayout.from_predicate(
        lambda q, k: ((q - k).abs() < 20) | (k % 16 == 0), LENGTH, LENGTH, block_size=16
    )
    torch.manual_seed(0)
    return nn.Sequential(Block(layout), Block(layout)).to(dtype)


def batches(dtype: torch.dtype = torch.float64) -> Tensor:
    """(step, batch, length, features)."""
    return torch.randn(STEPS, 2 * N_PROCESSES, LENGTH, 32, generator=torch.Generator().manual_seed(1), dtype=dtype)


def trained(layers: nn.Module, inputs: Tensor) -> list[float]:
    """The losses of a few training steps, which change the weights."""
    optimizer = torch.optim.AdamW(layers.parameters(), lr=0.01)
    losses = []
    for x in inputs:
        optimizer.zero_grad()
        loss = layers(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, torch.distributed.tensor.DTensor) else parameter


def work(rank: int, folder: str) -> None:
    """One process: trains on its share of each batch with DDP, then with FSDP2, and saves the results."""
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=N_PROCESSES)
    share = batches().chunk(N_PROCESSES, dim=1)[rank]
    parallel = DistributedDataParallel(model())
    losses = {"DDP": trained(parallel, share)}
    weights = {"DDP": {name.removeprefix("module."): p.detach() for name, p in parallel.named_parameters()}}
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (N_PROCESSES,))
    sharded = model()
    for block in sharded:
        fully_shard(block, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    losses["FSDP2"] = trained(sharded, share)
    weights["FSDP2"] = {name: whole(p.detach()) for name, p in sharded.named_parameters()}
    torch.save({"losses": losses, "weights": weights}, f"{folder}/{rank}.pt")
    # no process leaves while another still communicates
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    # skips interpreter shutdown, in which a gloo thread once failed: "terminate called without an active exception"
    os._exit(0)


@pytest.fixture(scope="module")
def parallel(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of each process."""
    if not torch.distributed.is_gloo_available():
        pytest.skip("needs gloo")
    folder = str(tmp_path_factory.mktemp("parallel"))
    torch.multiprocessing.spawn(work, args=(folder,), nprocs=N_PROCESSES)
    return [torch.load(f"{folder}/{rank}.pt") for rank in range(N_PROCESSES)]


@pytest.mark.parametrize("way", ["DDP", "FSDP2"])
def test_two_processes_train_as_one(parallel: list[dict[str, Any]], way: str) -> None:
    alone = model()
    losses = trained(alone, batches())
    shares = torch.tensor([process["losses"][way] for process in parallel])
    torch.testing.assert_close(shares.mean(dim=0).double(), torch.tensor(losses), check_dtype=False)
    assert not torch.equal(alone[0].attention.qkv.weight, model()[0].attention.qkv.weight)
    for process in parallel:
        torch.testing.assert_close(process["weights"][way], dict(alone.named_parameters()))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_layers_have_the_same_gradients_with_dropout(use_reentrant: bool) -> None:
    plain = model()
    for block in plain:
        block.attention.dropout_p = 0.4
    saving = copy.deepcopy(plain)
    for block in saving:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=use_reentrant)
    found = []
    for layers in (plain, saving):
        x = batches()[0].requires_grad_()
        torch.manual_seed(2)
        layers(x).square().sum().backward()
        found.append([x.grad, *(p.grad for p in layers.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_trains_in_a_half_type(dtype: torch.dtype) -> None:
    """Losses follow those in float32; float16 with its gradients scaled. Attention returns the half type."""
    layers, inputs, given = model(torch.float32), batches(torch.float32), []
    expected = trained(copy.deepcopy(layers), inputs)
    layers[1].attention.register_forward_hook(lambda module, arguments, out: given.append(out.dtype))
    optimizer, scaler = torch.optim.AdamW(layers.parameters(), lr=0.01), torch.amp.GradScaler("cpu")
    losses = []
    for x in inputs:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            loss = layers(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert given == [dtype] * STEPS
    assert expected[-1] < 0.9 * expected[0]
    # a few roundings of a value of the size of the loss
    assert all(abs(a - b) < 4 * torch.finfo(dtype).eps * b for a, b in zip(losses, expected, strict=True))


def test_an_exported_program_computes_the_same(tmp_path: Any) -> None:
    """With a dynamic batch size, saved, loaded and run."""
    layers, x = model().eval(), batches()[0]
    any_batch = {0: torch.export.Dim("batch", min=2, max=64)}
    program = torch.export.export(layers, (x,), dynamic_shapes=({**any_batch},))
    torch.export.save(program, tmp_path / "layers.pt2")
    again = torch.export.load(tmp_path / "layers.pt2").module()
    for inputs in (x, batches()[1].repeat(2, 1, 1)):
        torch.testing.assert_close(again(inputs), layers(inputs))
