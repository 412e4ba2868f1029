"""Plans that kernels make from document boundaries list the tiles of the layout that the host makes."""

from __future__ import annotations

import itertools
import pickle
import random
import sys

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")

import masks
from blocksparse_flash import BlockLayout, attention
from blocksparse_flash.packed import PackedLayout, layout_on_host
from blocksparse_flash.plan import packed_builder
from blocksparse_flash.plan.packed_builder import Documents, build_packed_plan
from blocksparse_flash.plan_format import FINE_TILE, TILE, Plan
from tests.plan.test_host_builder import check_side

BLOCK_SIZE = (128, 128)
ENDS_THE_PROCESS = pytest.mark.skipif(torch.cuda.is_available(), reason="an assertion of the GPU ends the process")


def packed(
    device: torch.device,
    cu_seqlens: list[int],
    *,
    length: int | None = None,
    window: tuple[int | None, int | None] = (None, None),
    max_seqlen: int | None = None,
    dtype: torch.dtype = torch.int32,
) -> Documents:
    """Documents that are the same ones on both sides."""
    boundaries = torch.tensor([cu_seqlens], dtype=dtype, device=device)
    size = cu_seqlens[-1] if length is None else length
    return Documents(boundaries, None, size, size, *window, max_seqlen)


def check(documents: Documents, *, causal: bool, tile: int, is_sorted: bool = True) -> Plan:
    plan = build_packed_plan(documents, causal=causal, tile=tile)
    assert plan.tile == tile
    mask = layout_on_host(documents, BLOCK_SIZE, is_causal=causal).to_dense().numpy()
    capacity = packed_builder._capacity(documents, causal, tile)
    for of_rows in (True, False):
        check_side(plan.to("cpu"), mask, of_rows=of_rows, capacity=capacity[not of_rows], is_sorted=is_sorted)
    return plan


# one; aligned; ragged; many in a tile; empty ones; of one token; a gap after the last
CASES = [
    ([0, 300], None),
    ([0, 128, 256, 512], None),
    ([0, 5, 100, 163, 700], None),
    ([0, 3, 7, 8, 20, 21, 30, 500, 640], None),
    ([0, 0, 40, 40, 40, 97, 390, 390], None),
    ([*range(140)], None),
    ([0, 100, 260], 640),
    ([0, 0, 0], 200),
    ([0, 200], 201),
]


@pytest.mark.sweep
@pytest.mark.parametrize("tile", [TILE, FINE_TILE])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(None, None), (None, 0), (70, 0), (70, None), (None, 130), (128, 40)], ids=str)
@pytest.mark.parametrize(("cu_seqlens", "length"), CASES, ids=lambda value: str(value)[:20])
def test_tiles_are_those_of_the_host(cu_seqlens, length, window, causal, tile, device):
    check(packed(device, cu_seqlens, length=length, window=window), causal=causal, tile=tile)


def random_documents(seed: int, device: torch.device) -> Documents:
    """Documents of equal or different boundaries on both sides, some of them empty, with a window or without."""
    numbers = random.Random(seed)
    n_documents, batch = numbers.choice([1, 2, 3, 7, 40]), numbers.choice([1, 1, 3])

    def row(length: int) -> list[int]:
        end = numbers.choice([length, numbers.randint(0, length)])
        cuts = sorted(
            numbers.randint(0, end) // (side := numbers.choice([1, 64])) * side for _ in range(n_documents - 1)
        )
        return [0, *cuts, end]

    def boundaries(length: int) -> torch.Tensor:
        dtype = numbers.choice([torch.int32, torch.int64])
        return torch.tensor([row(length) for _ in range(batch)], dtype=dtype, device=device)

    q_len, kv_len = (numbers.choice([1, 100, 128, 300, 700]) for _ in "qk")
    cu_q = boundaries(q_len)
    is_square = numbers.random() < 0.5
    cu_kv, kv_len = (None, q_len) if is_square else (boundaries(kv_len), kv_len)
    left, right = numbers.choice([None, 0, 5, 130, 300]), numbers.choice([None, None, 0, 7, 200])
    longest = numbers.choice([None, int(cu_q.diff().max())]) if is_square else None
    prefix = None
    if left is None and right is not None and numbers.random() < 0.7:
        lengths = [[numbers.choice([0, 3, 128, 200, kv_len]) for _ in range(n_documents)] for _ in range(batch)]
        prefix = torch.tensor(lengths, dtype=cu_q.dtype, device=device)
    return Documents(cu_q, cu_kv, q_len, kv_len, left, right, longest, prefix)


