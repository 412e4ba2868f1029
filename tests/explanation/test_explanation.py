"""The counts, predictions and advice of explain."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import masks
from blocksparse_flash import BlockLayout, explain, explanation
from blocksparse_flash.explanation import cost, memory, prediction, scheduling
from blocksparse_flash.explanation.call import Call
from blocksparse_flash.explanation.prediction import Device
from blocksparse_flash.validation import ScoreOptions
from tests.support import cases

H200 = Device("NVIDIA H200", (9, 0), 132, 1980.0, 4300.0)
A100 = Device("NVIDIA A100-SXM4-80GB", (8, 0), 108, 1410.0, 1800.0)
H100 = Device("NVIDIA H100 80GB HBM3", (9, 0), 132, 1980.0, 2900.0)


class OnGpu(Call):
    """A call with tensors on the host that counts as a call on a GPU."""

    has_kernels = True  # type: ignore[assignment]


def call(
    q_shape: tuple[int, ...] = (1, 16, 16384, 128),
    *,
    layout: BlockLayout | None = None,
    kv_heads: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    **changes: Any,
) -> Call:
    """A call on a GPU; its tensors are expanded single numbers, and count as loadable by TMA."""
    batch, heads, length, head_dim = q_shape
    q = torch.empty(q_shape, dtype=dtype, device="meta")
    k = torch.empty(batch, kv_heads or heads, length, head_dim, dtype=dtype, device="meta")
    options = {
        "q": q, "k": k, "v": k, "layout": layout, "causal": False, "has_kv_lengths": False, "dropout_p": 0.0,
        "deterministic": False, "dtype": dtype, "backend": "triton",
    }  # fmt: skip
    return OnGpu(**{**options, **changes})


def mods(**given: Any) -> ScoreOptions:
    return ScoreOptions(**{**dict.fromkeys(ScoreOptions._fields), **given})


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Explains a call as if it were on a GPU."""

    def explained(gpu_call: Call, device: Device | None = H200) -> explanation.Explanation:
        monkeypatch.setattr(cost, "device_of", lambda _: device)
        return explanation.explained(gpu_call, reason="by name", others=(), determinism="none")

    return explained


@functools.cache
def window(length: int = 16384, tokens: int = 512) -> BlockLayout:
    return masks.local(length, window=tokens)


