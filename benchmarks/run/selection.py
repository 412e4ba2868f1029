"""Speed of blocks selected by token: `python -m benchmarks.run.selection` on a CUDA GPU, one JSON line per figure.

Calls of `selected_attention`, bf16, causal, 16 blocks per token and KV head. A token selects its own block and earlier
ones: in "random" each token chooses alone, in "alike" 64 neighbors share 70 % of their blocks. Providers take turns:
"blocksparse_flash" as users call it, "blocksparse_flash tiles" without plans by key block (`plan` says which plan a
line has), "dense", causal attention of all pairs, and where it is installed (pip install fla-core) "fla", the selected
branch of its NSA. Outputs and gradients are compared with float32 on sampled rows before timing. TFLOP/s count the
pairs that attend. The direction "plan" is the layout and plan of a call alone: `ms` on the GPU, `host_us` until the
host has launched them.

Layers ("layer", forward and backward) have the same heads and random bf16 weights; they are not compared.

A case that fails is reported, and the exit status is 1. No case starts once --seconds have passed.
"""

from __future__ import annotations

import functools
import math
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from blocksparse_flash import BlockLayout, attention, dispatch, explain, nn, selected_attention
from blocksparse_flash.blocks.block_list import Frame
from blocksparse_flash.plan import block_selection
from blocksparse_flash.runtime.tensor_spec import specs_of

from . import measure
from .correctness import TOLERANCE, relative_error
from .overhead import microseconds
from .peers import Call, is_installed, tokens_first_call
from .small import on_gpu, take_turns

KEYS = [*measure.KEYS, "kv_heads", "block_size", "plan", "host_us"]
LENGTHS = (16384, 65536, 8192)
N_BLOCKS = 16
# "alike": tokens in a row, and the blocks of each that all of them select
NEIGHBORS, N_SHARED = 64, 11
# sampled queries of each head
ROWS = 32
EMBED_DIM = 2048
# the fewest query heads per KV head of fla's kernels
FLA_GROUP = 16
# repetitions of each call: as many as fit into this time, within bounds
BUDGET_MS, FEWEST, MOST = 1500, 5, 15
# cycles, some 2 ms: these calls make layouts and plans
ASLEEP = 4_000_000
KEY_BLOCKS, TILES = "key blocks", "tiles"


class Case(NamedTuple):
    """Calls of one shape and selection ("random" or "alike")."""

    length: int
    block_size: int = 128
    choice: str = "random"
    heads: int = 64
    kv_heads: int = 4
    head_dim: int = 128

    @property
    def facts(self) -> dict[str, Any]:
        return {
            "n": self.length, "batch": 1, "heads": self.heads, "kv_heads": self.kv_heads, "head_dim": self.head_dim,
            "dtype": "bf16", "block_size": self.block_size, "pattern": self.choice,
        }  # fmt: skip


def _cases() -> Iterator[Case]:
    for length in LENGTHS:
        for block_size in (128, 64):
            for choice in ("random", "alike"):
                yield Case(length, block_size, choice)
        if length == LENGTHS[0]:
            yield Case(length, kv_heads=8)
            yield Case(length, kv_heads=2)
            yield Case(length, head_dim=64)


CASES = tuple(_cases())


