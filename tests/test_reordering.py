"""Calls whose tokens are reordered, so that scattered keys share tiles: results, gradients, and where this is done.

Small layouts are reordered here even if gathering tokens takes longer than it saves.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from blocksparse_flash import BlockLayout, attention, attention_with_lse, dispatch, explain, gathering
from blocksparse_flash.plan import reordering
from blocksparse_flash.plan.layout_plans import Reordered
from blocksparse_flash.plan_format import FINE_TILE, TILE
from blocksparse_flash.runtime import tracing
from tests import test_zoo as zoo
from tests.support.cases import Case
from tests.support.forced_tiles import force_tile

pytest.importorskip("triton", reason="needs Triton")
CPU = torch.device("cpu")
BACKENDS = zoo.BACKENDS[1:]


@pytest.fixture(autouse=True)
def gathering_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reordering, "GATHER_TILES", 0.0)
    monkeypatch.setattr(reordering, "WORTH", 0.95)


def drawn(n: int, share: float, seed: int = 0) -> Tensor:
    return torch.rand(n, generator=torch.Generator().manual_seed(seed)) < share


def vertical_slash(q_len: int = 500, kv_len: int = 555, seeds: tuple[int, ...] = (0,), **axes: int) -> BlockLayout:
    """A causal window and scattered columns, others for each seed: of the heads, and then of the batches."""
    is_vertical = torch.stack([drawn(kv_len, 0.02, seed) for seed in seeds])

    def attends(*at: Tensor) -> Tensor:
        distance = at[-2] + kv_len - q_len - at[-1]
        which = sum(at[:-2], torch.zeros((), dtype=torch.int64))
        return (distance >= 0) & ((distance < 30) | is_vertical[which, at[-1]])

    return BlockLayout.from_predicate(attends, q_len, kv_len, **axes)


def global_tokens(n: int = 500, block_size: int = 128) -> BlockLayout:
    is_global = drawn(n, 0.03)
    return BlockLayout.from_predicate(
        lambda q, kv: ((q - kv).abs() < 20) | is_global[q] | is_global[kv], n, n, block_size=block_size
    )


def dilated(n: int = 512, dilation: int = 4) -> BlockLayout:
    return BlockLayout.from_predicate(
        lambda q, kv: ((q - kv).abs() < 8 * dilation) & ((q - kv) % dilation == 0), n, n, block_size=64
    )


def strided(n: int = 600, stride: int = 32) -> BlockLayout:
    return BlockLayout.from_predicate(
        lambda q, kv: (q >= kv) & ((q - kv < 8) | ((q - kv) % stride == 0)), n, n, block_size=64
    )


def fixed(n: int = 512, stride: int = 64) -> BlockLayout:
    return BlockLayout.from_predicate(
        lambda q, kv: (q >= kv) & ((q // stride == kv // stride) | (kv % stride == stride - 1)), n, n
    )


HEADS = Case("per-head", lambda: vertical_slash(seeds=(0, 0, 1, 2), heads=4))
# all groups have orders of different lengths
BATCHES = Case("per-batch", lambda: vertical_slash(400, 400, seeds=(0, 1, 2, 3, 4), batch=2, heads=4))
CASES = [
    (Case("vertical-slash", vertical_slash), zoo.Call(head_dim=32)),
    (Case("vertical-slash-fine", lambda: vertical_slash().with_block_size(32)), zoo.Call(head_dim=16, v_dim=24)),
    (Case("global", global_tokens), zoo.Call(head_dim=64, kv_heads=1, dtype=torch.bfloat16)),
    (Case("global-causal", global_tokens), zoo.Call(head_dim=16, causal=True, has_sinks=True)),
    (Case("dilated", dilated), zoo.Call(head_dim=24, v_dim=80, kv_heads=2)),
    (Case("strided", strided), zoo.Call(head_dim=32, softcap=2.0)),
    (Case("fixed", fixed), zoo.Call(head_dim=40, dtype=torch.bfloat16)),
    (HEADS, zoo.Call(head_dim=16, kv_heads=2)),
    (HEADS, zoo.Call(head_dim=32)),
    (HEADS, zoo.Call(head_dim=32, kv_heads=1)),
    (BATCHES, zoo.Call(head_dim=16, kv_heads=2)),
]
HOPPER_CALLS = [
    zoo.Call(head_dim=128, kv_heads=1, dtype=torch.bfloat16),
    zoo.Call(head_dim=64, v_dim=128, causal=True, dtype=torch.bfloat16),
]


def order_of(layout: BlockLayout, call: zoo.Call, device: torch.device = CPU) -> Reordered | None:
    heads = max(layout.shape[1], 4 if call.kv_heads < 4 else 2)
    return layout._reordered(device, call.causal, call.kv_heads if call.kv_heads < 4 else heads)


@pytest.mark.sweep(by=lambda case, call, tile: {tile, call.kv_heads, call.causal})
@pytest.mark.parametrize("tile", [TILE, FINE_TILE])
@pytest.mark.parametrize(("case", "call"), CASES, ids=[f"{case}-{call}" for case, call in CASES])
def test_it_is_as_accurate_as_the_reference(case, call, tile, device, monkeypatch):
    assert order_of(case.build(), call) is not None
    force_tile(monkeypatch, tile)
    zoo.assert_backend_is_accurate("triton", case, call, device)


@pytest.mark.skipif("hopper" not in BACKENDS, reason="needs compute capability 9.0")
@pytest.mark.parametrize("tile", [TILE, FINE_TILE])
@pytest.mark.parametrize("call", HOPPER_CALLS, ids=str)
@pytest.mark.parametrize("case", dict.fromkeys(case for case, _ in CASES), ids=str)
def test_hopper_is_as_accurate(case, call, tile, device, monkeypatch):
    assert order_of(case.build(), call) is not None
    force_tile(monkeypatch, tile)
    zoo.assert_backend_is_accurate("hopper", case, call, device)


@pytest.mark.parametrize(("case", "call"), CASES, ids=[f"{case}-{call}" for case, call in CASES])
def test_the_new_layout_has_the_same_pairs(case, call):
    """Position i has query q.order[i] and key kv.order[i]; places without a token have no pairs."""
    layout, found = case.build(), order_of(case.build(), call)
    batch, heads, q_len, kv_len = layout.shape
    mask = layout.to_dense()
    mask = mask.tril(kv_len - q_len) if call.causal else mask
    padded = torch.nn.functional.pad(mask, (0, 1, 0, 1))
    by_q, by_kv = (
        torch.arange(length)[None, None] if by is None else by.order.long()
        for by, length in ((found.q, q_len), (found.kv, kv_len))
    )
    by_q, by_kv = (by.repeat_interleave(heads // by.shape[1], dim=1).expand(batch, heads, -1) for by in (by_q, by_kv))
    axes = torch.arange(batch)[:, None, None, None], torch.arange(heads)[:, None, None]
    assert torch.equal(found.layout.to_dense(), padded[(*axes, by_q[..., :, None], by_kv[..., None, :])])
    assert found.layout.to_dense().sum() == mask.sum()
    for by in (found.q, found.kv):
        if by is not None:
            assert by.order.shape[:2] == by.inverse.shape[:2] in ((1, 1), (batch, call.kv_heads if heads > 1 else 1))
            # each token has one place
            place, token = (by.order >= 0).nonzero()[:, -1], by.order[by.order >= 0]
            axes = (by.order >= 0).nonzero()[:, :2].T
            assert torch.equal(by.inverse[axes[0], axes[1], token.long()].long(), place)
            assert (by.inverse >= 0).sum() == (by.order >= 0).sum()


def run(layout: BlockLayout, tensors: list[Tensor], **options: object) -> list[Tensor]:
    """out, lse, dq, dk, dv."""
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    out, lse = attention_with_lse(*leaves, layout, backend="triton", **options)
    return [out, lse, *torch.autograd.grad((out.sum(), lse.masked_fill(lse.isinf(), 0).sum()), leaves)]


@pytest.mark.parametrize("layout", [vertical_slash(768, 768), dilated()], ids=["vertical-slash", "dilated"])
def test_keys_that_no_query_attends_to_may_hold_nan(layout, device):
    n, block_size = layout.kv_len, layout.block_size
    is_unread = torch.zeros(n, dtype=torch.bool)
    # a tile of keys
    is_unread[128:256] = True
    layout &= BlockLayout.from_predicate(lambda q, kv: ~is_unread[kv] & (q >= 0), n, n, block_size=block_size)
    assert layout._reordered(CPU, False, 1) is not None
    tensors = list(torch.randn(3, 1, 1, n, 16, generator=torch.Generator().manual_seed(0)).to(device))
    clean = run(layout, tensors)
    for tensor in tensors[1:]:
        tensor[:, :, is_unread] = torch.nan
    for name, result, expected in zip(zoo.NAMES, run(layout, tensors), clean, strict=True):
        assert torch.equal(result, expected), name
    assert not clean[3][:, :, is_unread].any() and not clean[4][:, :, is_unread].any()


@pytest.mark.sweep(by=lambda names: {names == "v", len(names)})
@pytest.mark.parametrize("names", ["q", "k", "v", "qv"])
def test_gradients_may_be_missing_or_expanded(names, device):
    layout = global_tokens()
    assert layout._reordered(CPU, False, 1).q is not None
    tensors = dict(
        zip("qkv", torch.randn(3, 1, 2, 500, 16, generator=torch.Generator().manual_seed(0)).to(device), strict=True)
    )
    leaves = [tensors[name].requires_grad_() for name in names]
    results = []
    for backend in ("triton", "reference"):
        out, lse = attention_with_lse(*tensors.values(), layout, backend=backend)
        loss = out.sum() if names == "v" else lse.sum()
        results.append(torch.autograd.grad(loss, leaves, allow_unused=True))
    for actual, expected in zip(*results, strict=True):
        assert (actual is None) == (expected is None) or not (actual if expected is None else expected).any()
        if actual is not None and expected is not None:
            torch.testing.assert_close(actual, expected)


OPTIONS = {
    "dropout_p": 0.1,
    "kv_lengths": torch.tensor([555]),
    "alibi_slopes": torch.tensor([0.5]),
    "block_bias": torch.zeros(0),
    "pair_bias": torch.zeros(1, 1, 500, 555),
}


@pytest.mark.parametrize("option", [None, *OPTIONS])
def test_options_that_depend_on_positions_keep_the_order(option, device, monkeypatch):
    layout = vertical_slash()
    q, k = torch.zeros(1, 1, 500, 16, device=device), torch.zeros(1, 1, 555, 16, device=device)
    value = torch.zeros(layout.capacity) if option == "block_bias" else OPTIONS.get(option)
    options = {} if option is None else {option: value.to(device) if isinstance(value, Tensor) else value}
    gathers = []
    monkeypatch.setattr(gathering, "_launch", lambda *at, run=gathering._launch: gathers.append(at) or run(*at))
    attention(q, k, k, layout, backend="triton", **options)
    assert len(gathers) == (0 if option else 2)
    said = explain(q, k, k, layout, backend="triton", **options).order
    keeps = f"the tokens keep their order; without {option}, k and v would be copied"
    assert said.startswith(keeps if option else "k and v are copied")


@pytest.mark.parametrize("backend", ["eager", "reference"])
def test_other_backends_keep_the_order(backend, monkeypatch):
    monkeypatch.setattr(BlockLayout, "_reordered", None)
    q, k = torch.zeros(1, 1, 500, 16), torch.zeros(1, 1, 555, 16)
    attention(q, k, k, vertical_slash(), backend=backend)
    assert explain(q, k, k, vertical_slash(), backend=backend).order == ""


# torch's own use of torch.jit
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("is_direct", [True, False])
def test_forward_mode_is_refused(is_direct, device, monkeypatch):
    """By the error of other calls, which names the backend that has it."""
    if not is_direct:
        monkeypatch.setattr(tracing, "can_launch_directly", lambda *_: False)
    layout, q, k = vertical_slash(), *(torch.zeros(1, 1, n, 16, device=device) for n in (500, 555))
    assert layout._reordered(device, False, 1) is not None
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match=r"forward-mode differentiation .*reference"):
        attention(q, forward_ad.make_dual(k, torch.ones_like(k)), k, layout, backend="triton")


def test_selected_layouts_keep_their_order(device):
    layout = BlockLayout.from_topk(torch.zeros(1, 1, 32, 1, dtype=torch.int32, device=device), 512, 512, block_size=16)
    assert layout._reordered(device, False, 1) is None and layout._reordered(device, True, 1) is None


def test_explain_counts_what_runs(device):
    layout = global_tokens()
    found = layout._reordered(device, False, 1)
    q = torch.zeros(1, 2, 500, 16, device=device)
    said = explain(q, q, q, layout, backend="triton")
    plain = explain(q, q, q, layout, backend="triton", kv_lengths=torch.tensor([500], device=device))
    assert said.order == (
        "q, k and v are copied into an order in which scattered tokens share tiles: "
        f"{said.flops / plain.flops:.2g} times as many pairs are computed as without that. out and lse are put back"
    )
    assert said.flops < plain.flops and plain.order.startswith("the tokens keep their order; without kv_lengths, ")
    assert f"order        {said.order}" in str(said)
    plan = found.layout.plan("cpu", tile=said.tile[0])
    n_tiles = int(plan.row_records[..., 2].sum())
    assert said.tile_density == n_tiles / (-(-500 // plan.tile)) ** 2
    assert said.metadata_bytes == sum(tensor.nbytes for tensor in plan)
    assert said.flops == 2 * 2 * n_tiles * plan.tile**2 * 32
    # copies of q, k, v, out and lse in their order
    n_q, n_kv = found.q.order.shape[2], found.kv.order.shape[2]
    own_kv, own_q, new_kv, new_q = (4 * 2 * n * 16 for n in (2 * 500, 500, 2 * n_kv, n_q))
    of_rows = sum(
        tensor.nbytes for name, tensor in plan._asdict().items() if name.partition("_")[0] in ("row", "bitmasks")
    )
    # the copies are read again by attention, and its results to put them back
    assert said.forward.reads == own_q + own_kv + new_q + new_kv + of_rows + new_q + 4 * 2 * n_q
    assert said.forward.writes == new_q + new_kv + new_q + 4 * 2 * n_q + own_q + 4 * 2 * 500
    assert said.forward.workspace == 4 * 2 * (n_q * (16 + 16 + 1) + 2 * n_kv * 16)


def test_layouts_without_scattered_tokens_run_as_before(device, monkeypatch):
    """The real limits, on a plain layout: the plan is the layout's own, and nothing is gathered."""
    monkeypatch.undo()
    layout = BlockLayout.from_predicate(lambda q, kv: (q - kv).abs() < 100, 500, 500)
    plans = []
    monkeypatch.setattr(gathering, "gathered", None)
    monkeypatch.setattr("blocksparse_flash.ops.launch_forward", lambda *at, **_: plans.append(at[3]) or (at[0], at[0]))
    q = torch.zeros(1, 1, 500, 16, device=device)
    attention(q, q, q, layout, backend="triton")
    (plan,) = plans
    assert all(a is b for a, b in zip(plan, layout.plan(device, tile=plan[6].shape[1]), strict=True))


