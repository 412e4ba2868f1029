"""Example: training on sequences shared by several ranks, with FSDP2 over all ranks and context parallelism over some.

torchrun --nproc-per-node 4 -m benchmarks.run.train_context_parallel --context 2 --length 4096

The ranks form a mesh (data, context). Each row of the mesh holds its own sequences, and each rank of a row its share of
their tokens. Weights are sharded over all ranks.

    tokens     plan.shard(x, dim) takes this rank's tokens of inputs, labels and any other tensor with a value per token
    positions  plan.positions are positions in the whole sequence; SelfAttention uses them for its rotary positions
    labels     shift them before sharding: the next token may be on another rank
    loss       FSDP averages gradients over all ranks. Backpropagate (sum of this rank's losses) * ranks / (tokens of
               all ranks): the average is the gradient of the mean loss over all tokens, however many each rank holds

The task is to predict the token that came `period` tokens ago. It runs on CPUs (gloo) and GPUs (NCCL). A million tokens
on two GPUs of 141 GB, local and butterfly layers in turn, 16 heads of 128:

torchrun --nproc-per-node 2 -m benchmarks.run.train_context_parallel --length 1048576 --layers local butterfly \\
    --window 512 --embed-dim 2048 --heads 16 --kv-heads 16 --blocks 4 --bfloat16 --checkpoint --steps 4 --print-every 1

The features of a rank's 524,288 tokens take 2 GiB in bfloat16. With --checkpoint, each block keeps them once; the block
whose backward runs holds about 35 such tensors at its peak, half of them in its perceptron.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import masks
from blocksparse_flash import BlockLayout, distributed

VOCABULARY = 16
LAYERS = ("local", "butterfly")


class Block(nn.Module):
    """Attention and a perceptron, each with a norm and a residual; recomputed in the backward if is_checkpointed."""

    def __init__(
        self, embed_dim: int, plan: distributed.ContextPlan, *, layer: int = 0, is_checkpointed: bool = False
    ) -> None:
        super().__init__()
        self.is_checkpointed = is_checkpointed
        self.attention_norm, self.norm = nn.LayerNorm(embed_dim), nn.LayerNorm(embed_dim)
        self.attention = distributed.SelfAttention(embed_dim, plan, layer=layer, rope=10000.0)
        self.perceptron = nn.Sequential(
            nn.Linear(embed_dim, 4 * embed_dim), nn.GELU(), nn.Linear(4 * embed_dim, embed_dim)
        )

    def forward(self, x: Tensor) -> Tensor:
        # inside the FSDP unit, so that it gathers the weights once for both
        return checkpoint(self.computed, x, use_reentrant=False) if self.is_checkpointed else self.computed(x)

    def computed(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.perceptron(self.norm(x))


class Model(nn.Sequential):
    """Tokens to logits, token by token of this rank: (batch, local tokens) to (batch, local tokens, VOCABULARY).

    The plan's layers take turns.
    """

    def __init__(
        self, embed_dim: int, n_blocks: int, plan: distributed.ContextPlan, *, is_checkpointed: bool = False
    ) -> None:
        layers = (i % len(plan.layers) for i in range(n_blocks))
        blocks = (Block(embed_dim, plan, layer=layer, is_checkpointed=is_checkpointed) for layer in layers)
        super().__init__(nn.Embedding(VOCABULARY, embed_dim), *blocks, nn.Linear(embed_dim, VOCABULARY))


def batches(length: int, batch: int, period: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Whole sequences and labels (batch, length); equal seeds give equal sequences."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        tokens = torch.randint(VOCABULARY, (batch, length), generator=generator)
        yield tokens, tokens.roll(period, dims=1)


def scaled_loss(logits: Tensor, labels: Tensor, n_tokens: int, n_averaged: int) -> Tensor:
    """The loss to backpropagate: gradients averaged over n_averaged ranks are those of the mean over n_tokens.

    logits (..., VOCABULARY), labels (...): of this rank's tokens, perhaps none
    """
    total = F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), reduction="sum")
    return total * (n_averaged / n_tokens)


def layout_of(name: str, options: argparse.Namespace) -> BlockLayout:
    """The causal layout of a layer."""
    if name == "local":
        return masks.local(options.length, window=(options.window, 0))
    # `& masks.causal(length)` would list half of all blocks first
    return BlockLayout.from_predicate(
        lambda q_pos, kv_pos: kv_pos <= q_pos, options.length, options.length, block_size=128,
        within=masks.butterfly(options.length), dedup_key=lambda row, col: (row > col).astype("int64") - (row < col),
    )  # fmt: skip


def train(options: argparse.Namespace) -> list[float]:
    """The mean loss over all tokens, step by step, the same on every rank."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if not dist.is_initialized():
        try:
            dist.init_process_group("nccl" if device == "cuda" else "gloo")
        except ValueError as error:
            raise SystemExit(f"start with torchrun, one process per GPU, as in --help: {error}") from None
    if device == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    n_ranks = dist.get_world_size()
    if n_ranks % options.context:
        raise SystemExit(f"--context must divide the {n_ranks} ranks, got {options.context}")
    mesh = init_device_mesh(device, (n_ranks // options.context, options.context), mesh_dim_names=("data", "context"))
    layouts = [layout_of(name, options) for name in options.layers]
    plan = distributed.plan(layouts, mesh["context"], heads=(options.heads, options.kv_heads), order=options.order)
    if dist.get_rank() == 0:
        print(plan)

    # equal weights on every rank, before they are sharded
    torch.manual_seed(0)
    model = Model(options.embed_dim, options.blocks, plan, is_checkpointed=options.checkpoint).to(device)
    everyone = init_device_mesh(device, (n_ranks,))
    # weights and gradient reductions stay float32
    half = torch.bfloat16 if options.bfloat16 else None
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
    for block in [*model][1:-1]:
        fully_shard(block, mesh=everyone, mp_policy=policy)
    fully_shard(model, mesh=everyone, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)

    losses = []
    n_tokens = options.length * options.batch * mesh["data"].size()
    # one stream of sequences for each row of the mesh
    stream = batches(options.length, options.batch, options.period, seed=mesh["data"].get_local_rank())
    for step, whole in zip(range(options.steps), stream, strict=False):
        begin = time.perf_counter()
        tokens, labels = (plan.shard(sequences, dim=1).to(device) for sequences in whole)
        loss = scaled_loss(model(tokens), labels, n_tokens, n_ranks)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach() / n_ranks
        dist.all_reduce(mean)
        losses.append(mean.item())
        if dist.get_rank() == 0 and step % options.print_every == 0:
            # .item() has waited
            rate = n_tokens / (time.perf_counter() - begin)
            memory = f", {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if device == "cuda" else ""
            print(f"step {step:4}: loss {losses[-1]:.4f}, {rate:,.0f} tokens/s{memory}", flush=True)
    return losses


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=2, help="ranks that share a sequence")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=1, help="sequences of each row of the mesh")
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=["local"], help="of the blocks, in turn")
    parser.add_argument("--bfloat16", action="store_true", help="compute in bfloat16, keep weights in float32")
    parser.add_argument("--checkpoint", action="store_true", help="recompute each block in the backward")
    parser.add_argument("--window", type=int, default=256, help="tokens back which a token sees")
    parser.add_argument("--period", type=int, default=7, help="how many tokens ago the answer came")
    parser.add_argument("--order", default="contiguous", help="which rank holds which tokens, see distributed.plan")
    parser.add_argument("--embed-dim", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--print-every", type=int, default=10, help="steps")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    train(parsed())
    dist.destroy_process_group()