@pytest.mark.parametrize(
    "seed", [*range(5), *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(5, 100))]
)
def test_random_documents_have_the_tiles_of_the_host(seed, device):
    documents = random_documents(seed, device)
    for causal, tile in itertools.product((False, True), (TILE, FINE_TILE)):
        check(documents, causal=causal, tile=tile)


# ending in the tile of its queries, in the next, at a tile's end, far ahead, and with the document
@pytest.mark.sweep
@pytest.mark.parametrize("tile", [TILE, FINE_TILE])
@pytest.mark.parametrize("right", [0, 70])
@pytest.mark.parametrize(
    "prefix", [[5, 20, 0], [200, 200, 1], [128, 256, 60], [0, 500, 0], [1000, 1000, 1000]], ids=str
)
def test_prefixes_have_the_tiles_of_the_host(prefix, right, tile, device):
    for cu_seqlens, longest in (([0, 130, 700, 710], 570), ([0, 100, 110, 640], None)):
        documents = packed(device, cu_seqlens, window=(None, right), max_seqlen=longest)
        documents = documents._replace(prefix=torch.tensor([prefix], device=device))
        for causal in (False, True):
            check(documents, causal=causal, tile=tile)


def test_lists_have_room_for_the_longest_document_only(device):
    cu_seqlens = [0, 130, 256, 300, 1024]
    long = check(packed(device, cu_seqlens), causal=True, tile=TILE)
    short = check(packed(device, cu_seqlens, max_seqlen=724), causal=True, tile=TILE)
    assert len(short.row_indices) < len(long.row_indices)


@pytest.mark.parametrize("tile", [TILE, FINE_TILE])
def test_many_short_lists_keep_the_order_of_tokens(tile, device, monkeypatch):
    monkeypatch.setattr(packed_builder, "MAX_SORTED", 8)
    cu_seqlens = [0, 130, 256, 300, 600, 700, 701, 1024, 1200]
    check(packed(device, cu_seqlens, max_seqlen=323), causal=True, tile=tile, is_sorted=False)
    # lists that may have more tiles, and fewer lists
    check(packed(device, cu_seqlens), causal=True, tile=tile)
    check(packed(device, [0, 130, 256]), causal=True, tile=tile)


@pytest.mark.parametrize(
    ("cu_seqlens", "length", "max_seqlen"),
    [([1, 100], 128, None), ([0, 60, 50, 100], 128, None), ([0, 200], 128, None), ([0, 60, 128], 128, 67)],
    ids=["begins at 1", "decreases", "exceeds the length", "is too long"],
)
@ENDS_THE_PROCESS
def test_bad_boundaries_end_in_an_assertion(cu_seqlens, length, max_seqlen):
    documents = packed(torch.device("cpu"), cu_seqlens, length=length, max_seqlen=max_seqlen)
    with pytest.raises(RuntimeError, match="cu_seqlens must start at 0, never decrease, and end within the length"):
        build_packed_plan(documents, causal=False, tile=TILE)


def test_a_plan_that_would_be_too_large_is_refused_before_it_is_made():
    with pytest.raises(ValueError, match="max_seqlen: expected documents short enough for a plan"):
        build_packed_plan(packed(torch.device("cpu"), [0, 1 << 23]), causal=False, tile=TILE)


# ---- layouts


@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_that_of_the_ordinary_layout(causal, device):
    documents = packed(device, [0, 70, 200, 300], length=330, window=(90, None))
    layout, ordinary = PackedLayout.of(documents, BLOCK_SIZE), layout_on_host(documents, BLOCK_SIZE)
    backend = "auto" if device.type == "cuda" else "triton"
    torch.manual_seed(0)
    leaves = [torch.randn(1, 2, 330, 16, device=device, requires_grad=True) for _ in "qkv"]
    results = []
    for each in (layout, ordinary.to(device)):
        out = attention(*leaves, each, causal=causal, backend=backend)
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for actual, expected in zip(*results, strict=True):
        assert torch.allclose(actual, expected, atol=1e-5)
    assert not results[0][0][:, :, 300:].any()


