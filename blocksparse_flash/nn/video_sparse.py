"""Video sparse attention: blocks of keys selected by pooled queries and keys, and attention over the pools."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from einops import rearrange, repeat
from torch import Tensor, nn

from .. import validation
from ..blocks.checks import check_in_memory, check_tensor
from ..functional import attention
from ..layout import BlockLayout
from ..runtime import tracing
from .arguments import check_features, check_gates, check_positions, positive_int
from .layers import SelfAttention
from .positions import RotaryTable

# tokens of a block that plans made on a device may have
BLOCK_SIZES = (16, 32, 64, 128, 256)


@tracing.untraced
def video_sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, *, k_blocks: int, block_size: int = 64, coarse_gate: Tensor | None = None
) -> Tensor:
    """Attention of each block of queries to the k_blocks blocks of keys with the highest pooled scores.

    Queries, keys and values are averaged over blocks of consecutive tokens. In the coarse branch the averages attend to
    each other; every query of a block gets the same result. In the fine branch the queries of a block attend to the
    tokens of the k_blocks blocks whose coarse scores are highest. The result is fine + coarse_gate * coarse.

    q            (batch, heads, q_len, head_dim)
    k, v         (batch, kv_heads, kv_len, head_dim | v_head_dim), kv_heads a divisor of heads
    k_blocks     blocks of keys for each block of queries and head; all of them if there are fewer
    block_size   tokens of a block: 16, 32, 64, 128 or 256; the last block may be shorter
    coarse_gate  floating point, broadcasts to the result, such as (batch, heads, q_len, v_head_dim), and is converted
                 to its dtype; None: no coarse branch
    returns      (batch, heads, q_len, v_head_dim)
    raises       TypeError, ValueError; RuntimeError under transforms of torch.func, and in torch.export and torch.jit

    Selection, layout and plan are made on the device of q, without synchronization. The selection has no gradient; q, k
    and v have gradients through both branches. Memory is O(heads * (length / block_size)^2 + heads * length).
    torch.compile calls this function outside of its graphs (a graph break).

    Zhang et al., "Faster Video Diffusion with Trainable Sparse Attention" (VSA), arXiv:2505.13389, section 2.

    >>> q = torch.randn(1, 2, 256, 32)
    >>> video_sparse_attention(q, q, q, k_blocks=2, coarse_gate=torch.ones(())).shape
    torch.Size([1, 2, 256, 32])
    """
    check_tensor("q", q)
    # all that `attention` would refuse below, before anything is computed
    validation.check(q, k, v, None, False, None, None, 0.0, None, None, validation.autocast_dtype(q))
    positive_int("k_blocks", k_blocks)
    _check_block_size("block_size", block_size)
    _check_gate(coarse_gate, q, v)
    tracing.refuse_transforms(None, q, k, v, coarse_gate)
    tracing.refuse_export("video_sparse_attention")
    check_in_memory(q, "q")
    group = q.shape[1] // max(1, k.shape[1])
    # each head of keys once per query head that shares it
    pooled_q, pooled_k, pooled_v = (
        block_means(q, block_size),
        *(repeat(block_means(x, block_size), "b h n d -> b (h group) n d", group=group) for x in (k, v)),
    )
    # scaled before the product, which float16 may not hold otherwise
    scores = (pooled_q * q.shape[3] ** -0.5) @ pooled_k.mT
    # without queries or keys there is nothing to select
    layout = None
    if scores.numel():
        sizes: dict[str, Any] = {"k": min(k_blocks, scores.shape[3]), "block_size": block_size}
        layout = BlockLayout.from_scores(scores.detach(), q.shape[2], k.shape[2], **sizes)
    fine = attention(q, k, v, layout)
    if coarse_gate is None:
        return fine
    coarse = scores.softmax(-1) @ pooled_v
    coarse = repeat(coarse, "b h n d -> b h (n block) d", block=block_size)[:, :, : q.shape[2]]
    return fine + coarse_gate.to(fine.dtype) * coarse


def _check_block_size(name: str, size: int) -> None:
    if positive_int(name, size) not in BLOCK_SIZES:
        raise ValueError(f"{name} must be one of {BLOCK_SIZES} tokens, got {size}")


def _check_gate(gate: Tensor | None, q: Tensor, v: Tensor) -> None:
    if gate is None:
        return
    check_gates("coarse_gate", gate, q)
    shape = *q.shape[:3], v.shape[3]
    padded_shape = (1,) * (4 - gate.dim()) + gate.shape
    does_broadcast = len(padded_shape) == 4 and all(
        size in (1, wanted) for size, wanted in zip(padded_shape, shape, strict=True)
    )
    if not does_broadcast:
        raise ValueError(f"coarse_gate must broadcast to the shape of the result, {shape}, got {tuple(gate.shape)}")


def block_means(x: Tensor, block_size: int) -> Tensor:
    """Means over blocks of tokens: (batch, heads, length, d) to (batch, heads, blocks, d). The last may be shorter."""
    n_whole = x.shape[2] // block_size
    whole = n_whole * block_size
    found = [x[:, :, :whole].unflatten(2, (n_whole, block_size)).mean(3)]
    if whole < x.shape[2]:
        found.append(x[:, :, whole:].mean(2, keepdim=True))
    # autocast refuses to concatenate tensors of the other half type
    with tracing.without_autocast(x.device):
        return torch.cat(found, 2)


class VideoSparseAttention(nn.Module):
    """Self-attention over a grid of tokens: `video_sparse_attention` of cubes, between projections without bias.

    embed_dim  features per token, a multiple of num_heads unless head_dim is given
    num_heads  query heads
    grid       tokens along each axis, such as (frames, height, width); inputs are in row-major order
    k_blocks   cubes of keys for each cube of queries and head
    cube       tokens of a cube along each axis; their product is 16, 32, 64, 128 or 256
    kv_heads, rope, head_dim  as SelfAttention
    raises     TypeError, ValueError

    A block holds the tokens of one cube. Where an axis of the grid is not a multiple of the cube's side, cubes at its
    end are smaller, and blocks hold tokens of several neighboring cubes.

    The gate of the coarse branch is a linear function of the input that starts at zero. A new layer therefore computes
    sparse attention alone, and the weights of a dense layer, a SelfAttention, can be loaded into `projections`.

    Zhang et al., "Faster Video Diffusion with Trainable Sparse Attention" (VSA), arXiv:2505.13389, section 2; without
    the gate of the fine branch, as in its models adapted from dense ones.

    >>> VideoSparseAttention(64, 2, (4, 8, 8), k_blocks=2)(torch.zeros(1, 256, 64)).shape
    torch.Size([1, 256, 64])
    """

    # buffers
    order: Tensor
    place: Tensor

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        grid: Sequence[int],
        *,
        k_blocks: int,
        cube: Sequence[int] = (4, 4, 4),
        kv_heads: int | None = None,
        rope: float | None = None,
        head_dim: int | None = None,
    ) -> None:
        # imports the mask builders
        from ..masks import tile_order

        super().__init__()
        self.k_blocks = positive_int("k_blocks", k_blocks)
        self.projections = SelfAttention(embed_dim, num_heads, kv_heads=kv_heads, rope=rope, head_dim=head_dim)
        self.coarse_gate = nn.Linear(embed_dim, num_heads * self.projections.head_dim)
        nn.init.zeros_(self.coarse_gate.weight)
        nn.init.zeros_(self.coarse_gate.bias)
        for name, value in (("grid", grid), ("cube", cube)):
            if not isinstance(value, Iterable):
                raise TypeError(f"{name} must have the tokens along each axis, such as ({value},), got {value!r}")
        self.grid, self.cube = tuple(grid), tuple(cube)
        if len(self.grid) != len(self.cube):
            raise ValueError(f"cube must have one size for each of the {len(self.grid)} axes of grid, got {self.cube}")
        # also checks both
        order = tile_order(self.grid, tile=self.cube)
        self.block_size = math.prod(self.cube)
        _check_block_size("the product of cube", self.block_size)
        # token at each place in the order of cubes, and place of each token
        self.register_buffer("order", order, persistent=False)
        self.register_buffer("place", torch.argsort(order), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> VideoSparseAttention:
        """Also restores the order, which `to_empty` and the meta device discard and no state dict holds."""
        # imports the mask builders
        from ..masks import tile_order

        super()._apply(fn, recurse)
        device = "cpu" if self.order.is_meta else self.order.device
        order = tile_order(self.grid, tile=self.cube)
        self.order, self.place = order.to(device), torch.argsort(order).to(device)
        return self

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """x (batch, tokens of the grid, embed_dim), in row-major order, to the same shape.

        positions  for rope, as in SelfAttention: numbers (length,) or (length, axes), such as frame, row and column;
                   None is the row-major index
        raises     TypeError, ValueError
        """
        check_features("x", x)
        if x.dim() != 3 or x.shape[1] != len(self.order):
            raise ValueError(
                f"x must have shape (batch, {len(self.order)} tokens of the grid, embed_dim), got {tuple(x.shape)}"
            )
        if positions is not None:
            if isinstance(positions, RotaryTable):
                raise TypeError(
                    "positions must be a tensor of numbers, got RotaryTable, whose rows would have to be those of the "
                    "cubes: pass the positions that it was made of"
                )
            check_positions(positions)
            if positions.dim() not in (1, 2) or len(positions) != len(self.order):
                n = len(self.order)
                raise ValueError(
                    f"positions must have shape ({n},) or ({n}, axes), a row for each token of the grid, got "
                    f"{tuple(positions.shape)}"
                )
            positions = positions[self.order]
        elif self.projections.rope is not None:
            positions = self.order
        x = x[:, self.order]
        q, k, v = self.projections.project(x, positions)
        gate = rearrange(self.coarse_gate(x), "batch length (heads d) -> batch heads length d", d=v.shape[3])
        out = video_sparse_attention(q, k, v, k_blocks=self.k_blocks, block_size=self.block_size, coarse_gate=gate)
        return self.projections.unite(out)[:, self.place]

    def extra_repr(self) -> str:
        return f"{len(self.order)} tokens, k_blocks={self.k_blocks}, block_size={self.block_size}"
