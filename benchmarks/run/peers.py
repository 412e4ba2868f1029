"""Adapters for every attention implementation: ours and the peers that are installed. Peers are imported on use."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from blocksparse_flash import BlockLayout, attention, interop

from .patterns import BLOCK, WINDOW_BLOCKS, Pattern

# q, k, v (batch, heads, length, head_dim) -> out
Call = Callable[[Tensor, Tensor, Tensor], Tensor]


class Shape(NamedTuple):
    """Shape and device of a call."""

    batch: int
    heads: int
    head_dim: int
    device: str


# scores of SDPA's math: its backward takes 103 GB for 2^33 of them
MAX_SCORES = 1 << 29

# makes the mask of a pattern on the device, and returns the call
Prepare = Callable[[Pattern, Shape], Call]


class Peer(NamedTuple):
    """One implementation of attention.

    refuses       why it cannot compute a pattern, None if it can
    prepare       makes the mask on the device and returns the call
    package       package that must be installed; None for PyTorch itself
    tokens_first  tensors are stored as (batch, length, heads, head_dim); calls get views of them
    select        like prepare, from scores (n_rows, n_cols) on the device; each row keeps the k highest
    rebuilds      documented alternatives to prepare for changing masks, by their name in result lines
    """

    provider: str
    backend: str
    refuses: Callable[[Pattern, Shape], str | None]
    prepare: Prepare
    package: str | None = None
    tokens_first: bool = False
    select: Callable[[Tensor, int], Call] | None = None
    rebuilds: Mapping[str, Prepare] = MappingProxyType({})

    @property
    def is_ours(self) -> bool:
        return self.provider == "blocksparse_flash"


def _unless(can: Callable[[Pattern, Shape], bool], reason: str) -> Callable[[Pattern, Shape], str | None]:
    """A value of `refuses`: the reason, unless the peer can compute the pattern."""
    return lambda pattern, shape: None if can(pattern, shape) else reason


NOTHING = _unless(lambda pattern, shape: True, "")
BUT_DENSE = _unless(lambda pattern, shape: pattern.is_dense, "has no block layouts")
FROM_32 = _unless(lambda pattern, shape: pattern.block_size >= 32, "has no tiles below 32 for its gradients")
FINE_BLOCKS = _unless(lambda pattern, shape: pattern.block_size == 64 and not pattern.causal, "takes blocks of 64 only")
SQUARE_BLOCKS = _unless(
    lambda pattern, shape: pattern.block_size in (64, 128) and not pattern.causal, "takes full blocks of 64 or 128 only"
)
OTHER_BLOCKS = _unless(lambda pattern, shape: pattern.block_size == BLOCK, f"takes blocks of {BLOCK} only")
BATCHES = _unless(lambda pattern, shape: shape.batch == 1, "takes one sequence, not a batch")
FEW_SCORES = _unless(
    lambda pattern, shape: shape.batch * shape.heads * pattern.length**2 <= MAX_SCORES,
    f"keeps all scores in memory: timed with up to 2^{MAX_SCORES.bit_length() - 1} of them only",
)
BUT_NEIGHBORHOODS = _unless(lambda pattern, shape: pattern.name == "neighborhood", "has neighborhoods only")


def tokens_first_call(function: Callable[..., Any], **options: Any) -> Call:
    """A call of a function of (batch, length, heads, head_dim), which may return a tuple that begins with out."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = function(*(x.transpose(1, 2) for x in (q, k, v)), **options)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return call


def ours(backend: str, *, deterministic: bool = False) -> Peer:
    """A backend of ours; `deterministic` is part of its name."""

    def prepare(pattern: Pattern, shape: Shape) -> Call:
        layout = pattern.layout()
        if layout is not None:
            # copies the plan in advance; the first call would wait for it
            layout.plan(shape.device, non_blocking=True)
        return functools.partial(
            attention, layout=layout, causal=pattern.causal, backend=backend, deterministic=deterministic
        )

    def select(scores: Tensor, k: int) -> Call:
        length = BLOCK * scores.shape[0]
        layout = BlockLayout.from_scores(scores[None, None], length, length, k=k, block_size=BLOCK)
        return functools.partial(attention, layout=layout, backend=backend, deterministic=deterministic)

    named = f"{backend}, deterministic" if deterministic else backend
    return Peer("blocksparse_flash", named, NOTHING, prepare, select=select)


