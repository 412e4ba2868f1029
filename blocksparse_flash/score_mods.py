"""Score mods: softcap, ALiBi slopes, block bias, pair bias and sinks, and their gradients, in plain PyTorch.

With s = scale q k^T, in this order: s = c tanh(s / c), s -= slope * |q_pos + kv_len - q_len - kv_pos|, s += block bias,
s += pair bias.
A sink adds one logit to each row, in the sum of exponentials only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .plan_format import TILE

LOG2_E = math.log2(math.e)
# a pair_bias below this counts as -inf, also torch.finfo(torch.float32).min: the running maximum of kernels starts at
# -3e38 in base 2, so lower scores have no weight
LOWEST_BIAS = -3e38 / LOG2_E


def slopes_of(heads: int) -> list[float]:
    """The ALiBi slopes of a number of heads, 1 or more; `nn.alibi_slopes` has the definition."""
    n_regular = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (head + 1) / n_regular) for head in range(n_regular)]
    # the next power of two has half the step
    return slopes + [2.0 ** (-4.0 * (2 * head + 1) / n_regular) for head in range(heads - n_regular)]


class Scores(NamedTuple):
    """The score mods of a call; float32, or float64 for float64. pair_bias may have another floating type.

    sinks, alibi_slopes  (heads,) or None
    block_bias  (batch | 1, heads | 1, stored blocks) or None
    bias_index  the tensors of a block_bias.BiasIndex; empty without a bias
    softcap     c > 0, or 0.0 for none
    pair_bias   (batch | 1, heads | 1, q_len, kv_len) with any strides, or None
    is_causal   whether keys after a query are masked, by the plan if there is one
    """

    sinks: Tensor | None
    alibi_slopes: Tensor | None
    block_bias: Tensor | None
    bias_index: list[Tensor]
    softcap: float
    pair_bias: Tensor | None = None
    is_causal: bool = False

    @property
    def bias_cell(self) -> tuple[int, int] | None:
        """Queries and keys of a bias cell: the part of a tile that has one bias."""
        if self.block_bias is None:
            return None
        _, down, across = self.bias_index[0].shape
        return TILE // down, TILE // across

    def tables(self, direction: int, *, base_2: bool) -> Tensor | None:
        """The bias of each cell of each tile in the row lists (direction 0) or column lists (1) of a plan.

        base_2   multiplies by log2(e), for exp2
        returns  (batch | 1, heads | 1, listed tiles, cells, cells), contiguous; 0 where no block is stored
        """
        if self.block_bias is None:
            return None
        index = self.bias_index[direction]
        padded = F.pad(self.block_bias * LOG2_E if base_2 else self.block_bias, (0, 1))
        return padded.index_select(2, index.flatten()).reshape(*padded.shape[:2], *index.shape)

    def new_sums(self, shape: tuple[int, ...], *, is_partial: bool = False) -> Tensor:
        """Output tensor for the sums of ds over each grain of each tile; see `sums_shape`.

        is_partial  whether the kernel leaves out tiles, whose sums are 0
        """
        assert self.block_bias is not None
        sums = self.block_bias.new_empty(shape)
        # the last entry is no tile: blocks that the plan dropped take their gradient from it
        (sums if is_partial else sums[:, :, -1]).zero_()
        return sums

    def bias_gradient(self, sums: Tensor, direction: int = 0) -> Tensor:
        """The gradient of block_bias from these sums, added in a fixed order.

        direction  0: of the tiles of the plan's row lists, 1: of its column lists
        """
        assert self.block_bias is not None
        places = self.bias_index[2 + direction]
        _, down, across = self.bias_index[0].shape
        of_cells = sums.reshape(*sums.shape[:3], down, sums.shape[3] // down, across, sums.shape[4] // across)
        flat = of_cells.sum(dim=(4, 6)).flatten(2)
        of_blocks = flat.index_select(2, places.flatten()).reshape(*flat.shape[:2], *places.shape).sum(dim=3)
        for axis in (0, 1):
            if self.block_bias.shape[axis] == 1:
                of_blocks = of_blocks.sum(dim=axis, keepdim=True)
        return of_blocks

    def sinks_gradient(self, lse: Tensor, delta: Tensor) -> Tensor:
        """The gradient of the sinks; lse, delta (batch, heads, q_len), where delta = rowsum(dout out) - dlse.

        A sink has the weight exp(sink - lse) and no value, so dout v^T is 0 for it.
        """
        assert self.sinks is not None
        # a sink of -inf counts as none: its gradient is 0, even where lse is -inf too
        weight = torch.exp(self.sinks[:, None] - lse).nan_to_num(0.0)
        return -(weight * delta).sum(dim=(0, 2), dtype=torch.float64).to(self.sinks.dtype)

    def gradients(
        self,
        wanted: Sequence[bool],
        lse: Tensor,
        delta: Tensor,
        of_slopes: Tensor | None,
        of_bias: Tensor | None,
        dpair_bias: Tensor | None = None,
        *,
        bias_direction: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The gradients of sinks, slopes, block bias and pair bias; empty where they are not wanted.

        of_slopes, of_bias  sums of -ds * distance, (batch, heads, q_len), and sums of ds: see `sums_shape`
        bias_direction  see bias_gradient
        """
        dsinks = self.sinks_gradient(lse, delta) if wanted[0] else lse.new_empty(0)
        dslopes = lse.new_empty(0)
        if of_slopes is not None and self.alibi_slopes is not None:
            dslopes = of_slopes.sum(dim=(0, 2), dtype=torch.float64).to(self.alibi_slopes.dtype)
        dblock_bias = lse.new_empty(0) if of_bias is None else self.bias_gradient(of_bias, bias_direction)
        return dsinks, dslopes, dblock_bias, lse.new_empty(0) if dpair_bias is None else dpair_bias


def sums_shape(
    batch_heads: tuple[int, int],
    record_shape: tuple[int, ...],
    n_tiles: int,
    cell: tuple[int, int],
    step: tuple[int, int],
) -> tuple[int, int, int, int, int]:
    """(batch | 1, heads | 1, tiles + 1, grains, grains). A grain is the part of a bias cell that one step covers.

    batch_heads   of the call
    record_shape  of the plan's lists, and n_tiles in them
    step     queries and keys that a program sums in one step
    """
    # 1 for an axis along which the tiles themselves differ
    shared = [size if of_plan == 1 else 1 for size, of_plan in zip(batch_heads, record_shape[:2], strict=True)]
    grain = min(cell[0], step[0]), min(cell[1], step[1])
    return shared[0], shared[1], n_tiles + 1, TILE // grain[0], TILE // grain[1]
