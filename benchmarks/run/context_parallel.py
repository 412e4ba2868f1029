"""Scaling of attention over several GPUs; writes one JSON line per figure.

torchrun --nproc-per-node 2 -m benchmarks.run.context_parallel --lengths 65536 262144 --kv-heads 16 4

Measures the link between the GPUs first. Then each case runs on one process of every GPU, and shared by all of them
with each provider of context_providers.py. Outputs and gradients are compared with those of one process before
timing; a provider that is wrong or fails is reported and not timed. fwd, bwd and step (both in a row) are times of
the slowest rank, medians over samples.

The bound of a figure is max(attention of the busiest rank, its received bytes / link). For "exchange" without pass-Q
rows the forward is also timed in parts: overlap = (messages + attention - both) / the shorter one.

--lengths tokens are shared among all ranks (strong scaling). Without a GPU it runs on gloo.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from blocksparse_flash import BlockLayout, attention

from . import measure
from .context_providers import PROVIDERS, NotTimed, Provider, parts, provider, whole_layout
from .correctness import relative_error
from .patterns import BLOCK, Pattern, patterns

# keys of a result line
KEYS = [
    "bench", "scaling", "provider", "pattern", "density", "n", "ranks", "heads", "kv_heads", "head_dim", "dtype",
    "order", "chunks", "priority", "direction", "ms", "one_ms", "speedup", "efficiency", "bound_ms", "bound_by",
    "messages_ms", "attention_ms", "overlap", "received_bytes", "bound_bytes", "all_gather_bytes", "link_gb_s",
    "device", "torch", "triton", "commit",
]  # fmt: skip
# keys of a line about the link
LINK_KEYS = ["bench", "what", "ranks", "bytes", "ms", "gb_s", "device", "torch", "triton", "commit"]
# bytes of the messages that measure the link
LINK_BYTES = 512 * 2**20
DIRECTIONS = ("fwd", "bwd", "step")
# largest error relative to the largest value; bf16 has 0.01
TOLERANCE = 0.03
# target milliseconds per sample; number of first calls, which build connections and compile
SAMPLE_MS, WARM_UP = 10.0, 2


class Ranks(NamedTuple):
    """The group that computes, and a host group that agrees on the next step."""

    group: Any
    host: Any
    device: str

    @property
    def is_first(self) -> bool:
        return dist.get_rank(self.group) == 0

    def worst(self, value: float) -> float:
        """The largest value of any rank."""
        found = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.host)
        return found.item()


def _sample(call: Callable[[], Any], n_calls: int, device: str) -> float:
    if device != "cuda":
        begin = time.perf_counter()
        for _ in range(n_calls):
            call()
        return 1000 * (time.perf_counter() - begin) / n_calls
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(n_calls):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / n_calls


def milliseconds(call: Callable[[], Any], ranks: Ranks, runs: int) -> float:
    """Median over samples of the slowest rank's time. Every rank makes equally many calls."""
    for _ in range(WARM_UP):
        took = ranks.worst(_sample(call, 1, ranks.device))
    n_calls = max(1, min(16, int(SAMPLE_MS / max(took, 1e-3))))
    # fewer samples of slow calls
    runs = runs if took < 10 * SAMPLE_MS else min(runs, 3)
    times = []
    for _ in range(runs):
        dist.barrier(ranks.host)
        times.append(ranks.worst(_sample(call, n_calls, ranks.device)))
    return statistics.median(times)


def link(ranks: Ranks, n_bytes: int, runs: int, out: Path) -> float:
    """GB/s received by a rank in an all-to-all of n_bytes. Records it, and the rate between neighbors."""
    rank, n_ranks = dist.get_rank(ranks.group), dist.get_world_size(ranks.group)
    message = torch.ones(n_bytes // (256 * n_ranks) * n_ranks, 128, dtype=torch.bfloat16, device=ranks.device)
    into = torch.empty_like(message)
    right, left = (rank + 1) % n_ranks, (rank - 1) % n_ranks

    def all_to_all() -> None:
        dist.all_to_all_single(into, message, group=ranks.group)

    def around() -> None:
        ways = [dist.P2POp(dist.isend, message, right, ranks.group), dist.P2POp(dist.irecv, into, left, ranks.group)]
        for work in dist.batch_isend_irecv(ways):
            work.wait()

    rates = []
    for what, call, moved in (
        ("all_to_all", all_to_all, message.nbytes * (n_ranks - 1) // n_ranks),
        ("send and receive", around, message.nbytes),
    ):
        ms = milliseconds(call, ranks, runs)
        rates.append(moved / ms / 1e6)
        line = {"bench": "link", "what": what, "ranks": n_ranks, "bytes": moved, "ms": ms, "gb_s": rates[-1]}
        if ranks.is_first:
            measure.append(out, line | measure.environment(torch.device(ranks.device)), LINK_KEYS)
    return rates[0]


def results(call: Callable[..., Tensor], inputs: list[Tensor], dout: Tensor) -> dict[str, Tensor]:
    out = call(*inputs)
    return dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *torch.autograd.grad(out, inputs, dout)), strict=True))