# ---- counts ----


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("case", cases.LAYOUTS, ids=str)
def test_tiles_and_pairs_are_counted_as_in_the_mask(case: cases.Case, causal: bool) -> None:
    layout = case.build()
    batch, heads = 2, 4
    q, k = torch.zeros(batch, heads, layout.q_len, 16), torch.zeros(batch, heads, layout.kv_len, 16)
    mask = layout.to_dense().expand(batch, heads, -1, -1)
    if causal:
        mask = mask.tril(layout.kv_len - layout.q_len)
    n_tiles = n_partial = 0
    for head in mask.flatten(0, 1):
        for rows in head.split(128):
            for tile in rows.split(128, dim=1):
                n_tiles += bool(tile.any())
                n_partial += bool(tile.any()) and int(tile.sum()) < 128 * 128
    found = explain(q, k, k, layout, causal=causal)
    grid = batch * heads * -(-layout.q_len // 128) * -(-layout.kv_len // 128)
    assert found.tile_density == pytest.approx(n_tiles / grid)
    assert found.partial_share == pytest.approx(n_partial / n_tiles if n_tiles else 0.0)
    assert found.fill == pytest.approx(int(mask.sum()) / (n_tiles * 128 * 128) if n_tiles else 1.0)
    assert found.flops == 4 * n_tiles * 128 * 128 * 16 and found.backward_flops == 10 * n_tiles * 128 * 128 * 16
    every = explain(q, k, k, layout, causal=causal, backend="reference")
    assert every.fill == pytest.approx(int(mask.sum()) / mask.numel()) and every.tile_density == 1.0


@pytest.mark.parametrize(("q_len", "kv_len", "causal"), [(100, 300, False), (100, 300, True), (300, 100, True)])
def test_pairs_are_counted_without_a_layout(q_len: int, kv_len: int, causal: bool) -> None:
    q, k = torch.zeros(1, 2, q_len, 16), torch.zeros(1, 2, kv_len, 16)
    mask = torch.ones(q_len, kv_len, dtype=torch.bool)
    mask = mask.tril(kv_len - q_len) if causal else mask
    found = explain(q, k, k, causal=causal)
    computed = found.tile_density * -(-q_len // 128) * -(-kv_len // 128) * 128 * 128
    assert found.fill == pytest.approx(int(mask.sum()) / computed)


def test_balance_has_the_longest_and_the_mean_line() -> None:
    # 8 tile rows: the first attends to all 8, each other to itself
    layout = BlockLayout.from_blocks([0] * 8 + [*range(1, 8)], [*range(8), *range(1, 8)], 1024, 1024, block_size=128)
    q, k = torch.zeros(1, 4, 1024, 16), torch.zeros(1, 2, 1024, 16)
    balance = explain(q, k, k, layout).balance
    # a KV head iterates over a tile column for both of its query heads: two tiles in the first column, four in others
    assert balance == cost.Balance(8, 15 / 8, 4, 2 * 15 / 8, None, None, None)


def test_selections_on_the_device_are_counted() -> None:
    layout = BlockLayout.from_topk(torch.tensor([0, 1, 1, -1]).reshape(1, 1, 2, 2), 256, 256, block_size=128)
    q = torch.zeros(1, 2, 256, 16)
    found = explain(q, q, q, layout)
    assert (found.tile_density, found.partial_share, found.fill) == (3 / 4, 0.0, 1.0)
    assert found.balance[:4] == (2, 1.5, 2, 1.5)


def test_meta_tensors_are_counted_but_not_predicted() -> None:
    q = torch.empty(1, 2, 1024, 16, device="meta")
    found = explain(q, q, q, masks.local(1024, window=100), causal=True)
    assert found.tile_density < 0.3 and "meta" in found.unpredicted


# ---- time ----


def test_a_measured_gpu_has_a_prediction_and_a_dense_one(on: Any) -> None:
    found = on(call(layout=window()))
    predicted = found.prediction
    assert predicted is not None and predicted.caveats == () and found.unpredicted == ""
    assert (
        0.1 < predicted.forward_ms < predicted.backward_ms < 3 and predicted.dense_forward_ms > 8 * predicted.forward_ms
    )
    # the tiles of the window are of 64 x 64, those of the dense call of 128 x 128
    assert found.tile == (64, 64)
    dense = on(call()).prediction
    assert (predicted.dense_forward_ms, predicted.dense_backward_ms) == (dense.forward_ms, dense.backward_ms)
    assert 1.0 <= found.balance.forward < 1.3 and found.balance.n_sms == 132
    report = str(found)
    assert f"time         forward {predicted.forward_ms:.2g} ms, backward {predicted.backward_ms:.2g} ms" in report
    assert "forward      143.6 GFLOP, reads 201.4 MB, writes 68.16 MB, workspace 0 B" in report
    assert "times as long" in report and "measurements on NVIDIA H200" in report and "not calibrated" not in report
    assert "on 132 SMs" in report


def test_dense_is_not_compared_with_itself(on: Any) -> None:
    found = on(call())
    assert found.prediction.dense_forward_ms == found.prediction.forward_ms and "   dense" not in str(found)


def test_no_time_is_predicted_without_measurements(on: Any) -> None:
    for gpu_call, device, why in (
        (call(layout=window()), A100, "compute capability 8.0"),
        (call(), H100._replace(clock=0.0), "does not report clock and bandwidth"),
        (call(), H100._replace(bandwidth=0.0), "does not report clock and bandwidth"),
        (call((1, 16, 16384, 256)), H200, "head dimension of 256"),
        (call(dtype=torch.float32), H200, "torch.float32 was not measured"),
        (call(dropout_p=0.1), H200, "dropout was not measured"),
        (call(backend="hopper", deterministic=True), H200, "launch for dq alone"),
        (call((0, 16, 16384, 128)), H200, "nothing to compute"),
        (call((1, 16, 64, 128)), H200, "few queries"),
    ):
        found = on(gpu_call, device)
        assert found.prediction is None and why in found.unpredicted
        assert f"time         not predicted: {found.unpredicted}" in str(found)
    q = torch.zeros(1, 2, 64, 16)
    assert explain(q, q, q).unpredicted == '"eager" on cpu was not measured'


def test_predictions_near_a_measurement_have_caveats(on: Any) -> None:
    for gpu_call, device, why in (
        (
            call(layout=window()),
            H100,
            "the model was not fitted to this NVIDIA H100 80GB HBM3: scaled from NVIDIA H200",
        ),
        (call((1, 16, 16384, 32)), H200, "a head dimension of 32 was not measured: taken as 64"),
        (call(has_kv_lengths=True), H200, "as if all were kv_len"),
        (call((1, 16, 16384, 100)), H200, "TMA cannot load q and k and v"),
    ):
        found = on(gpu_call, device)
        assert any(why in caveat for caveat in found.prediction.caveats), found.prediction.caveats
        assert f"not calibrated: {found.prediction.caveats[0]}" in str(found)


@pytest.fixture
def device_with(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """cost.device_of an H200 with further properties."""
    device_of = cost.device_of

    def read(**properties: int) -> Device | None:
        h200 = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, **properties)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: h200)
        device_of.cache_clear()
        return device_of(torch.device("cuda", 0))

    yield read
    device_of.cache_clear()


def test_device_of_reads_the_properties_of_a_gpu(device_with: Any) -> None:
    found = device_with(clock_rate=1_980_000, memory_clock_rate=3_201_000, memory_bus_width=6144)
    assert found is not None and found[:4] == H200[:4] and found.bandwidth == pytest.approx(4300, rel=0.01)
    assert cost.device_of(torch.device("cpu")) is None


def test_a_gpu_without_clock_and_bandwidth_is_still_predicted(device_with: Any, on: Any) -> None:
    found = device_with()
    assert found == H200._replace(clock=0.0, bandwidth=0.0)
    # a GPU that was measured needs neither
    assert on(call(), found).prediction == on(call(), H200).prediction


def test_dq_is_added_by_tile_columns_of_hopper_alone() -> None:
    assert memory.adds_dq(call(backend="hopper"))
    for other in (
        call(),
        call(backend="hopper", deterministic=True),
        call(backend="hopper", scores=mods(alibi_slopes=torch.ones(16, requires_grad=True))),
        call((1, 2, 512, 256), backend="hopper"),
        call(backend="hopper", layout=masks.random(16384, density=0.1, block_size=64, seed=0)),
    ):
        assert not memory.adds_dq(other)


def test_heads_of_a_group_add_to_dk_and_dv() -> None:
    grouped = call((1, 32, 8192, 128), backend="hopper", causal=True, kv_heads=8)
    plain = call((1, 32, 8192, 128), backend="hopper", causal=True)
    assert memory.varying_gradients(grouped) == "dq, dk and dv" and memory.varying_gradients(plain) == "dq"
    assert memory.varying_gradients(call((1, 32, 8192, 128))) == ""
    # float32 sums of dk and dv
    assert memory.backward(grouped, 132).workspace - memory.backward(plain, 132).workspace == 4 * 8 * 8192 * 256
    _, backward = cost.programs(grouped, 132)
    assert np.array_equal(backward.cols.tiles, cost.programs(plain, 132)[1].cols.tiles)


def test_dq_of_few_long_tile_columns_is_added_by_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Call, "n_sms", 132)
    layout = masks.random((16384, 1024), density=0.5, block_size=128, seed=0)
    q, k = (torch.empty(1, heads, length, 128, dtype=torch.bfloat16) for heads, length in ((64, 16384), (4, 1024)))
    of_columns = Call(q, k, k, layout, False, False, 0.0, False, q.dtype, "hopper")
    assert memory.has_separate_dq(of_columns) and memory.varying_gradients(of_columns) == "dk and dv"


