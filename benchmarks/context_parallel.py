"""How does attention scale over several GPUs? One JSON line a figure:

torchrun --nproc-per-node 4 -m benchmarks.context_parallel --scaling strong --length 65536

Strong scaling shares one length among 1, 2, 4, ... ranks; weak scaling gives each rank --length tokens. In the same run:

    exchange    distributed.attention, needed keys in chunks of heads that travel while others are computed
    ulysses     distributed.attention, whole heads
    all_gather  every key to every rank, then the same kernels
    flex        what PyTorch's context parallelism does: the same gather, FlexAttention with an equivalent mask_mod

A time is the slowest rank's, the median of --runs. Every output is compared with one process before it is timed; a wrong one
is reported and not timed. For exchange the forward is also timed in parts, messages alone and attention alone:
overlap = (messages + attention - both) / the shorter one, where no queries travel. Without a GPU it runs on gloo, to try it out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from blocksparse_flash import BlockLayout, attention, distributed
from blocksparse_flash.distributed import exchange
from blocksparse_flash.distributed.local import attend
from blocksparse_flash.distributed.side import sides

from .patterns import BLOCK, Pattern, patterns

PROVIDERS = ("exchange", "ulysses", "all_gather", "flex")
# of a result line, in this order
KEYS = [
    "bench", "scaling", "provider", "pattern", "density", "n", "ranks", "heads", "kv_heads", "head_dim", "dtype", "chunks",
    "direction", "ms", "efficiency", "messages_ms", "attention_ms", "overlap", "received_bytes", "bound_bytes",
    "all_gather_bytes", "device", "torch",
]  # fmt: skip

Call = Callable[[Tensor, Tensor, Tensor], Tensor]


# ---- what is compared ----


def table_mask(pattern: Pattern, first_query: int, device: str) -> Callable[..., Tensor]:
    """The mask_mod of a pattern for queries counted from first_query: it looks its block up."""
    table = torch.from_numpy(pattern.blocks).to(device)

    def attends(batch: Tensor, head: Tensor, q_pos: Tensor, kv_pos: Tensor) -> Tensor:  # noqa: ARG001
        q_pos = q_pos + first_query
        there = table[q_pos // BLOCK, kv_pos // BLOCK]
        return there & (kv_pos <= q_pos) if pattern.causal else there

    return attends


def whole_layout(pattern: Pattern) -> BlockLayout:
    """The pattern's pairs, dense ones too."""
    length = BLOCK * len(pattern.blocks)
    blocks = BlockLayout.from_block_mask(pattern.blocks, length, length, block_size=BLOCK)
    if not pattern.causal:
        return blocks
    return BlockLayout.from_predicate(
        lambda q_pos, kv_pos: kv_pos <= q_pos, length, length, block_size=BLOCK, within=blocks,
        looks=lambda row, col: (row > col).astype("int64") - (row < col),
    )  # fmt: skip


def gathered(k: Tensor, v: Tensor, group: Any) -> tuple[Tensor, Tensor]:
    """All keys and values, as PyTorch's context parallelism gathers them; differentiable."""
    from torch.distributed.tensor.experimental._context_parallel._cp_custom_ops import flex_cp_allgather

    return flex_cp_allgather(k, v, 2, group.group_name)


