"""Speed of a decoding step: `python -m benchmarks.run.decode` on a CUDA GPU, one JSON line per figure.

A few queries at the end of many keys, bf16, 32 query heads on 8 KV heads, head_dim 128: all keys ("dense"), or a layout
shared by all heads ("sparse"): 128 sinks, a window of 1,024 tokens, 10 % of the blocks at random, causal. "paged 16":
all keys, in pages of 16 in random order, the heads of a key side by side. "selected 16": 10 % of such pages, at random.
Peers: FlexAttention, compiled, with the same layout, and scaled_dot_product_attention, dense only. Outputs are compared
with float32 before timing; wrong ones are reported and not timed.

Lines: direction "graph" is the replay of a CUDA graph with a cold L2 cache, without host time; "call" is the wall
clock of one call. gb_per_s counts the stored blocks of k and v, once per KV head; copy_share is that relative to the
rate at which a copy of 1 GiB reads and writes. setup_ms is the first call, which compiles.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

import masks
from blocksparse_flash import BlockLayout, attention, paged_attention
from blocksparse_flash.interop.kv_lists import to_kv_lists

from . import measure
from .correctness import is_right, mask_of
from .peers import Call, compiled_flex, sdpa_call

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 32, 8, 128, 128
KEYS = [
    "bench", "provider", "backend", "pattern", "density", "n", "q_len", "batch", "heads", "kv_heads", "head_dim",
    "dtype", "direction", "ms", "ms_p20", "ms_p80", "gb_per_s", "copy_share", "peak_bytes", "setup_ms", "device",
    "torch", "triton", "commit",
]  # fmt: skip


class Case(NamedTuple):
    """Sequences in a batch, queries, keys; the pattern is "sparse", "dense", "paged N" or "selected N", pages of N."""

    batch: int
    q_len: int
    kv_len: int
    pattern: str

    def layout(self) -> BlockLayout | None:
        if self.pattern == "dense" or self.pattern.startswith("paged"):
            return None
        if self.page_size:
            return masks.random((self.q_len, self.kv_len), density=0.1, seed=0, block_size=(64, self.page_size))
        mask = "(sink_window(sinks=128, window=1024) | random(density=0.1, seed=0)) & causal"
        return masks.build(mask, (self.q_len, self.kv_len), block_size=BLOCK)

    @property
    def page_size(self) -> int:
        """Keys per page; 0 without pages."""
        return int(self.pattern.split()[1]) if " " in self.pattern else 0

    @property
    def density(self) -> float:
        layout = self.layout()
        return 1.0 if layout is None else layout.density

    @property
    def stored_bytes(self) -> float:
        """Bytes of k and v that a step has to read."""
        return self.density * self.batch * KV_HEADS * self.kv_len * HEAD_DIM * 2 * 2


# a batch as on a server, then one sequence
CASES = [
    Case(batch, q_len, kv_len, pattern)
    for batch, q_len, kv_len in [
        (8, 1, 1 << 17),
        *((1, q_len, kv_len) for kv_len in (1 << 14, 1 << 17, 1 << 20) for q_len in (1, 16, 64)),
    ]
    for pattern in ("sparse", "dense")
]
CASES += [
    Case(batch, q_len, 1 << 17, pattern)
    for batch, q_len in ((8, 1), (1, 1), (1, 16))
    for pattern in ("paged 16", "paged 64", "paged 256", "selected 16", "selected 64")
]


class Provider(NamedTuple):
    """One implementation; prepare makes the mask on the device and returns the call, or None if it has no such mask."""

    name: str
    backend: str
    prepare: Callable[[Case, str], Call | None]


class FromPages:
    """A call on k and v in pages, into which its first call copies them."""

    def __init__(self, case: Case, device: str) -> None:
        generator = torch.Generator(device=device).manual_seed(0)
        n_pages = case.batch * case.kv_len // case.page_size
        table = torch.randperm(n_pages, device=device, generator=generator)
        self.table = table.reshape(case.batch, -1).int()
        self.lengths = torch.full((case.batch,), case.kv_len, dtype=torch.int32, device=device)
        layout = case.layout()
        # a layout has one row of blocks
        self.selected = None if layout is None else layout.indices.to(device).expand(case.batch, 1, -1)
        self.page_size = case.page_size
        self.pages: tuple[Tensor, Tensor] | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.pages is None:
            self.pages = self._in_pages(k), self._in_pages(v)
        return paged_attention(
            q, *self.pages, self.table, self.lengths, selected=self.selected, causal=False, backend="triton"
        )

    def _in_pages(self, cache: Tensor) -> Tensor:
        _, kv_heads, _, dim = cache.shape
        pages = cache.new_empty(self.table.numel(), self.page_size, kv_heads, dim).transpose(1, 2)
        pages[self.table.long()] = cache.unflatten(2, (-1, self.page_size)).transpose(1, 2)
        return pages


def _ours(case: Case, device: str) -> Call:
    if case.page_size:
        return FromPages(case, device)
    layout = case.layout()
    layout = None if layout is None else layout.to(device)
    return functools.partial(attention, layout=layout, deterministic=False, backend="triton")


def _flex(case: Case, device: str) -> Call | None:
    if case.page_size:
        return None
    # more rows than fit into one tile of its decoding kernel, which takes milliseconds for them
    is_too_long = HEADS // KV_HEADS * case.q_len > BLOCK
    options = {"FORCE_USE_FLEX_ATTENTION": True} if is_too_long else {}
    mask = _block_mask(case, device, is_all_partial=not is_too_long)
    return functools.partial(compiled_flex(), block_mask=mask, enable_gqa=True, kernel_options=options)


def _block_mask(case: Case, device: str, *, is_all_partial: bool) -> BlockMask:
    """The mask of a case; without a BlockMask, FlexAttention makes one block of 2^30 keys.

    is_all_partial  whether full blocks are listed as partial. The decoding kernel is then up to 4.4 times as fast: it
                    divides partial blocks evenly among its splits, and full ones as if all keys were stored, which
                    leaves most splits empty. The other kernel is faster with full blocks
    """
    lengths, layout = (case.q_len, case.kv_len), case.layout()
    if layout is None:
        every = torch.ones(1, case.kv_len // BLOCK, dtype=torch.bool)
        layout = BlockLayout.from_block_mask(every, *lengths, block_size=BLOCK)
    # by FlexAttention's own rule, all blocks would be partial, since their rows end with the queries
    partial, full = to_kv_lists(layout.to(device), ragged_is_full=True, width=layout.n_cols)
    pairs = None
    if len(layout.bitmasks):
        table = layout.to_dense().reshape(-1).to(device)

        def pairs(_batch: Tensor, _head: Tensor, q_pos: Tensor, kv_pos: Tensor) -> Tensor:
            return table[q_pos * case.kv_len + kv_pos]

    from_lists = functools.partial(BlockMask.from_kv_blocks, BLOCK_SIZE=BLOCK, mask_mod=pairs, seq_lengths=lengths)
    if not is_all_partial:
        return from_lists(*partial, *full)
    # a layout has one row of blocks
    cols = torch.nn.functional.pad(layout.indices, (0, layout.n_cols - layout.nnz))
    return from_lists(partial.counts + full.counts, cols.to(partial.cols).expand_as(partial.cols))


def _sdpa(kernel: str, case: Case, _device: str) -> Call | None:
    return sdpa_call(kernel, enable_gqa=True) if case.pattern == "dense" else None


PROVIDERS = [
    Provider("blocksparse_flash", "triton", _ours),
    Provider("flex", "triton", _flex),
    Provider("cudnn", "cudnn", functools.partial(_sdpa, "CUDNN_ATTENTION")),
    Provider("flash_attention_2", "sdpa", functools.partial(_sdpa, "FLASH_ATTENTION")),
]


def inputs(case: Case, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v, the same values for every provider."""
    generator = torch.Generator(device=device).manual_seed(0)
    q, k, v = (
        torch.randn(case.batch, heads, length, HEAD_DIM, device=device, dtype=torch.bfloat16, generator=generator)
        for heads, length in ((HEADS, case.q_len), (KV_HEADS, case.kv_len), (KV_HEADS, case.kv_len))
    )
    return q, k, v


