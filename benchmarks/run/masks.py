"""Time and memory of building masks: `python -m benchmarks.run.masks`, one JSON line per figure.

Ours on one core: every family at 65,536 tokens, and three masks at 1,048,576. Peers, at shorter lengths:
FlexAttention's create_block_mask, which evaluates every pair, eager and compiled, and a dense mask (a bool per pair,
then any() over blocks). Masks that others build too are compared block by block. Times are processor times of one
thread, except the first compiled call, whose compilation has a line of its own in wall time, since the C++ compiler is
another process. Peak memory is that of the process over its value before the call; it needs Linux and glibc.
"""

from __future__ import annotations

import ctypes
import gc
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.attention.flex_attention import create_block_mask

import masks
from blocksparse_flash import BlockLayout

from . import measure

BLOCK = 128
KEYS = [
    "bench", "provider", "pattern", "density", "n", "block_size", "nnz", "ms", "ms_p20", "ms_p80", "peak_bytes",
    "layout_bytes", "device", "torch", "numpy", "commit",
]  # fmt: skip
# tokens; a dense mask takes a byte per pair, create_block_mask eight and more
PEER_LENGTHS = (4096, 8192, 16384)

Predicate = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Case(NamedTuple):
    """A mask to build; `attends` is its predicate over pairs where peers can build it too."""

    pattern: str
    n: int
    build: Callable[[], BlockLayout]
    attends: Predicate | None = None


def bounds(n: int, n_documents: int) -> np.ndarray:
    """cu_seqlens of documents with random boundaries."""
    begins = np.random.default_rng(0).choice(np.arange(1, n), n_documents - 1, replace=False)
    return np.concatenate([[0], np.sort(begins), [n]])