def test_it_is_a_layout_like_any_other(device):
    documents = packed(device, [0, 70, 200, 300])
    layout, ordinary = PackedLayout.of(documents, BLOCK_SIZE), layout_on_host(documents, BLOCK_SIZE).to(device)
    assert isinstance(layout, BlockLayout) and layout == ordinary and hash(layout) == hash(ordinary)
    assert layout.shape == ordinary.shape and layout.nnz == ordinary.nnz and repr(layout) == repr(ordinary)
    assert layout.to(device) is layout and layout.device == device
    causal = masks.causal(300).to(device)
    made = (layout & causal, layout.T, layout.crop(0, 100), pickle.loads(pickle.dumps(layout)))
    wanted = (ordinary & causal, ordinary.T, ordinary.crop(0, 100), ordinary)
    for each, other in zip(made, wanted, strict=True):
        assert type(each) is BlockLayout and each == other


def test_boundaries_are_read_when_a_layout_is_used():
    """As in a CUDA graph, whose replays find other boundaries."""
    documents = packed(torch.device("cpu"), [0, 70, 300])
    layout = PackedLayout.of(documents, BLOCK_SIZE)
    before = hash(layout)
    documents.cu_q[0, 1] = 200
    assert layout == masks.documents([0, 200, 300]) and hash(layout) != before


@pytest.mark.parametrize(("length", "expected"), [(16384, TILE), (300, FINE_TILE)])
def test_short_documents_have_fine_tiles(length, expected):
    documents = packed(torch.device("cpu"), [*range(0, 16385, length)], length=16384)
    assert packed_builder.shares_of(documents).fastest(128, "hopper") == expected


# ---- masks.documents


def read_on_device(**changes):
    arguments = {
        "cu_seqlens": torch.tensor([0, 10]),
        "kv_cu_seqlens": None,
        "prefix": None,
        "length": 10,
        "left": None,
        "right": None,
        "max_seqlen": None,
    }
    from masks.documents import _on_device

    return lambda: _on_device(**{**arguments, **changes})


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"length": None}, ValueError, "length: expected the number of tokens, such as length=q.shape"),
        ({"length": (10, 12)}, ValueError, "length: expected one number for the same documents on both sides"),
        ({"length": 1 << 30}, ValueError, "length: expected at most 1073741823 tokens"),
        ({"cu_seqlens": torch.tensor([0.0])}, TypeError, "cu_seqlens: expected int32 or int64, got torch.float32"),
        ({"cu_seqlens": torch.zeros(1, 2, 2, dtype=torch.int32)}, ValueError, "cu_seqlens: expected shape"),
        (
            {"cu_seqlens": torch.zeros(0, dtype=torch.int32)},
            ValueError,
            r"cu_seqlens: expected shape \(documents \+ 1,\)",
        ),
        ({"kv_cu_seqlens": [0, 10]}, ValueError, "kv_cu_seqlens: expected a tensor on cpu, like cu_seqlens, got list"),
        ({"kv_cu_seqlens": torch.tensor([0, 1, 2])}, ValueError, r"kv_cu_seqlens: expected the shape of"),
        ({"prefix": torch.tensor([1.0])}, TypeError, "prefix: expected int32 or int64, got torch.float32"),
        (
            {"prefix": torch.ones(1, device="meta").int()},
            ValueError,
            "prefix: expected a tensor on cpu, like cu_seqlens",
        ),
        ({"prefix": torch.tensor([1, 2])}, ValueError, r"prefix: expected one for each document, shape \(1,\)"),
        ({"prefix": -1}, ValueError, "prefix: expected int, a number of tokens, of at least 0"),
        ({"prefix": [1]}, TypeError, "prefix: expected int"),
    ],
    ids=str,
)
def test_boundaries_on_a_gpu_are_checked_without_reading_them(changes, error, message):
    with pytest.raises(error, match=message):
        read_on_device(**changes)()


def test_a_prefix_longer_than_int32_is_the_longest_on_a_gpu():
    assert read_on_device(prefix=2**40)().prefix.tolist() == [[2**31 - 1]]


