"""The features of a projection as heads."""

from __future__ import annotations

from collections.abc import Sequence

from einops import rearrange
from torch import Tensor


def heads_of(features: Tensor, counts: Sequence[int], head_dim: int) -> list[Tensor]:
    """Views (batch, count, length, head_dim) of (batch, length, features), one for each count of heads.

    Split along the features, so that the gradients, which lie in memory as the views do, are joined by one copy. A
    split along the heads would join them head by head, and its result would be copied into the order of the features.
    """
    parts = features.split([count * head_dim for count in counts], dim=2)
    return [rearrange(part, "batch length (heads d) -> batch heads length d", d=head_dim) for part in parts]
