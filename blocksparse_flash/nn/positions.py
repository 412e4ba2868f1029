"""Positions: rotary tables, learned vectors, ALiBi slopes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..plan import block_selection
from ..runtime import tracing
from ..runtime.tensor_spec import in_order_of, new_in_order_of
from ..score_mods import slopes_of
from .arguments import check_input, check_positions, positive_int, rotary_base, runs_kernels


def alibi_slopes(num_heads: int) -> Tensor:
    """ALiBi slopes for num_heads heads, for `alibi_slopes` of attention: float32 (num_heads,), on the CPU.

    2 ** (-8 (h + 1) / num_heads) for a power of two; otherwise the slopes of the power of two below, then every other
    slope of the power of two above (Press et al., arXiv:2108.12409, section 3, and the code published with it).

    >>> alibi_slopes(3)
    tensor([0.0625, 0.0039, 0.2500])
    """
    return torch.tensor(slopes_of(positive_int("num_heads", num_heads)), dtype=torch.float32, device="cpu")


class RotaryTable(NamedTuple):
    """Rotation angles of each token's features, returned by `rotary_table`.

    cos, sin  float32 (length, head_dim / 2): cosines and sines of the angles. Within the library also
              (batch | 1, 1, length, head_dim / 2), for positions that differ between sequences
    """

    cos: Tensor
    sin: Tensor


def rotary_table(positions: Tensor, base: float, head_dim: int) -> RotaryTable:
    """Rotary table for the `positions` argument of SelfAttention and Encoder; layers and calls can share one.

    positions  (length,) or (length, axes): positions of the tokens, in any unit
    base       the `rope` of the layers
    head_dim   the `head_dim` of the layers

    A token at position p rotates features d and d + head_dim / 2 together, by p * base ** (-2 d / head_dim), so the
    score of a query and a key depends on their distance. With several axes the pairs are split into equal groups, one
    per axis, and each group is rotated as if it were the whole head. Angles are float32, since half types cannot
    represent large positions (Su et al., "RoFormer", arXiv:2104.09864, section 3.4).

    Raises TypeError, ValueError.
    """
    base = rotary_base("base", base)
    positive_int("head_dim", head_dim)
    check_positions(positions)
    coordinates = positions[:, None] if positions.dim() == 1 else positions
    if coordinates.dim() != 2 or not coordinates.shape[1] or head_dim % (2 * coordinates.shape[1]):
        raise ValueError(
            "positions must have shape (length,) or (length, axes), with a head_dim that is a multiple of 2 * axes, "
            f"since each axis rotates pairs of features, got {tuple(positions.shape)} and head_dim={head_dim}"
        )
    n_pairs, axes = head_dim // 2, coordinates.shape[1]
    exponents = torch.arange(n_pairs // axes, device=coordinates.device, dtype=torch.float32) * (axes / n_pairs)
    angles = (coordinates.float()[:, :, None] * base**-exponents).flatten(1)
    return RotaryTable(angles.cos(), angles.sin())


# ---- the operator, for torch.compile ----

# inductor would fuse the rotation of dq and dk with the concatenation of dq, dk and dv into the gradient of one
# projection, in a kernel that takes five times as long as these two steps
torch.library.define("blocksparse_flash::rotate", "(Tensor x, Tensor cos, Tensor sin, bool is_inverse) -> Tensor")


def _launch(x: Tensor, cos: Tensor, sin: Tensor, is_inverse: bool) -> Tensor:
    from ..kernels.triton.rotary import rotated

    with tracing.on_device(x.device):
        return rotated(x, cos, sin, is_inverse=is_inverse)


torch.library.impl("blocksparse_flash::rotate", "default", _launch)


@torch.library.register_fake("blocksparse_flash::rotate")
def _fake(x: Tensor, cos: Tensor, sin: Tensor, is_inverse: bool) -> Tensor:  # noqa: ARG001 - of the operator
    return new_in_order_of(x if x.stride(-1) == 1 else x.contiguous(), x.shape[3])


class Rotary(torch.autograd.Function):
    """A rotation, whose gradient is rotated back.

    is_direct  launches the kernel without the dispatcher, which tracers need
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, is_inverse: bool, is_direct: bool = False) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.is_inverse, ctx.is_direct = is_inverse, is_direct
        if is_direct:
            return _launch(x, cos, sin, is_inverse)
        with torch._C._AutoDispatchBelowAutograd():
            return _rotate_operator(x, cos, sin, is_inverse)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        back = Rotary.apply(grad, *ctx.saved_tensors, not ctx.is_inverse, ctx.is_direct)
        return back, None, None, None, None


torch.library.impl("blocksparse_flash::rotate", "Autograd", Rotary.apply)
_rotate_operator = torch.ops.blocksparse_flash.rotate.default


def _runs_operator(device: torch.device, dtype: torch.dtype) -> bool:
    # fake CUDA tensors can be traced on a machine without a GPU
    return dtype in block_selection.COMPARABLE and torch.cuda.is_available() and tracing.runs_triton(device.index)


# torch.compile calls it once, and its answer becomes a constant of the graph
_runs_operator._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _takes_operator(heads: Tensor) -> bool:
    return torch.compiler.is_compiling() and heads.is_cuda and _runs_operator(heads.device, heads.dtype)


# ---- positions ----


def _has_table_for_kernels(heads: Tensor, table: RotaryTable) -> bool:
    """Whether the kernel for rotary positions takes a table: of this shape, and without gradient."""
    cos, sin = table
    shape, leading = (heads.shape[2], heads.shape[3] // 2), tuple(cos.shape[:-2])
    has_shape = cos.shape == sin.shape and cos.shape[-2:] == shape and leading in ((), (1, 1), (heads.shape[0], 1))
    return has_shape and cos.device == heads.device and not (cos.requires_grad or sin.requires_grad)


def rotate(heads: Tensor, table: RotaryTable) -> Tensor:
    """Applies rotary positions to heads (batch, heads, length, head_dim).

    On a GPU in one pass, with cosines and sines in float32, also under torch.compile. Elsewhere and under other tracers
    they are rounded to the type of the heads.
    """
    if runs_kernels(heads) and _has_table_for_kernels(heads, table):
        rotated: Tensor = Rotary.apply(heads, table.cos, table.sin, False, True)
        return rotated
    if _takes_operator(heads) and _has_table_for_kernels(heads, table):
        compiled: Tensor = _rotate_operator(heads, table.cos, table.sin, False)
        return compiled
    cos, sin = table.cos.to(heads.dtype), table.sin.to(heads.dtype)
    left, right = heads.chunk(2, dim=-1)
    # for head_dim 2, torch.cat returns strides that attention does not accept
    return in_order_of(heads, torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1))


class LearnedPositions(nn.Module):
    """Learned absolute positions: adds weight[i], of weight (length, embed_dim), to token i.

    length     maximum sequence length
    embed_dim  features per token
    raises     TypeError, ValueError
    """

    def __init__(self, length: int, embed_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(positive_int("length", length), positive_int("embed_dim", embed_dim)))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, length, embed_dim) to the same shape."""
        check_input(x, self.weight.shape[1])
        if x.shape[1] > len(self.weight):
            raise ValueError(f"x has {x.shape[1]} tokens, but there are positions for {len(self.weight)}")
        return x + self.weight[: x.shape[1]]