def providers(
    pattern: Pattern, layout: BlockLayout, group: Any, options: argparse.Namespace, device: str
) -> Iterator[tuple[str, Call, distributed.ContextPlan]]:
    """(provider, call, plan) of everything asked for that can run here."""
    heads = options.heads, options.kv_heads
    rank, n_ranks = dist.get_rank(group), dist.get_world_size(group)
    first = partial(distributed.plan, layout, group, heads=heads)
    local = layout.q_len // n_ranks
    for provider in options.providers:
        if provider == "ulysses" and options.kv_heads % n_ranks:
            continue
        scheme = provider if provider in ("exchange", "ulysses") else "exchange"
        plan = first(scheme=scheme, order=options.order if scheme == provider else "contiguous")
        if scheme == provider:
            yield provider, partial(_shared, plan, options.chunks), plan
        elif layout.q_len % (n_ranks * BLOCK):
            continue
        elif provider == "all_gather":
            rows = layout.select(rows=slice(rank * local // BLOCK, (rank + 1) * local // BLOCK)).to(device)
            yield provider, partial(_from_all, rows, group), plan
        elif device == "cuda":
            yield provider, _flex(pattern, rank * local, local, layout.kv_len, group), plan


def _shared(plan: distributed.ContextPlan, chunks: int | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return distributed.attention(q, k, v, plan, chunks=chunks)


def _from_all(rows: BlockLayout, group: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = gathered(k, v, group)
    return attention(q, k, v, rows)


def _flex(pattern: Pattern, first_query: int, n_queries: int, kv_len: int, group: Any) -> Call:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask_mod = table_mask(pattern, first_query, "cuda")
    mask = torch.compile(create_block_mask)(mask_mod, None, None, n_queries, kv_len, device="cuda")
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, *gathered(k, v, group), block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


def parts(plan: distributed.ContextPlan, chunks: int | None, q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, Any]:
    """The forward of exchange in two: (its messages alone, attention to what has arrived already)."""
    n_chunks = chunks or max(n for n in range(1, 5) if k.shape[1] % n == 0)
    keys = sides(plan.layers[0].tensors, plan.layers[0].counts, plan.n_ranks)[0]
    pieces = exchange.chunked(n_chunks, q, k, keys.plan)
    backend = "triton" if q.device.type == "cuda" else "eager"

    def travel() -> list[Tensor]:
        return [flight.arrived() for flight in exchange.send_keys(k, v, keys, pieces, plan.group)[1]]

    arrived = travel()

    def compute() -> None:
        for piece, part in zip(pieces, arrived, strict=True):
            k_all, v_all = exchange.extended(k[:, piece.kv], v[:, piece.kv], keys, part)
            attend(q[:, piece.q], k_all, v_all, piece.plan, q.shape[3] ** -0.5, backend)

    return travel, compute


# ---- measuring ----


def milliseconds(call: Callable[[], Any], group: Any, runs: int, device: str) -> float:
    """Median over runs of the slowest rank's time."""
    times = []
    for _ in range(runs + 2):
        dist.barrier(group)
        if device == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            took = start.elapsed_time(end)
        else:
            begin = time.perf_counter()
            call()
            took = 1000 * (time.perf_counter() - begin)
        slowest = torch.tensor([took], device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
        times.append(slowest.item())
    # two to warm up: the first message builds its connections
    return statistics.median(times[2:])


def worst_error(out: Tensor, whole: list[Tensor], layout: BlockLayout, plan: distributed.ContextPlan) -> float:
    """The largest error of any rank against one process, relative to the largest value."""
    q, k, v = whole
    expected = plan.shard(attention(q, k, v, layout.to(out.device)), dim=2)
    error = torch.zeros(1, device=out.device)
    if out.numel():
        error[0] = (out.float() - expected.float()).abs().max() / expected.float().abs().max()
    dist.all_reduce(error, dist.ReduceOp.MAX, group=plan.group)
    return error.item()


def run(pattern: Pattern, group: Any, options: argparse.Namespace, device: str, alone: dict[Any, float]) -> None:
    """Measure every provider on the ranks of a group; rank 0 prints and writes. alone: times of one rank, by what."""
    n_ranks, layout = dist.get_world_size(group), whole_layout(pattern)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    whole = [
        torch.randn(1, heads, layout.q_len, options.head_dim, device=device, dtype=dtype)
        for heads in (options.heads, options.kv_heads, options.kv_heads)
    ]
    for provider, call, plan in providers(pattern, layout, group, options, device):
        q, k, v = (plan.shard(tensor, dim=2).requires_grad_() for tensor in whole)
        out = call(q, k, v)
        error = worst_error(out.detach(), whole, layout, plan)
        if not error < 0.02:
            if dist.get_rank(group) == 0:
                print(f"{provider:10} {pattern.name:10} WRONG, relative error {error:.3g}; not timed", flush=True)
            continue
        costs, size = plan.layers[0].costs, options.head_dim * q.element_size()
        received = costs.exchange if provider == "exchange" else costs.all_gather
        if provider == "ulysses" and costs.ulysses is not None:
            received = costs.ulysses
        line = {
            "bench": "context_parallel", "scaling": options.scaling, "provider": provider, "pattern": pattern.name,
            "density": layout.density, "n": layout.q_len, "ranks": n_ranks, "heads": options.heads,
            "kv_heads": options.kv_heads, "head_dim": options.head_dim, "dtype": "bf16" if device == "cuda" else "fp32",
            "chunks": options.chunks, "received_bytes": int(received.max()) * size,
            "bound_bytes": int(costs.bound.max()) * size, "all_gather_bytes": int(costs.all_gather.max()) * size,
            "device": torch.cuda.get_device_name() if device == "cuda" else "cpu", "torch": torch.__version__,
            "messages_ms": None, "attention_ms": None, "overlap": None,
        }  # fmt: skip
        backward = partial(torch.autograd.grad, out, (q, k, v), torch.ones_like(out), retain_graph=True)
        for direction, timed in (("fwd", partial(call, q, k, v)), ("bwd", backward)):
            ms = milliseconds(timed, group, options.runs, device)
            what = pattern.name, provider, direction
            alone.setdefault(what, ms)
            ideal = alone[what] / (n_ranks if options.scaling == "strong" else 1)
            found = {**line, "direction": direction, "ms": ms, "efficiency": ideal / ms}
            if provider == "exchange" and direction == "fwd" and n_ranks > 1 and not len(costs.shipped):
                with torch.no_grad():
                    travel, compute = (
                        milliseconds(part, group, options.runs, device) for part in parts(plan, options.chunks, q, k, v)
                    )
                shorter = min(travel, compute)
                found |= {"messages_ms": travel, "attention_ms": compute, "overlap": (travel + compute - ms) / shorter}
            if dist.get_rank(group) == 0:
                report(found, options.out)


def report(line: dict[str, Any], path: Path) -> None:
    """One JSON object with exactly KEYS, appended as a line, and a row for the reader."""
    assert set(line) == set(KEYS), set(line) ^ set(KEYS)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps({key: line[key] for key in KEYS}) + "\n")
    overlap = "" if line["overlap"] is None else f"  overlap {line['overlap']:.2f}"
    print(
        f"{line['provider']:10} {line['pattern']:10} {line['ranks']} ranks {line['direction']} {line['ms']:9.3f} ms  "
        f"efficiency {line['efficiency']:.2f}  receives {line['received_bytes'] / 2**20:.4g} MiB, bound "
        f"{line['bound_bytes'] / 2**20:.4g}{overlap}",
        flush=True,
    )


# ---- the command ----


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scaling", choices=("strong", "weak"), default="strong")
    parser.add_argument("--length", type=int, default=65536, help="tokens; of all ranks (strong) or of each (weak)")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=16)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--patterns", nargs="+", default=["local", "butterfly", "random", "bigbird", "causal"])
    parser.add_argument("--providers", nargs="+", choices=PROVIDERS, default=list(PROVIDERS))
    parser.add_argument("--order", default="contiguous", help="of exchange and ulysses, see distributed.plan")
    parser.add_argument("--chunks", type=int, help="messages of exchange; default: up to 4")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument(
        "--out", type=Path, default=Path("benchmarks/results/context_parallel.jsonl"), help="appended to"
    )
    options = parser.parse_args(arguments)
    if options.length < BLOCK or options.length % BLOCK:
        parser.error(f"--length must be a multiple of {BLOCK}, got {options.length}")
    if options.heads % options.kv_heads:
        parser.error(f"--heads must be a multiple of --kv-heads, got {options.heads} and {options.kv_heads}")
    known = [pattern.name for pattern in patterns(8 * BLOCK)]
    if not set(options.patterns) <= set(known):
        parser.error(f"--patterns must be among {known}, got {options.patterns}")
    return options


def main() -> None:
    options = parsed()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    n_all = dist.get_world_size()
    alone: dict[Any, float] = {}
    counts = [2**i for i in range(n_all.bit_length()) if 2**i <= n_all]
    groups = {n_ranks: dist.new_group(range(n_ranks)) for n_ranks in counts}
    for n_ranks, group in groups.items():
        length = options.length * (n_ranks if options.scaling == "weak" else 1)
        for pattern in patterns(length):
            if pattern.name in options.patterns and dist.get_rank() < n_ranks:
                run(pattern, group, options, device, alone)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
