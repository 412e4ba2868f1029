"""ALiBi windows: per-head windows that drop pairs whose ALiBi penalty exceeds a threshold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from numbers import Real

import numpy as np
import torch

from blocksparse_flash import BlockLayout
from blocksparse_flash.score_mods import slopes_of

from .canvas import BlockSize, Length
from .checks import check_dense, read_integer, read_switch, type_name
from .heads import MAX_HEADS, by_head
from .local import local
from .public import public


def _read_positive(name: str, value: object) -> float:
    if isinstance(value, bool | np.bool_) or not isinstance(value, Real):
        raise TypeError(f"{name}: expected a positive number, got {value!r} ({type_name(value)})")
    try:
        number = float(value)
    # an int or a fraction above the largest float
    except OverflowError:
        number = math.inf
    if not 0.0 < number < math.inf:
        raise ValueError(f"{name}: expected a positive number, got {value!r}")
    return number


@public
def alibi_windows(
    length: Length,
    *,
    threshold: float,
    heads: int | None = None,
    slopes: Sequence[float] | np.ndarray | torch.Tensor | None = None,
    causal: bool = False,
    block_size: BlockSize = 128,
) -> BlockLayout:
    """Each head has its own window, which holds the tokens whose ALiBi penalty is at most `threshold`.

    Keeps slope_h * |d| <= threshold, where d = q_pos + (kv_len - q_len) - kv_pos: head h is local(window=w_h) with
    w_h = floor(threshold / slope_h), computed exactly. ALiBi multiplies the weight of every dropped key by less than
    exp(-threshold).

    length      tokens, or (q_len, kv_len), aligned bottom-right
    threshold   largest penalty kept, in units of the scores, positive
    heads       number of heads, which get the slopes of the paper: 2**(-8 (h + 1) / heads) for a power of two; else
                those of the next lower power of two, followed by every other slope of the next higher one
    slopes      (heads,), positive: the slopes, instead of heads
    causal      True also requires d >= 0, as the paper does
    block_size  tokens per side of a block, a multiple of 16, or (block_q, block_kv)
    returns     BlockLayout of shape (1, heads, q_len, kv_len), exact to the token
    raises      ValueError if both or neither of heads and slopes are given, or a value is not positive; TypeError if
                a value is not a number

    Press et al., "Train Short, Test Long", arXiv:2108.12409, section 3 (slopes). The threshold is that of xFormers'
    alibi_pattern.

    >>> alibi_windows(1024, heads=8, threshold=16.0, causal=True).shape
    (1, 8, 1024, 1024)
    """
    causal = read_switch("causal", causal)
    limit = Fraction(_read_positive("threshold", threshold))
    if (heads is None) == (slopes is None):
        raise ValueError(
            f"heads, slopes: expected exactly one of the two, got {'both' if slopes is not None else 'neither'}"
        )
    if heads is not None:
        numbers = slopes_of(read_integer("heads", heads, at_least=1, at_most=MAX_HEADS, unit="heads"))
    else:
        if isinstance(slopes, torch.Tensor):
            check_dense("slopes", slopes)
        given = slopes.tolist() if isinstance(slopes, np.ndarray | torch.Tensor) else slopes
        if not isinstance(given, Sequence) or isinstance(given, str | bytes):
            raise TypeError(
                f"slopes: expected numbers in a sequence, array or tensor, got {slopes!r} ({type_name(slopes)})"
            )
        numbers = [_read_positive(f"slopes[{head}]", slope) for head, slope in enumerate(given)]
        if not numbers:
            raise ValueError("slopes: expected at least one head, got none")
    windows = [int(limit // Fraction(slope)) for slope in numbers]
    return by_head(
        lambda window: local(length, window=(window, 0) if causal else window, block_size=block_size), windows
    )
