"""masks.top_k and top_p: the chosen blocks are the best of each row."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import masks


def open_cols(row: int, q_len: int, kv_len: int, block_q: int, block_kv: int, causal: bool) -> list[int]:
    """Cols with a pair that is not in the future."""
    n_cols = -(-kv_len // block_kv)
    last_query = min((row + 1) * block_q, q_len) - 1
    return [col for col in range(n_cols) if not causal or col * block_kv <= last_query + kv_len - q_len]


def best(scores: list[float], cols: list[int], k: int) -> set[int]:
    """The k cols with the highest scores, ties by ascending col."""
    return set(sorted((col for col in cols if scores[col] > -math.inf), key=lambda col: (-scores[col], col))[:k])


def fewest(scores: list[float], cols: list[int], p: float) -> set[int]:
    """Cols by descending score until their softmax weights sum to p."""
    ordered = sorted((col for col in cols if scores[col] > -math.inf), key=lambda col: (-scores[col], col))
    total = math.fsum(math.exp(scores[col]) for col in ordered)
    found, shares = set(), []
    for col in ordered:
        if math.fsum(shares) >= p:
            break
        found.add(col)
        shares.append(math.exp(scores[col]) / total)
    return found


def drawn(seed: int, block_size: tuple[int, int]) -> tuple[int, int, np.ndarray]:
    random = np.random.default_rng(seed)
    q_len, kv_len = (int(length) for length in random.integers(1, 900, 2))
    batch_heads = [(), (3,), (2, 3)][seed % 3]
    scores = random.normal(0, 2, (*batch_heads, -(-q_len // block_size[0]), -(-kv_len // block_size[1])))
    if seed % 2:
        # many equal ones
        scores = np.round(scores)
    scores[random.random(scores.shape) < 0.1] = -np.inf
    return q_len, kv_len, scores


def assert_chosen(layout, scores: np.ndarray, causal: bool, choose) -> None:
    q_len, kv_len = layout.shape[2:]
    block_q, block_kv = layout.block_size
    scores = scores.reshape((1,) * (4 - scores.ndim) + scores.shape)
    expected = np.zeros((*scores.shape[:2], q_len, kv_len), dtype=bool)
    for batch, head, row in np.ndindex(scores.shape[:3]):
        cols = open_cols(row, q_len, kv_len, block_q, block_kv, causal)
        for col in choose(scores[batch, head, row].tolist(), cols):
            expected[batch, head, row * block_q : (row + 1) * block_q, col * block_kv : (col + 1) * block_kv] = True
    if causal:
        expected &= np.arange(kv_len) <= np.arange(q_len)[:, None] + kv_len - q_len
    assert layout.shape == expected.shape
    assert torch.equal(layout.to_dense(), torch.from_numpy(expected))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("block_size", [(16, 16), (48, 48), (64, 64), (128, 128), (32, 64)])
@pytest.mark.parametrize("seed", range(6))
def test_top_k_row_by_row(seed, block_size, causal):
    q_len, kv_len, scores = drawn(seed, block_size)
    for k in (0, 1, 3, scores.shape[-1], 10**9):
        layout = masks.top_k(scores, q_len, kv_len, k=k, block_size=block_size, causal=causal)
        assert_chosen(layout, scores, causal, lambda row, cols, k=k: best(row, cols, k))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("block_size", [(16, 16), (48, 48), (64, 64), (128, 128), (32, 64)])
@pytest.mark.parametrize("seed", range(0, 12, 2))
def test_top_p_row_by_row(seed, block_size, causal):
    q_len, kv_len, scores = drawn(seed, block_size)
    for p in (0.0, 0.3, 0.9, 0.999999):
        layout = masks.top_p(scores, q_len, kv_len, p=p, block_size=block_size, causal=causal)
        assert_chosen(layout, scores, causal, lambda row, cols, p=p: fewest(row, cols, p))


def test_top_p_of_equal_scores_is_a_share_of_the_row():
    # 16 equal blocks: weights of 1/16 are exact
    scores = np.full((1, 16), 5.0)
    for n_kept in range(17):
        assert masks.top_p(scores, 128, 2048, p=n_kept / 16).indices.tolist() == list(range(n_kept))


def test_top_p_of_everything_keeps_what_weighs_anything():
    scores = np.array([[0.0, -40.0, -700.0, -10_000.0, -np.inf]])
    assert masks.top_p(scores, 128, 640, p=1.0).indices.tolist() == [0, 1, 2]
    assert masks.top_p(np.full((1, 5), -np.inf), 128, 640, p=1.0).nnz == 0
    # large scores do not overflow
    assert masks.top_p(np.array([[1e300, 1e300, 0.0]]), 128, 384, p=0.9).indices.tolist() == [0, 1]


@pytest.mark.parametrize("make", [torch.from_numpy, lambda scores: torch.from_numpy(scores).float()])
def test_scores_come_as_tensors_too(make):
    scores = np.random.default_rng(0).normal(size=(2, 8, 8)).astype(np.float32).astype(np.float64)
    for choose, given in ((masks.top_k, {"k": 2}), (masks.top_p, {"p": 0.5})):
        expected = choose(scores, 1000, 1024, **given)
        tensor = make(scores).requires_grad_()
        assert choose(tensor, 1000, 1024, **given) == expected
        assert tensor.shape == (2, 8, 8) and expected.shape == (1, 2, 1000, 1024)


def test_scores_are_left_as_they_were():
    scores = np.zeros((4, 4))
    masks.top_k(scores, 512, 512, k=1, causal=True)
    masks.top_p(scores, 512, 512, p=0.5, causal=True)
    assert not scores.any()


def test_nothing_has_no_blocks():
    for q_len, kv_len in ((0, 0), (0, 300), (300, 0)):
        scores = np.zeros((-(-q_len // 128), -(-kv_len // 128)))
        assert masks.top_k(scores, q_len, kv_len, k=3).nnz == 0
        assert masks.top_p(scores, q_len, kv_len, p=0.5).nnz == 0


@pytest.mark.parametrize(("choose", "given"), [(masks.top_k, {"k": 1}), (masks.top_p, {"p": 0.5})])
@pytest.mark.parametrize(
    ("scores", "error", "message"),
    [
        ([[0.0]], TypeError, "scores: expected floats in an array or tensor, got list"),
        (np.zeros((4, 4), int), TypeError, "scores: .* got ndarray of int64"),
        (torch.zeros(4, 4).bool(), TypeError, "scores: .* got Tensor of torch.bool"),
        (np.zeros((4, 3)), ValueError, r"scores: .* ends in \(4, 4\), from 512 queries .* got \(4, 3\)"),
        (np.zeros(4), ValueError, "scores: expected shape"),
        (np.zeros((0, 4, 4)), ValueError, "at least one batch and one head"),
        (np.full((4, 4), np.nan), ValueError, "scores: expected no nan, got 16"),
        (np.full((4, 4), np.inf), ValueError, r"scores: expected no \+inf"),
    ],
)
def test_refused_scores(choose, given, scores, error, message):
    with pytest.raises(error, match=message):
        choose(scores, 512, 512, **given)


@pytest.mark.parametrize(
    ("choose", "arguments", "error", "message"),
    [
        (masks.top_k, {"k": -1}, ValueError, "k: .* at least 0, got -1"),
        (masks.top_k, {"k": 2.0}, TypeError, "k: .* got 2.0"),
        (masks.top_k, {"k": 2, "causal": 1}, TypeError, "causal: expected a bool"),
        (masks.top_p, {"p": 1.5}, ValueError, "p: .* from 0 to 1, got 1.5"),
        (masks.top_p, {"p": "all"}, TypeError, "p: .* got 'all'"),
        (masks.top_p, {"p": 0.5, "causal": None}, TypeError, "causal: expected a bool"),
        (masks.top_p, {"p": 0.5, "block_size": 100}, ValueError, "block_size: .* got 100"),
    ],
)
def test_refused(choose, arguments, error, message):
    with pytest.raises(error, match=message):
        choose(np.zeros((4, 4)), 512, 512, **arguments)


@pytest.mark.parametrize(("lengths", "name"), [((2**31, 512), "q_len"), ((512, 2**31), "kv_len")])
def test_lengths_that_are_too_large_are_named(lengths, name):
    with pytest.raises(ValueError, match=f"{name}: .* from 0 to 2147483647, got 2147483648"):
        masks.top_k(np.zeros((4, 4)), *lengths, k=1)


@pytest.mark.parametrize(
    "build", [lambda scores: masks.top_k(scores, 256, 256, k=1), lambda scores: masks.top_p(scores, 256, 256, p=0.5)]
)
def test_masked_scores_are_refused(build):
    with pytest.raises(TypeError, match="scores: expected a plain array, got a masked one"):
        build(np.ma.array([[3.0, 1.0], [1.0, 3.0]], mask=np.eye(2, dtype=bool)))


def test_equal_scores_keep_the_fewest_blocks_despite_rounding():
    for n_blocks in range(1, 33):
        for n_kept in range(1, n_blocks + 1):
            layout = masks.top_p(np.zeros((1, n_blocks)), 16, 16 * n_blocks, p=n_kept / n_blocks, block_size=16)
            assert layout.nnz == n_kept
