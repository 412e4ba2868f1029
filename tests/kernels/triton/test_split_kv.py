"""Split-KV forward: any number of splits gives the same result.

Forward and backward, with the tolerance of test_zoo.py: NaN around the inputs, new memory full of NaN.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from blocksparse_flash import BlockLayout, attention_with_lse
from tests.support import cases, plain
from tests.support.cases import Case
from tests.support.closeness import assert_as_accurate
from tests.test_zoo import (
    BFLOAT16,
    Call,
    Layout,
    assert_backend_is_accurate,
    buried,
    expected,
    inputs,
    kv_lengths,
    name_of,
    run,
    score_mods,
    sizes_of,
)

split_kv = pytest.importorskip("blocksparse_flash.kernels.triton.split_kv", reason="needs Triton")

# 1 writes out without a combining launch; 37 is more than the steps of a row, so that some splits are empty
NUM_SPLITS = (1, 2, 37)


def sinks_and_window(q_len: int, kv_len: int, block_size: int = 64) -> BlockLayout:
    """Bitmasks in the first, diagonal and ragged last tile, and a query without keys, the third if there is one."""
    ahead = kv_len - q_len
    return BlockLayout.from_predicate(
        lambda q_pos, kv_pos: (
            ((kv_pos < 5) | (q_pos + ahead - kv_pos < 200)) & (kv_pos <= q_pos + ahead) & (q_pos != 2)
        ),
        q_len,
        kv_len,
        block_size=block_size,
    )


def random_pairs(q_len: int, kv_len: int, heads: int) -> BlockLayout:
    """Different keys for each head; the first head has none."""
    mask = torch.rand(heads, q_len, kv_len, generator=torch.Generator().manual_seed(kv_len)) < 0.2
    mask[0] = False
    mask[1, :, 128:256] = True
    return BlockLayout.from_dense(mask, block_size=(16, 32))


def by_batch(q_len: int, kv_len: int) -> BlockLayout:
    return BlockLayout.from_predicate(
        lambda batch, head, q_pos, kv_pos: (kv_pos % (7 * batch + 2) == 0) & (q_pos >= 0),
        q_len,
        kv_len,
        block_size=128,
        batch=2,
    )


def full_blocks(q_len: int, kv_len: int) -> BlockLayout:
    """No bitmasks, and fewer tiles than programs."""
    return BlockLayout.from_blocks([0, 0, 0], [0, 2, 3], q_len, kv_len, block_size=128)


def selected(q_len: int, kv_len: int) -> BlockLayout:
    """A selection with unused entries."""
    return BlockLayout.from_topk(torch.tensor([[[[3, -1, 0, -1, 3, -1]]]]), q_len, kv_len, block_size=128)


# kv_len 300, 500: the last tile is ragged; 512: it is not
LAYOUTS: list[Layout] = [
    Case("sinks-1", lambda: sinks_and_window(1, 500)),
    Case("sinks-7", lambda: sinks_and_window(7, 500)),
    Case("sinks-30", lambda: sinks_and_window(30, 512)),
    # several blocks per tile in both directions
    Case("fine-25", lambda: sinks_and_window(25, 500, 16)),
    Case("per-head-1", lambda: random_pairs(1, 300, 4)),
    Case("per-head-17", lambda: random_pairs(17, 300, 4)),
    Case("per-batch-3", lambda: by_batch(3, 300)),
    Case("full-1", lambda: full_blocks(1, 512)),
    Case("selected-2", lambda: selected(2, 500)),
    Case("empty-1", lambda: BlockLayout.from_blocks([], [], 1, 300, block_size=64)),
    (1, 300),
    (1, 16),
    (18, 300),
]
CALLS = [
    Call(kv_heads=1, dtype=BFLOAT16),
    Call(head_dim=1, v_dim=3),
    Call(head_dim=40, v_dim=96, kv_heads=1),
    Call(head_dim=128, dtype=torch.float16, has_kv_lengths=True),
    Call(head_dim=32, causal=True, kv_heads=1, scale=-0.3),
    Call(head_dim=256, kv_heads=1, dtype=BFLOAT16, causal=True, has_kv_lengths=True),
    Call(head_dim=16, scale=0.0, has_kv_lengths=True),
]
# a program has rows of several heads, each with its own sink, slope and biases
SCORES = [
    Call(head_dim=40, bias="heads", pairs="heads", has_slopes=True, kv_heads=1),
    Call(head_dim=16, bias="heads", has_sinks=True, scale=0.0, has_kv_lengths=True),
    Call(head_dim=64, has_sinks=True, softcap=1.5, scale=-0.3, dtype=torch.float16),
    Call(
        head_dim=16, bias="batch", pairs="batch", has_sinks=True, softcap=2.0, has_slopes=True, has_kv_lengths=True,
        causal=True, kv_heads=1
    ),
    Call(head_dim=32, has_sinks=True, kv_heads=1),
]  # fmt: skip


@pytest.fixture
def n_splits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(split_kv, "num_splits", lambda *_: request.param)
    split_kv.split_kv_launches.cache_clear()
    yield request.param
    split_kv.split_kv_launches.cache_clear()


def spread() -> list[Any]:
    """Every layout with every number of splits, in turn with all calls, and once with score mods."""
    chosen = [
        (layout, CALLS[(3 * index + turn) % len(CALLS)], n_splits)
        for index, layout in enumerate(LAYOUTS)
        for turn, n_splits in enumerate(NUM_SPLITS)
    ]
    for index, layout in enumerate(LAYOUTS):
        chosen.append((layout, SCORES[index % len(SCORES)], NUM_SPLITS[index % len(NUM_SPLITS)]))
    # all options together, all heads in one program, several splits
    chosen.append((LAYOUTS[3], SCORES[3], 2))
    return [pytest.param(*each, id=f"{name_of(each[0])}-{each[1]}-splits{each[2]}") for each in chosen]


@pytest.mark.sweep
@pytest.mark.parametrize(("layout", "call", "n_splits"), spread(), indirect=["n_splits"])
def test_split_rows_are_as_accurate_as_the_reference(layout: Layout, call: Call, n_splits: int, device) -> None:
    """With 2 splits also the backward, which is not split."""
    _, _, q_len, kv_len = sizes_of(layout, call)
    assert split_kv.is_suitable((1, 1, q_len, 1), kv_len, 0.0)
    if n_splits == 2:
        assert_backend_is_accurate("triton", layout, call, device)
    else:
        q, k, v, *_ = (buried(tensor.to(device)) for tensor in inputs(layout, call).values() if tensor.dim() == 4)
        found = attention_with_lse(
            *(q, k, v, layout.build() if isinstance(layout, Case) else None),
            causal=call.causal,
            scale=call.scale,
            kv_lengths=kv_lengths(layout, call, device) if call.has_kv_lengths else None,
            backend="triton",
            softcap=call.softcap,
            **score_mods(layout, call, call.dtype, device),
        )
        for name, result, references in zip(("out", "lse"), found, expected(layout, call, device), strict=False):
            assert_as_accurate(result, *references, name=name)
    assert split_kv.split_kv_launches.cache_info().misses == 1


# with 2 heads per program: around 16, 32, 64 and 128 rows, which are one or more blocks of a program
QUERIES = [1, 2, 3, 6, 7, 8, 9, 15, 16, 17, 31, 32, 33, 50, 63, 64]


@pytest.mark.sweep(by=lambda index, n_splits: {index % 5})
@pytest.mark.parametrize("index", range(len(QUERIES)), ids=[str(q_len) for q_len in QUERIES])
@pytest.mark.parametrize("n_splits", [3], indirect=True)
def test_any_number_of_queries_is_accurate(index: int, n_splits: int, device) -> None:
    """With about the fewest keys that are split; in turn dense, causal, one layout for all heads, one per head."""
    q_len, kind = QUERIES[index], index % 4
    kv_len = max(100, split_kv.KEYS_PER_QUERY * q_len + index % 3)
    layout = {2: sinks_and_window(q_len, kv_len), 3: random_pairs(q_len, kv_len, 4)}.get(kind)
    generator = torch.Generator().manual_seed(q_len)
    q, k, v = (
        torch.randn(1, heads, length, 16, generator=generator).to(device)
        for heads, length in ((4, q_len), (2, kv_len), (2, kv_len))
    )
    out, lse = attention_with_lse(q, k, v, layout, causal=kind == 1, backend="triton")
    assert split_kv.split_kv_launches.cache_info().misses == 1
    mask = None if layout is None else layout.to_dense().to(device)
    dout, dlse = torch.zeros_like(out), torch.zeros_like(lse)
    plains, truths = (of(q, k, v, dout, dlse, mask, causal=kind == 1) for of in (plain.results, plain.truths))
    for actual, name, same, truth in zip((out, lse), ("out", "lse"), plains, truths, strict=False):
        assert_as_accurate(actual, same, truth, name=name)


@pytest.mark.parametrize("n_splits", [1, 3], indirect=True)
def test_a_sink_counts_once_per_row(n_splits: int, device) -> None:
    """The first sink is -inf and has no effect; the third query has no keys."""
    layout = sinks_and_window(7, 300)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, length, 16, generator=generator).to(device) for length in (7, 300, 300))
    sinks = torch.tensor([-torch.inf, 0.5], device=device)
    out, lse = attention_with_lse(q, k, v, layout, sinks=sinks, backend="triton")
    plain_out, plain_lse = attention_with_lse(q, k, v, layout, backend="triton")
    # not bitwise: calls with and without sinks run different kernels
    close = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)
    close(out[:, 0], plain_out[:, 0])
    close(lse[:, 0], plain_lse[:, 0])
    assert not out[:, :, 2].any() and lse[0, :, 2].tolist() == pytest.approx([-math.inf, 0.5])
    # a sink lowers the weights by its share
    close(out[:, 1], plain_out[:, 1] * (plain_lse[:, 1] - lse[:, 1]).exp()[..., None])
    close(lse[:, 1], torch.logaddexp(plain_lse[:, 1], sinks[1]))


@pytest.mark.parametrize("n_splits", [5], indirect=True)
def test_two_runs_are_bitwise_equal(n_splits: int, device) -> None:
    layout, call = LAYOUTS[1], CALLS[0]
    tensors = {name: tensor.to(device) for name, tensor in inputs(layout, call).items()}
    first, again = (run("triton", layout, call, tensors, device) for _ in range(2))
    assert all(map(torch.equal, first, again))


# one load; one load, partly empty; several loads, the last one partly empty; several loads
@pytest.mark.parametrize(("n_splits", "at_once"), [(2, 2), (5, 8), (37, 16), (64, 16)])
def test_splits_are_merged_by_weight(n_splits: int, at_once: int, device) -> None:
    """Empty splits, an empty row, and lse so far apart that only the largest counts."""
    n_rows, v_dim = 5, 24
    generator = torch.Generator().manual_seed(n_splits)
    outs = torch.randn(n_splits, n_rows, v_dim, generator=generator)
    maxima = 3 * torch.randn(n_splits, n_rows, generator=generator)
    sums = 1 + 100 * torch.rand(n_splits, n_rows, generator=generator)
    maxima[-1, 3] = 10_000.0
    is_empty = torch.zeros(n_splits, n_rows, dtype=torch.bool)
    is_empty[:, 1] = True
    is_empty[::2, 2] = True
    outs[is_empty], maxima[is_empty], sums[is_empty] = 0.0, -3.0e38, 0.0
    out, lse = torch.empty(n_rows, v_dim, device=device), torch.empty(n_rows, device=device)
    sizes = {"n_heads": 1, "n_rows": n_rows, "n_splits": n_splits, "q_len": n_rows}
    sizes |= {"V_DIM": v_dim, "DIM_V": 32, "SPLITS": at_once}
    maxima_and_sums = torch.stack([maxima, sums], dim=-1).to(device)
    split_kv.combine_kernel[(n_rows,)](outs.to(device), maxima_and_sums, None, out, lse, **sizes)
    logs = sums.double().log() + maxima.double() * math.log(2)
    weights = logs.softmax(0).nan_to_num(0.0)
    expected_out = (weights[..., None] * outs.double() / sums.where(sums > 0, 1.0)[..., None]).sum(0)
    torch.testing.assert_close(out.cpu().double(), expected_out, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse.cpu().double(), logs.logsumexp(0), rtol=1e-6, atol=1e-6)


def test_calls_with_dropout_are_not_split(device) -> None:
    """They run the other forward, which drops the same pairs as the backward."""
    layout, call = LAYOUTS[0], Call(head_dim=32, dropout_p=0.4, kv_heads=1)
    split_kv.split_kv_launches.cache_clear()
    assert_backend_is_accurate("triton", layout, call, device)
    assert split_kv.split_kv_launches.cache_info().misses == 0


@pytest.mark.parametrize(
    ("q_len", "kv_len", "dropout_p", "expected"),
    [
        (1, 16, 0.0, True),
        (64, 1 << 20, 0.0, True),
        (64, 1024, 0.0, True),
        (65, 1 << 20, 0.0, False),
        (64, 1023, 0.0, False),
        (1, 15, 0.0, False),
        (1, 1 << 20, 0.1, False),
    ],
)
def test_few_queries_with_many_keys_are_split(q_len: int, kv_len: int, dropout_p: float, expected: bool) -> None:
    assert split_kv.is_suitable((8, 32, q_len, 128), kv_len, dropout_p) == expected


@pytest.mark.parametrize(
    ("n_tiles", "n_programs", "n_sms", "expected"),
    [
        # 8 sequences of 8 KV heads on an H200; one sequence; as many programs as SMs and more
        (112, 64, 132, 6),
        (1024, 8, 132, 49),
        (1024, 132, 132, 3),
        (1024, 1000, 132, 1),
        # at most one split per tile, and at most 256
        (5, 8, 132, 5),
        (8192, 1, 132, 256),
        (0, 8, 132, 1),
    ],
)
def test_num_splits_fills_the_gpu(n_tiles: int, n_programs: int, n_sms: int, expected: int) -> None:
    assert split_kv.num_splits(n_tiles, n_programs, n_sms) == expected


@pytest.mark.parametrize(
    ("tile", "q_len", "expected"),
    [
        # 23 tiles of 128 keys, or as many keys in 46 tiles of 64; 4, 64 and 256 rows that share them
        (128, 1, 23),
        (64, 1, 23),
        (128, 16, 23),
        (64, 16, 23),
        (128, 64, 11),
        (64, 64, 23),
    ],
)
def test_a_split_has_128_keys_or_more_and_two_tiles_for_128_rows(tile: int, q_len: int, expected: int) -> None:
    q, n_tiles = torch.empty(1, 32, q_len, 128, dtype=BFLOAT16), 23 * 128 // tile
    options = split_kv.options_of(q, [], 1.0, False, 0.0)._replace(tile=tile, major=9, shared_memory=232448)
    shapes = q.shape, (1, 8, 1 << 14, 128)
    found = split_kv.division_of(shapes, 2, (1, 1, 1, 8), n_tiles, options, 132)
    assert found.n_splits == expected


def test_no_layout_of_the_zoo_is_split() -> None:
    """Hence the layouts of this file: those of the zoo have too many queries."""
    assert not any(
        split_kv.is_suitable((1, 1, *case.build().shape[2:3], 1), case.build().shape[3], 0.0) for case in cases.LAYOUTS
    )
