"""Masks from block scores on the host: the top k of each row, or the fewest that hold a share p of its softmax."""

from __future__ import annotations

import numpy as np
import torch

from blocksparse_flash import BlockLayout

from .canvas import MAX_TOKENS, BlockSize, Canvas, read_canvas
from .checks import check_dense, read_fraction, read_integer, read_switch, type_name
from .local import past_of
from .public import public

Scores = np.ndarray | torch.Tensor


def _read_canvas(q_len: int, kv_len: int, block_size: BlockSize) -> Canvas:
    lengths = {"q_len": q_len, "kv_len": kv_len}
    q_len, kv_len = (
        read_integer(name, length, at_least=0, at_most=MAX_TOKENS, unit="tokens") for name, length in lengths.items()
    )
    return read_canvas((q_len, kv_len), block_size)


def _read_scores(scores: Scores, canvas: Canvas) -> np.ndarray:
    """float64 ([[batch,] heads,] n_rows, n_cols), a copy."""
    if isinstance(scores, torch.Tensor):
        check_dense("scores", scores)
    if isinstance(scores, np.ma.MaskedArray):
        raise TypeError(
            "scores: expected a plain array, got a masked one; scores.filled(-np.inf) leaves out its blocks"
        )
    if isinstance(scores, torch.Tensor) and scores.is_floating_point():
        array = scores.detach().to("cpu", torch.float64).numpy()
    elif isinstance(scores, np.ndarray) and scores.dtype.kind == "f":
        array = scores
    else:
        raise TypeError(f"scores: expected floats in an array or tensor, got {type_name(scores)}")
    grid = canvas.n_rows, canvas.n_cols
    if not 2 <= array.ndim <= 4 or array.shape[-2:] != grid:
        raise ValueError(
            f"scores: expected shape ([[batch,] heads,] n_rows, n_cols) that ends in {grid}, from {canvas.q_len} "
            f"queries and {canvas.kv_len} keys in blocks of {canvas.block_size}, got {tuple(array.shape)}"
        )
    if 0 in array.shape[:-2]:
        raise ValueError(f"scores: expected at least one batch and one head, got shape {tuple(array.shape)}")
    array = array.astype(np.float64)
    if np.isnan(array).any():
        raise ValueError(
            f"scores: expected no nan, got {np.isnan(array).sum()}. Give -inf to blocks that must not be chosen"
        )
    if np.isposinf(array).any():
        raise ValueError("scores: expected no +inf. To force a block, add it to the layout: top_k(...) | local(...)")
    return array


def _open_blocks(canvas: Canvas, causal: bool) -> np.ndarray:
    """bool (n_rows, n_cols): the blocks that may be chosen; if causal, those with a pair that is not in the future."""
    if not causal:
        return np.ones((canvas.n_rows, canvas.n_cols), dtype=bool)
    _, last_query = canvas.row_span(np.arange(canvas.n_rows))
    return np.arange(canvas.n_cols) * canvas.block_kv <= last_query[:, None]


def _layout_of(is_chosen: np.ndarray, canvas: Canvas, causal: bool) -> BlockLayout:
    layout = BlockLayout.from_block_mask(is_chosen, canvas.q_len, canvas.kv_len, block_size=canvas.block_size)
    return past_of(layout) if causal else layout


@public
def top_k(
    scores: Scores, q_len: int, kv_len: int, *, k: int, block_size: BlockSize = 128, causal: bool = False
) -> BlockLayout:
    """Each block row attends to the k blocks with the highest scores.

    Ties go to the lowest col. Blocks with score -inf are never chosen, even if fewer than k others exist. The diagonal
    is not added: use `top_k(...) | local(...)`.

    scores      float ([[batch,] heads,] n_rows, n_cols), array or tensor; copied to the host
    q_len       query tokens
    kv_len      key tokens
    k           blocks in every row; more than n_cols means all
    block_size  tokens per side of a block, a multiple of 16, or (block_q, block_kv)
    causal      True chooses among blocks that hold a pair with kv_pos <= q_pos + (kv_len - q_len), and keeps only such
                pairs
    returns     BlockLayout of shape (batch | 1, heads | 1, q_len, kv_len), full blocks only unless causal; in time and
                memory O(scores)
    raises      ValueError if scores have another shape or hold nan or inf, or if k < 0; TypeError if scores are not
                floating-point

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


@public
def top_p(
    scores: Scores, q_len: int, kv_len: int, *, p: float, block_size: BlockSize = 128, causal: bool = False
) -> BlockLayout:
    """Each block row attends to the fewest blocks whose softmax weights sum to at least p.

    The softmax runs over the scores of a row, in float64. Blocks are taken by descending score, ties by ascending col,
    until their weights sum to p, up to rounding. Blocks with score -inf are never chosen. p=0 keeps no block, p=1 every
    block whose weight is not 0.

    scores      float ([[batch,] heads,] n_rows, n_cols), array or tensor; copied to the host
    q_len       query tokens
    kv_len      key tokens
    p           sum of softmax weights to keep, 0 to 1
    block_size  tokens per side of a block, a multiple of 16, or (block_q, block_kv)
    causal      True applies softmax and choice to blocks that hold a pair with kv_pos <= q_pos + (kv_len - q_len), and
                keeps only such pairs
    returns     BlockLayout of shape (batch | 1, heads | 1, q_len, kv_len), full blocks only unless causal; in time and
                memory O(scores)
    raises      ValueError if scores have another shape or hold nan or inf, or if p is out of range; TypeError if scores
                are not floating-point

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
    # in a row of only -inf all weights are 0
    weights = np.exp(values - np.where(np.isfinite(highest), highest, 0.0))
    descending = np.take_along_axis(weights, order, axis=-1)
    # suffix sums, from the smallest weight: prefix sums would lose small weights near p=1
    left = np.cumsum(descending[..., ::-1], axis=-1)[..., ::-1]
    total = left[..., :1]
    # taken while the blocks before hold less than p, that is while more than 1 - p is left, beyond the rounding of sums
    rounding = 1.0 + values.shape[-1] * np.finfo(np.float64).eps
    is_taken = (left > (1.0 - p) * total * rounding) & (descending > 0.0)
    is_chosen = np.zeros(values.shape, dtype=bool)
    np.put_along_axis(is_chosen, order, is_taken, axis=-1)
    return _layout_of(is_chosen, canvas, causal)