@pytest.mark.parametrize("causal", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_compiled_calls_are_reordered_if_the_order_was_made_before(causal, device):
    """By an eager call, which makes no other plan."""
    layout = global_tokens()
    function = torch.compile(
        lambda q, k, v: attention(q, k, v, layout, causal=causal, backend="triton"), fullgraph=True, backend="aot_eager"
    )
    tensors = list(torch.randn(3, 1, 2, 500, 16, generator=torch.Generator().manual_seed(0)).to(device))
    results = []
    for call in (lambda q, k, v: attention(q, k, v, layout, causal=causal, backend="triton"), function):
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        out = call(*leaves)
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    assert layout._reordered(device, causal, 2) is not None
    # sums in another order would have other last bits
    for name, *pair in zip(("out", "dq", "dk", "dv"), *results, strict=True):
        assert torch.equal(*pair), name


def scattered_blocks() -> BlockLayout:
    """Blocks of 16 that fill few of their tiles, so that the plans of all tile sizes differ in worth."""
    attends = drawn(32 * 32, 0.1).view(32, 32)
    return BlockLayout.from_block_mask(attends, 500, 500, block_size=16)


def two_heads() -> BlockLayout:
    """Other columns for each head: query heads that share keys have one order."""
    return vertical_slash(500, 500, (0, 1), heads=2)


@pytest.mark.parametrize("build", [global_tokens, scattered_blocks, two_heads])
def test_calls_of_a_layout_get_what_a_new_one_would_give_them(build, monkeypatch):
    """What a layout has prepared for one call is used by calls of the same kind alone."""
    monkeypatch.undo()
    monkeypatch.setattr(reordering, "GATHER_TILES", 0.0)
    monkeypatch.setattr(reordering, "WORTH", 0.95)
    # kernels for GPUs, which get the plans of a CPU here
    monkeypatch.setattr(dispatch, "_choose_by_specs", lambda backend, *_: backend)
    monkeypatch.setattr(dispatch, "choose", lambda backend, *_: backend)
    given: list[list[Tensor]] = []

    def launch(q: Tensor, k: Tensor, v: Tensor, plan: list[Tensor], *_: object, **__: object) -> tuple[Tensor, Tensor]:
        given.append(plan)
        return q, q[..., 0].float()

    monkeypatch.setattr("blocksparse_flash.ops.launch_forward", launch)
    lengths = torch.tensor([400])
    kinds = [
        {"backend": backend, "causal": causal, **options}
        for backend in ("hopper", "triton")
        for causal in (False, True)
        for options in ({}, {"kv_lengths": lengths}, {"dropout_p": 0.5, "seed": 0})
    ]

    def plans_of(layout: BlockLayout, kind: dict[str, object], sizes: tuple[int, int, int]) -> list[Tensor]:
        head_dim, v_dim, kv_heads = sizes
        q, k, v = (
            torch.zeros(1, heads, 500, dim, dtype=torch.bfloat16)
            for heads, dim in ((2, head_dim), (kv_heads, head_dim), (kv_heads, v_dim))
        )
        given.clear()
        attention(q, k, v, layout, **kind)
        (plan,) = given
        return plan

    expected = {
        (number, sizes): plans_of(build(), kind, sizes)
        for number, kind in enumerate(kinds)
        for sizes in ((64, 64, 2), (64, 64, 1), (128, 128, 2), (256, 256, 2), (64, 256, 2), (256, 64, 2))
    }
    # else the test would not notice calls that share
    assert len({tuple(map(tuple, (tensor.shape for tensor in plan))) for plan in expected.values()}) > 2
    shared = build()
    for (number, sizes), plan in [*expected.items(), *reversed(expected.items())]:
        found = plans_of(shared, kinds[number], sizes)
        assert len(found) == len(plan), (number, sizes)
        assert all(torch.equal(a, b) for a, b in zip(found, plan, strict=True)), (number, sizes)
