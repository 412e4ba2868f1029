"""Attention to keys in pages equals its definition on the keys of each sequence, on every backend.

Pages that no sequence uses, the rest of the last page, keys before all windows and new memory are full of NaN; entries
of the page table beyond a sequence are out of range.
"""

from __future__ import annotations

import importlib.util
import itertools
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from blocksparse_flash import attention_with_lse, paged_attention, paged_attention_with_lse, reference
from tests.support.closeness import assert_as_accurate

HALF, BFLOAT16, SINGLE, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")


class Case(NamedTuple):
    """A call; lengths in keys, or as (pages, keys more).

    order     "hnd": (n_pages, kv_heads, page, dim) in memory; "nhd": (n_pages, page, kv_heads, dim)
    selected  for "" none, "all" heads, each "group" or each "head"
    """

    page: int = 16
    heads: tuple[int, int] = (4, 1)
    q_len: int = 1
    dims: tuple[int, int] = (64, 64)
    dtype: torch.dtype = SINGLE
    order: str = "hnd"
    lengths: tuple[Any, ...] = (0, 1, (1, -1), (1, 0), (4, 3))
    selected: str = ""
    causal: bool = True
    window: int | None = None
    scale: float | None = None
    softcap: float | None = None
    has_sinks: bool = False

    def __str__(self) -> str:
        given = {name: value for name, value in self._asdict().items() if value != self._field_defaults[name]}
        return "-".join(f"{name}={value}".replace("torch.", "") for name, value in given.items()) or "plain"


class Call(NamedTuple):
    """Arguments of a call in float64, and the keys that queries may read."""

    q: Tensor
    k_pages: Tensor
    v_pages: Tensor
    table: Tensor
    lengths: Tensor
    selected: Tensor | None
    sinks: Tensor | None

    def run(self, case: Case, backend: str, device: torch.device) -> tuple[Tensor, Tensor]:
        q, k, v = (tensor.to(case.dtype) for tensor in (self.q, self.k_pages, self.v_pages))
        if case.order == "nhd":
            k, v = (tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (k, v))
        tensors = (q, k, v, self.table, self.lengths, self.selected, self.sinks)
        q, k, v, table, lengths, selected, sinks = (None if t is None else t.to(device) for t in tensors)
        return paged_attention_with_lse(
            q, k, v, table, lengths, selected=selected, causal=case.causal, window=case.window, scale=case.scale,
            sinks=sinks, softcap=case.softcap, backend=backend,
        )  # fmt: skip


