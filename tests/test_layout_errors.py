"""Errors and warnings of BlockLayout, and of layouts made in compiled code."""

from __future__ import annotations

import functools
import logging
import pickle
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch

import masks
from blocksparse_flash import BlockLayout, attention
from blocksparse_flash.blocks import predicates

_GOOD = BlockLayout.from_predicate(lambda q_pos, kv_pos: kv_pos <= q_pos, 40, 40, block_size=16)
_SIZES = {"q_len": 40, "kv_len": 40, "block_size": 16}
_ONES = torch.ones(40, 40, dtype=torch.bool)


def _direct(**changes: Any) -> BlockLayout:
    return BlockLayout(**(_GOOD.state_dict() | changes))


def _int32(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _predicate(fn: Any = lambda q_pos, kv_pos: kv_pos <= q_pos, **changes: Any) -> BlockLayout:
    return BlockLayout.from_predicate(fn, **(_SIZES | changes))


def _by_index(rows: Any, cols: Any, **changes: Any) -> BlockLayout:
    return BlockLayout.from_blocks(rows, cols, **(_SIZES | changes))


def _sparse(matrix: Any) -> BlockLayout:
    return BlockLayout.from_scipy(matrix, **_SIZES)


def _eye(value: float = 1.0, size: int = 3) -> Any:
    return scipy.sparse.csr_array(value * np.eye(size))


def _twice() -> Any:
    return scipy.sparse.coo_array((np.ones(2), (np.zeros(2, int), np.zeros(2, int))), shape=(3, 3))


def _state(**changes: Any) -> BlockLayout:
    state = _GOOD.state_dict() | changes
    return BlockLayout.from_state_dict({name: value for name, value in state.items() if value is not None})


# name: (call, exception, pattern of its message)
_BAD: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "rows-bool-in-a-list": (
        lambda: _by_index([True, 0], [0, 0]),
        ValueError,
        "rows must be integers, got a bool in a list",
    ),
    "rows-masked": (
        lambda: _by_index(np.ma.array([1, 2], mask=[0, 1]), [0, 0]),
        ValueError,
        "rows must be a plain array, got a",
    ),
    "device-name": (lambda: _GOOD.to("foo"), ValueError, "device must be one of PyTorch's, got 'foo'"),
    "device-index": (lambda: _GOOD.to(-1), ValueError, "device must be one of PyTorch's, got -1"),
    "device-none": (lambda: _GOOD.to(None), TypeError, "device must be a torch.device, a str or an int"),
    "plan-device": (lambda: _GOOD.plan([]), TypeError, r"device must be a torch.device, .* got \[\]"),
    "plan-device-name": (lambda: _GOOD.plan("cudaa"), ValueError, "device must be one of PyTorch's, got 'cudaa'"),
    "plan-tile-list": (lambda: _GOOD.plan("cpu", tile=[64]), ValueError, r"tile must be 128, 64 or 16 .* got \[64\]"),
    "plan-tile-float": (lambda: _GOOD.plan("cpu", tile=64.0), ValueError, "tile must be 128, 64 or 16 .* got 64.0"),
    "bias_index-device": (lambda: _GOOD.bias_index("foo"), ValueError, "device must be one of PyTorch's, got 'foo'"),
    "indptr-list": (lambda: _direct(indptr=[0, 1, 3, 6]), TypeError, "indptr"),
    "indptr-int64": (lambda: _direct(indptr=_GOOD.indptr.long()), ValueError, "indptr must be int32, got torch.int64"),
    "indptr-1-axis": (lambda: _direct(indptr=_GOOD.indptr[0, 0]), ValueError, "indptr must have shape"),
    "indptr-short": (lambda: _direct(indptr=_GOOD.indptr[..., :-1]), ValueError, "indptr must have shape"),
    "indptr-no-heads": (lambda: _direct(indptr=_GOOD.indptr[:, :0]), ValueError, "indptr must have shape"),
    "indptr-from-1": (lambda: _direct(indptr=_int32([[[1, 1, 3, 6]]])), ValueError, "indptr must start at 0"),
    "indptr-gap-between-heads": (
        lambda: _direct(indptr=_int32([[[0, 1, 1, 2], [3, 3, 3, 6]]])),
        ValueError,
        "indptr must start at 0, and each head",
    ),
    "indptr-falls": (
        lambda: _direct(indptr=_int32([[[0, 4, 3, 6]]])),
        ValueError,
        "indptr must not decrease, but row 1",
    ),
    "indptr-negative": (lambda: _direct(indptr=_int32([[[0, -4, 3, 6]]])), ValueError, "indptr must not decrease"),
    "indptr-ends-early": (lambda: _direct(indptr=_int32([[[0, 1, 3, 5]]])), ValueError, "indptr must end .* 6, got 5"),
    "indptr-ends-late": (lambda: _direct(indptr=_int32([[[0, 1, 3, 7]]])), ValueError, "indptr must end .* 6, got 7"),
    "indices-float": (lambda: _direct(indices=_GOOD.indices.float()), ValueError, "indices must be int32"),
    "indices-2-axes": (lambda: _direct(indices=_GOOD.indices[None]), ValueError, "indices must have one axis"),
    "indices-negative": (lambda: _direct(indices=_int32([-1, 0, 1, 0, 1, 2])), ValueError, "indices .* got -1 at 0"),
    "indices-large": (lambda: _direct(indices=_int32([0, 0, 1, 0, 1, 3])), ValueError, "indices .* got 3 at 5"),
    "indices-unsorted": (
        lambda: _direct(indices=_int32([0, 1, 0, 0, 1, 2])),
        ValueError,
        "indices must ascend .* row 1",
    ),
    "indices-twice": (lambda: _direct(indices=_int32([0, 0, 1, 0, 2, 2])), ValueError, "indices must ascend .* row 2"),
    "ids-bool": (lambda: _direct(bitmask_ids=_GOOD.bitmask_ids.bool()), ValueError, "bitmask_ids must be int32"),
    "ids-short": (lambda: _direct(bitmask_ids=_GOOD.bitmask_ids[1:]), ValueError, "bitmask_ids must have the shape"),
    "ids-low": (lambda: _direct(bitmask_ids=_int32([-2, -1, 0, -1, -1, 1])), ValueError, "bitmask_ids .* got -2 at 0"),
    "ids-high": (lambda: _direct(bitmask_ids=_int32([0, -1, 0, -1, -1, 2])), ValueError, "bitmask_ids .* got 2 at 5"),
    "bitmasks-int64": (lambda: _direct(bitmasks=_GOOD.bitmasks.long()), ValueError, "bitmasks must be int32"),
    "bitmasks-2-axes": (lambda: _direct(bitmasks=_GOOD.bitmasks[0]), ValueError, "bitmasks must have shape"),
    "bitmasks-wide": (lambda: _direct(bitmasks=_GOOD.bitmasks.repeat(1, 1, 2)), ValueError, "bitmasks must have shape"),
    "bitmasks-elsewhere": (
        lambda: _direct(bitmasks=_GOOD.bitmasks.to("meta")),
        ValueError,
        "bitmasks must be on indptr's",
    ),
    "dense-list": (lambda: BlockLayout.from_dense([[True]], block_size=16), TypeError, "mask must be a torch.Tensor"),
    "dense-float": (lambda: BlockLayout.from_dense(_ONES.float(), block_size=16), ValueError, "mask must be bool"),
    "dense-int8": (
        lambda: BlockLayout.from_dense(_ONES.numpy().astype(np.int8), block_size=16),
        ValueError,
        "mask must be bool",
    ),
    "dense-1-axis": (lambda: BlockLayout.from_dense(_ONES[0], block_size=16), ValueError, "mask must have 2, 3"),
    "dense-5-axes": (
        lambda: BlockLayout.from_dense(_ONES[None, None, None], block_size=16),
        ValueError,
        "mask must have",
    ),
    "dense-no-heads": (lambda: BlockLayout.from_dense(_ONES.expand(0, 40, 40), block_size=16), ValueError, "one head"),
    "predicate-none": (lambda: _predicate(None), TypeError, "fn must be a function"),
    "predicate-python-bool": (
        lambda: _predicate(lambda q_pos, kv_pos: True),
        TypeError,
        "fn must return a bool tensor",
    ),
    **{
        f"predicate-{name}": (functools.partial(_predicate, fn), ValueError, message)
        for name, fn, message in (
            ("and", lambda q_pos, kv_pos: q_pos >= kv_pos and kv_pos < 3, r"fn .* and, or, not, if.*use \(a\) & \(b\)"),
            ("if", lambda q_pos, kv_pos: q_pos < 3 if kv_pos < 3 else q_pos > 3, "fn .* torch.where"),
            ("chain", lambda q_pos, kv_pos: 0 <= q_pos - kv_pos < 5, r"fn .* \(0 <= d\) & \(d < 5\)"),
            ("max", lambda q_pos, kv_pos: max(q_pos, kv_pos) < 5, "fn .* torch.maximum"),
            ("int", lambda q_pos, kv_pos: int(q_pos) > 5, r"fn .* int\(\), float\(\)"),
            ("list", lambda q_pos, kv_pos: [True][q_pos], r"fn .* torch.as_tensor\(table\)"),
        )
    },
    "predicate-array": (
        lambda: _predicate(lambda q_pos, kv_pos: np.ones((40, 40), np.bool_)[q_pos, kv_pos]),
        TypeError,
        r"fn must return a bool tensor, got ndarray: .*torch.as_tensor\(table\)",
    ),
    "predicate-mask-mod": (
        lambda: _predicate(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx),
        TypeError,
        r"fn must take \(q_pos, kv_pos\), but <lambda> takes 4 arguments, as FlexAttention's mask_mod.*give heads=1",
    ),
    "predicate-2-of-4": (
        lambda: _predicate(heads=2),
        TypeError,
        r"fn must take \(batch, head, q_pos, kv_pos\), since heads= or batch= was given, but <lambda> takes 2",
    ),
    "predicate-1-argument": (
        lambda: _predicate(lambda q_pos: q_pos >= 0),
        TypeError,
        r"fn must take \(q_pos, kv_pos\): <lambda>",
    ),
    "predicate-int-tensor": (
        lambda: _predicate(lambda q_pos, kv_pos: q_pos * kv_pos),
        ValueError,
        "fn must return a bool tensor",
    ),
    "predicate-shape": (
        lambda: _predicate(lambda q_pos, kv_pos: _ONES),
        ValueError,
        "fn must return a tensor that broad",
    ),
    "heads-0": (lambda: _predicate(heads=0), ValueError, r"heads must be in 1 \.\. 2\*\*31 - 1"),
    "heads-float": (lambda: _predicate(heads=2.0), TypeError, "heads must be an int"),
    "heads-bool": (lambda: _predicate(heads=True), TypeError, "heads must be an int"),
    "batch-negative": (lambda: _predicate(batch=-1), ValueError, r"batch must be in 1 \.\. 2\*\*31 - 1"),
    "within-tensor": (lambda: _predicate(within=_ONES), TypeError, "within must be a BlockLayout"),
    "within-length": (
        lambda: _predicate(within=_GOOD, q_len=41),
        ValueError,
        "within: lengths must be equal, got 41 x 40 and 40 x 40",
    ),
    "within-blocks": (
        lambda: _predicate(within=_GOOD, block_size=32),
        ValueError,
        r"within: block_size must be equal, got \(32, 32\) and \(16, 16\)",
    ),
    "within-heads": (
        lambda: _predicate(heads=3, within=BlockLayout.from_dense(_ONES.expand(2, 40, 40), block_size=16)),
        ValueError,
        "within: batch and heads",
    ),
    "dedup-key-number": (lambda: _predicate(dedup_key=3), TypeError, "dedup_key must be a function"),
    "dedup-key-float": (
        lambda: _predicate(dedup_key=lambda row, col: row / 2),
        TypeError,
        "dedup_key must return integers",
    ),
    "dedup-key-shape": (
        lambda: _predicate(dedup_key=lambda row, col: row[1:]),
        ValueError,
        "dedup_key must return one number",
    ),
    "rows-float": (lambda: _by_index([0.0], [0]), ValueError, "rows must be integers, got float64"),
    "rows-bool": (lambda: _by_index(torch.tensor([True]), [0]), ValueError, "rows must be integers, got bool"),
    "rows-2-axes": (lambda: _by_index([[0]], [0]), ValueError, "rows must have one axis"),
    "rows-negative": (lambda: _by_index([0, -1], [0, 0]), ValueError, "rows must be .* got -1 at 1"),
    "rows-large": (lambda: _by_index([3], [0]), ValueError, "rows must be in 0 .. n_rows - 1 = 2, got 3"),
    "cols-string": (lambda: _by_index([0], ["0"]), ValueError, "cols must be integers"),
    "cols-large": (lambda: _by_index([0], [3]), ValueError, "cols must be in 0 .. n_cols - 1 = 2, got 3"),
    "cols-short": (lambda: _by_index([0, 1], [0]), ValueError, "rows and cols .* got 2 and 1"),
    "block-twice": (
        lambda: _by_index([2, 0, 2], [1, 0, 1]),
        ValueError,
        r"rows and cols .* block \(row 2, col 1\) is repeated",
    ),
    "no-such-block": (lambda: _by_index([0], [0], q_len=0), ValueError, "rows must be"),
    "first-length": (
        lambda: BlockLayout.from_ranges([0, 0], [1, 1, 1], **_SIZES),
        ValueError,
        "first must have one entry .* 3 rows",
    ),
    "first-negative": (
        lambda: BlockLayout.from_ranges([0, -1, 0], [1, 1, 1], **_SIZES),
        ValueError,
        "first must be .* got -1 at 1",
    ),
    "stop-large": (
        lambda: BlockLayout.from_ranges([0, 0, 0], [1, 4, 1], **_SIZES),
        ValueError,
        "stop must be .* got 4 at 1",
    ),
    "stop-float": (
        lambda: BlockLayout.from_ranges([0, 0, 0], [1.0, 2.0, 1.0], **_SIZES),
        ValueError,
        "stop must be integers",
    ),
    "block-mask-shape": (
        lambda: BlockLayout.from_block_mask(_ONES[:3, :4], **_SIZES),
        ValueError,
        r"mask must end in .* = \(3, 3\), got",
    ),
    "block-mask-of-tokens": (
        lambda: BlockLayout.from_block_mask(_ONES, **_SIZES),
        ValueError,
        r"mask must end in .*; BlockLayout.from_dense\(mask\) takes a mask of tokens",
    ),
    "block-mask-float": (
        lambda: BlockLayout.from_block_mask(torch.ones(3, 3), **_SIZES),
        ValueError,
        "mask must be bool",
    ),
    "scipy-array": (lambda: _sparse(np.eye(3)), TypeError, "matrix must be a scipy.sparse"),
    "scipy-shape": (lambda: _sparse(_eye(size=4)), ValueError, r"matrix must have shape .* \(3, 3\), got \(4, 4\)"),
    "scipy-of-tokens": (
        lambda: _sparse(_eye(size=40)),
        ValueError,
        r"matrix must have shape .*; blocksparse_flash.interop.from_scipy_csr\(matrix\) takes a matrix of tokens",
    ),
    "scipy-2": (lambda: _sparse(_eye(2.0)), ValueError, "matrix has a value 2"),
    "scipy-1-twice": (lambda: _sparse(_twice()), ValueError, "matrix has a value 2"),
    "scipy-of-partial": (lambda: _sparse(_GOOD.to_scipy()), ValueError, "matrix has a value 2"),
    "state-list": (lambda: BlockLayout.from_state_dict([]), TypeError, "state must be"),
    "state-missing": (lambda: _state(indices=None), ValueError, r"state .* missing \['indices'\]"),
    "state-unexpected": (lambda: _state(blocks=1), ValueError, r"state .* unexpected \['blocks'\]"),
    "state-corrupt": (lambda: _state(indices=_GOOD.indices + 1), ValueError, "indices must be in"),
    "state-number-tensor": (lambda: _state(q_len=torch.tensor(40.0)), TypeError, "q_len must be an int, got 40.0"),
    "state-size-tensor": (
        lambda: _state(block_size=torch.tensor([16, 16, 16])),
        ValueError,
        "block_size must be an int or",
    ),
    "state-length": (lambda: _state(q_len=400), ValueError, "indptr must have shape"),
    "head-large": (lambda: _GOOD.to_scipy(head=1), ValueError, "head must be in 0 .. 0"),
    "batch-float": (lambda: _GOOD.to_scipy(batch=0.0), TypeError, "batch must be an int"),
    "plan-causal": (
        lambda: _GOOD.plan("cpu", causal="no"),
        TypeError,
        r"causal must be True or False, got 'no' \(str\)",
    ),
    "plan-wait": (lambda: _GOOD.plan("cpu", non_blocking=1), TypeError, "non_blocking must be True or False, got 1"),
    "plan-tile": (lambda: _GOOD.plan("cpu", tile=32), ValueError, "tile must be 128, 64 or 16 tokens, got 32"),
    "plan-tile-long": (
        lambda: BlockLayout.from_blocks([0], [0], 2**30 + 1, 40, block_size=256).plan("cpu", tile=64),
        ValueError,
        r"tile must be 128 for more than 2\*\*30 tokens, got 64 for 1073741825 x 40",
    ),
    "to-causal": (lambda: _GOOD.to("cpu", causal=1), TypeError, "causal must be True or False, got 1"),
    "to-wait": (lambda: _GOOD.to("cpu", non_blocking="no"), TypeError, "non_blocking must be True or False, got 'no'"),
    "bias_index-causal": (
        lambda: _GOOD.bias_index("cpu", causal=None),
        TypeError,
        "causal must be True or False, got None",
    ),
    "q_len-negative": (lambda: _by_index([], [], q_len=-1), ValueError, "q_len must be in"),
    "q_len-float": (lambda: _by_index([], [], q_len=64.0), TypeError, "q_len must be an int, got 64.0"),
    "q_len-bool": (lambda: _by_index([], [], q_len=True), TypeError, "q_len must be an int"),
    "q_len-huge": (lambda: _by_index([], [], q_len=2**31), ValueError, "q_len must be in"),
    "kv_len-negative": (lambda: _by_index([], [], kv_len=-5), ValueError, "kv_len must be in .* got -5"),
    "kv_len-none": (lambda: _by_index([], [], kv_len=None), TypeError, "kv_len must be an int"),
}
_BAD_BLOCK_SIZES: list[tuple[Any, type[Exception]]] = [
    (20, ValueError),
    (0, ValueError),
    (8, ValueError),
    (-16, ValueError),
    (272, ValueError),
    ((16, 24), ValueError),
    ((512, 64), ValueError),
    ((16,), ValueError),
    ((16, 16, 16), ValueError),
    ((), ValueError),
    (True, TypeError),
    (1.5, TypeError),
    (64.0, TypeError),
    ((64, 64.0), TypeError),
    ((True, 64), TypeError),
    ("64", TypeError),
    (None, TypeError),
]


