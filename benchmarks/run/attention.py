"""Speed of attention and its peers: `python -m benchmarks.run.attention` on a CUDA GPU, one JSON line per figure.

Peers: FlexAttention, compiled and with full blocks (for causal a partial diagonal); for dense and causal the kernels
of scaled_dot_product_attention, cuDNN, FlashAttention-2 and "math"; and, where installed, FlashAttention-4,
FlashInfer, MIT's and cuDNN's block-sparse attention, FastVideo's, xFormers and NATTEN. Outputs and gradients are
compared with float32 on sampled rows before timing; wrong ones are reported and not timed. The peers of a pattern take
turns within one process.

Lines: direction is "fwd", "bwd" (backward alone), "mask" (wall clock: from a bool per block on the host to the mask on
the device), "step" or "steps" (--sweep change); setup_ms is the first call, which compiles. TFLOP/s count stored
blocks: 4 * heads * nnz * block_size^2 * head_dim forward, 2.5 times that backward. Joules are those of the whole GPU in
a loop of calls, where NVML has a counter and pynvml is installed (pip install nvidia-ml-py). One line has the rate of a
matrix product of 8192 x 8192 x 8192.

--sweep length         2 K to 1 M tokens, fixed keys per query, and dense
--sweep density        1 % to 100 % of random blocks, and dense
--sweep block-size     blocks of 16 to 256 tokens at one density
--sweep fine           random blocks of 64, 32 and 16 as models select them: 5 to 25 %, also of 2.5 times the length
--sweep regroup        masks of blocks of 128 in finer blocks: all of them stored, or 80 % of each block of 128
--sweep change         a step with one mask, with a new mask from the host, and with a mask selected on the GPU;
                       FlexAttention's from prepared lists and from create_block_mask, eager and compiled. The host
                       waits for each "step"; "steps" run in a row, as in training
--sweep deterministic  the patterns by `hopper` with deterministic=True and without; other kernels are deterministic

`python -m benchmarks.report` makes tables and pictures of the lines.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import measure, sweeps
from .correctness import is_right
from .patterns import Pattern
from .peers import Call, Peer, Prepare, Shape, ours, peers
from .sweeps import SAME_MASK

# products of a direction, relative to the two of a forward
FACTORS = {"fwd": 1.0, "bwd": 2.5, "step": 3.5}


class Run(NamedTuple):
    """Settings shared by all measurements of one head_dim."""

    batch: int
    hidden: int
    head_dim: int
    out: Path
    device: str = "cuda"

    @property
    def shape(self) -> Shape:
        return Shape(self.batch, self.hidden // self.head_dim, self.head_dim, self.device)

    def tflops(self, pattern: Pattern, direction: str, ms: float) -> float:
        return FACTORS[direction] * pattern.flops(self.batch, self.shape.heads, self.head_dim) / ms * 1e-9


def inputs(run: Run, length: int, *, tokens_first: bool = False) -> tuple[list[Tensor], Tensor]:
    """([q, k, v], dout), bf16 (batch, heads, length, head_dim), the same values for every peer.

    tokens_first  stored as (batch, length, heads, head_dim)
    """
    generator = torch.Generator(device=run.device).manual_seed(0)
    size = (run.batch, run.shape.heads, length, run.head_dim)

    def drawn() -> Tensor:
        x = torch.randn(size, device=run.device, dtype=torch.bfloat16, generator=generator)
        return x.transpose(1, 2).contiguous().transpose(1, 2) if tokens_first else x

    return [drawn().requires_grad_() for _ in range(3)], drawn()


def facts(bench: str, name: str, pattern: Pattern, peer: Peer, run: Run) -> dict[str, Any]:
    """The keys of a line that describe the measurement, without its figures."""
    return {
        "bench": bench, "provider": peer.provider, "backend": peer.backend, "pattern": name, "density": pattern.density,
        "n": pattern.length, "batch": run.batch, "heads": run.shape.heads, "head_dim": run.head_dim, "dtype": "bf16",
        **measure.environment(),
    }  # fmt: skip


def for_each(among: Iterable[Peer], name: str, pattern: Pattern, run: Run, work: Callable[[Peer, str], None]) -> None:
    """Calls work(peer, label) for every peer that supports the pattern, and prints why the others are not timed."""
    for peer in among:
        label = f"{peer.provider:22} {peer.backend:6} {name:14} {pattern.length:8} head_dim {run.head_dim:3}"
        refusal = peer.refuses(pattern, run.shape)
        if refusal is None:
            measure.guarded(label, peer.is_ours, functools.partial(work, peer, label))
        else:
            print(f"{label}: {refusal}; not timed", flush=True)


class Ready(NamedTuple):
    """A peer whose results are right: its line without figures, and the calls to time by direction."""

    line: dict[str, Any]
    calls: dict[str, Callable[[], Any]]


def compare(case: sweeps.Case, among: Iterable[Peer], run: Run) -> None:
    """Measures every peer that supports the pattern, forward and backward: a line each, all of them at the end.

    The peers take turns.
    """
    lines = []
    ready: list[Ready] = []
    for_each(among, case.name, case.pattern, run, functools.partial(make_ready, case, run, ready))
    for direction in ("fwd", "bwd"):
        there = [(line, calls[direction]) for line, calls in ready if direction in calls]
        peaks = [measure.peak_bytes(call) for _, call in there]
        timings = measure.milliseconds_in_turns([call for _, call in there])
        for (line, call), peak, times in zip(there, peaks, timings, strict=True):
            tflops, joules = run.tflops(case.pattern, direction, times["ms"]), measure.joules(call, times["ms"])
            found = {
                **line, "direction": direction, **times, "tflops": tflops, "peak_bytes": peak, "joules": joules,
            }  # fmt: skip
            lines.append(found)
    # not before, so that --resume finds whole cases only
    for line in lines:
        measure.append(run.out, line, measure.KEYS_WITH_ENERGY)


def compare_all(cases: Iterable[sweeps.Case], among: list[Peer], run: Run, *, resume: bool = False) -> None:
    """Measures every case. Kernels compiled for other shapes are dropped: they count toward PyTorch's limit.

    resume  skips cases that run.out has; the times of masks are written first and do not count
    """
    compiled_for: tuple[int, int] | None = None
    for case in cases:
        facts = {
            "bench": case.bench, "pattern": case.name, "n": case.pattern.length, "batch": run.batch,
            "heads": run.shape.heads, "head_dim": run.head_dim, "direction": "fwd",
        }  # fmt: skip
        if resume and measure.is_measured(run.out, facts):
            continue
        sizes = case.pattern.length, case.pattern.block_size
        if sizes != compiled_for:
            torch.compiler.reset()
            compiled_for = sizes
        compare(case, among, run)


def make_ready(case: sweeps.Case, run: Run, ready: list[Ready], peer: Peer, label: str) -> None:
    """Checks the results of one peer on one pattern, times its mask, and appends it to `ready`."""
    pattern = case.pattern
    tensors, dout = inputs(run, pattern.length, tokens_first=peer.tokens_first)
    call = peer.prepare(pattern, run.shape)
    setup_ms = measure.first_call_milliseconds(functools.partial(call, *tensors))
    if not is_right(call, tensors, pattern.attends, label):
        return
    line = {**facts(case.bench, case.name, pattern, peer, run), "setup_ms": setup_ms}
    built = measure.wall_milliseconds(lambda: peer.prepare(pattern, run.shape))
    measure.append(run.out, {**line, "direction": "mask", **built, "tflops": None, "peak_bytes": None})
    ready.append(Ready(line, measure.directions(call, tensors, dout)))


def change(among: Iterable[Peer], run: Run, length: int, *, steps: int = 20) -> None:
    """Times a step (mask, forward, backward) with one mask, with a new mask each, and with masks selected on the GPU.

    steps  timed one by one, and as many in a row
    """
    # drawn in advance, as in a model: only building masks from them is timed
    drawn = [sweeps.changing(length, seed=seed) for seed in range(steps)]
    for_each(among, "random", drawn[0], run, functools.partial(time_changes, drawn, run))


def ways_of(peer: Peer, drawn: list[Pattern], run: Run, kept: Call) -> dict[str, Callable[[], Iterator[Call]]]:
    """`pattern` of result lines -> the calls of successive steps; each way starts with the first mask.

    kept  the call with the first mask
    """
    scores = [torch.rand(pattern.blocks.shape, device=run.device) for pattern in drawn]
    k_blocks = int(drawn[0].blocks[0].sum())

    def rebuilt(prepare: Prepare) -> Iterator[Call]:
        return (prepare(pattern, run.shape) for pattern in drawn)

    def selected(select: Callable[[Tensor, int], Call]) -> Iterator[Call]:
        return (select(each, k_blocks) for each in scores)

    prepares = {"new mask from the host": peer.prepare, **peer.rebuilds}
    found: dict[str, Callable[[], Iterator[Call]]] = {SAME_MASK: lambda: itertools.repeat(kept)}
    found |= {name: functools.partial(rebuilt, prepare) for name, prepare in prepares.items()}
    if peer.select is not None:
        found["new mask selected on the GPU"] = functools.partial(selected, peer.select)
    return found


def time_changes(drawn: list[Pattern], run: Run, peer: Peer, label: str) -> None:
    """Times every way in which the masks of one peer change: a line each for synchronized steps and steps in a row."""
    pattern, n_steps = drawn[0], len(drawn)
    tensors, dout = inputs(run, pattern.length, tokens_first=peer.tokens_first)
    kept = peer.prepare(pattern, run.shape)

    def step(call: Call) -> None:
        torch.autograd.grad(call(*tensors), tensors, dout)

    def in_a_row(calls: Iterator[Call]) -> None:
        for call in itertools.islice(calls, n_steps):
            step(call)

    if not kept(*tensors).requires_grad:
        print(f"{label}: has no gradients; not timed", flush=True)
        return
    setup_ms = measure.first_call_milliseconds(lambda: step(kept))
    if not is_right(kept, tensors, pattern.attends, label):
        return

    def time_way(way: str, calls: Callable[[], Iterator[Call]], label: str) -> None:
        first_ms = setup_ms
        if way in peer.rebuilds:
            first_ms = measure.first_call_milliseconds(lambda: step(next(calls())))
            if not is_right(next(calls()), tensors, pattern.attends, label):
                return
        row = measure.wall_milliseconds(lambda: in_a_row(calls()), runs=3)
        successive = calls()
        timed = {
            "step": measure.wall_milliseconds(lambda: step(next(successive)), warmup=2, runs=n_steps - 2),
            "steps": {key: ms / n_steps for key, ms in row.items()},
        }
        for direction, times in timed.items():
            line = {**facts("change", way, pattern, peer, run), "direction": direction, **times}
            tflops = run.tflops(pattern, "step", times["ms"])
            measure.append(run.out, {**line, "tflops": tflops, "peak_bytes": None, "setup_ms": first_ms})

    for way, calls in ways_of(peer, drawn, run, kept).items():
        way_label = f"{label}   {way:38}"
        measure.guarded(way_label, peer.is_ours, functools.partial(time_way, way, calls, way_label))


def matmul(run: Run, *, side: int = 8192) -> None:
    """Times one large matrix product, whose rate is the reference for all others."""
    a, b = (torch.randn(side, side, device=run.device, dtype=torch.bfloat16) for _ in range(2))
    setup_ms = measure.first_call_milliseconds(lambda: a @ b)
    times = measure.milliseconds(lambda: a @ b)
    tflops = 2 * side**3 / times["ms"] * 1e-9
    line = {
        "bench": "matmul", "provider": "torch", "backend": "cublas", "pattern": "dense", "density": 1.0, "n": side,
        "batch": 1, "heads": 1, "head_dim": side, "dtype": "bf16", "direction": "fwd", **times, "tflops": tflops,
        "peak_bytes": measure.peak_bytes(lambda: a @ b), "setup_ms": setup_ms, **measure.environment(),
    }  # fmt: skip
    measure.append(run.out, line)


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = measure.parser(__doc__, "attention.jsonl")
    parser.add_argument("--sweep", choices=sweeps.NAMES, help="default: none, the patterns at one length")
    tokens = "tokens, a multiple of 256; default 16384, of --sweep length 1048576"
    parser.add_argument("--length", type=measure.multiple_of(256), help=tokens)
    parser.add_argument("--batch", type=measure.multiple_of(1), default=1)
    parser.add_argument("--patterns", nargs="+", help="names; default: all")
    measure.add_resume(parser)
    options = measure.parsed_with_sizes(parser, arguments)
    if options.length is None:
        options.length = 1 << 20 if options.sweep == "length" else 1 << 14
    if options.sweep == "change" and options.resume:
        parser.error("--resume does not go with --sweep change, which has one case")
    if options.sweep == "change" and options.patterns is not None:
        parser.error("--patterns does not go with --sweep change, which has one pattern, random")
    if options.sweep == "deterministic" and options.providers is not None:
        parser.error("--providers does not go with --sweep deterministic, which has one, blocksparse_flash")
    known = {case.pattern.name for case in sweeps.cases(options.sweep, 256)}
    for name in options.patterns or ():
        if name not in known:
            parser.error(f"--patterns must be among {', '.join(sorted(known))}, got {name}")
    return options


def chosen(names: list[str] | None, capability: tuple[int, int]) -> list[Peer]:
    """The peers to compare; prints those that are not installed, and refuses unknown names."""
    there, absent = peers(capability)
    for peer in absent:
        print(f"not installed, so not compared: {peer.provider} ({peer.package})")
    known = dict.fromkeys(peer.provider for peer in there)
    for name in names or ():
        if name not in known:
            why = "is not installed" if name in {peer.provider for peer in absent} else "is not known"
            raise SystemExit(f"--providers: {name} {why}; there are {', '.join(known)}")
    return [peer for peer in there if names is None or peer.provider in names]


def main(arguments: list[str] | None = None) -> None:
    options = parsed(arguments)
    measure.require_gpu()
    capability = torch.cuda.get_device_capability()
    if options.sweep == "deterministic":
        if capability != (9, 0):
            raise SystemExit("--sweep deterministic needs compute capability 9.0: others are deterministic anyway")
        among = [ours("hopper", deterministic=each) for each in (False, True)]
    else:
        among = chosen(options.providers, capability)
    runs = [Run(options.batch, options.hidden, head_dim, options.out) for head_dim in options.head_dims]
    matmul(runs[0])
    for run in runs:
        if options.sweep == "change":
            torch.compiler.reset()
            change(among, run, options.length)
            continue
        cases = sweeps.cases(options.sweep, options.length)
        names = options.patterns
        chosen_cases = (case for case in cases if names is None or case.pattern.name in names)
        compare_all(chosen_cases, among, run, resume=options.resume)


if __name__ == "__main__":
    main()