def sdpa_call(kernel: str, **options: Any) -> Call:
    """scaled_dot_product_attention restricted to one kernel, a name in SDPBackend."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(getattr(SDPBackend, kernel)):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)

    return call


def sdpa(provider: str, backend: str, kernel: str) -> Peer:
    def prepare(pattern: Pattern, _shape: Shape) -> Call:
        return sdpa_call(kernel, is_causal=pattern.causal)

    def refuses(pattern: Pattern, shape: Shape) -> str | None:
        return BUT_DENSE(pattern, shape) or (FEW_SCORES(pattern, shape) if kernel == "MATH" else None)

    return Peer(provider, backend, refuses, prepare)


@functools.cache
def compiled_flex(is_autotuned: bool = False) -> Callable[..., Tensor]:
    from torch._functorch import config
    from torch.nn.attention.flex_attention import flex_attention

    # otherwise a backward can run only once, and cannot be timed alone
    config.donated_buffer = False
    # fullgraph: an error at the recompilation limit, not a silent fallback to eager
    mode = "max-autotune-no-cudagraphs" if is_autotuned else None
    return torch.compile(flex_attention, dynamic=False, fullgraph=True, mode=mode)


def _flex_lists(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """(counts, cols) of the True blocks of each row, then the others, as in BlockMask."""
    counts = blocks.sum(1, dtype=torch.int32)[None, None]
    return counts, torch.argsort(~blocks, dim=1, stable=True).to(torch.int32)[None, None]


def _block_lists(pattern: Pattern, shape: Shape) -> tuple[Tensor, Tensor]:
    """(cols, counts) of the stored blocks: int32 (batch, heads, rows, largest count) and (batch, heads, rows)."""
    counts, cols = _flex_lists(torch.from_numpy(pattern.blocks).to(shape.device))
    cols = cols[..., : int(counts.max())].expand(shape.batch, shape.heads, -1, -1)
    return cols.contiguous(), counts.expand(shape.batch, shape.heads, -1).contiguous()


def flex_mask(pattern: Pattern, device: str) -> Any:
    """The pattern as FlexAttention's BlockMask, from block lists, without a mask function on full blocks."""
    from torch.nn.attention.flex_attention import BlockMask

    diagonal = np.eye(len(pattern.blocks), dtype=bool) & pattern.causal
    causal_pairs = (lambda b, h, q, kv: q >= kv) if pattern.causal else None
    partial, full = (torch.from_numpy(blocks).to(device) for blocks in (diagonal, pattern.blocks & ~diagonal))
    return BlockMask.from_kv_blocks(
        *_flex_lists(partial), *_flex_lists(full), BLOCK_SIZE=pattern.block_size, mask_mod=causal_pairs
    )