# all of 9 heads are interleaved
@pytest.mark.parametrize("heads", [8, 9])
@pytest.mark.parametrize("layout", [None, "causal"])
def test_causal_lines_of_several_heads_are_interleaved(heads: int, layout: str | None) -> None:
    found = None if layout is None else masks.build(layout, 8192, block_size=128)
    causal = call((1, heads, 8192, 128), backend="hopper", causal=True, layout=found)
    for one, other in zip(cost.programs(causal, 132)[1], causal.sides, strict=True):
        assert sorted(one.tiles) == sorted(other.tiles)
    in_turn = scheduling.makespan(cost.programs(causal, 132)[1].cols.tiles, 132)
    assert in_turn < scheduling.makespan(causal.sides.cols.tiles, 132)


def test_sums_over_heads_with_a_layout_count_its_tiles() -> None:
    """The tiles of the layout, by tile column of each query head, not those of a call without a layout."""
    layout = masks.build("local(window=2048)", 8192, block_size=128)
    grouped = call((1, 32, 8192, 128), backend="hopper", layout=layout, kv_heads=8)
    assert memory.sums_dkdv(grouped, 132)
    _, backward = cost.programs(grouped, 132)
    assert (
        backward.cols.tiles.sum() == grouped.sides.cols.tiles.sum() == 32 * layout.plan("cpu").row_records[..., 2].sum()
    )