@pytest.mark.parametrize("name", _BAD)
def test_errors_name_the_wrong_argument(name: str) -> None:
    call, error, message = _BAD[name]
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(("block_size", "error"), _BAD_BLOCK_SIZES, ids=str)
def test_every_constructor_refuses_bad_block_sizes(block_size: Any, error: type[Exception]) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: _direct(block_size=block_size),
        lambda: BlockLayout.from_dense(_ONES, block_size=block_size),
        lambda: _predicate(block_size=block_size),
        lambda: _by_index([0], [0], block_size=block_size),
        lambda: BlockLayout.from_ranges([], [], 40, 40, block_size=block_size),
        lambda: BlockLayout.from_block_mask(_ONES, 40, 40, block_size=block_size),
        lambda: BlockLayout.from_scipy(_eye(), 40, 40, block_size=block_size),
        lambda: _state(block_size=block_size) if block_size is not None else _direct(block_size=None),
    ]
    for call in calls:
        with pytest.raises(error, match="block_size must be"):
            call()


def test_errors_of_a_predicate_are_passed_on() -> None:
    def broken(q_pos: torch.Tensor, kv_pos: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("a fault of its own")

    with pytest.raises(RuntimeError, match=r"^a fault of its own$"):
        _predicate(broken)
    with pytest.raises(TypeError, match="unsupported operand"):
        _predicate(lambda q_pos, kv_pos: q_pos + None)


@pytest.mark.parametrize("has_tqdm", [True, False])
def test_a_long_evaluation_warns_and_shows_progress(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, caplog: Any, has_tqdm: bool
) -> None:
    if has_tqdm:
        pytest.importorskip("tqdm")
    else:
        monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr(predicates, "MANY_PAIRS", 1000)
    monkeypatch.setattr(predicates, "_PAIRS_AT_ONCE", 256)
    caplog.set_level(logging.INFO, "blocksparse_flash")
    expected = (
        "from_predicate evaluates fn for 1,600 pairs; a builder of blocksparse_flash.masks, within= or dedup_key="
    )
    with pytest.warns(UserWarning, match=expected) as warned:
        layout = _predicate()
    assert len(warned) == 1 and warned[0].filename == __file__
    assert layout == BlockLayout.from_dense(_ONES.tril(), block_size=16)
    assert ("from_predicate" in capsys.readouterr().err) == has_tqdm
    assert ("from_predicate: 77 % of the pairs evaluated" in caplog.messages) == (not has_tqdm)


def test_within_dedup_key_and_few_pairs_avoid_the_warning(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    _predicate()
    monkeypatch.setattr(predicates, "MANY_PAIRS", 1000)
    _predicate(within=_GOOD)
    _predicate(dedup_key=lambda row, col: row - col)
    _predicate(q_len=20)
    assert capsys.readouterr().err == ""


_IN_COMPILED_CODE: dict[str, Callable[[], BlockLayout]] = {
    "masks.local": lambda: masks.local(40, window=3, block_size=16),
    "masks.build": lambda: masks.build("butterfly | local(3)", 40, block_size=16),
    "from_predicate": _predicate,
    "from_dense": lambda: BlockLayout.from_dense(_ONES, block_size=16),
    "from_ranges": lambda: BlockLayout.from_ranges([0, 0, 0], [1, 2, 3], **_SIZES),
    "|": lambda: _GOOD | masks.local(40, window=3, block_size=16),
    "T": lambda: _GOOD.T,
    "stack_heads": lambda: BlockLayout.stack_heads([_GOOD, _GOOD]),
}


@pytest.mark.sweep(by=lambda name: {list(_IN_COMPILED_CODE).index(name) % 3})
@pytest.mark.parametrize("name", _IN_COMPILED_CODE)
def test_layouts_made_in_compiled_code_are_not_traced(name: str) -> None:
    """torch.compile breaks the graph there; with fullgraph=True its error says where to build the layout."""
    q = torch.randn(1, 2, 40, 16)

    def call(q: torch.Tensor) -> torch.Tensor:
        return attention(2 * q, q, q, _IN_COMPILED_CODE[name]()) + 1

    torch.testing.assert_close(torch.compile(call, backend="eager")(q), call(q))
    torch.compiler.reset()
    with pytest.raises(Exception, match="build this one outside the compiled function, once, and pass it in"):
        torch.compile(call, backend="eager", fullgraph=True)(q)


def test_no_mask_builder_is_traced() -> None:
    for name in masks.__all__:
        assert getattr(masks, name)._torchdynamo_disable, name
        assert pickle.loads(pickle.dumps(getattr(masks, name))) is getattr(masks, name)


def test_more_blocks_than_int32_counts_are_refused_before_they_are_made() -> None:
    """65536 x 65536 blocks are 2**32. Sizes are checked first, so this takes no time and no memory."""
    length = 1 << 20
    nothing = BlockLayout.from_blocks([], [], length, length, block_size=16)
    row = [0] * 65536
    diagonal = list(range(65536))
    wide = BlockLayout.from_blocks(diagonal, diagonal, length, length, block_size=16)
    per_head = BlockLayout.from_dense(torch.ones(2**16, 1, 1, dtype=torch.bool), block_size=16)
    per_batch = BlockLayout.from_dense(torch.ones(2**15, 1, 1, 1, dtype=torch.bool), block_size=16)
    for call in (
        lambda: ~nothing,
        lambda: ~wide,
        lambda: BlockLayout.from_ranges(row, [65536] * 65536, length, length, block_size=16),
        lambda: BlockLayout.from_predicate(lambda q_pos, kv_pos: q_pos == kv_pos, length, length, block_size=16),
        lambda: per_head | per_batch,
    ):
        with pytest.raises(ValueError, match=r"nnz must be below 2\*\*31"):
            call()