def flex_table_mask(pattern: Pattern, device: str, *, is_compiled: bool) -> Any:
    """The pattern as a BlockMask from a mask function, which looks up every pair in a table of blocks on the device.

    The documented way: O(length^2) in time and, if not compiled, in memory.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    table, side = torch.from_numpy(pattern.blocks).to(device), pattern.block_size

    def attends(_b: Tensor, _h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return table[q // side, kv // side]

    create = torch.compile(create_block_mask, dynamic=False, fullgraph=True) if is_compiled else create_block_mask
    return create(attends, None, None, pattern.length, pattern.length, device=device, BLOCK_SIZE=side)


def flex(compiled: Callable[..., Callable[..., Tensor]] = compiled_flex) -> Peer:
    def prepare(pattern: Pattern, shape: Shape) -> Call:
        if pattern.name == "dense":
            return compiled()
        mask, side = flex_mask(pattern, shape.device), pattern.block_size
        if side >= BLOCK:
            return functools.partial(compiled(), block_mask=mask)
        # its tiles are 128 by default; for gradients, only autotuning tries others
        tiles = {"fwd_BLOCK_M": side, "fwd_BLOCK_N": side}
        return functools.partial(compiled(is_autotuned=True), block_mask=mask, kernel_options=tiles)

    def select(scores: Tensor, k: int) -> Call:
        from torch.nn.attention.flex_attention import BlockMask

        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, scores.topk(k, dim=1).indices, True)
        lists = *_flex_lists(torch.zeros_like(chosen)), *_flex_lists(chosen)
        return functools.partial(compiled(), block_mask=BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=BLOCK))

    def rebuild(pattern: Pattern, shape: Shape, *, is_compiled: bool) -> Call:
        return functools.partial(compiled(), block_mask=flex_table_mask(pattern, shape.device, is_compiled=is_compiled))

    rebuilds = {
        "new mask, create_block_mask": functools.partial(rebuild, is_compiled=False),
        "new mask, create_block_mask, compiled": functools.partial(rebuild, is_compiled=True),
    }
    return Peer("flex", "triton", FROM_32, prepare, select=select, rebuilds=rebuilds)


def _flash_attention_4(pattern: Pattern, shape: Shape) -> Call:
    from flash_attn.cute import flash_attn_func
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    options: dict[str, Any] = {"causal": pattern.causal}
    layout = pattern.layout()
    if layout is not None:
        mask = interop.to_flash_attention_4(layout.to(shape.device))
        # without the backward's tensors, gradients would be dense
        options["block_sparse_tensors"] = BlockSparseTensorsTorch(*mask.block_sparse_tensors)
        options["block_sparse_tensors_bwd"] = BlockSparseTensorsTorch(*mask.block_sparse_tensors_bwd)
    return tokens_first_call(flash_attn_func, **options)


def _flashinfer(pattern: Pattern, shape: Shape) -> Call:
    """Forward only: outputs have no gradients."""
    import flashinfer

    layout = pattern.layout()
    if layout is None:
        run = functools.partial(flashinfer.single_prefill_with_kv_cache, causal=pattern.causal)
    else:
        workspace = torch.empty(128 << 20, dtype=torch.uint8, device=shape.device)
        wrapper = flashinfer.BlockSparseAttentionWrapper(workspace)
        blocks = interop.to_flashinfer(layout.to(shape.device))._asdict()
        sizes = {"num_qo_heads": shape.heads, "num_kv_heads": shape.heads, "head_dim": shape.head_dim}
        wrapper.plan(**blocks, **sizes, q_data_type=torch.bfloat16)
        run = wrapper.run

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return run(*(x[0].transpose(0, 1) for x in (q, k, v))).transpose(0, 1)[None]

    return call


def _block_sparse_attention(pattern: Pattern, shape: Shape) -> Call:
    from block_sparse_attn import block_sparse_attn_func

    blocks = torch.from_numpy(pattern.blocks).to(shape.device)
    masks = blocks.expand(shape.batch, shape.heads, -1, -1).contiguous()
    kinds = torch.ones(shape.heads, dtype=torch.int32, device=shape.device)
    bounds = torch.arange(shape.batch + 1, dtype=torch.int32, device=shape.device) * pattern.length

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
        out = block_sparse_attn_func(
            q, k, v, bounds, bounds, kinds, None, masks, pattern.length, pattern.length, 0.0, is_causal=pattern.causal
        )  # fmt: skip
        return out.unflatten(0, (shape.batch, -1)).transpose(1, 2)

    return call


class _CudnnFunction(torch.autograd.Function):
    """Forward and backward of cuDNN's block-sparse attention, which has no gradients of its own."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, cols: Tensor, options: dict[str, Any]) -> Tensor:
        from cudnn.block_sparse_attention.api import block_sparse_attention_forward

        found = block_sparse_attention_forward(q, k, v, cols, **options)
        ctx.save_for_backward(q, k, v, found["o_tensor"], found["lse_tensor"], cols)
        ctx.options = options
        return found["o_tensor"]

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        from cudnn.block_sparse_attention.api import block_sparse_attention_backward

        found = block_sparse_attention_backward(dout, *ctx.saved_tensors, **ctx.options)
        return found["dq_tensor"], found["dk_tensor"], found["dv_tensor"], None, None


