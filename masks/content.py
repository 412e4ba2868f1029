"""Masks from block scores on the host: the top k of each row, or the fewest that hold a share p of its softmax."""

from __future__ import annotations

import numpy as np
import torch

from blocksparse_flash import BlockLayout

from .canvas import BlockSize, Canvas, read_canvas
from .checks import read_fraction, read_integer, read_switch, specs_of
from .local import past_of

Scores = np.ndarray | torch.Tensor


def _read_canvas(q_len: int, kv_len: int, block_size: BlockSize) -> Canvas:
    lengths = {"q_len": q_len, "kv_len": kv_len}
    q_len, kv_len = (read_integer(name, length, at_least=0, unit="tokens") for name, length in lengths.items())
    return read_canvas((q_len, kv_len), block_size)


def _read_scores(scores: Scores, canvas: Canvas) -> np.ndarray:
    """float64 ([[batch,] heads,] n_rows, n_cols), a copy."""
    if isinstance(scores, torch.Tensor) and scores.is_meta:
        raise ValueError("scores: expected numbers, got a tensor on the meta device, which has none")
    if isinstance(scores, torch.Tensor) and scores.is_floating_point():
        array = scores.detach().to("cpu", torch.float64).numpy()
    elif isinstance(scores, np.ndarray) and scores.dtype.kind == "f":
        array = scores
    else:
        raise TypeError(f"scores: expected floats in an array or tensor, got {specs_of(scores)}")
    grid = canvas.n_rows, canvas.n_cols
    if not 2 <= array.ndim <= 4 or array.shape[-2:] != grid:
        raise ValueError(
            f"scores: expected shape ([[batch,] heads,] n_rows, n_cols) that ends in {grid}, from {canvas.q_len} queries "
            f"and {canvas.kv_len} keys in blocks of {canvas.block_size}, got {tuple(array.shape)}"
        )
    if 0 in array.shape[:-2]:
        raise ValueError(f"scores: expected at least one batch and one head, got shape {tuple(array.shape)}")
    array = array.astype(np.float64)
    if np.isnan(array).any():
        raise ValueError(
            f"scores: expected no nan, got {np.isnan(array).sum()}. Give -inf to blocks that must not be chosen"
        )
    if np.isposinf(array).any():
        raise ValueError("scores: expected no inf, got it. To force a block, join it: top_k(...) | local(...)")
    return array


def _open_blocks(canvas: Canvas, causal: bool) -> np.ndarray:
    """bool (n_rows, n_cols): which blocks may be chosen; with causal those that have a pair not in the future."""
    if not causal:
        return np.ones((canvas.n_rows, canvas.n_cols), dtype=bool)
    _, last_query = canvas.row_span(np.arange(canvas.n_rows))
    return np.arange(canvas.n_cols) * canvas.block_kv <= last_query[:, None]


def _layout_of(is_chosen: np.ndarray, canvas: Canvas, causal: bool) -> BlockLayout:
    layout = BlockLayout.from_block_mask(is_chosen, canvas.q_len, canvas.kv_len, block_size=canvas.block_size)
    return past_of(layout) if causal else layout