class Case(NamedTuple):
    """One pattern over all tokens: inputs (q, k, v, dout), results and times of one process."""

    pattern: Pattern
    layout: BlockLayout
    heads: tuple[int, int]
    whole: list[Tensor]
    expected: dict[str, Tensor]
    one_ms: dict[str, float]


def drawn(length: int, heads: tuple[int, int], head_dim: int, device: str) -> list[Tensor]:
    """q, k, v, dout: the same on every rank."""
    generator = torch.Generator(device).manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return [
        torch.randn(1, n, length, head_dim, generator=generator, device=device, dtype=dtype)
        for n in (heads[0], heads[1], heads[1], heads[0])
    ]


def case_of(pattern: Pattern, kv_heads: int, ranks: Ranks, options: argparse.Namespace) -> Case:
    """Runs and times `pattern` in one process."""
    heads = options.heads, kv_heads
    layout, *whole = whole_layout(pattern), *drawn(pattern.length, heads, options.head_dim, ranks.device)
    *inputs, dout = whole
    inputs = [x.clone().requires_grad_() for x in inputs]

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, layout)

    expected = results(call, inputs, dout)
    timed = measure.directions(call, inputs, dout)
    one_ms = {direction: milliseconds(timed[direction], ranks, options.runs) for direction in DIRECTIONS}
    return Case(pattern, layout, heads, whole, expected, one_ms)


def shards(one: Provider, case: Case) -> tuple[list[Tensor], Tensor]:
    """([q, k, v], dout) of this rank."""
    *inputs, dout = (one.plan.shard(tensor, dim=2) for tensor in case.whole)
    return [tensor.requires_grad_() for tensor in inputs], dout


def checked(case: Case, name: str, ranks: Ranks, options: argparse.Namespace) -> Provider:
    """A provider whose results on this rank are those of one process. Raises NotTimed."""
    one = provider(
        name, case.pattern, case.layout, ranks.group, case.heads, options.order, options.chunks, ranks.device
    )
    errors = []
    for result, tensor in results(one.call, *shards(one, case)).items():
        expected = one.plan.shard(case.expected[result], dim=2)
        error = relative_error(tensor, expected.float()).item() if tensor.numel() else 0.0
        errors += [f"{result} {error:.3g}"] if not error < TOLERANCE else []
    if errors:
        raise NotTimed(f"WRONG, relative errors: {', '.join(errors)}")
    return one


def lines(
    case: Case, one: Provider, ranks: Ranks, options: argparse.Namespace, link_gb_s: float
) -> Iterator[dict[str, Any]]:
    """Measures a provider whose results are correct."""
    inputs, dout = shards(one, case)
    costs, size = one.plan.layers[0].costs, options.head_dim * dout.element_size()
    n_ranks = dist.get_world_size(ranks.group)
    line = {
        "bench": "context_parallel", "scaling": "strong", "provider": one.name, "pattern": case.pattern.name,
        "density": case.pattern.density, "n": case.pattern.length, "ranks": n_ranks, "heads": case.heads[0],
        "kv_heads": case.heads[1], "head_dim": options.head_dim, "dtype": "bf16" if ranks.device == "cuda" else "fp32",
        "order": one.plan.order, "chunks": options.chunks, "priority": "high",
        "received_bytes": one.received * size, "bound_bytes": int(costs.bound.max()) * size,
        "all_gather_bytes": int(costs.received["all_gather"].max()) * size, "link_gb_s": link_gb_s,
        "messages_ms": None, "attention_ms": None, "overlap": None,
    }  # fmt: skip
    timed = measure.directions(one.call, inputs, dout)
    for direction in DIRECTIONS:
        ms, one_ms = milliseconds(timed[direction], ranks, options.runs), case.one_ms[direction]
        speedup = one_ms / ms
        # received keys are returned as gradients
        messages = line["received_bytes"] / link_gb_s / 1e6 * (2 if direction == "step" else 1)
        compute = one_ms * one.tiles / case.pattern.nnz
        found = line | {
            "direction": direction, "ms": ms, "one_ms": one_ms, "speedup": speedup, "efficiency": speedup / n_ranks,
            "bound_ms": max(messages, compute), "bound_by": "link" if messages > compute else "compute",
        }  # fmt: skip
        if one.name == "exchange" and direction == "fwd" and not len(costs.pass_q_rows):
            with torch.no_grad():
                travel, compute = (
                    milliseconds(part, ranks, options.runs) for part in parts(one.plan, options.chunks, *inputs)
                )
            overlap = (travel + compute - ms) / max(min(travel, compute), 1e-6)
            found |= {"messages_ms": travel, "attention_ms": compute, "overlap": overlap}
        yield found