def _cudnn_block_sparse(pattern: Pattern, shape: Shape) -> Call:
    """Gradients exist for head_dim 128 only."""
    cols, counts = _block_lists(pattern, shape)
    options: dict[str, Any] = {"sparse_block_size": pattern.block_size}
    if counts.unique().numel() > 1:
        options["q2k_block_nums"] = counts

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.set_grad_enabled(shape.head_dim == 128):
            return _CudnnFunction.apply(q, k, v, cols, options)

    return call


def _fastvideo(pattern: Pattern, shape: Shape) -> Call:
    """Its Triton kernels; the others are compiled for one version of PyTorch."""
    from fastvideo_kernel.block_sparse_attn import block_sparse_attn_triton

    cols, counts = _block_lists(pattern, shape)
    sizes = torch.full((pattern.blocks.shape[1],), pattern.block_size, dtype=torch.int32, device=shape.device)
    return lambda q, k, v: block_sparse_attn_triton(q, k, v, cols, counts, sizes)[0]


def _xformers(pattern: Pattern, _shape: Shape) -> Call:
    from xformers.ops import LowerTriangularMask, memory_efficient_attention

    return tokens_first_call(memory_efficient_attention, attn_bias=LowerTriangularMask() if pattern.causal else None)


def _natten(pattern: Pattern, _shape: Shape) -> Call:
    """With a stride of one block all its queries share a window that starts and ends at block boundaries."""
    from natten import na1d

    return tokens_first_call(na1d, kernel_size=BLOCK * min(WINDOW_BLOCKS, len(pattern.blocks)), stride=BLOCK)


PACKAGES = (
    Peer("flash_attention_4", "cute", OTHER_BLOCKS, _flash_attention_4, "flash_attn.cute", tokens_first=True),
    Peer("flashinfer", "auto", BATCHES, _flashinfer, "flashinfer", tokens_first=True),
    Peer("block_sparse_attention", "cuda", OTHER_BLOCKS, _block_sparse_attention, "block_sparse_attn", True),
    Peer("cudnn_block_sparse", "cute", SQUARE_BLOCKS, _cudnn_block_sparse, "cudnn.block_sparse_attention"),
    Peer("fastvideo", "triton", FINE_BLOCKS, _fastvideo, "fastvideo_kernel"),
    Peer("xformers", "auto", BUT_DENSE, _xformers, "xformers", tokens_first=True),
    Peer("natten", "auto", BUT_NEIGHBORHOODS, _natten, "natten", tokens_first=True),
)  # fmt: skip


def is_installed(package: str) -> bool:
    """Whether a package or submodule can be found; imports only the parent packages."""
    names = package.split(".")
    return all(importlib.util.find_spec(".".join(names[: end + 1])) is not None for end in range(len(names)))


def peers(capability: tuple[int, int]) -> tuple[list[Peer], list[Peer]]:
    """(those that can run on a GPU of this compute capability, those whose package is not installed)."""
    mine = [ours(backend) for backend in (["hopper", "triton"] if capability == (9, 0) else ["triton"])]
    cudnn = sdpa("cudnn", "cudnn", "CUDNN_ATTENTION")
    torches = [flex(), cudnn, sdpa("flash_attention_2", "sdpa", "FLASH_ATTENTION"), sdpa("math", "sdpa", "MATH")]
    there = [peer for peer in PACKAGES if peer.package is None or is_installed(peer.package)]
    return [*mine, *torches, *there], [peer for peer in PACKAGES if peer not in there]