# ---- advice ----


def advised(words: str, advice: tuple[str, ...]) -> bool:
    return any(words in sentence for sentence in advice)


def scattered(length: int = 16384, density: float = 0.125) -> BlockLayout:
    return masks.random(length, density=density, seed=0, block_size=16)


def few_rows() -> BlockLayout:
    """One block of 128 queries that attends to everything, and a diagonal."""
    n = 16384 // 128
    return BlockLayout.from_blocks([0] * n + [*range(1, n)], [*range(n), *range(1, n)], 16384, 16384, block_size=128)


# words -> a call whose advice contains them
ADVICE = {
    "in blocks of 16 x 16": lambda: call((1, 16, 2048, 128), layout=scattered(2048)),
    "dense attention is no slower": lambda: call((1, 16, 2048, 128), layout=scattered(2048)),
    "the layout never attends to the future": lambda: call((1, 16, 2048, 128), layout=masks.causal(2048), causal=True),
    "100% of the tiles of dense attention are computed": lambda: call(
        (1, 16, 2048, 128), layout=masks.causal(2048), causal=True, dtype=torch.float32
    ),
    "head_dim 80 is computed as 128: 38%": lambda: call((1, 16, 2048, 80)),
    "v_head_dim 80 is computed as 96: 17%": lambda: call((1, 16, 2048, 80), backend="hopper"),
    "head_dim 80 is computed as 128 in the forward and 96 in the backward: 38% and 17%": lambda: call(
        (1, 16, 2048, 80), v=torch.empty(1, 16, 2048, 128, dtype=torch.bfloat16, device="meta"), backend="hopper"
    ),
    "head_dim 160 is computed as 192: 17%": lambda: call((1, 16, 2048, 160), backend="hopper"),
    "rows of q and k and v are not a multiple of 16 bytes": lambda: call((1, 16, 2048, 100)),
    "float32 products are computed exactly": lambda: call((1, 16, 2048, 64), dtype=torch.float32),
    "8 blocks of 128 queries leave some of 132 SMs idle": lambda: call((1, 2, 512, 64)),
    "the longest tile row has 128 tiles": lambda: call((1, 4, 16384, 128), layout=few_rows()),
    "each head of k and v is repeated 2 times": lambda: with_keys(repeated()),
    "each head of k and v is repeated 4 times": lambda: with_keys(
        torch.rand(1, 1, 2048, 64).half().expand(1, 4, -1, -1)
    ),
    "softcap takes 2.00 times as long": lambda: call(backend="hopper", scores=mods(softcap=30.0)),
    "alibi_slopes takes 1.13 times as long": lambda: call(backend="hopper", scores=mods(alibi_slopes=torch.ones(16))),
    "alibi_slopes takes 1.09 times as long": lambda: call(
        backend="hopper", causal=True, scores=mods(alibi_slopes=torch.ones(16))
    ),
    "alibi_slopes.detach()": lambda: call(
        backend="hopper", scores=mods(alibi_slopes=torch.ones(16, requires_grad=True))
    ),
    'pair_bias runs on "triton"': lambda: call(scores=mods(pair_bias=torch.zeros(1, 1, 1, 1))),
    "multiples of 128 tokens, got 64 x 64": lambda: call(
        layout=masks.local(16384, window=512, block_size=64), scores=mods(block_bias=torch.zeros(1))
    ),
    "block_bias takes 1.05 times as long in the forward and 1.05 in the backward": lambda: call(
        backend="hopper", layout=window(), scores=mods(block_bias=torch.zeros(1))
    ),
    "block_bias takes 1.05 times as long in the forward and 1.11 in the backward": lambda: call(
        backend="hopper", layout=window(), scores=mods(block_bias=torch.zeros(1, requires_grad=True))
    ),
    "deterministic=True takes about 1.2 times": lambda: call(backend="hopper", deterministic=True),
    "strides or the address of k and v": lambda: with_keys(torch.rand(1, 4, 2048, 68).half()[..., 1:65]),
}  # fmt: skip