def graphed(call: Callable[[], Any]) -> Callable[[], Any]:
    """The replay of a CUDA graph of a call, which must have been made before."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def copy_rate(device: str, *, size: int = 1 << 30) -> float:
    """GB/s that a copy reads and writes."""
    source, target = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    return 2e-6 * size / measure.milliseconds(lambda: target.copy_(source))["ms"]


def run(case: Case, provider: Provider, device: str, copied: float, out: Path) -> None:
    """Measures one case; reports why a peer cannot run it. copied: GB/s of a copy."""
    label = f"{provider.name:18} {case}"
    work = functools.partial(time_one, case, provider, device, copied, out, label)
    measure.guarded(label, provider.name == "blocksparse_flash", work)


@torch.no_grad()
def time_one(case: Case, provider: Provider, device: str, copied: float, out: Path, label: str) -> None:
    """Writes a line for each clock; reports a wrong output instead."""
    call = provider.prepare(case, device)
    if call is None:
        return
    tensors = inputs(case, device)
    step = functools.partial(call, *tensors)
    setup_ms = measure.first_call_milliseconds(step)
    if not is_right(call, tensors, mask_of(case.layout()), label):
        return
    facts = {
        "bench": "decode", "provider": provider.name, "backend": provider.backend, "pattern": case.pattern,
        "density": case.density, "n": case.kv_len, "q_len": case.q_len, "batch": case.batch, "heads": HEADS,
        "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "dtype": "bf16", "peak_bytes": measure.peak_bytes(step),
        "setup_ms": setup_ms, **measure.environment(),
    }  # fmt: skip
    times = {"call": measure.wall_milliseconds(step, warmup=3, runs=21), "graph": measure.milliseconds(graphed(step))}
    for direction, found in times.items():
        rate = 1e-6 * case.stored_bytes / found["ms"]
        line = {**facts, "direction": direction, **found, "gb_per_s": rate, "copy_share": rate / copied}
        measure.append(out, line, KEYS)


def main(arguments: list[str] | None = None) -> None:
    parser = measure.parser(__doc__, "decode.jsonl")
    names = [provider.name for provider in PROVIDERS]
    parser.add_argument("--providers", nargs="+", choices=names, default=names)
    kv_lens = sorted({case.kv_len for case in CASES})
    parser.add_argument("--kv-lens", nargs="+", type=int, choices=kv_lens, default=kv_lens)
    options = parser.parse_args(arguments)
    measure.require_gpu()
    copied = copy_rate("cuda")
    print(f"a copy of 1 GiB: {copied:.0f} GB/s", flush=True)
    for case in [case for case in CASES if case.kv_len in options.kv_lens]:
        # kernels compiled for other shapes count toward PyTorch's limit
        torch.compiler.reset()
        for provider in PROVIDERS:
            if provider.name in options.providers:
                run(case, provider, "cuda", copied, options.out)


if __name__ == "__main__":
    main()