def test_masks_keep_boundaries_on_their_gpu(monkeypatch):
    """On the CPU, where a flag stands for the GPU."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(sys.modules["masks.documents"], "can_build", lambda _: True)
    boundaries = torch.tensor([0, 70, 300], dtype=torch.int32)
    layout = masks.documents(boundaries, causal=True, length=320, window=64, max_seqlen=256, block_size=64)
    assert isinstance(layout, PackedLayout) and layout.block_size == (64, 64)
    assert layout._documents[2:] == (320, 320, 64, 0, 256, None)
    assert layout._documents.cu_q.data_ptr() == boundaries.data_ptr()
    lengths = torch.tensor([60, 200])
    with_prefixes = [masks.documents(boundaries, causal=True, length=320, prefix=each) for each in (lengths, 60)]
    assert with_prefixes[0]._documents.prefix.data_ptr() == lengths.data_ptr()
    assert with_prefixes[1]._documents.prefix.tolist() == [[60, 60]]
    monkeypatch.undo()
    assert layout == masks.documents([0, 70, 300], causal=True, length=320, window=64, block_size=64)
    for each, expected in zip(with_prefixes, ([60, 200], 60), strict=True):
        assert each == masks.documents([0, 70, 300], causal=True, length=320, prefix=expected)


# ---- where lists with room, and boundaries that change, could mislead


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("rows", "max_seqlen"), [([[0, 256, 512]], 256), ([[0, 300, 320], [0, 10, 64]], None)], ids=str
)
def test_a_bias_of_blocks_is_that_of_the_ordinary_layout(rows, max_seqlen, causal, device):
    cu = torch.tensor(rows, device=device)
    documents = Documents(cu, None, rows[0][-1], rows[0][-1], None, None, max_seqlen)
    layout, ordinary = PackedLayout.of(documents, BLOCK_SIZE), layout_on_host(documents, BLOCK_SIZE)
    torch.manual_seed(0)
    bias = torch.randn(ordinary.nnz, device=device)
    q = torch.randn(len(rows), 1, documents.q_len, 16, device=device)
    for backend in ("eager", "triton"):
        found = [
            attention(q, q, q, each, block_bias=bias, causal=causal, backend=backend) for each in (layout, ordinary)
        ]
        assert torch.allclose(*found, atol=1e-5)


def test_compiled_code_reads_it_as_any_other(device):
    layout = PackedLayout.of(packed(device, [0, 70, 300]), BLOCK_SIZE)
    assert torch.compile(lambda each: torch.zeros(1) + each.nnz, backend="eager")(layout) == layout.nnz


def test_compiled_code_attends_by_it(device):
    layout = PackedLayout.of(packed(device, [0, 70, 300]), BLOCK_SIZE)
    q = torch.randn(1, 1, 300, 16, device=device)
    compiled = torch.compile(lambda q: attention(q, q, q, layout, backend="eager"), backend="eager")
    assert torch.allclose(compiled(q), attention(q, q, q, layout, backend="eager"), atol=1e-6)


def test_gathered_scores_follow_the_boundaries():
    documents = packed(torch.device("cpu"), [0, 128, 384])
    layout, scores = PackedLayout.of(documents, BLOCK_SIZE), torch.arange(9.0).view(1, 1, 3, 3)
    assert layout.gather(scores).flatten().tolist() == [0, 4, 5, 7, 8]
    documents.cu_q[0, 1] = 256
    assert layout.gather(scores).flatten().tolist() == [0, 1, 3, 4, 8]


@pytest.mark.parametrize("rows", [[[1, 100]], [[0, 60, 50, 100]], [[0, 200]]], ids=str)
def test_the_host_refuses_bad_boundaries_too(rows):
    cu = torch.tensor(rows)
    with pytest.raises(ValueError, match="cu_seqlens must start at 0, never decrease, and end within the length"):
        PackedLayout.of(Documents(cu, None, 128, 128, None, None, None), BLOCK_SIZE).to_dense()


@ENDS_THE_PROCESS
def test_max_seqlen_limits_both_sides():
    cu = torch.tensor([[0, 100, 300]])
    with pytest.raises(RuntimeError, match="no document longer than max_seqlen"):
        build_packed_plan(Documents(cu, cu.clone(), 300, 300, None, None, 50), causal=False, tile=TILE)


def test_one_tensor_for_both_sides_is_one_set_of_documents():
    cu = torch.tensor([0, 5, 10])
    assert read_on_device(cu_seqlens=cu, kv_cu_seqlens=cu)().is_square