def test_a_pair_bias_is_read_and_its_gradient_written() -> None:
    q = torch.zeros(1, 2, 256, 16)
    bias = torch.zeros(1, 2, 256, 256, dtype=torch.bfloat16, requires_grad=True)
    plain, found = (explain(q, q, q, pair_bias=each) for each in (None, bias))
    assert (found.forward.reads - plain.forward.reads, found.forward.writes) == (bias.nbytes, plain.forward.writes)
    assert found.backward.reads - plain.backward.reads == found.backward.writes - plain.backward.writes == bias.nbytes
    fixed = explain(q, q, q, pair_bias=bias.detach()).backward
    assert (fixed.reads, fixed.writes) == (found.backward.reads, plain.backward.writes)


@pytest.mark.parametrize(("backend", "n_sides"), [("eager", 1), ("reference", 0)])
def test_a_block_bias_is_read_with_its_index_and_its_gradient_written(backend: str, n_sides: int) -> None:
    q, layout = torch.zeros(1, 2, 256, 16), masks.local(256, window=40, block_size=32)
    bias = torch.zeros(2, layout.capacity, requires_grad=True)
    plain, fixed, found = (
        explain(q, q, q, layout, backend=backend, block_bias=each) for each in (None, bias.detach(), bias)
    )
    index = layout.bias_index("cpu")
    of_index = [n_sides * index.rows.nbytes, n_sides * index.row_places.nbytes]
    assert fixed.forward.reads - plain.forward.reads == bias.nbytes + of_index[0]
    assert fixed.backward.reads - plain.backward.reads == bias.nbytes + of_index[0]
    assert found.backward.reads - fixed.backward.reads == of_index[1]
    assert fixed.backward.writes == plain.backward.writes == found.backward.writes - bias.nbytes
    assert found.metadata_bytes - plain.metadata_bytes == n_sides * sum(tensor.nbytes for tensor in index)


def repeated() -> torch.Tensor:
    return torch.rand(1, 2, 2048, 64).half().repeat_interleave(2, dim=1)


def with_keys(k: torch.Tensor) -> Call:
    q = torch.zeros(1, 4, 2048, 64, dtype=torch.float16)
    return call(q=q, k=k, v=k, dtype=torch.float16)


def test_determinism_that_costs_nothing_has_no_advice(on: Any) -> None:
    for free in (call(deterministic=True), call((1, 4, 2048, 256), backend="hopper", deterministic=True)):
        assert not advised("deterministic", on(free).advice)


@pytest.mark.parametrize("words", ADVICE)
def test_advice_is_given_where_it_applies(on: Any, words: str) -> None:
    found = on(ADVICE[words]())
    assert advised(words, found.advice), found.advice
    assert str(found).count("advice       ") == len(found.advice)


def test_a_good_call_needs_no_advice(on: Any) -> None:
    for gpu_call in (
        call(layout=window()),
        call(layout=window(), causal=True),
        call(causal=True),
        call((4, 16, 4096, 64), kv_heads=4),
        call((1, 16, 4096, 64), layout=masks.causal(4096)),
        call(scores=mods(softcap=30.0, alibi_slopes=torch.ones(16))),
        call(backend="hopper", scores=mods(sinks=torch.ones(16))),
    ):
        assert on(gpu_call).advice == ()


# all heads differ; all are zero, which proves nothing; some are equal, but not in groups
@pytest.mark.parametrize("heads", [[0, 1, 2, 3], [4, 4, 4, 4], [0, 0, 1, 0], [0, 1, 1, 2]], ids=str)
def test_different_heads_are_not_called_repeated(on: Any, heads: list[int]) -> None:
    k = torch.cat([torch.rand(1, 4, 2048, 64), torch.zeros(1, 1, 2048, 64)], dim=1).half()[:, heads]
    assert not advised("is repeated", on(with_keys(k)).advice)


def test_advice_depends_on_the_gpu(on: Any) -> None:
    strided = ADVICE["strides or the address of k and v"]()
    # no TMA before sm90
    assert not advised("strides", on(strided, A100).advice)
    assert advised("the backend copies them", on(dataclasses.replace(strided, backend="hopper")).advice)
    few = ADVICE["8 blocks of 128 queries leave some of 132 SMs idle"]()
    assert not advised("SMs", on(few, A100._replace(n_sms=8)).advice)


def test_the_table_is_read_from_the_package() -> None:
    assert {one.backend for one in prediction.calibrations()} <= {"triton", "triton-64", "hopper", "hopper-64"}