def selected(case: Case, device: str) -> Tensor:
    """int64 (1, kv_heads, length, blocks): the blocks of each token, -1 where there are too few before it."""
    generator = torch.Generator(device=device).manual_seed(0)
    n_cols = -(-case.length // case.block_size)
    own = torch.arange(case.length, device=device)[:, None] // case.block_size
    is_later = torch.arange(n_cols, device=device) > own
    n_shared = min(n_cols, N_SHARED if case.choice == "alike" else 1)

    def drawn(n_rows: int) -> Tensor:
        return torch.rand(n_rows, n_cols, device=device, generator=generator)

    found = []
    for _ in range(case.kv_heads):
        shared = drawn(-(-case.length // NEIGHBORS)).repeat_interleave(NEIGHBORS, 0)[: case.length]
        shared = shared.masked_fill(is_later, -1).scatter(1, own, 1.0)
        scores = drawn(case.length).scatter_add(1, shared.topk(n_shared).indices, torch.ones_like(shared))
        scores, cols = scores.masked_fill(is_later, -1).topk(min(n_cols, N_BLOCKS))
        found.append(cols.masked_fill(scores < 0, -1))
    return torch.stack(found)[None]


def n_pairs(case: Case, indices: Tensor | None) -> int:
    """Query-key pairs that attend, of all heads. indices: of `selected`; None for all causal pairs."""
    if indices is None:
        return case.heads * case.length * (case.length + 1) // 2
    beyond = case.block_size - 1 - torch.arange(case.length) % case.block_size
    of_kv_heads = int((indices >= 0).sum()) * case.block_size - case.kv_heads * int(beyond.sum())
    return case.heads // case.kv_heads * of_kv_heads


def layout_of(case: Case, indices: Tensor) -> BlockLayout:
    """The layout that `selected_attention` makes."""
    group = case.heads // case.kv_heads
    rows_per_token = 1 << (group - 1).bit_length()
    sides = rows_per_token, case.block_size
    frame = Frame(1, case.kv_heads, case.length * rows_per_token, case.length, sides)
    made = block_selection.by_indices(indices, frame)._replace(
        rows_per_token=rows_per_token, may_have_selected_plan=True
    )
    return BlockLayout._from_selection(made, frame)


class Planner:
    """Makes the layout and plan of a case as a call does.

    name     of the plan: KEY_BLOCKS or TILES
    backend  that "auto" chooses
    """

    def __init__(self, case: Case, indices: Tensor, *, may_list_key_blocks: bool) -> None:
        layout = layout_of(case, indices)
        self._case, self._indices, self._dims = case, indices, (case.head_dim, case.head_dim)
        rows = torch.empty(1, case.kv_heads, layout.q_len, case.head_dim, dtype=torch.bfloat16, device=indices.device)
        k = rows[:, :, : case.length]
        self.backend = dispatch.decide("auto", rows, k, k, rows.dtype, specs_of(rows, k, k), "")
        self._has_selected_plan = (
            may_list_key_blocks
            and dispatch.takes_selected_plans(self.backend, *self._dims, has_options=False)
            and layout._has_selected_plan(indices.device, (1, case.kv_heads))
        )
        self.name = KEY_BLOCKS if self._has_selected_plan else TILES

    def __call__(self) -> None:
        layout, device = layout_of(self._case, self._indices), self._indices.device
        if self._has_selected_plan:
            layout._selected_plan(True)
        else:
            tile = dispatch.fastest_tile(self.backend, layout._tile_shares(device, True), *self._dims)
            layout.plan(device, causal=True, tile=tile)


# ---- correctness ----


def worst_errors(call: Call, case: Case, indices: Tensor | None, inputs: list[Tensor]) -> dict[str, float]:
    """Relative error of out, dq, dk and dv, over the first, the last and other rows."""
    device = inputs[0].device
    generator = torch.Generator().manual_seed(0)
    rows = torch.cat([torch.tensor([0, case.length - 1]), torch.randperm(case.length, generator=generator)])
    rows = torch.unique(rows[:ROWS]).to(device)
    out = call(*inputs)
    dout = torch.zeros_like(out)
    dout[:, :, rows] = torch.randn(out[:, :, rows].shape, generator=generator).to(out)
    gradients = torch.autograd.grad(out, inputs, dout)
    errors: dict[str, list[Tensor]] = {name: [] for name in ("out", "dq", "dk", "dv")}
    keys, group = torch.arange(case.length, device=device), case.heads // case.kv_heads
    for kv_head in range(case.kv_heads):
        heads = slice(kv_head * group, kv_head * group + group)
        attends = keys <= rows[:, None]
        if indices is not None:
            attends &= (keys // case.block_size == indices[0, kv_head, rows][..., None]).any(1)
        q, k, v = (
            x.detach().float().requires_grad_()
            for x in (inputs[0][0, heads], inputs[1][0, kv_head], inputs[2][0, kv_head])
        )
        scores = q[:, rows] @ k.T / math.sqrt(case.head_dim)
        expected = scores.masked_fill(~attends, -math.inf).softmax(-1) @ v
        truth = expected.detach(), *torch.autograd.grad(expected, (q, k, v), dout[0, heads][:, rows].float())
        found = (
            out.detach()[0, heads][:, rows],
            gradients[0][0, heads],
            gradients[1][0, kv_head],
            gradients[2][0, kv_head],
        )
        for each, one, other in zip(errors.values(), found, truth, strict=True):
            each.append(relative_error(one, other))
    # Python's max() may drop a NaN
    return {name: torch.stack(each).max().item() for name, each in errors.items()}


# ---- measuring ----


def timed(calls: list[Callable[[], Any]]) -> list[dict[str, float]]:
    """Median and percentiles of each warm call's milliseconds on the GPU, in turns, with a cold L2 cache."""
    cache = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    together = sum(measure.first_call_milliseconds(call) for call in calls)
    rounds = min(MOST, max(FEWEST, int(BUDGET_MS / together)))
    return take_turns(calls, functools.partial(on_gpu, cache=cache, asleep=ASLEEP), rounds)


def in_tiles(call: Call) -> Call:
    """The call without plans by key block."""

    def made(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with mock.patch.object(dispatch, "takes_selected_plans", lambda *_, **__: False):
            return call(q, k, v)

    return made


def fla(case: Case, indices: Tensor) -> Call:
    """The selected branch of flash-linear-attention's NSA, which has tokens before heads."""
    from fla.ops.nsa import parallel_nsa

    of_tokens = indices.transpose(1, 2).contiguous()
    options = {"block_indices": of_tokens, "block_counts": of_tokens.shape[3], "block_size": case.block_size}
    return tokens_first_call(parallel_nsa, **options)


def has_fla(case: Case) -> bool:
    """Whether fla is installed and has kernels for the case."""
    return is_installed("fla") and case.heads // case.kv_heads >= FLA_GROUP


def inputs_of(case: Case, device: str, *, tokens_first: bool = False) -> tuple[list[Tensor], Tensor]:
    """([q, k, v], dout), bf16. tokens_first: in memory, of which they are views."""
    generator = torch.Generator(device=device).manual_seed(0)
    q, dout, k, v = (
        torch.randn(1, heads, case.length, case.head_dim, device=device, dtype=torch.bfloat16, generator=generator)
        for heads in (case.heads, case.heads, case.kv_heads, case.kv_heads)
    )
    if tokens_first:
        q, dout, k, v = (each.transpose(1, 2).contiguous().transpose(1, 2) for each in (q, dout, k, v))
    return [each.requires_grad_() for each in (q, k, v)], dout


def compare(case: Case, out: Path, device: str = "cuda") -> None:
    """A line for each provider and direction of a case."""
    of_heads_first = inputs_of(case, device)
    q, k, v = of_heads_first[0]
    indices = selected(case, device)
    planners = {
        "blocksparse_flash": Planner(case, indices, may_list_key_blocks=True),
        "blocksparse_flash tiles": Planner(case, indices, may_list_key_blocks=False),
    }
    by_token = functools.partial(selected_attention, indices=indices, block_size=case.block_size)
    calls: dict[str, Call] = {
        "blocksparse_flash": by_token, "blocksparse_flash tiles": in_tiles(by_token),
        "dense": functools.partial(attention, causal=True),
    }  # fmt: skip
    if planners["blocksparse_flash"].name == TILES:
        # both would be the same call
        del calls["blocksparse_flash tiles"]
    if has_fla(case):
        calls["fla"] = fla(case, indices)
    backends = {name: planner.backend for name, planner in planners.items()}
    backends |= {"dense": explain(q, k, v, causal=True).backend, "fla": "triton"}
    ready: list[tuple[dict[str, Any], dict[str, Callable[[], Any]]]] = []
    for provider, call in calls.items():
        chosen = None if provider == "dense" else indices
        inputs, dout = inputs_of(case, device, tokens_first=True) if provider == "fla" else of_heads_first
        setup_ms = measure.first_call_milliseconds(functools.partial(call, *inputs))
        errors = worst_errors(call, case, chosen, inputs)
        if not all(error <= TOLERANCE for error in errors.values()):
            raise AssertionError(f"{provider}: WRONG, relative errors {errors}")
        planner, pairs = planners.get(provider), n_pairs(case, chosen)
        line = {
            "bench": "selection", "provider": provider, **case.facts, "density": pairs / case.heads / case.length**2,
            "backend": backends[provider],
            "plan": None if planner is None else planner.name, "setup_ms": setup_ms, "host_us": None,
            **measure.environment(),
        }  # fmt: skip
        timings = measure.directions(call, inputs, dout)
        del timings["step"]
        if planner is not None:
            timings["plan"] = planner
        ready.append((line, timings))
    for direction in ("fwd", "bwd", "plan"):
        there = [(line, timings[direction]) for line, timings in ready if direction in timings]
        peaks = [measure.peak_bytes(each) for _, each in there]
        for (line, timing), peak, times in zip(there, peaks, timed([each for _, each in there]), strict=True):
            found = {**line, "direction": direction, **times, "tflops": None, "peak_bytes": peak}
            if direction == "plan":
                found["host_us"] = microseconds(timing, runs=40)
            else:
                flops = {"fwd": 4, "bwd": 10}[direction] * line["density"] * case.heads * case.length**2 * case.head_dim
                found["tflops"] = flops / times["ms"] * 1e-9
            measure.append(out, found, KEYS)


# ---- layers ----


def layers(case: Case) -> dict[str, torch.nn.Module]:
    """Self-attention with the heads of a case, by name."""
    heads: dict[str, Any] = {"kv_heads": case.kv_heads, "head_dim": case.head_dim, "rope": 10000.0}
    return {
        "SelfAttention": nn.SelfAttention(EMBED_DIM, case.heads, causal=True, **heads),
        "NativeSparseAttention": nn.NativeSparseAttention(EMBED_DIM, case.heads, **heads),
        "MixtureOfBlockAttention": nn.MixtureOfBlockAttention(
            EMBED_DIM, case.heads, k_blocks=8, block_size=256, by_group=True, **heads
        ),
        "SharedIndexAttention": nn.SharedIndexAttention(EMBED_DIM, case.heads, **heads),
    }


def compare_layers(case: Case, out: Path, device: str = "cuda") -> None:
    """A line for each layer."""
    torch.manual_seed(0)
    x = torch.randn(1, case.length, EMBED_DIM, device=device, dtype=torch.bfloat16, requires_grad=True)
    dout = torch.randn_like(x)

    def step(layer: torch.nn.Module) -> None:
        result = layer(x)
        # with the loss of its indexer
        results, gradients = (result, (dout, None)) if isinstance(result, tuple) else ((result,), (dout,))
        torch.autograd.grad(results, (x, *layer.parameters()), gradients)

    with torch.device(device):
        made = {name: layer.to(torch.bfloat16) for name, layer in layers(case).items()}
    steps = {name: functools.partial(step, layer) for name, layer in made.items()}
    setups = [measure.first_call_milliseconds(call) for call in steps.values()]
    peaks = [measure.peak_bytes(call) for call in steps.values()]
    for name, setup_ms, peak, times in zip(steps, setups, peaks, timed([*steps.values()]), strict=True):
        line = {
            "bench": "selection", "provider": "blocksparse_flash", "backend": "auto", **case.facts, "pattern": name,
            "block_size": None, "density": None, "plan": None, "direction": "layer", **times, "tflops": None,
            "peak_bytes": peak, "setup_ms": setup_ms, "host_us": None, **measure.environment(),
        }  # fmt: skip
        measure.append(out, line, KEYS)


def main(arguments: list[str] | None = None) -> None:
    parser = measure.parser(__doc__, "selection.jsonl")
    parser.add_argument("--only", choices=("calls", "layers"), help="default: both")
    lengths = sorted({*LENGTHS, *(case.length for case in CASES)})
    parser.add_argument("--lengths", type=int, choices=lengths, nargs="+", help="tokens; default: all")
    parser.add_argument("--seconds", type=float, default=150.0, help="start no case after this time")
    options = parser.parse_args(arguments)
    measure.require_gpu()
    work = {"calls": [(compare, case) for case in CASES], "layers": [(compare_layers, Case(n)) for n in LENGTHS]}
    begun, failed = time.monotonic(), 0
    for run, case in [each for name, found in work.items() if options.only in (None, name) for each in found]:
        if options.lengths is not None and case.length not in options.lengths:
            continue
        if time.monotonic() - begun > options.seconds:
            print(f"{run.__name__} {case}: no time left; not measured", flush=True)
            continue
        try:
            run(case, options.out)
        except Exception:  # noqa: BLE001  reported, and the other cases go on
            print(f"{run.__name__} {case}: FAILED\n{traceback.format_exc()}", flush=True)
            failed += 1
        # after the except block, which keeps the frames of the failed case alive
        measure.release()
    if failed:
        raise SystemExit(f"{failed} cases failed")


if __name__ == "__main__":
    main()