def top_k(
    scores: Scores, q_len: int, kv_len: int, *, k: int, block_size: BlockSize = 128, causal: bool = False
) -> BlockLayout:
    """Each block row attends to the k blocks of the highest scores.

    Of equal scores the lowest col wins. A score of -inf is never chosen; a row with fewer than k others keeps those.
    Nothing is added: `top_k(...) | local(...)` keeps the diagonal as well.

    scores      float ([[batch,] heads,] n_rows, n_cols), array or tensor, on any device: brought to the host
    q_len, kv_len  tokens
    k           blocks in every row; more than there are means all
    block_size  tokens per side of a block, a multiple of 16, or (block_q, block_kv)
    causal      True chooses among the blocks that hold a pair with kv_pos <= q_pos + (kv_len - q_len), and keeps only
                those pairs
    returns     BlockLayout of shape (batch | 1, heads | 1, q_len, kv_len), of full blocks only unless causal. Time and
                memory O(scores)
    raises      ValueError if scores have another shape or hold nan or inf, or k < 0, TypeError if they are no floats

    Jiang et al., "MInference 1.0", arXiv:2407.02490, section 3.2 (block-sparse heads); Lu et al., "MoBA",
    arXiv:2502.13189, section 2.2.

    >>> top_k(np.arange(16.0).reshape(4, 4), 512, 512, k=1).indices.tolist()
    [3, 3, 3, 3]
    """
    canvas = _read_canvas(q_len, kv_len, block_size)
    k = min(read_integer("k", k, at_least=0, unit="blocks"), canvas.n_cols)
    causal = read_switch("causal", causal)
    values = _read_scores(scores, canvas)
    values[..., ~_open_blocks(canvas, causal)] = -np.inf
    if not k:
        return _layout_of(np.zeros(values.shape, dtype=bool), canvas, causal)
    # the k-th highest of every row
    least = np.partition(values, canvas.n_cols - k, axis=-1)[..., canvas.n_cols - k, None]
    is_above, is_level = values > least, values == least
    n_level = k - is_above.sum(axis=-1, keepdims=True)
    is_chosen = is_above | (is_level & (np.cumsum(is_level, axis=-1) <= n_level))
    return _layout_of(is_chosen & (values > -np.inf), canvas, causal)


def top_p(
    scores: Scores, q_len: int, kv_len: int, *, p: float, block_size: BlockSize = 128, causal: bool = False
) -> BlockLayout:
    """Each block row attends to the fewest blocks that together hold at least the share p of the row's softmax.

    The softmax is over the scores of a row, in float64; blocks are taken from the highest score down, of equal scores
    the lowest col first, until their shares sum to p. A score of -inf has no share and is never chosen. p=0 keeps
    nothing, p=1 every block whose share is not 0.

    scores      float ([[batch,] heads,] n_rows, n_cols), array or tensor, on any device: brought to the host
    q_len, kv_len  tokens
    p           share of the softmax, 0 to 1
    block_size  tokens per side of a block, a multiple of 16, or (block_q, block_kv)
    causal      True shares out and chooses among the blocks that hold a pair with kv_pos <= q_pos + (kv_len - q_len),
                and keeps only those pairs
    returns     BlockLayout of shape (batch | 1, heads | 1, q_len, kv_len), of full blocks only unless causal. Time and
                memory O(scores)
    raises      ValueError if scores have another shape or hold nan or inf, or p lies outside, TypeError if they are no
                floats

    Xu et al., "XAttention", arXiv:2503.16428, section 2.2 (threshold block selection).

    >>> top_p(np.zeros((4, 4)), 512, 512, p=0.5).nnz
    8
    """
    canvas = _read_canvas(q_len, kv_len, block_size)
    p = read_fraction("p", p)
    causal = read_switch("causal", causal)
    values = _read_scores(scores, canvas)
    values[..., ~_open_blocks(canvas, causal)] = -np.inf
    order = np.argsort(-values, axis=-1, kind="stable")
    highest = values.max(axis=-1, keepdims=True, initial=-np.inf)
    # a row of -inf alone has no shares
    weights = np.exp(values - np.where(np.isfinite(highest), highest, 0.0))
    descending = np.take_along_axis(weights, order, axis=-1)
    # what is left from each place on, summed from the smallest: sums from the largest would lose the small ones near p=1
    left = np.cumsum(descending[..., ::-1], axis=-1)[..., ::-1]
    total = left[..., :1]
    # taken while those before it hold less than p, that is while more than 1 - p is left
    is_taken = (left > (1.0 - p) * total) & (descending > 0.0)
    is_chosen = np.zeros(values.shape, dtype=bool)
    np.put_along_axis(is_chosen, order, is_taken, axis=-1)
    return _layout_of(is_chosen, canvas, causal)