def families(n: int) -> Iterator[Case]:
    """Every family once."""
    random = np.random.default_rng(0)
    scores = random.normal(size=(-(-n // BLOCK), -(-n // BLOCK)))
    buckets = np.sort(random.integers(0, n // 256, n))
    parents = [-1, *((node - 1) // 8 for node in range(1, 4096))]
    every_1024th = range(0, n, 1024)
    grid, tile = (n // 256, 256), (8, 16)
    order = masks.tile_order(grid, tile=tile)
    yield Case("butterfly", n, lambda: masks.butterfly(n))
    yield Case("local", n, lambda: masks.local(n, window=512))
    yield Case("causal", n, lambda: masks.causal(n))
    yield Case("global_tokens", n, lambda: masks.global_tokens(n, tokens=16))
    yield Case("strided", n, lambda: masks.strided(n, stride=1024, causal=True))
    yield Case("longformer", n, lambda: masks.longformer(n, window=256, global_tokens=16))
    yield Case("bigbird", n, lambda: masks.bigbird(n, seed=0))
    yield Case("pixelfly", n, lambda: masks.pixelfly(n))
    yield Case("prefix_lm", n, lambda: masks.prefix_lm(n, prefix=n // 8))
    yield Case("sink_window", n, lambda: masks.sink_window(n, sinks=4, window=4096))
    yield Case("a_shape", n, lambda: masks.a_shape(n))
    yield Case("tri_shape", n, lambda: masks.tri_shape(n))
    yield Case("block_diagonal", n, lambda: masks.block_diagonal(n, size=1000))
    yield Case("block_causal", n, lambda: masks.block_causal(n, size=1000))
    yield Case("fixed", n, lambda: masks.fixed(n, stride=1024, summary=16, causal=True))
    yield Case("dilated_window, 3 heads", n, lambda: masks.dilated_window(n, window=8, dilation=[1, 50, 1000]))
    yield Case("longnet", n, lambda: masks.longnet(n, segments=[2048, n], dilations=[1, 512]))
    yield Case("hierarchical", n, lambda: masks.hierarchical(n, size=128))
    yield Case("neighborhood", n, lambda: masks.neighborhood(grid, kernel=7))
    yield Case("swin", n, lambda: masks.swin(grid, window=16, shift=8))
    yield Case("axial", n, lambda: masks.axial((n // 4096, 64, 64), axes=[1, 2]))
    yield Case("sliding_tile, tiles", n, lambda: masks.sliding_tile(grid, kernel=(24, 48), tile=tile, order=order))
    yield Case("documents, 64", n, lambda: masks.documents(bounds(n, 64)))
    yield Case("documents, 600", n, lambda: masks.documents(bounds(n, 600)))
    yield Case("shared_prefix, 16", n, lambda: masks.shared_prefix(bounds(n, 16)))
    yield Case("vertical_slash", n, lambda: masks.vertical_slash(n, verticals=every_1024th, slashes=range(100)))
    yield Case("tree, 4096 nodes", n, lambda: masks.tree(parents, prompt=n - 4096))
    yield Case("block_diffusion", n, lambda: masks.block_diffusion(n // 2, size=32))
    yield Case("alibi_windows, 8 heads", n, lambda: masks.alibi_windows(n, heads=8, threshold=16.0, causal=True))
    yield Case("random", n, lambda: masks.random(n, blocks_per_row=8, seed=0))
    yield Case("erdos_renyi", n, lambda: masks.erdos_renyi(n, density=0.02, seed=0))
    yield Case("expander", n, lambda: masks.expander(n, degree=8, seed=0))
    yield Case("small_world", n, lambda: masks.small_world(n, neighbors=8, rewire=0.1, seed=0))
    yield Case("lsh, sorted", n, lambda: masks.lsh(buckets))
    yield Case("top_k", n, lambda: masks.top_k(scores, n, n, k=16))
    yield Case("top_p", n, lambda: masks.top_p(scores, n, n, p=0.5))


def long_ones(n: int) -> Iterator[Case]:
    """Masks of a million tokens."""
    packed = bounds(n, 10_000)
    union = "butterfly | local(window=512) | global_tokens(tokens=16)"
    yield Case("butterfly | local | global_tokens", n, lambda: masks.build(union, n))
    yield Case("documents, 10000", n, lambda: masks.documents(packed))
    yield Case("documents, 10000, causal", n, lambda: masks.documents(packed, causal=True))


def comparable(n: int) -> Iterator[Case]:
    """Masks that peers build as well."""
    packed = bounds(n, 16)
    document = torch.from_numpy(np.repeat(np.arange(16), np.diff(packed)))
    yield Case("causal", n, lambda: masks.causal(n), lambda q, kv: q >= kv)
    yield Case("local", n, lambda: masks.local(n, window=512), lambda q, kv: (q - kv).abs() <= 512)
    yield Case("documents, 16", n, lambda: masks.documents(packed), lambda q, kv: document[q] == document[kv])


def dense_blocks(case: Case) -> torch.Tensor:
    """bool (rows, cols): blocks with a pair, from the mask of all pairs."""
    assert case.attends is not None
    position = torch.arange(case.n)
    mask = case.attends(position[:, None], position[None, :])
    return mask.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK)).any(3).any(1)


def flex_blocks(case: Case, create: Callable[..., Any] = create_block_mask) -> Any:
    """FlexAttention's BlockMask of the mask."""
    attends = case.attends
    assert attends is not None
    return create(lambda _b, _h, q, kv: attends(q, kv), None, None, case.n, case.n, device="cpu", BLOCK_SIZE=BLOCK)


def compiled_for(case: Case) -> tuple[Callable[[], Any], float]:
    """A compiled call that makes the BlockMask, and the milliseconds of its compilation."""
    # without a reset PyTorch silently stops compiling after a few masks
    torch.compiler.reset()
    torch.compiler.config.force_disable_caches = True
    create = torch.compile(create_block_mask, fullgraph=True, dynamic=False)
    begin = time.perf_counter()
    flex_blocks(case, create)
    return lambda: flex_blocks(case, create), 1000 * (time.perf_counter() - begin)


def peak_bytes(call: Callable[[], Any]) -> int:
    """Peak memory of the process during a call, over its memory before."""

    def status(field: str) -> int:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
        return 1024 * int(line.split()[1])

    gc.collect()
    # returns freed memory to the system, so that it counts when it is allocated again
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = status("VmRSS")
    # resets the peak
    Path("/proc/self/clear_refs").write_text("5")
    call()
    return max(0, status("VmHWM") - before)


def milliseconds(call: Callable[[], Any], *, seconds: float = 0.5, least: int = 3) -> dict[str, float]:
    """Median and percentiles of a call's processor time, over `seconds` of calls, at least `least`."""
    times: list[float] = []
    until = time.process_time() + seconds
    while len(times) < least or (time.process_time() < until and len(times) < 200):
        begin = time.process_time()
        call()
        times.append(1000 * (time.process_time() - begin))
    return measure.percentiles(times)


def processor() -> str:
    """The name of the CPU."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


def record(
    case: Case, provider: str, call: Callable[[], Any], layout: BlockLayout, out: Path, once_ms: float | None = None
) -> None:
    """Measures one call and appends a line. once_ms: its time, if it was measured already."""
    peak = peak_bytes(call) if once_ms is None else None
    times = milliseconds(call) if once_ms is None else dict.fromkeys(("ms", "ms_p20", "ms_p80"), once_ms)
    tensors = (layout.indptr, layout.indices, layout.bitmask_ids, layout.bitmasks)
    line = {
        "bench": "masks", "provider": provider, "pattern": case.pattern, "density": layout.density, "n": case.n,
        "block_size": BLOCK, "nnz": layout.nnz, **times, "peak_bytes": peak,
        "layout_bytes": sum(tensor.nbytes for tensor in tensors) if provider == "blocksparse_flash" else None,
        "device": processor(), "torch": torch.__version__, "numpy": np.__version__, "commit": measure.commit(),
    }  # fmt: skip
    measure.append(out, line, KEYS)


def run(case: Case, out: Path) -> None:
    """Measure ours, and the peers where they can build the mask."""
    layout = case.build()
    record(case, "blocksparse_flash", case.build, layout, out)
    if case.attends is None:
        return
    stored = layout.to_scipy().toarray() > 0
    assert np.array_equal(dense_blocks(case).numpy(), stored)
    compiled, once_ms = compiled_for(case)
    for make in (lambda: flex_blocks(case), compiled):
        assert np.array_equal(make().to_dense()[0, 0].numpy() > 0, stored)
    record(case, "dense", lambda: dense_blocks(case), layout, out)
    record(case, "flex", lambda: flex_blocks(case), layout, out)
    record(case, "flex, compiled", compiled, layout, out)
    record(case, "flex, compiled, first call", compiled, layout, out, once_ms)


def main(given: list[str] | None = None) -> None:
    parser = measure.parser(__doc__, "masks.jsonl")
    parser.add_argument("--patterns", nargs="+", help="names; default: all")
    multiple = measure.multiple_of(BLOCK)
    tokens = f"tokens, multiples of {BLOCK}"
    parser.add_argument("--peer-lengths", type=multiple, nargs="+", default=PEER_LENGTHS, help=tokens)
    arguments = parser.parse_args(given)
    torch.set_num_threads(1)
    cases = [*families(65_536), *long_ones(1_048_576)]
    cases += [case for n in arguments.peer_lengths for case in comparable(n)]
    known = dict.fromkeys(case.pattern for case in cases)
    for name in arguments.patterns or ():
        if name not in known:
            parser.error(f"--patterns must be among {'; '.join(known)}, got {name}")
    for case in cases:
        if arguments.patterns is None or case.pattern in arguments.patterns:
            run(case, arguments.out)


if __name__ == "__main__":
    main()