def on_every_rank(name: str, ranks: Ranks, make: Callable[[], Any]) -> Any:
    """make() if it succeeded on every rank; otherwise None, and the first rank prints why, so that all continue."""
    found, status = None, ""
    try:
        found = make()
    except NotTimed as error:
        status = str(error)
    except Exception as error:  # noqa: BLE001  reported, and the ranks continue together
        status = "".join(traceback.format_exception_only(error)).strip()[:600]
    reasons: list[Any] = [None] * dist.get_world_size(ranks.host)
    dist.all_gather_object(reasons, status, group=ranks.host)
    if not any(reasons):
        return found
    if ranks.is_first:
        text = "; ".join(f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason)
        print(f"  {name:10} not timed: {text}", flush=True)
    return None


def run(case: Case, name: str, ranks: Ranks, options: argparse.Namespace, link_gb_s: float) -> None:
    """Builds, checks and measures one provider; rank 0 writes."""
    one = on_every_rank(name, ranks, lambda: checked(case, name, ranks, options))
    if one is None:
        return
    found = on_every_rank(name, ranks, lambda: [*lines(case, one, ranks, options, link_gb_s)])
    for line in found if found is not None and ranks.is_first else ():
        measure.append(options.out, line | measure.environment(torch.device(ranks.device)), KEYS)


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = measure.parser(__doc__, "context_parallel.jsonl")
    parser.add_argument("--lengths", type=measure.multiple_of(BLOCK), nargs="+", default=[65536], help="tokens")
    parser.add_argument("--heads", type=measure.multiple_of(1), default=16)
    parser.add_argument("--kv-heads", type=int, nargs="+", default=[16])
    parser.add_argument("--head-dim", type=measure.multiple_of(1), default=128)
    names = [pattern.name for pattern in patterns(8 * BLOCK)]
    default = ["local", "butterfly", "random", "bigbird"]
    parser.add_argument("--patterns", nargs="+", choices=names, default=default)
    parser.add_argument("--providers", nargs="+", choices=PROVIDERS, default=list(PROVIDERS))
    parser.add_argument("--order", default="contiguous", help="of exchange, ulysses and gathered, see distributed.plan")
    parser.add_argument("--chunks", type=measure.multiple_of(1), help="messages of exchange; default: up to 4")
    parser.add_argument("--runs", type=measure.multiple_of(1), default=5, help="samples of a measurement")
    options = parser.parse_args(arguments)
    for kv_heads in options.kv_heads:
        if kv_heads < 1 or options.heads % kv_heads:
            parser.error(f"--heads must be a multiple of --kv-heads, got {options.heads} and {kv_heads}")
    return options


def initialized() -> Ranks:
    """All processes as one group. A hang ends after two minutes."""
    try:
        return _initialized()
    except ValueError as error:
        raise SystemExit(f"start with torchrun, one process per GPU, as in --help: {error}") from None


def _initialized() -> Ranks:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    timeout = datetime.timedelta(seconds=120)
    if device != "cuda":
        dist.init_process_group("gloo", timeout=timeout)
        return Ranks(dist.group.WORLD, dist.group.WORLD, device)
    torch.cuda.set_device(dist.get_node_local_rank(fallback_rank=0))
    # messages have priority over attention
    nccl = dist.ProcessGroupNCCL.Options()
    nccl.is_high_priority_stream = True
    dist.init_process_group("nccl", timeout=timeout, pg_options=nccl)
    return Ranks(dist.group.WORLD, dist.new_group(backend="gloo", timeout=timeout), device)


def main() -> None:
    options = parsed()
    ranks = initialized()
    link_gb_s = link(ranks, LINK_BYTES, options.runs, options.out)
    for length in options.lengths:
        # patterns of random blocks take seconds to draw: once for all numbers of heads
        shown = [pattern for pattern in patterns(length) if pattern.name in options.patterns]
        for kv_heads, pattern in itertools.product(options.kv_heads, shown):
            case = case_of(pattern, kv_heads, ranks, options)
            if ranks.is_first:
                print(f"{pattern.name}, {pattern.length} tokens, {options.heads}/{kv_heads} heads", flush=True)
            for name in options.providers:
                run(case, name, ranks, options, link_gb_s)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
