"""How fast is attention beside its peers? `python -m benchmarks.attention` on a CUDA GPU, one JSON line a figure.

Peers in the same run: torch.compile(flex_attention) given full blocks (for causal a partial diagonal), and cuDNN through
scaled_dot_product_attention for dense and causal. Every output is compared with float32 on sampled rows before it is
timed; a wrong one is reported and not timed. TFLOP/s count stored 128 x 128 blocks: 4 * heads * nnz * 128 * 128 *
head_dim forward, 2.5 times that backward.
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from blocksparse_flash import BlockLayout, attention

from . import measure

BLOCK = 128


class Pattern(NamedTuple):
    """A block-level pattern: which blocks, as bool (n_rows, n_cols); `causal` masks inside the diagonal ones too."""

    name: str
    blocks: np.ndarray
    causal: bool = False

    @property
    def nnz(self) -> int:
        return int(self.blocks.sum())

    @property
    def is_dense(self) -> bool:
        return self.name in ("dense", "causal")

    def layout(self) -> BlockLayout | None:
        if self.is_dense:
            return None
        rows, cols = np.nonzero(self.blocks)
        length = BLOCK * len(self.blocks)
        return BlockLayout.from_blocks(rows, cols, length, length, block_size=BLOCK)


def patterns(length: int, *, random_density: float = 1 / 8, seed: int = 0) -> Iterator[Pattern]:
    """Dense, causal, and four block-level patterns with full blocks."""
    n_blocks = length // BLOCK
    row, col = np.arange(n_blocks)[:, None], np.arange(n_blocks)[None, :]
    generator = np.random.default_rng(seed)
    yield Pattern("dense", np.ones((n_blocks, n_blocks), dtype=bool))
    yield Pattern("causal", col <= row, causal=True)
    yield Pattern("local", abs(row - col) <= 4)
    stride = row ^ col
    yield Pattern("butterfly", (stride & (stride - 1)) == 0)
    yield Pattern("random", (generator.random((n_blocks, n_blocks)) < random_density) | (row == col))
    drawn = generator.permuted(np.tile(np.arange(n_blocks), (n_blocks, 1)), axis=1)[:, :3]
    drawn = (drawn[:, :, None] == np.arange(n_blocks)).any(axis=1)
    yield Pattern("bigbird", (abs(row - col) <= 1) | drawn | (row < 2) | (col < 2))


def flex_mask(pattern: Pattern, device: str) -> Any:
    """The pattern as FlexAttention's BlockMask, built from block lists: no mask function on full blocks."""
    from torch.nn.attention.flex_attention import BlockMask

    def lists(blocks: np.ndarray) -> tuple[Tensor, Tensor]:
        mask = torch.from_numpy(blocks).to(device)
        count = mask.sum(1, dtype=torch.int32)[None, None]
        return count, torch.argsort(~mask, dim=1, stable=True).to(torch.int32)[None, None]

    diagonal = np.eye(len(pattern.blocks), dtype=bool) & pattern.causal
    causal_pairs = (lambda b, h, q, kv: q >= kv) if pattern.causal else None
    return BlockMask.from_kv_blocks(
        *lists(diagonal), *lists(pattern.blocks & ~diagonal), BLOCK_SIZE=BLOCK, mask_mod=causal_pairs
    )


@functools.cache
def compiled_flex() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def providers(pattern: Pattern, device: str) -> Iterator[tuple[str, str, Callable[[Tensor, Tensor, Tensor], Tensor]]]:
    """(provider, backend, call) of everything that can run the pattern here."""
    layout = pattern.layout()
    if layout is not None:
        layout = layout.to(device)
    backends = ["hopper", "triton"] if torch.cuda.get_device_capability() == (9, 0) else ["triton"]
    for backend in backends:
        yield (
            "blocksparse_flash",
            backend,
            functools.partial(attention, layout=layout, causal=pattern.causal, backend=backend, deterministic=False),
        )
    if pattern.name == "dense":
        yield "flex", "triton", compiled_flex()
    else:
        mask = flex_mask(pattern, device)
        yield "flex", "triton", lambda q, k, v: compiled_flex()(q, k, v, block_mask=mask)
    if pattern.is_dense:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        def cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=pattern.causal)

        yield "cudnn", "cudnn", cudnn


def worst_error(out: Tensor, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, n_rows: int = 64) -> float:
    """Largest error over sampled rows against float32, relative to the largest value."""
    length = q.shape[2]
    rows = torch.randint(length, (n_rows,), device=q.device)
    mask = torch.from_numpy(pattern.blocks).to(q.device)[rows // BLOCK].repeat_interleave(BLOCK, dim=1)
    if pattern.causal:
        mask &= torch.arange(length, device=q.device) <= rows[:, None]
    scores = q[:, :, rows].float() @ k.float().transpose(-1, -2) / math.sqrt(q.shape[3])
    expected = scores.masked_fill(~mask, -math.inf).softmax(-1) @ v.float()
    return ((out[:, :, rows].float() - expected).abs().max() / expected.abs().max()).item()


def run(pattern: Pattern, length: int, batch: int, head_dim: int, hidden: int, out: Path, device: str = "cuda") -> None:
    """Measure every provider on one pattern, forward and backward, and print a row each."""
    heads = hidden // head_dim
    shape = (batch, heads, length, head_dim)
    q, k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    dout = torch.randn(shape, device=device, dtype=torch.bfloat16)
    flops = 4 * batch * heads * pattern.nnz * BLOCK * BLOCK * head_dim
    for provider, backend, call in providers(pattern, device):
        forward = functools.partial(call, q, k, v)
        setup_ms = measure.first_call_milliseconds(forward)
        result = forward()
        error = worst_error(result.detach(), q.detach(), k.detach(), v.detach(), pattern)
        if not error < 0.02:
            print(f"{provider:18} {pattern.name:10} head_dim {head_dim}: WRONG, relative error {error:.3g}; not timed")
            continue
        backward = functools.partial(torch.autograd.grad, result, (q, k, v), dout, retain_graph=True)
        line = {
            "bench": "attention", "provider": provider, "backend": backend, "pattern": pattern.name,
            "density": pattern.nnz / pattern.blocks.size, "n": length, "batch": batch, "heads": heads,
            "head_dim": head_dim, "dtype": "bf16", **measure.environment(),
        }  # fmt: skip
        row = f"{provider:18} {pattern.name:10} head_dim {head_dim:3}"
        for direction, timed, factor in (("fwd", forward, 1.0), ("bwd", backward, 2.5)):
            peak = measure.peak_bytes(timed)
            times = measure.milliseconds(timed)
            tflops = factor * flops / times["ms"] * 1e-9
            timing = {"direction": direction, **times, "tflops": tflops, "peak_bytes": peak, "setup_ms": setup_ms}
            measure.append(out, {**line, **timing})
            row += f"   {direction} {times['ms']:8.3f} ms {tflops:6.1f} TFLOP/s"
        print(row, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=16384, help="tokens, a multiple of 128")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--hidden", type=int, default=2048, help="heads * head_dim")
    parser.add_argument("--head-dims", type=int, nargs="+", default=[128, 64])
    parser.add_argument("--patterns", nargs="+", help="names; default: all")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/attention.jsonl"), help="appended to")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("needs a CUDA GPU")
    density = 1 / 8 if arguments.length < 65536 else 0.05
    for head_dim in arguments.head_dims:
        for pattern in patterns(arguments.length, random_density=density):
            if arguments.patterns is None or pattern.name in arguments.patterns:
                run(pattern, arguments.length, arguments.batch, head_dim, arguments.hidden, arguments.out)


if __name__ == "__main__":
    main()