def drawn(case: Case, seed: int = 0) -> Call:
    """Pages in random order; the last sequence shares its first page with the one before it."""
    generator = torch.Generator().manual_seed(seed)
    heads, kv_heads = case.heads
    lengths = [n if isinstance(n, int) else n[0] * case.page + n[1] for n in case.lengths]
    used = [-(-length // case.page) for length in lengths]
    max_pages, batch = max(used) + 2, len(lengths)
    order = torch.randperm(sum(used) + 5, generator=generator)
    table = torch.tensor([-7, 10**6]).repeat(batch, max_pages)[:, :max_pages].int()
    k, v = (torch.full((len(order), kv_heads, case.page, dim), torch.nan, dtype=DOUBLE) for dim in case.dims)
    taken = 0
    for i, n_pages in enumerate(used):
        table[i, :n_pages] = order[taken : taken + n_pages]
        taken += n_pages
        begin = 0 if case.window is None else max(0, lengths[i] - case.q_len - case.window + 1)
        for cache, pos in itertools.product((k, v), range(begin, lengths[i])):
            row = cache[table[i, pos // case.page], :, pos % case.page]
            row.copy_(torch.randn(row.shape, generator=generator, dtype=DOUBLE))
    if min(lengths[-2:]) >= case.page and case.window is None:
        table[-1, 0] = table[-2, 0]
    q = torch.randn(batch, heads, case.q_len, case.dims[0], generator=generator, dtype=DOUBLE)
    selected = None
    if case.selected:
        n_lists = {"all": 1, "group": kv_heads, "head": heads}[case.selected]
        # repeated and unused entries, pages beyond the length, and a list without any page
        selected = torch.randint(-1, max_pages, (batch, n_lists, 5), generator=generator)
        selected[-1, -1, 1] = selected[-1, -1, 0]
        selected[0, 0] = -1
    sinks = torch.randn(heads, generator=generator) if case.has_sinks else None
    # rounded once, so that every type has the same inputs
    q, k, v = (tensor.to(case.dtype).double() for tensor in (q, k, v))
    return Call(q, k, v, table, torch.tensor(lengths), selected, sinks)


def expected(case: Case, call: Call, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Sequence by sequence: the reference on its keys in order, with a mask made pair by pair."""
    found = []
    for i, length in enumerate(call.lengths.tolist()):
        pages = call.table[i, : -(-length // case.page)].long()
        k, v = (
            c[pages].transpose(0, 1).flatten(1, 2)[None, :, :length].to(dtype) for c in (call.k_pages, call.v_pages)
        )
        mask = torch.zeros(case.heads[0], case.q_len, length, dtype=torch.bool)
        for head, token, key in itertools.product(*map(range, mask.shape)):
            own = length - case.q_len + token
            sees = key <= own or not case.causal
            if case.window is not None:
                sees = sees and key > own - case.window
            if call.selected is not None:
                chosen = call.selected[i, head * call.selected.shape[1] // case.heads[0]]
                sees = sees and key // case.page in chosen.tolist()
            mask[head, token, key] = sees
        options = {"scale": case.scale, "sinks": call.sinks, "softcap": case.softcap}
        found.append(reference.attention(call.q[i : i + 1].to(dtype), k, v, mask[None], **options))
    return torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found])


def assert_accurate(case: Case, backend: str, device: torch.device) -> None:
    call = drawn(case)
    found = call.run(case, backend, device)
    truths, plains = expected(case, call, DOUBLE), expected(case, call, case.dtype)
    for name, *tensors in zip(("out", "lse"), found, plains, truths, strict=True):
        actual, plain, truth = (tensor.cpu() for tensor in tensors)
        assert_as_accurate(actual, plain, truth, name=name)


CASES = [
    Case(),
    Case(order="nhd", heads=(2, 2)),
    Case(page=32, heads=(8, 1), order="nhd", q_len=3, dtype=BFLOAT16),
    Case(page=64, heads=(4, 1), dims=(128, 80), q_len=3, dtype=HALF),
    Case(page=128, heads=(4, 4), dims=(80, 128), order="nhd", dtype=BFLOAT16, lengths=(0, (1, 1), (1, 0), (2, -1))),
    Case(page=256, heads=(4, 2), dims=(16, 16), q_len=2, lengths=(300, 513)),
    Case(page=16, heads=(8, 1), q_len=17, dims=(32, 24), lengths=(0, 5, 17, 100), order="nhd"),
    Case(page=32, heads=(2, 1), q_len=70, dims=(16, 16), lengths=(70, 33, 150)),
    Case(page=16, dims=(1, 3), lengths=(40, 7), heads=(6, 2)),
    Case(page=16, dims=(256, 256), heads=(8, 1), dtype=HALF, lengths=(40, 100)),
    Case(page=512, dims=(16, 16), lengths=(600, 1030)),
    # options
    Case(causal=False, q_len=3, heads=(4, 2), dims=(32, 32)),
    Case(window=20, q_len=1, dims=(32, 32)),
    Case(window=1, q_len=3, dims=(16, 16), order="nhd"),
    Case(page=128, window=100, q_len=3, dims=(16, 16), lengths=((3, 5), 90, 0, 2)),
    Case(softcap=1.5, q_len=3, heads=(8, 2), dims=(32, 32), scale=-0.3),
    Case(has_sinks=True, q_len=2, heads=(4, 2), dims=(32, 32), dtype=HALF),
    Case(has_sinks=True, softcap=2.0, window=30, q_len=3, dims=(16, 16), scale=0.0),
    # selections
    Case(selected="all", heads=(4, 2), dims=(32, 32)),
    Case(selected="group", heads=(8, 2), q_len=3, dims=(32, 32), order="nhd", dtype=HALF),
    Case(selected="head", heads=(4, 2), dims=(32, 32)),
    Case(selected="group", page=64, heads=(4, 2), dims=(32, 16), q_len=2, causal=False),
    Case(selected="group", page=128, heads=(4, 1), dims=(16, 16), lengths=((3, 5), (2, 0), 0, 2), dtype=BFLOAT16),
    Case(selected="head", page=32, has_sinks=True, softcap=2.0, window=40, q_len=3, dims=(16, 16), heads=(4, 2)),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_eager_is_the_definition_in_float64(case: Case) -> None:
    case = case._replace(dtype=DOUBLE)
    call = drawn(case)
    for found, truth in zip(call.run(case, "eager", torch.device("cpu")), expected(case, call, DOUBLE), strict=True):
        torch.testing.assert_close(found, truth)


@pytest.mark.parametrize("case", [case for case in CASES if case.dtype != SINGLE], ids=str)
def test_eager_is_accurate(case: Case, device: torch.device) -> None:
    assert_accurate(case, "eager", device)


@pytest.fixture
def n_splits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Splits that sequences share; also fewer than there are sequences, and more than they have steps."""
    from blocksparse_flash.kernels.triton import paged

    monkeypatch.setattr(paged, "shared_splits", lambda *_: request.param)
    paged.paged_launches.cache_clear()
    return request.param


@needs_triton
@pytest.mark.sweep(by=lambda case, n_splits: {case, n_splits})
@pytest.mark.parametrize("n_splits", [1, 3, 20], indirect=True)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_triton_is_accurate(case: Case, n_splits: int, device: torch.device) -> None:
    assert_accurate(case, "triton", device)


# every configuration of split_kv.config: padded dimensions, types, and up to 16, 32, 64 and 128 rows of a program; each
# with a page smaller and one larger than a step
CONFIGURATIONS = [
    Case(page=page, heads=(4, 1), q_len=q_len, dims=(dim, dim), dtype=dtype, lengths=(300, 70), softcap=softcap)
    for dim, dtype, q_len, (page, softcap) in itertools.product(
        (16, 32, 64, 128, 256), (HALF, SINGLE), (1, 5, 9, 17), ((16, None), (64, 3.0))
    )
]


@needs_triton
@pytest.mark.sweep(by=lambda case: {case.dims, case.q_len, (case.dtype, case.page)})
@pytest.mark.parametrize("case", CONFIGURATIONS, ids=str)
def test_every_configuration_is_accurate(case: Case, device: torch.device) -> None:
    from blocksparse_flash.kernels.triton import paged

    # other tests change the number of splits
    paged.paged_launches.cache_clear()
    assert_accurate(case, "triton", device)


# ---- calls ----

GOOD = drawn(Case(selected="group"))


def arguments(**changes: Any) -> dict[str, Any]:
    found = {
        "q": GOOD.q, "k_pages": GOOD.k_pages, "v_pages": GOOD.v_pages, "page_table": GOOD.table,
        "kv_lengths": GOOD.lengths,
    }  # fmt: skip
    return found | changes


@needs_triton
def test_the_grid_does_not_depend_on_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """One prepared launch for all lengths and tables; splits for 8 sequences of 8 KV heads on 132 SMs."""
    from blocksparse_flash.kernels.triton import paged
    from blocksparse_flash.runtime.tensor_spec import specs_of

    monkeypatch.setattr(paged, "num_sms", lambda _: 132)
    q = torch.empty(8, 32, 1, 128, dtype=BFLOAT16)
    k = torch.empty(100, 8, 16, 128, dtype=BFLOAT16)
    options = paged.options_of(q, [], 1.0, True, 0.0)
    splits = {}
    for n_entries, window in ((8192, None), (8, None), (8, 1000), (8192, 64), (8192, 1000)):
        lists = paged.Lists(1, n_entries, (n_entries, 0), 8192)
        launches = paged.paged_launches(specs_of(q, k, k), lists, window, options)
        splits[n_entries, window] = launches.n_splits
        assert launches.attend._grid == ((launches.n_splits or 8) * 8, 1, 1)
    # 49 shared ones, and one for each sequence; none for at most 128 keys
    assert splits == {(8192, None): 57, (8, None): 0, (8, 1000): 0, (8192, 64): 0, (8192, 1000): 57}


def test_views_of_a_cache_of_many_layers_are_read_in_place(device: torch.device) -> None:
    """The pages of a layer, and of keys, in a tensor of all layers."""
    everything = torch.randn(9, 3, 2, 16, 2, 32, device=device)
    table, lengths = torch.tensor([[4, 1, 7], [2, 4, 0]], device=device).int(), torch.tensor([40, 20], device=device)
    q = torch.randn(2, 4, 2, 32, device=device)
    k, v = everything[:, 1].transpose(2, 3).unbind(1)
    assert not k.is_contiguous()
    for backend in ("eager", "triton"):
        if backend == "triton":
            pytest.importorskip("triton")
        out, lse = paged_attention_with_lse(q, k, v, table, lengths, backend=backend)
        for i, length in enumerate(lengths.tolist()):
            keys, values = (c[table[i].long()].transpose(0, 1).flatten(1, 2)[None, :, :length] for c in (k, v))
            alone = attention_with_lse(q[i : i + 1], keys, values, causal=True)
            torch.testing.assert_close((out[i : i + 1], lse[i : i + 1]), alone, rtol=1e-5, atol=1e-5)


def test_of_no_keys_and_of_no_queries_there_is_nothing() -> None:
    for shape, n_pages, max_pages, k in (
        ((2, 4, 1, 8), 3, 0, None),
        ((2, 4, 1, 8), 0, 2, None),
        ((2, 4, 1, 8), 3, 2, 0),
        # select_pages gives -1 for pages that there are not
        ((2, 4, 1, 8), 3, 0, 2),
        ((2, 4, 1, 8), 0, 2, 2),
    ):
        cache = torch.zeros(n_pages, 2, 16, 8)
        selected = None if k is None else torch.full((2, 1, k), -1, dtype=torch.int32)
        lengths = torch.full((2,), 20 if k == 0 else 0)
        out, lse = paged_attention_with_lse(
            torch.randn(shape), cache, cache, torch.zeros(2, max_pages).int(), lengths, selected=selected
        )
        assert out.shape == shape and not out.any() and lse.isneginf().all()
    cache = torch.zeros(3, 2, 16, 8)
    for shape in ((0, 4, 1, 8), (2, 4, 0, 8)):
        n = shape[0]
        out = paged_attention(torch.randn(shape), cache, cache, torch.zeros(n, 2).int(), torch.zeros(n).long())
        assert out.shape == shape


def test_a_compiled_function_has_one_graph() -> None:
    def function(q: Tensor, **rest: Any) -> Tensor:
        return paged_attention(q * 2, **rest, selected=GOOD.selected, window=20, softcap=2.0).sin()

    found = torch.compile(function, backend="aot_eager", fullgraph=True)(**arguments())
    torch.testing.assert_close(found, function(**arguments()))


def test_opcheck_accepts_the_operator() -> None:
    options = (GOOD.selected, None, None, 0.1, True, 0.0, "eager")
    torch.library.opcheck(
        torch.ops.blocksparse_flash.paged_attention.default,
        (*GOOD[:5], *options),
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_static"),
    )


def test_gradients_are_refused_by_name() -> None:
    q = GOOD.q.clone().requires_grad_()
    with pytest.raises(ValueError, match="paged_attention has no gradients"):
        paged_attention(**arguments(q=q))
    with torch.no_grad():
        paged_attention(**arguments(q=q))


WRONG: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "type": (TypeError, "k_pages must be a torch.Tensor, got list", {"k_pages": []}),
    "dims": (ValueError, "q must have shape .batch, heads, q_len, head_dim., got", {"q": GOOD.q[0]}),
    "dtype": (ValueError, "k_pages must be of q's dtype torch.float64, got", {"k_pages": GOOD.k_pages.float()}),
    "pages": (ValueError, "k_pages and v_pages must agree", {"v_pages": GOOD.v_pages[1:]}),
    "head_dim": (ValueError, "k_pages must have q's head_dim 8, got 64", {"q": GOOD.q[..., :8].contiguous()}),
    "order": (ValueError, r"multiple of k_pages' heads, got 4 and 16; .* k_pages.transpose\(1, 2\)", {
        "k_pages": GOOD.k_pages.transpose(1, 2), "v_pages": GOOD.v_pages.transpose(1, 2)}),
    "page_size": (ValueError, "page_size that is a power of two, 16 or more, got 12", {
        "k_pages": GOOD.k_pages[:, :, :12], "v_pages": GOOD.v_pages[:, :, :12]}),
    "stride": (ValueError, "v_pages must have a last stride of 1", {"v_pages": GOOD.v_pages.mT.contiguous().mT}),
    "table_dtype": (ValueError, "page_table must be int32, got torch.int64", {"page_table": GOOD.table.long()}),
    "table_shape": (ValueError, r"page_table must have shape \(batch = 5, max_pages\)", {"page_table": GOOD.table[1:]}),
    "table_stride": (ValueError, "page_table must have a last stride", {"page_table": GOOD.table.T.contiguous().T}),
    "table_values": (ValueError, "page_table must have ids of 0 .. n_pages - 1", {"page_table": GOOD.table + 10**6}),
    "table_last": (ValueError, "page_table must have ids of 0 .. n_pages - 1 = 12 within the length", {
        "page_table": GOOD.table.index_put((torch.tensor(4), torch.tensor(4)), torch.tensor(13).int())}),
    "device": (ValueError, "page_table must be on q's device cpu, got meta", {"page_table": GOOD.table.to("meta")}),
    "lengths": (ValueError, r"kv_lengths must be 0 to 112, max_pages \* page_size, got 113", {
        "kv_lengths": torch.tensor([0, 1, 2, 3, 113])}),
    "lengths_shape": (ValueError, "kv_lengths must have shape", {"kv_lengths": GOOD.lengths[1:]}),
    "selected_dtype": (ValueError, "selected must be int32 or int64", {"selected": torch.zeros(5, 1, 2)}),
    "selected_shape": (ValueError, r"selected must have shape \(batch = 5, heads = 4, kv_heads = 1 or 1, k\)", {
        "selected": torch.zeros(5, 3, 2).int()}),
    "selected_values": (ValueError, "selected must be -1 .none. or in 0 .. max_pages - 1 = 6, got 7", {
        "selected": torch.full((5, 1, 2), 7)}),
    "window": (ValueError, "window must be 1 to", {"window": 0}),
    "window_type": (TypeError, "window must be an int", {"window": (3, 0)}),
    "window_causal": (ValueError, "window must be None with causal=False", {"window": 3, "causal": False}),
    "scale": (ValueError, "scale must be finite", {"scale": float("nan")}),
    "softcap": (ValueError, "softcap must be", {"softcap": -1.0}),
    "sinks": (ValueError, "sinks must have shape", {"sinks": torch.zeros(3)}),
    "causal": (TypeError, "causal must be True or False", {"causal": 1}),
    "backend": (ValueError, "backend must be one of", {"backend": "cuda"}),
    "hopper": (ValueError, "hopper", {"backend": "hopper"}),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_calls_are_refused(case: str) -> None:
    error, message, changes = WRONG[case]
    with pytest.raises(error, match=message):
        paged_attention(**arguments(**changes))


def test_pages_whose_keys_are_far_apart_are_refused() -> None:
    """Offsets within a page are 32-bit. Meta tensors take no memory."""
    cache = torch.empty(16, 9, 2**24, device="meta").as_strided((9, 1, 16, 64), (64, 64, 9 * 2**24, 1))
    with pytest.raises(ValueError, match=r"k_pages must have the keys of a page within 2\*\*31 elements"):
        paged_attention(torch.empty(1, 1, 1, 64, device="meta"), cache, cache, GOOD.table[:1], GOOD.lengths[:1])


def test_page_table_entries_before_a_window_may_be_anything() -> None:
    torch.manual_seed(0)
    q, (k_pages, v_pages) = torch.randn(2, 4, 1, 16), torch.randn(2, 8, 2, 16, 16)
    lengths, table = torch.tensor([40, 20]), torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7]], dtype=torch.int32)
    stale = table.clone()
    stale[0, :2] = -1
    calls = [paged_attention(q, k_pages, v_pages, each, lengths, window=3) for each in (table, stale)]
    assert torch.equal(*calls)
    with pytest.raises(ValueError, match="page_table must have ids of 0"):
        paged_attention(q, k_pages, v_pages, stale, lengths, window=10)
