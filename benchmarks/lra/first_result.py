"""A first result within seconds, then the demo: `python -m benchmarks.lra.first_result` takes the demo's options."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import masks
from benchmarks.run.measure import wall_milliseconds
from blocksparse_flash import attention


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def first_result(length: int = 2048) -> bool:
    """Draws a mask as text, times dense and sparse attention, and compares gradients. Returns whether they agree.

    length  tokens, a multiple of 64
    """
    block_size = 64
    layout = masks.local(length, window=block_size, block_size=block_size)
    layout = layout | masks.global_tokens(length, tokens=block_size, block_size=block_size)
    print(f"local | global_tokens on {length} tokens: {layout.density:.1%} of the blocks of {block_size} tokens")
    print(layout)
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    with torch.random.fork_rng():
        torch.manual_seed(0)
        q, k, v, gradient = torch.randn(4, 1, 2, length, 64, device=device(), dtype=dtype)
    leaves = tuple(tensor.requires_grad_() for tensor in (q, k, v))

    def gradients(**options: Any) -> tuple[Tensor, ...]:
        return torch.autograd.grad(attention(q, k, v, **options), leaves, gradient)

    def dense() -> tuple[Tensor, ...]:
        return torch.autograd.grad(F.scaled_dot_product_attention(q, k, v), leaves, gradient)

    of_dense, of_sparse = (wall_milliseconds(call, runs=2)["ms"] for call in (dense, lambda: gradients(layout=layout)))
    print(
        f"   forward and backward on {device()}, {str(dtype).removeprefix('torch.')}: PyTorch dense "
        f"{of_dense:.1f} ms, block-sparse {of_sparse:.1f} ms, {of_dense / of_sparse:.1f}x as fast"
    )
    pairs = zip(gradients(layout=layout), gradients(layout=layout, backend="reference"), strict=True)
    error = max(((ours - plain).abs().max() / plain.abs().max()).item() for ours, plain in pairs)
    limit = 0.02 if dtype == torch.bfloat16 else 1e-4
    verdict = "agree with" if error <= limit else "DIFFER from"
    print(f"   gradients {verdict} plain PyTorch: the largest difference is {error:.1e} of the largest gradient")
    return error <= limit


def main() -> int:
    """Shows the first result, and only then imports the demo, which takes seconds."""
    options = sys.argv[1:]
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    agree = None if {"-h", "--help"} & set(options) else first_result()
    torch.set_num_threads(n_threads)
    try:
        from benchmarks.lra import demo
    except ModuleNotFoundError as error:
        sys.exit(f"the demo needs {error.name}: pip install '.[demo]'")
    return demo.main(options, agree=agree)


if __name__ == "__main__":
    sys.exit(main())
