"""Errors for unsupported kinds of tensors and for arguments that are not tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import scipy.sparse
import torch
from torch import Tensor

import masks
from blocksparse_flash import BlockLayout, interop
from tests.support.meaning import TENSORS

SQUARE = {"q_len": 256, "kv_len": 256, "block_size": 128}
ONES, COLS = torch.ones(256, 256, dtype=torch.bool), torch.zeros(1, 1, 2, 1, dtype=torch.int64)
BLOCKS, SCORES, ROWS = torch.ones(2, 2, dtype=torch.bool), torch.zeros(1, 1, 2, 2), torch.tensor([0, 1])
NESTED = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)

FIELDS = {name: getattr(masks.causal(256), name) for name in (*TENSORS, "q_len", "kv_len", "block_size")}

# constructor: (call, name of the argument, a good value)
CONSTRUCTORS: dict[str, tuple[Callable[[Any], Any], str, Tensor]] = {
    "from_dense": (lambda t: BlockLayout.from_dense(t, block_size=128), "mask", ONES),
    "from_block_mask": (lambda t: BlockLayout.from_block_mask(t, **SQUARE), "mask", BLOCKS),
    "from_topk": (lambda t: BlockLayout.from_topk(t, **SQUARE), "indices", COLS),
    "from_scores": (lambda t: BlockLayout.from_scores(t, k=1, **SQUARE), "scores", SCORES),
    "from_blocks-rows": (lambda t: BlockLayout.from_blocks(t, [0, 1], **SQUARE), "rows", ROWS),
    "from_blocks-cols": (lambda t: BlockLayout.from_blocks([0, 1], t, **SQUARE), "cols", ROWS),
    "from_ranges": (lambda t: BlockLayout.from_ranges([0, 0], t, **SQUARE), "stop", ROWS),
    "permute": (lambda t: masks.causal(2).permute(t), "q_order", ROWS),
    "direct": (lambda t: BlockLayout(**(FIELDS | {"indices": t})), "indices", masks.causal(256).indices),
    "state": (
        lambda t: BlockLayout.from_state_dict(masks.causal(256).state_dict() | {"q_len": t}), "q_len", torch.tensor(256)
    ),
}  # fmt: skip
BAD: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "sparse": (lambda t: t.to_sparse(), r"{} is a sparse tensor \(torch.sparse_coo\); pass {}.to_dense\(\)"),
    "meta": (lambda t: t.to("meta"), "{} (is on the meta device, which holds no data|must be on indptr's device)"),
    "nested": (lambda t: NESTED, "{} is a nested tensor; pass {}.to_padded_tensor"),
}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_tensors_without_dense_memory_are_refused(name: str, kind: str) -> None:
    build, argument, good = CONSTRUCTORS[name]
    change, message = BAD[kind]
    assert build(good).nnz > 0
    with pytest.raises(ValueError, match=message.format(argument, argument)):
        build(change(good))


@pytest.mark.parametrize("name", ["from_dense", "from_block_mask", "from_topk", "from_scores", "direct"])
def test_nested_lists_are_refused_with_a_fix(name: str) -> None:
    build, argument, good = CONSTRUCTORS[name]
    with pytest.raises(TypeError, match=rf"{argument} must be a torch.Tensor.* got list; torch.tensor\({argument}\)"):
        build(good.tolist())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([[0], [1]], r"must have one axis, got shape \(2, 1\); pass a list of integers"),
        ([[0], [0, 1]], r"must be a list of integers .* nested .*torch.tensor\(\[0, 1\]\)"),
        ([0, [1]], r"must be a list of integers"),
        ([torch.zeros(2), torch.zeros(3)], r"must be a list of integers"),
        ([torch.tensor(0, device="meta")], r"must be a list of integers"),
        ([None, 1], "must be integers, got object"),
        ([0.0, 1.0], "must be integers, got float64"),
    ],
    ids=str,
)
def test_lists_of_anything_but_integers_are_refused(values: Any, message: str) -> None:
    for name in ("from_blocks-rows", "from_blocks-cols", "from_ranges"):
        build, argument, _ = CONSTRUCTORS[name]
        with pytest.raises(ValueError, match=f"{argument} {message}"):
            build(values)


def test_lists_of_integers_are_accepted() -> None:
    expected = BlockLayout.from_blocks(ROWS, ROWS, **SQUARE)
    for values in ([0, 1], (0, 1), [torch.tensor(0), torch.tensor(1)], ROWS.numpy(), ROWS.to(torch.uint8)):
        assert BlockLayout.from_blocks(values, values, **SQUARE) == expected  # type: ignore[arg-type]
    assert BlockLayout.from_blocks([], [], **SQUARE).nnz == 0


@pytest.mark.parametrize("matrix", [BLOCKS.to_sparse(), BLOCKS, BLOCKS.tolist(), BLOCKS.to("meta")], ids=str)
def test_scipy_constructors_refuse_other_matrices(matrix: Any) -> None:
    for build, fix in (
        (
            lambda: BlockLayout.from_scipy(matrix, **SQUARE),
            r"scipy.sparse.csr_array\(matrix\).*matrix.to_dense\(\).numpy\(\)",
        ),
        (lambda: interop.from_scipy_csr(matrix, block_size=128), "from_torch_sparse.*from_dense"),
        (lambda: interop.from_scipy_bsr(matrix), "from_torch_sparse.*from_dense"),
    ):
        with pytest.raises(TypeError, match=f"matrix must be a scipy.sparse .*got .*{fix}"):
            build()
    assert BlockLayout.from_scipy(scipy.sparse.csr_array(BLOCKS.to_sparse().to_dense().numpy()), **SQUARE).nnz == 4
