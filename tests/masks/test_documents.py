"""masks.documents: packed documents do not see each other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import masks
from blocksparse_flash import BlockLayout
from tests.support.double_loop import assert_attends

# one; aligned to blocks; ragged; many in a block; empty at the start, inside and at the end; of one token; ending one
# token into a block
CASES = [
    [0, 130],
    [0, 64, 192, 256],
    [0, 5, 100, 163, 203],
    [0, 3, 7, 8, 20, 21, 30, 150],
    [0, 0, 40, 40, 40, 97, 97],
    list(range(51)),
    [0, 17, 49, 65, 100],
]
BLOCK_SIZES = [16, 48, 64, (32, 64), (64, 32)]


def document_of(cu_seqlens: list[int], position: int) -> int:
    holders = [i for i, begin in enumerate(cu_seqlens[:-1]) if begin <= position < cu_seqlens[i + 1]]
    (document,) = holders
    return document


def attends(q_pos: int, kv_pos: int, cu_seqlens: list[int], causal: bool) -> bool:
    is_same = document_of(cu_seqlens, q_pos) == document_of(cu_seqlens, kv_pos)
    return is_same and (kv_pos <= q_pos or not causal)


@pytest.mark.sweep
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("cu_seqlens", CASES, ids=str)
def test_double_loop(cu_seqlens, block_size, causal):
    layout = masks.documents(cu_seqlens, causal=causal, block_size=block_size)
    assert layout.shape == (1, 1, cu_seqlens[-1], cu_seqlens[-1])
    assert_attends(layout, lambda q_pos, kv_pos: attends(q_pos, kv_pos, cu_seqlens, causal))


@given(
    lengths=st.lists(st.integers(0, 60), max_size=8),
    causal=st.booleans(),
    block_size=st.tuples(st.sampled_from([16, 48, 64, 128]), st.sampled_from([16, 48, 64, 128])),
)
@settings(deadline=None, max_examples=40)
def test_any_documents(lengths, causal, block_size):
    cu_seqlens = [0, *np.cumsum(lengths, dtype=int).tolist()]
    layout = masks.documents(cu_seqlens, causal=causal, block_size=block_size)
    assert_attends(layout, lambda q_pos, kv_pos: attends(q_pos, kv_pos, cu_seqlens, causal))


@pytest.mark.parametrize("make", [list, tuple, np.array, torch.tensor, lambda bounds: torch.tensor(bounds).int()])
def test_bounds_come_in_any_container(make):
    assert masks.documents(make([0, 100, 250])) == masks.documents([0, 100, 250])


def test_closed_form_counts():
    # documents of 2, 1 and 4 whole blocks
    layout = masks.documents([0, 256, 384, 896])
    assert layout.nnz == 2 * 2 + 1 + 4 * 4
    assert len(layout.bitmasks) == 0
    layout = masks.documents([0, 256, 384, 896], causal=True)
    assert layout.nnz == 3 + 1 + 10
    assert len(layout.bitmasks) == 1


def test_one_document_is_everything():
    assert masks.documents([0, 1000]).density == 1.0
    assert masks.documents([0, 1000], causal=True) == masks.causal(1000)


def test_equal_documents_share_their_bitmasks():
    # 200 = 128 + 72: offsets within a block repeat after 16 documents
    few, many = (masks.documents(np.arange(n + 1) * 200) for n in (32, 512))
    assert len(few.bitmasks) == len(many.bitmasks)


@pytest.mark.parametrize("make", [list, np.array, torch.tensor])
@pytest.mark.parametrize("lengths", [[100, 156], [3] * 20, [1, 1, 40]])
def test_the_document_of_each_token_is_refused_with_a_hint(lengths, make):
    ids = np.repeat(np.arange(len(lengths)), lengths).tolist()
    with pytest.raises(ValueError, match=r"look like the document of each token\. Write ") as caught:
        masks.documents(make(ids))
    bounds = eval(str(caught.value).partition("Write ")[2], {"numpy": np, "ids": ids, "len": len})
    assert bounds == [0, *np.cumsum(lengths)]
    assert masks.documents(bounds) == masks.documents([0, *np.cumsum(lengths)])


# many empty ones; the end repeated, as by padding; one token each, a few empty; few; no token at all
@pytest.mark.parametrize(
    "bounds",
    [[0, *[40] * 30, 97], [0, 60, *[61] * 30], [0, 0, *range(30), 29, 29], [0, 0, 0, 1, 1, 1], [0] * 100],
    ids=str,
)
def test_bounds_with_empty_documents_are_no_documents_of_tokens(bounds):
    assert masks.documents(bounds) == masks.documents(np.unique(bounds) if max(bounds) else [0])


def test_causal_is_the_causal_half():
    bounds = [0, 77, 77, 300, 411]
    assert masks.documents(bounds, causal=True) == masks.documents(bounds) & masks.causal(411)


def test_no_documents_have_no_blocks():
    assert masks.documents([0]).shape == (1, 1, 0, 0)
    assert masks.documents([0, 0, 0], causal=True).nnz == 0


@pytest.mark.parametrize(
    ("cu_seqlens", "error", "message"),
    [
        ([], ValueError, "cu_seqlens: expected at least one entry, 0, got none"),
        ([5, 10], ValueError, "cu_seqlens: expected 0 as the first entry, got 5"),
        ([0, 10, 7, 20], ValueError, "cu_seqlens: .* never decrease, got 10 at index 1 and 7 after it"),
        ([0, -1], ValueError, "cu_seqlens: .* never decrease, got 0 at index 0 and -1 after it"),
        ([0, 10.0], TypeError, "cu_seqlens: expected ints, got 10.0"),
        ([False, 10], TypeError, "cu_seqlens: expected ints, got False"),
        (torch.tensor([0.0, 1.0]), TypeError, "cu_seqlens: expected ints, got Tensor of torch.float32"),
        (np.zeros((1, 1, 2), dtype=int), ValueError, "cu_seqlens: expected one axis"),
        (10, TypeError, "cu_seqlens: expected ints in a sequence"),
        (None, TypeError, "cu_seqlens: expected ints in a sequence"),
    ],
    ids=str,
)
def test_refused(cu_seqlens, error, message):
    with pytest.raises(error, match=message):
        masks.documents(cu_seqlens)


def test_refused_causal():
    with pytest.raises(TypeError, match="causal: expected a bool, got 1"):
        masks.documents([0, 10], causal=1)


# ---- windows, other boundaries for the keys, and a length


def position(cu_q: list[int], cu_kv: list[int], q_pos: int) -> tuple[int, int] | None:
    """(document, key at the position of the query with the ends of the document aligned); None after the documents."""
    if q_pos >= cu_q[-1]:
        return None
    document = document_of(cu_q, q_pos)
    return document, cu_kv[document + 1] - (cu_q[document + 1] - q_pos)


@given(
    lengths=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=6),
    gap=st.tuples(st.integers(0, 40), st.integers(0, 40)),
    window=st.sampled_from([None, 0, 7, (3, None), (None, 2), (20, 5)]),
    causal=st.booleans(),
    prefix=st.one_of(st.none(), st.integers(0, 60), st.lists(st.integers(0, 60), min_size=6, max_size=6)),
    is_same=st.booleans(),
    block_size=st.sampled_from([16, 64, (32, 128)]),
)
@settings(deadline=None, max_examples=80)
def test_any_documents_with_windows_and_other_keys(lengths, gap, window, causal, prefix, is_same, block_size):
    cu_q, cu_kv = ([0, *np.cumsum([pair[side] for pair in lengths]).tolist()] for side in (0, 1))
    if is_same:
        cu_kv, gap = cu_q, (gap[0], gap[0])
    left, right = (window, window) if isinstance(window, int) else (window or (None, None))
    size = cu_q[-1] + gap[0], cu_kv[-1] + gap[1]
    if left is not None or (right is None and not causal):
        prefix = None
    elif isinstance(prefix, list):
        prefix = prefix[: len(lengths)]
    layout = masks.documents(
        cu_q,
        causal=causal,
        window=window,
        prefix=prefix,
        kv_cu_seqlens=None if is_same else cu_kv,
        length=size,
        block_size=block_size,
    )
    assert layout.shape[2:] == size

    def attends(q_pos: int, kv_pos: int) -> bool:
        found = position(cu_q, cu_kv, q_pos)
        if found is None or not cu_kv[found[0]] <= kv_pos < cu_kv[found[0] + 1]:
            return False
        if prefix is not None and kv_pos - cu_kv[found[0]] < np.broadcast_to(prefix, len(lengths))[found[0]]:
            return True
        distance = found[1] - kv_pos
        return (
            (left is None or distance <= left)
            and (right is None or -distance <= right)
            and (distance >= 0 or not causal)
        )

    expected = np.array([[attends(i, j) for j in range(size[1])] for i in range(size[0])], bool).reshape(size)
    assert np.array_equal(layout.to_dense()[0, 0].numpy(), expected)


def test_the_prefix_of_one_document_is_that_of_prefix_lm():
    for prefix in (0, 100, 300):
        assert masks.documents([0, 300], causal=True, prefix=prefix) == masks.prefix_lm(300, prefix=prefix)
    # a prefix longer than its document is all of it, also one that does not fit into 64 bits
    for prefix in (2**40, 2**63 - 1, 2**63, 2**70):
        assert masks.documents([0, 300], causal=True, prefix=prefix) == masks.documents([0, 300])


def test_a_window_is_that_of_local():
    bounds = [0, 40, 200]
    for window in (30, (30, 0), (None, 12)):
        assert masks.documents(bounds, window=window) == masks.documents(bounds) & masks.local(200, window=window)
    # sums of such a window and a position do not fit into 64 bits
    for window in (2**63 - 1, 10**30, (10**30, None), (None, 2**63 - 1)):
        assert masks.documents(bounds, window=window) == masks.documents(bounds)


def test_each_sequence_of_a_batch_has_its_own_documents():
    bounds = [[0, 40, 200], [0, 130, 170]]
    layout = masks.documents(bounds, causal=True, length=210)
    for make in (torch.tensor, np.array):
        assert masks.documents(make(bounds), causal=True, length=210) == layout
    alone = [masks.documents(row, causal=True, length=210) for row in bounds]
    assert layout == BlockLayout.stack_batches(alone) and layout.shape == (2, 1, 210, 210)


def test_the_last_tokens_of_a_cache_attend_to_what_was_before():
    """Each sequence has its own number of keys; the last query is at the last of them."""
    layout = masks.documents(
        [[0, 3], [0, 3]], kv_cu_seqlens=[[0, 5], [0, 4]], causal=True, length=(3, 6), block_size=16
    )
    expected = [["111000", "111100", "111110"], ["110000", "111000", "111100"]]
    rows = [["".join("01"[int(pair)] for pair in row) for row in head[0]] for head in layout.to_dense()]
    assert rows == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 9}, "cu_seqlens: expected boundaries up to the length, 9, got 10"),
        ({"kv_cu_seqlens": [0, 5]}, "kv_cu_seqlens: expected as many entries as cu_seqlens, 3, got 2"),
        ({"kv_cu_seqlens": [[0, 5], [0, 5, 6]]}, r"kv_cu_seqlens: .* entries for each sequence, got \[2, 3\]"),
        ({"kv_cu_seqlens": [[0, 5, 3]]}, r"kv_cu_seqlens\[0\]: .* never decrease, got 5 at index 1"),
        (
            {"kv_cu_seqlens": [0, 5, 20], "length": 10},
            "kv_cu_seqlens: .* up to the length, 10, got 20",
        ),
        ({"kv_cu_seqlens": [1, 5, 20]}, "kv_cu_seqlens: expected 0 as the first entry, got 1"),
        ({"max_seqlen": 5}, "max_seqlen: expected at least the tokens of the longest document of cu_seqlens, 6, got 5"),
        ({"max_seqlen": -1}, "max_seqlen: expected int, a number of tokens, of at least 0"),
        ({"window": -1}, "window: expected int, a number of tokens, of at least 0"),
        ({"prefix": 1}, "prefix: expected None unless causal=True or window=.* got causal=False and window=None"),
        ({"prefix": 1, "causal": True, "window": 3}, "prefix: expected None .* got causal=True and window=3"),
        ({"prefix": -1, "causal": True}, "prefix: expected int, a number of tokens, of at least 0"),
        ({"prefix": [3, -1], "causal": True}, "prefix: expected at least 0 tokens, got -1"),
        ({"prefix": [1, 2, 3], "causal": True}, r"prefix: expected an int, or one for each document, shape \(2,\) or"),
    ],
    ids=str,
)
def test_refused_options(options, message):
    with pytest.raises(ValueError, match=message):
        masks.documents([0, 4, 10], **options)


def test_sequences_with_few_documents_repeat_the_last_boundary():
    layout = masks.documents([[0, 1] + [1] * 18, list(range(0, 100, 5))], length=100)
    assert layout == BlockLayout.stack_batches([masks.documents(b, length=100) for b in ([0, 1], range(0, 100, 5))])
    assert masks.documents([0, 1, 2, 3] + [3] * 16, length=100) == masks.documents([0, 1, 2, 3], length=100)
