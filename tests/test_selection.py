"""Attention to blocks selected by token equals its definition, forward and backward, on every backend."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import masks
from blocksparse_flash import BlockLayout, attention, selected_attention, selected_attention_with_lse, selection
from tests.support.closeness import assert_as_accurate

# kv_heads, group, query_block_size, block_size, q_len, kv_len, k
CASES = [
    (2, 1, 1, 16, 70, 70, 2),
    (1, 1, 1, 128, 40, 300, 2),
    (2, 2, 1, 32, 100, 130, 2),
    (1, 4, 1, 64, 50, 333, 3),
    (2, 4, 1, 128, 70, 260, 2),
    (1, 4, 16, 32, 100, 100, 2),
    (1, 8, 1, 64, 33, 200, 2),
    (2, 16, 1, 64, 30, 150, 2),
    (1, 16, 16, 16, 40, 90, 3),
    (1, 16, 64, 128, 130, 400, 2),
    (1, 32, 1, 64, 9, 150, 2),
    (1, 64, 1, 16, 5, 40, 2),
    (1, 128, 1, 32, 6, 70, 2),
    (2, 3, 1, 64, 45, 100, 2),
    (1, 5, 4, 32, 45, 80, 2),
    (1, 2, 128, 256, 200, 600, 2),
    # more queries than keys: the first ones attend to nothing if causal
    (1, 4, 1, 32, 90, 60, 1),
    (1, 2, 8, 16, 64, 48, 1),
]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def drawn_indices(batch: int, heads: int, n_rows: int, k: int, n_cols: int) -> Tensor:
    """Random blocks with duplicates and unused entries; the second row selects none, the third its last block twice."""
    generator = torch.Generator().manual_seed(1)
    indices = torch.randint(-1, n_cols, (batch, heads, n_rows, k), generator=generator)
    indices[:, :, 1:2] = -1
    indices[:, :, 2:3] = n_cols - 1
    return indices


def dense_mask(indices: Tensor, heads: int, q_len: int, kv_len: int, block: int, q_block: int, causal: bool) -> Tensor:
    """Pair by pair."""
    batch, axis = indices.shape[:2]
    mask = torch.zeros(batch, heads, q_len, kv_len, dtype=torch.bool)
    for b, h, t in itertools.product(range(batch), range(heads), range(q_len)):
        chosen = set(indices[b, h * axis // heads, t // q_block].tolist()) - {-1}
        for col in chosen:
            stop = min((col + 1) * block, kv_len, t + kv_len - q_len + 1 if causal else kv_len)
            mask[b, h, t, col * block : max(col * block, stop)] = True
    return mask


def expected(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q @ k.mT * scale).masked_fill(~mask, -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.nan_to_num(neginf=0)[..., None]).exp()
    return (weights.masked_fill(~mask, 0).to(v.dtype)) @ v, lse


def leaves(case: tuple[int, ...], dtype: torch.dtype, batch: int = 2) -> tuple[list[Tensor], Tensor, dict[str, int]]:
    kv_heads, group, q_block, block, q_len, kv_len, k = case
    shapes = [(batch, kv_heads * group, q_len, 24), (batch, kv_heads, kv_len, 24), (batch, kv_heads, kv_len, 16)]
    tensors = [drawn(*shape, seed=seed).to(dtype).requires_grad_() for seed, shape in enumerate(shapes)]
    indices = drawn_indices(batch, kv_heads, -(-q_len // q_block), k, -(-kv_len // block))
    return tensors, indices, {"block_size": block, "query_block_size": q_block}


def truth_of(tensors: list[Tensor], indices: Tensor, sizes: dict[str, int], causal: bool) -> tuple[Tensor, Tensor]:
    q, k, v = tensors
    mask = dense_mask(indices, q.shape[1], q.shape[2], k.shape[2], *sizes.values(), causal)
    return expected(q, k, v, mask, q.shape[3] ** -0.5)


def gradients(out: Tensor, lse: Tensor, tensors: list[Tensor]) -> tuple[Tensor, ...]:
    """Of a random weighting of out and of the finite lse."""
    dout, dlse = drawn(*out.shape, seed=7).to(out), drawn(*lse.shape, seed=8).to(lse)
    finite = lse.isfinite()
    return torch.autograd.grad(
        (out * dout).sum() + (lse.masked_fill(~finite, 0) * dlse).sum(), tensors, retain_graph=True
    )


@pytest.mark.parametrize("backend", ["eager", "reference"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_the_definition_in_float64(case: tuple[int, ...], causal: bool, backend: str) -> None:
    tensors, indices, sizes = leaves(case, torch.float64)
    found = selected_attention_with_lse(*tensors, indices, **sizes, causal=causal, backend=backend)
    truth = truth_of(tensors, indices, sizes, causal)
    for one, other in zip(found, truth, strict=True):
        torch.testing.assert_close(one, other)
    # a query without keys has no gradient; autograd of the naive form gives NaN there
    truth_grads = [grad.nan_to_num() for grad in gradients(*truth_of(tensors, indices, sizes, causal), tensors)]
    for name, one, other in zip("qkv", gradients(*found, tensors), truth_grads, strict=True):
        torch.testing.assert_close(one, other, msg=lambda text, name=name: f"d{name}: {text}")


def assert_kernels_are_as_accurate(
    found: tuple[Tensor, Tensor],
    low: list[Tensor],
    tensors: list[Tensor],
    truth_of: Callable[[list[Tensor]], tuple[Tensor, Tensor]],
) -> None:
    """Raises unless out, lse and gradients, found from `low`, are as accurate as `truth_of` the same q, k, v.

    tensors  q, k, v in float32 on the CPU
    """
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    truth, same = truth_of(exact), truth_of(tensors)
    assert_as_accurate(found[0].cpu(), [same[0]], truth[0], name="out")
    torch.testing.assert_close(found[1].cpu(), truth[1].float())
    for name, *grads in zip(
        "qkv", gradients(*found, low), gradients(*same, tensors), gradients(*truth, exact), strict=True
    ):
        one, other, right = (grad.cpu().nan_to_num() for grad in grads)
        assert_as_accurate(one, [other], right, name=f"d{name}")


@pytest.mark.sweep(by=lambda case, causal: {causal, ("group", case[1]), ("keys", case[3])})
@pytest.mark.usefixtures("by_kernels")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernels_are_as_accurate_as_pytorch(case: tuple[int, ...], causal: bool, device: torch.device) -> None:
    pytest.importorskip("triton", reason="needs Triton")
    tensors, indices, sizes = leaves(case, torch.float32, batch=1)
    low = [tensor.detach().to(device).requires_grad_() for tensor in tensors]
    found = selected_attention_with_lse(*low, indices.to(device), **sizes, causal=causal, backend="triton")
    assert_kernels_are_as_accurate(found, low, tensors, lambda each: truth_of(each, indices, sizes, causal))


# kv_heads, group, query_block_size, block_size, tokens; then boundaries of one sequence, or of each of two
DOCUMENTS = [
    ((2, 1, 1, 16, 70), [0, 5, 37, 37, 61]),
    ((2, 2, 1, 32, 100), [[0, 0, 17, 70], [0, 33, 64, 64]]),
    ((1, 3, 4, 128, 150), [0, 150]),
    ((1, 4, 16, 64, 150), [[0, 10, 140, 150], [0, 70, 70, 100]]),
    ((1, 1, 128, 128, 300), [0, 128, 130, 290]),
    ((1, 2, 64, 64, 200), [0]),
]


def in_documents(mask: Tensor, boundaries: list[Any]) -> Tensor:
    """The pairs of a mask (batch, heads, length, length) within a document."""
    kept = torch.zeros_like(mask)
    rows = boundaries if isinstance(boundaries[0], list) else [boundaries] * len(mask)
    for one, whole, row in zip(kept, mask, rows, strict=True):
        for first, stop in itertools.pairwise(row):
            one[:, first:stop, first:stop] = whole[:, first:stop, first:stop]
    return kept


def packed_leaves(sizes: tuple[int, ...], dtype: torch.dtype) -> tuple[list[Tensor], Tensor, dict[str, int]]:
    kv_heads, group, q_block, block, length = sizes
    return leaves((kv_heads, group, q_block, block, length, length, 3), dtype)


def truth_in_documents(
    tensors: list[Tensor], indices: Tensor, sizes: dict[str, int], causal: bool, boundaries: list[Any]
) -> tuple[Tensor, Tensor]:
    q, k, v = tensors
    mask = dense_mask(indices, q.shape[1], q.shape[2], k.shape[2], *sizes.values(), causal)
    return expected(q, k, v, in_documents(mask, boundaries), q.shape[3] ** -0.5)


@pytest.mark.parametrize("backend", ["eager", "reference"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("case", "boundaries"), DOCUMENTS, ids=str)
def test_in_packed_documents_it_is_the_definition_in_float64(
    case: tuple[int, ...], boundaries: list[Any], causal: bool, backend: str
) -> None:
    """Blocks of keys and of queries that straddle documents are cut, token by token."""
    tensors, indices, sizes = packed_leaves(case, torch.float64)
    options: dict[str, Any] = {**sizes, "causal": causal, "cu_seqlens": torch.tensor(boundaries), "backend": backend}
    found = selected_attention_with_lse(*tensors, indices, **options)
    truth = truth_in_documents(tensors, indices, sizes, causal, boundaries)
    for one, other in zip(found, truth, strict=True):
        torch.testing.assert_close(one, other)
    truth_grads = [grad.nan_to_num() for grad in gradients(*truth, tensors)]
    for name, one, other in zip("qkv", gradients(*found, tensors), truth_grads, strict=True):
        torch.testing.assert_close(one, other, msg=lambda text, name=name: f"d{name}: {text}")


@pytest.mark.sweep(by=lambda case, causal: {causal, ("group", case[0][1]), ("keys", case[0][3])})
@pytest.mark.usefixtures("by_kernels")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("case", DOCUMENTS, ids=str)
def test_in_packed_documents_the_kernels_are_as_accurate_as_pytorch(
    case: tuple[tuple[int, ...], list[Any]], causal: bool, device: torch.device
) -> None:
    pytest.importorskip("triton", reason="needs Triton")
    boundaries = case[1]
    tensors, indices, sizes = packed_leaves(case[0], torch.float32)
    low = [tensor.detach().to(device).requires_grad_() for tensor in tensors]
    options: dict[str, Any] = {**sizes, "causal": causal, "cu_seqlens": torch.tensor(boundaries, device=device)}
    found = selected_attention_with_lse(*low, indices.to(device), **options, backend="triton")
    assert_kernels_are_as_accurate(
        found, low, tensors, lambda each: truth_in_documents(each, indices, sizes, causal, boundaries)
    )


@pytest.mark.parametrize("query_block_size", [1, 16])
@pytest.mark.parametrize("backend", ["eager", "reference"])
def test_packed_documents_equal_each_document_alone(backend: str, query_block_size: int) -> None:
    """Documents that begin at blocks; indices count the blocks of the packed sequence."""
    boundaries, block = [0, 48, 64, 150], 16
    q, k, v = (drawn(1, heads, 150, 8, seed=seed).requires_grad_() for seed, heads in enumerate((4, 2, 2)))
    dout, found, alone = drawn(1, 4, 150, 8, seed=3), [], []
    for first, stop in itertools.pairwise(boundaries):
        n_rows, n_cols = -(-(stop - first) // query_block_size), -(-(stop - first) // block)
        indices = drawn_indices(1, 2, n_rows, 3, n_cols)
        found.append(torch.where(indices < 0, -1, indices + first // block))
        parts = (tensor[:, :, first:stop] for tensor in (q, k, v))
        sizes: dict[str, Any] = {"block_size": block, "query_block_size": query_block_size, "backend": backend}
        alone.append(selected_attention(*parts, indices, **sizes))
    # the first document also selects blocks of others
    found[0][:, :, :, 0] = 5
    alone[0] = selected_attention(
        *(tensor[:, :, :48] for tensor in (q, k, v)), torch.where(found[0] == 5, -1, found[0]), **sizes
    )
    out = selected_attention(q, k, v, torch.cat(found, 2), cu_seqlens=torch.tensor(boundaries), **sizes)
    whole = torch.cat(alone, 2)
    torch.testing.assert_close(out, whole)
    grads, alone_grads = (torch.autograd.grad(each, (q, k, v), dout) for each in (out, whole))
    for one, other in zip(grads, alone_grads, strict=True):
        torch.testing.assert_close(one, other)


def test_blocks_of_queries_in_packed_documents_agree_with_a_layout() -> None:
    q, k = drawn(1, 2, 200, 8), drawn(1, 2, 200, 8, seed=1)
    indices, boundaries = drawn_indices(1, 2, 4, 3, 4), torch.tensor([0, 70, 150])
    layout = BlockLayout.from_topk(indices, 200, 200, block_size=64)
    layout = layout & masks.documents(boundaries, length=200, block_size=64)
    out = selected_attention(q, k, k, indices, block_size=64, query_block_size=64, cu_seqlens=boundaries)
    torch.testing.assert_close(out, attention(q, k, k, layout, causal=True))


def test_one_selection_serves_sequences_with_their_own_documents() -> None:
    q, k = drawn(2, 4, 60, 8), drawn(2, 2, 60, 8, seed=1)
    indices, boundaries = drawn_indices(1, 2, 60, 2, 4), [[0, 30, 60], [0, 7, 50]]
    mask = in_documents(dense_mask(indices.expand(2, -1, -1, -1), 4, 60, 60, 16, 1, True), boundaries)
    for backend in ("eager", "reference"):
        options: dict[str, Any] = {"block_size": 16, "cu_seqlens": torch.tensor(boundaries), "backend": backend}
        out = selected_attention(q, k, k, indices, **options)
        torch.testing.assert_close(out, expected(q, k, k, mask, 8**-0.5)[0])


@pytest.mark.parametrize("heads", [1, 2, 4], ids=["all", "group", "head"])
@pytest.mark.parametrize("batch", [1, 2])
def test_a_selection_is_for_all_heads_or_a_group_or_a_head(heads: int, batch: int) -> None:
    q, k = drawn(2, 4, 60, 8), drawn(2, 2, 60, 8, seed=1)
    indices = drawn_indices(batch, heads, 60, 2, 4)
    mask = dense_mask(indices.expand(2, -1, -1, -1), 4, 60, 60, 16, 1, True)
    for backend in ("eager", "reference"):
        out = selected_attention(q, k, k, indices, block_size=16, backend=backend)
        torch.testing.assert_close(out, expected(q, k, k, mask, 8**-0.5)[0])


@pytest.mark.parametrize("backend", ["eager", "reference"])
def test_autocast_chooses_the_dtype(backend: str) -> None:
    """Regression: the reference, and calls without queries, ignored it."""
    q, k, indices = drawn(1, 4, 60, 8).float(), drawn(1, 2, 60, 8, seed=1).float(), drawn_indices(1, 2, 60, 2, 4)
    wanted = selected_attention(q.bfloat16(), k.bfloat16(), k.bfloat16(), indices, block_size=16, backend=backend)
    with torch.autocast("cpu", torch.bfloat16):
        out = selected_attention(q, k.bfloat16(), k, indices, block_size=16, backend=backend)
        empty = selected_attention(q[:, :, :0], k, k, indices[:, :, :0], block_size=16, backend=backend)
    assert torch.equal(out, wanted) and empty.dtype == torch.bfloat16


def test_of_nothing_there_is_nothing() -> None:
    for batch, heads, q_len, k in ((1, 2, 0, 2), (1, 2, 5, 0), (1, 0, 5, 2), (0, 2, 5, 2)):
        q, x = drawn(batch, heads, q_len, 8).requires_grad_(), drawn(batch, min(1, heads), 20, 8)
        indices = torch.zeros(batch, min(1, heads), q_len, k, dtype=torch.int64)
        out, lse = selected_attention_with_lse(q, x, x, indices, block_size=16)
        assert out.shape == (batch, heads, q_len, 8) and lse.shape == (batch, heads, q_len)
        if not k:
            assert not out.any() and (lse == -torch.inf).all()
        out.sum().backward()


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_blocks_may_be_longer_than_the_keys(backend: str) -> None:
    """Memory does not grow with them."""
    q, x, indices = drawn(1, 4, 40, 8), drawn(1, 1, 40, 8), torch.zeros(1, 1, 40, 1, dtype=torch.int64)
    found = [selected_attention(q, x, x, indices, block_size=size, backend=backend) for size in (128, 1 << 40)]
    torch.testing.assert_close(*found)


def test_blocks_of_queries_selected_by_score_agree_with_a_layout() -> None:
    """One head of keys for each query head, and blocks that from_topk takes too."""
    q, k = drawn(1, 2, 200, 8), drawn(1, 2, 200, 8, seed=1)
    indices = drawn_indices(1, 2, 4, 2, 4)
    layout = BlockLayout.from_topk(indices, 200, 200, block_size=64)
    out = selected_attention(q, k, k, indices, block_size=64, query_block_size=64)
    torch.testing.assert_close(out, attention(q, k, k, layout, causal=True), rtol=0, atol=0)


def test_a_compiled_function_has_a_graph_break() -> None:
    q, k = drawn(1, 4, 40, 8), drawn(1, 2, 40, 8, seed=1)
    indices = drawn_indices(1, 2, 40, 2, 3)

    def function(q: Tensor) -> Tensor:
        return selected_attention(q * 2, k, k, indices, block_size=16).sin()

    torch.testing.assert_close(torch.compile(function, backend="eager")(q), function(q))


# torch's own use of torch.jit
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_forward_mode_is_refused() -> None:
    q, indices = torch.randn(1, 2, 32, 8), torch.zeros(1, 1, 32, 1, dtype=torch.int64)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(RuntimeError, match="forward-mode differentiation"):
            selected_attention(dual, q[:, :1], q[:, :1], indices, block_size=16)


def test_the_reference_is_mapped_over_selections() -> None:
    """Regression: torch.vmap refused the check of the indices."""
    q, k = drawn(3, 1, 4, 40, 8), drawn(3, 1, 2, 40, 8, seed=1)
    indices = drawn_indices(3, 2, 40, 2, 3)[:, None]

    def function(q: Tensor, k: Tensor, indices: Tensor) -> Tensor:
        return selected_attention(q, k, k, indices, block_size=16, backend="reference")

    each = [function(*arguments) for arguments in zip(q, k, indices, strict=True)]
    torch.testing.assert_close(torch.vmap(function)(q, k, indices), torch.stack(each))


INDICES = torch.zeros(1, 2, 40, 2, dtype=torch.int64)
WRONG = {
    "type": (TypeError, "indices must be a torch.Tensor, got list", {"indices": [[0]]}),
    "dtype": (ValueError, "indices must be integers, got torch.float32", {"indices": INDICES.float()}),
    "rows": (
        ValueError,
        r"heads = 4, kv_heads = 2 or 1, 10, n_selected\) for 40 queries in blocks",
        {"query_block_size": 4},
    ),
    "heads": (ValueError, "indices must have shape", {"indices": INDICES.expand(1, 2, 40, 2).repeat(1, 4, 1, 1)}),
    "range": (ValueError, r"indices must be -1 \(none\) or in 0 .. n_cols - 1 = 2, got 3", {"indices": INDICES + 3}),
    "keys": (ValueError, "block_size must be 16, 32, 64 or a multiple of 128 keys, got 1;", {"block_size": 1}),
    "large": (ValueError, "block_size must be 16, 32, 64 or a multiple of 128 keys, got 192", {"block_size": 192}),
    "float": (TypeError, "block_size must be an int, got 16.0", {"block_size": 16.0}),
    "queries": (ValueError, "query_block_size must be a power of two from 1 to 128", {"query_block_size": 3}),
    "causal": (TypeError, "causal must be True or False", {"causal": 1}),
    "backend": (ValueError, "backend", {"backend": "cuda"}),
    "q": (ValueError, "q must have", {"q": torch.zeros(4, 40, 8)}),
    "device": (ValueError, "indices must be on q's device cpu, got meta", {"indices": INDICES.to("meta")}),
    "list": (TypeError, "cu_seqlens must be a torch.Tensor, got list", {"cu_seqlens": [0, 40]}),
    "floats": (
        TypeError,
        r"cu_seqlens must be int32 or int64, got torch\.float32; cu_seqlens\.to\(torch\.int32\) makes it",
        {"cu_seqlens": torch.zeros(2)},
    ),
    "batch": (
        ValueError,
        r"cu_seqlens must have shape \(documents \+ 1,\) or \(batch = 1, .* got \(2, 3\); boundaries that all",
        {"cu_seqlens": torch.zeros(2, 3, dtype=torch.int64)},
    ),
    "number": (ValueError, r"cu_seqlens must have shape .*got \(\)", {"cu_seqlens": torch.tensor(0)}),
    "start": (ValueError, r"cu_seqlens must start at 0.*got \[\[1, 40\]\]", {"cu_seqlens": torch.tensor([1, 40])}),
    "drop": (ValueError, "cu_seqlens must start at 0, never decrease", {"cu_seqlens": torch.tensor([0, 9, 8])}),
    "end": (ValueError, "cu_seqlens .* end within 40 tokens", {"cu_seqlens": torch.tensor([0, 41])}),
    "empty": (
        ValueError,
        'backend must be one of .*, got "cuda"',
        {"backend": "cuda", "indices": INDICES[:, :, :0], "q": torch.zeros(1, 4, 0, 8)},
    ),
    "nested": (
        ValueError,
        "indices must be a dense, strided tensor, got a nested tensor",
        {"indices": torch.nested.nested_tensor([torch.zeros(40, 2)], layout=torch.jagged)},
    ),
    "sparse": (
        ValueError,
        r"cu_seqlens must be a dense, strided tensor, got a torch\.sparse_coo tensor",
        {"cu_seqlens": torch.tensor([0, 40]).to_sparse()},
    ),
    "elsewhere": (
        ValueError,
        "cu_seqlens must be on q's device cpu, got meta",
        {"cu_seqlens": torch.zeros(2, dtype=torch.int64, device="meta")},
    ),
    "fewer queries": (
        ValueError,
        "q must have as many tokens as k, got 40 and 30",
        {"cu_seqlens": torch.tensor([0, 30]), **dict.fromkeys("kv", torch.zeros(1, 2, 30, 8))},
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_calls_are_refused(case: str) -> None:
    error, message, changes = WRONG[case]
    arguments: dict[str, Any] = {"q": torch.zeros(1, 4, 40, 8), "k": torch.zeros(1, 2, 40, 8), "indices": INDICES}
    arguments |= {"v": arguments["k"], "block_size": 16} | changes
    with pytest.raises(error, match=message):
        selected_attention(**arguments)


def test_an_unknown_backend_is_refused_before_the_layout_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "_layout", lambda *_: pytest.fail("made a layout"))
    q, k = torch.zeros(1, 4, 40, 8), torch.zeros(1, 2, 40, 8)
    with pytest.raises(ValueError, match=r'backend must be one of .*, got "cuda"'):
        selected_attention(q, k, k, INDICES, block_size=16, backend="cuda")
