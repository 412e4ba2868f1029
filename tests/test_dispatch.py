"""The choice of a backend and of its kernels, with reasons."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch

from blocksparse_flash import BlockLayout, dispatch, ops
from blocksparse_flash.functional import attention, explain
from blocksparse_flash.plan_format import tile_of
from blocksparse_flash.runtime.tensor_spec import specs_of
from tests.support.small_call import good_call


def test_auto_on_the_cpu_is_eager():
    explanation = explain(**good_call())
    assert explanation.backend == "eager"
    assert torch.equal(attention(**good_call()), attention(**good_call(), backend="eager"))


@pytest.fixture
def on_gpu(monkeypatch):
    """A context that pretends that GPU 0 has some compute capability and Triton some version."""
    triton = pytest.importorskip("triton", reason="needs Triton")

    @contextlib.contextmanager
    def pretend(capability, version="3.7.1", interpret=False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
        monkeypatch.setattr(triton, "__version__", version)
        monkeypatch.setattr(triton.knobs.runtime, "interpret", interpret)
        dispatch._why_not_on_gpu.cache_clear()
        yield
        dispatch._why_not_on_gpu.cache_clear()

    yield pretend
    dispatch._why_not_on_gpu.cache_clear()


@pytest.mark.parametrize(
    ("capability", "dtype", "expected"),
    [
        ((9, 0), torch.bfloat16, "hopper"),
        ((9, 0), torch.float32, "triton"),
        ((10, 0), torch.bfloat16, "triton"),
        ((8, 0), torch.float16, "triton"),
        ((12, 1), torch.float32, "triton"),
        ((9, 0), torch.float64, "eager"),
        ((7, 5), torch.float16, "eager"),
    ],
)
def test_auto_on_a_gpu_depends_on_capability_and_dtype(on_gpu, capability, dtype, expected):
    with on_gpu(capability):
        device = torch.device("cuda", 0)
        assert dispatch.choose("auto", device, dtype) == expected
        if expected == "eager":
            with pytest.raises(ValueError, match=r'"triton" cannot run this call: it needs .*would use "eager"'):
                dispatch.choose("triton", device, dtype)
        else:
            assert dispatch.choose("triton", device, dtype) == "triton"
            assert dispatch.choose("eager", device, dtype) == "eager"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"capability": (10, 0)}, "it needs compute capability 9.0, this GPU has 10.0"),
        ({"version": "3.10.0"}, "it supports Triton 3.6, 3.7, 3.8, 3.9, this is 3.10.0"),
        ({"interpret": True}, "interpreter"),
        ({"has_dropout": True}, "it has no dropout"),
        (
            {"bias_blocks": (128, 64)},
            "its block_bias needs blocks whose sides are multiples of 128 tokens, got 128 x 64",
        ),
        ({"bias_blocks": (16, 16), "has_pair_bias": True}, "it has no pair_bias"),
        ({"has_pair_bias": True}, "it has no pair_bias"),
        ({"dtype": torch.float32}, "it needs float16 or bfloat16, got torch.float32"),
        ({"start": 1}, "strides and an address of k that are multiples of 16 bytes"),
        ({"stride": 65}, "strides and an address of k that are multiples of 16 bytes"),
    ],
    ids=str,
)
def test_hopper_refuses_unsupported_calls_with_a_reason(on_gpu, change, words):
    """With tensors on the CPU, since only the choice is tested."""
    dtype = change.get("dtype", torch.bfloat16)
    q = torch.zeros(1, 1, 8, 64, dtype=dtype)
    k = torch.zeros(600, dtype=dtype)[change.get("start", 0) :].as_strided(q.shape, (1, 1, change.get("stride", 64), 1))
    with on_gpu(change.get("capability", (9, 0)), change.get("version", "3.7.1"), change.get("interpret", False)):
        device = torch.device("cuda", 0)
        options = {name: change[name] for name in ("has_dropout", "bias_blocks", "has_pair_bias") if name in change}
        unfit = dispatch.why_not_hopper((q, k, q), dtype, dispatch.missing_option(**options))
        with pytest.raises(ValueError, match=f'"hopper" cannot run this call: .*{words}.*would use "triton"'):
            dispatch.choose("hopper", device, dtype, unfit)
        assert dispatch.choose("auto", device, dtype, unfit) == "triton"


@pytest.mark.parametrize(
    ("shape", "strides"),
    # (batch, length, heads, 72) in memory, and a batch of 1 with any stride; rows of 6 bytes; the largest head_dim
    [((1, 2, 8, 64), (3, 72, 144, 1)), ((1, 2, 8, 3), (48, 24, 3, 1)), ((1, 1, 8, 256), (2048, 2048, 256, 1))],
    ids=str,
)
def test_hopper_accepts_all_strides_that_tma_can_load(on_gpu, shape, strides):
    k = torch.zeros(5000, dtype=torch.bfloat16).as_strided(shape, strides, 8)
    with on_gpu((9, 0)):
        device = torch.device("cuda", 0)
        unfit = dispatch.why_not_hopper((k, k, k), torch.bfloat16)
        assert unfit is None
        assert dispatch.choose("hopper", device, torch.bfloat16, unfit) == "hopper"


def test_reasons_on_a_hopper_gpu(on_gpu):
    device, half = torch.device("cuda", 0), torch.bfloat16
    with on_gpu((9, 0)):
        assert dispatch._why("triton", device) == "q is on cuda:0, which runs the Triton kernels"
        assert "compute capability 9.0" in dispatch._why("hopper", device)
        assert "slower than the kernels for this GPU" in dispatch._why_not("triton", device, half, False, None)
        assert "was asked for by name" in dispatch._why_not("hopper", device, half, True, None)
    with on_gpu((9, 0), version="3.10.0"):
        assert "this is 3.10.0" in dispatch._why_not("hopper", device, half, False, None)
        assert dispatch.choose("auto", device, half) == "triton"


class OnGpu(torch.Tensor):
    """A CPU tensor that reports GPU 0 as its device."""

    is_cuda = True
    device = torch.device("cuda", 0)  # type: ignore[assignment]


def decide(backend, q, k, *, dtype=torch.bfloat16, is_traced=False, **options):
    specs = None if is_traced else specs_of(q, k, k)
    dispatch._choose_by_specs.cache_clear()
    q, k = q.as_subclass(OnGpu), k.as_subclass(OnGpu)
    return dispatch.decide(backend, q, k, k, dtype, specs, dispatch.missing_option(**options))


@pytest.fixture
def large():
    return torch.zeros(131072 * 65, dtype=torch.bfloat16).as_strided((1, 1, 131072, 64), (0, 0, 64, 1))


def test_traced_calls_leave_auto_to_the_operator(on_gpu, large):
    with on_gpu((9, 0)):
        assert decide("auto", large, large, is_traced=True) == "auto"
        assert decide("hopper", large, large, is_traced=True) == "hopper"
        assert decide("auto", large, large, is_traced=True, has_dropout=True) == "triton"
        assert decide("auto", large, large, is_traced=True, dtype=torch.float32) == "triton"
        assert decide("auto", large, large) == decide("hopper", large, large) == "hopper"
        assert decide("auto", large, large, bias_blocks=(64, 128)) == "triton"
        assert decide("auto", large, large, bias_blocks=(128, 256)) == "hopper"
        assert decide("auto", large, large, has_pair_bias=True) == "triton"
        assert decide("auto", large, large, has_pair_bias=True, is_traced=True) == "triton"
    with on_gpu((8, 0)):
        assert decide("auto", large, large, is_traced=True) == decide("auto", large, large) == "triton"


@pytest.mark.parametrize(
    ("length", "stride", "expected"),
    # 2 * 65536 rows of 64 are just enough; one row less; rows that are not aligned to 16 bytes
    [(65536, 64, "hopper"), (65535, 64, "triton"), (65536, 65, "triton")],
)
def test_auto_chooses_hopper_where_it_pays(on_gpu, large, length, stride, expected):
    q = large.as_strided((1, 1, length, 64), (0, 0, stride, 1))
    assert dispatch.resolve(q, q, q, 128) == expected
    # only this backend has gathered tiles
    assert dispatch.resolve(q, q, q, 16) == "hopper"
    with on_gpu((9, 0)):
        assert decide("auto", q, q) == expected


@pytest.mark.parametrize(("q_len", "expected"), [(64, "triton"), (65, "hopper")])
def test_few_queries_run_on_triton_for_any_number_of_keys(on_gpu, q_len, expected):
    k = torch.zeros(1, 1, 262144, 64, dtype=torch.bfloat16)
    assert dispatch.resolve(k[:, :, :q_len], k, k, 64) == expected
    with on_gpu((9, 0)):
        assert decide("auto", k[:, :, :q_len], k) == expected


@pytest.mark.parametrize("deterministic", [False, True])
def test_determinism_reaches_the_backward_of_hopper(deterministic):
    pytest.importorskip("triton", reason="needs Triton")
    backward = ops._kernels("hopper", deterministic)[1]
    assert isinstance(backward, functools.partial) == deterministic
    for name in ("triton", "eager"):
        assert ops._kernels(name, deterministic) == ops._kernels(name, False)


def test_only_additions_to_dq_are_not_bitwise_reproducible():
    assert "except for dq" in dispatch.explained_determinism(False, varying="dq")
    for deterministic in (True, False, None):
        found = dispatch.explained_determinism(deterministic, varying="")
        assert found.startswith("bitwise identical in every run, forward and backward")


def test_slopes_have_a_gradient_if_autograd_sees_them():
    slopes = torch.ones(2, requires_grad=True)
    assert dispatch.has_gradient(slopes)
    assert not dispatch.has_gradient(slopes.detach()) and not dispatch.has_gradient(None)
    with torch.no_grad():
        assert not dispatch.has_gradient(slopes)


@pytest.mark.parametrize(("backend", "block_size", "expected"), [
    ("hopper", 64, 64), ("auto", 64, 64), ("hopper", 128, 128), ("triton", 64, 64), ("eager", 64, 128),
])  # fmt: skip
def test_fine_layouts_get_a_plan_of_fine_tiles(monkeypatch, backend, block_size, expected):
    """Which kernels run follows from the plan; "auto" is a traced call on a Hopper GPU."""
    plans = []
    monkeypatch.setattr(dispatch, "decide", lambda *_, **__: backend)
    monkeypatch.setattr(ops, "attention", lambda q, k, v, plan, *_, **__: plans.append(plan) or (q, q))
    q = torch.zeros(1, 16, 1024, 64)
    layout = BlockLayout.from_blocks(list(range(8)), list(range(8)), 1024, 1024, block_size=block_size)
    attention(q, q, q, layout)
    (plan,) = plans
    assert tile_of(plan) == expected


def test_a_bias_of_blocks_has_tiles_of_128(monkeypatch):
    """Its tables are made for them."""
    plans = []
    monkeypatch.setattr(dispatch, "decide", lambda *_, **__: "triton")
    monkeypatch.setattr(ops, "attention", lambda q, k, v, plan, *_, **__: plans.append(plan) or (q, q))
    q, layout = torch.zeros(1, 1, 1024, 64), BlockLayout.from_blocks([0], [0], 1024, 1024, block_size=64)
    attention(q, q, q, layout, softcap=3.0)
    attention(q, q, q, layout, block_bias=torch.zeros(1, 1, 1))
    assert [tile_of(plan) for plan in plans] == [64, 128]


def test_fine_tiles_of_hopper_have_kernels_of_their_own():
    pytest.importorskip("triton", reason="needs Triton")
    forward, backward = ops._kernels("hopper", False, 64)
    assert (forward.__module__.split(".")[-1], backward.__module__.split(".")[-1]) == ("fine_forward", "fine_backward")
    assert ops._kernels("triton", False, 64) == ops._kernels("triton", False, 128)


def test_without_triton_auto_is_eager_and_says_why(monkeypatch):
    monkeypatch.setattr(dispatch.importlib.util, "find_spec", lambda name: None)
    dispatch._why_not_on_gpu.cache_clear()
    try:
        assert dispatch.choose("auto", torch.device("cuda", 0), torch.float16) == "eager"
        with pytest.raises(ValueError, match="Triton is not installed"):
            attention(**good_call(), backend="triton")
    finally:
        dispatch._why_not_on_gpu.cache_clear()
