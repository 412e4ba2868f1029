"""Whether tiles of 64 x 64 pay for a layout: the Hopper kernels exist for these and for tiles of 128 x 128."""

from __future__ import annotations

from ..blocks.block_list import Frame
from ..plan_format import FINE_TILE, TILE

# time per pair of the 64 x 64 kernels over that of the others, forward and backward together, by padded head dimension
# (H100, 16,384 tokens, random blocks of 128: 1.08 and 1.19, butterfly 1.09 and 1.12; kernels/hopper/TUNING.md)
SLOWDOWN = {64: 1.08, 128: 1.15}
# largest share of a layout for which 64 x 64 tiles can pay
MAX_SHARE = 1 / min(SLOWDOWN.values())
# the share taken for small blocks that are selected on the device, which is not waited for
SELECTED_SHARE = 0.5


def fine_share(n_fine: int, n_coarse: int) -> float:
    """Pairs in the 64 x 64 tiles of a layout over those in its 128 x 128 tiles, 0.25 to 1; 1 without tiles."""
    return n_fine * FINE_TILE**2 / (n_coarse * TILE**2) if n_coarse else 1.0


def consists_of_tiles(frame: Frame) -> bool:
    """Whether blocks consist of whole 128 x 128 tiles."""
    return all(side % TILE == 0 for side in frame.block_size)


def pays(share: float, dim: int) -> bool:
    """Whether 64 x 64 tiles are faster for a layout with this `fine_share`. dim: the larger head dimension, padded."""
    return share * SLOWDOWN[dim] <= 1
