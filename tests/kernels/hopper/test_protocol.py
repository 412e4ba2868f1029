"""The Hopper kernels under many orders of events, on a simulator of their synchronization; needs no GPU.

The layouts and calls of test_zoo.py and every launch configuration are accurate, each under another order of events.
test_seeded_faults.py shows that faults are detected. gluon_simulator.py has the simulator.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")

import masks
from blocksparse_flash import BlockLayout, dispatch, ops
from blocksparse_flash.kernels.hopper.backward import Config as BackwardConfig
from blocksparse_flash.kernels.hopper.forward import Config as ForwardConfig
from blocksparse_flash.kernels.hopper.forward import three_warpgroups_pay
from blocksparse_flash.plan import gathered_builder
from blocksparse_flash.plan_format import FINE_TILE, GATHERED_TILE
from blocksparse_flash.plan_format import TILE as TILE_SIDE
from tests import test_zoo as zoo
from tests.kernels.triton import test_combine_splits
from tests.support import cases
from tests.support.forced_tiles import force_tile
from tests.support.gluon_simulator import Simulation

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="needs Triton's interpreter: a GPU runs the kernels")

CPU = torch.device("cpu")
LAYOUTS = [*cases.LAYOUTS, *zoo.DENSE]
CALLS = [call for call in zoo.HOPPER_CALLS if max(call.head_dim, call.v_dim or 0) <= 128]
WIDE_HEAD_CALLS = [call for call in zoo.HOPPER_CALLS if call not in CALLS]
(WINDOW,) = [case for case in cases.LAYOUTS if case.name == "window"]
# has tile rows with several full tiles
(CAUSAL_LAYOUT,) = [case for case in cases.LAYOUTS if case.name == "causal"]
BFLOAT16 = torch.bfloat16


def mixed(tile: int) -> BlockLayout:
    """Random blocks: partial and full tiles, up to 5 in a tile row or column, different in 4 heads; an empty row."""
    mask = (
        torch.rand(1, 4, 10, 10, generator=torch.Generator().manual_seed(0))
        < torch.tensor([0.5, 0.7, 0.85, 0.95])[:, None, None]
    )
    mask[:, :, 4:6] = False
    return BlockLayout.from_block_mask(mask, 75 * tile // 16, 5 * tile, block_size=tile // 2)


MIXED_FINE = cases.Case("mixed-fine", lambda: mixed(FINE_TILE))


def long_lines() -> BlockLayout:
    """Another long tile row and tile column in each of 4 heads."""
    mask = torch.eye(6, dtype=torch.bool).repeat(1, 4, 1, 1)
    for head in range(4):
        mask[0, head, 5 - head], mask[0, head, :, head] = True, True
    return BlockLayout.from_block_mask(mask, 6 * TILE_SIDE - 9, 6 * TILE_SIDE, block_size=TILE_SIDE)


LONG_LINES = cases.Case("long-lines", long_lines)


def options_of(call: zoo.Call) -> set[Any]:
    """What a call has: head dimensions, data types and the values of numbers do not count."""
    named = dataclasses.asdict(call)
    return {name for name in named if named[name] not in (None, False)} - {"dtype", "head_dim"} | {
        ("kv_heads", call.kv_heads)
    }


class Each(NamedTuple):
    """A layout with a call and splits that its index chooses."""

    layout: zoo.Layout
    call: zoo.Call
    num_splits: int = 1
    n_lines: int = 1

    @property
    def values(self) -> set[Any]:
        """What a sample has: each option of a call, or each number of splits and of split lines."""
        if self.num_splits > 1:
            return {("splits", self.num_splits), ("lines", self.n_lines)}
        return options_of(self.call)


# 7 and 11 are coprime to the number of calls: consecutive layouts get different calls, and every call is used
assert len(CALLS) % 7 and len(CALLS) % 11


def whole(index: int) -> Each:
    return Each(LAYOUTS[index], CALLS[7 * index % len(CALLS)])


def whole_in_tiles_of_64(index: int) -> Each:
    return Each(LAYOUTS[index], CALLS[(7 * index + 3) % len(CALLS)])


def with_splits(index: int) -> Each:
    return Each(LAYOUTS[index], CALLS[11 * index % len(CALLS)], (3, 2)[index // 2 % 2], (1, 99, 2)[index % 3])


def with_splits_in_tiles_of_64(index: int) -> Each:
    return with_splits(index)._replace(call=CALLS[(11 * index + 1) % len(CALLS)])


@pytest.mark.sweep(by=lambda index: whole(index).values)
@pytest.mark.parametrize("index", range(len(LAYOUTS)), ids=[zoo.name_of(layout) for layout in LAYOUTS])
def test_every_layout_is_accurate(check, index):
    check(Simulation(seed=index), *whole(index)[:2])


# test_every_call_is_accurate_in_tiles_of_64 has the calls
@pytest.mark.sweep(by=lambda index: {index % 6})
@pytest.mark.parametrize("index", range(len(cases.LAYOUTS)), ids=[str(layout) for layout in cases.LAYOUTS])
def test_every_layout_is_accurate_in_tiles_of_64(check, index):
    check(Simulation(seed=index), *whole_in_tiles_of_64(index)[:2], tile=FINE_TILE)


def in_gathered_tiles(index: int) -> Each:
    return with_splits(index)._replace(call=CALLS[(11 * index + 2) % len(CALLS)])


@pytest.mark.sweep(by=lambda index: {index % 6})
@pytest.mark.parametrize("index", range(len(cases.LAYOUTS)), ids=[str(layout) for layout in cases.LAYOUTS])
def test_every_layout_is_accurate_in_gathered_tiles(check, monkeypatch, index):
    """Every second one with splits; in turns tiles from anywhere, neighbors, and what takes less time."""
    each = in_gathered_tiles(index)
    monkeypatch.setattr(gathered_builder, "GATHERED_STEP", (0.0, 1.25, 100.0)[index % 3])
    simulation = Simulation(seed=index)
    if index % 2:
        simulation = split(simulation, each.num_splits, each.n_lines)
    # the plan depends on the constant
    monkeypatch.setitem(each.layout.build()._cache, "plans", {})
    check(simulation, each.layout, in_float16(each.call) if index % 2 else each.call, tile=GATHERED_TILE)


def first_and_nearest_keys() -> BlockLayout:
    """The last 64 of 4,096 tokens attend to the first 16 keys and to those of their own block of 16."""

    def attends(q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return (kv < 16) | ((q + 4032) // 16 == kv // 16)

    return BlockLayout.from_predicate(attends, 64, 4096, block_size=16)


def test_slopes_keep_small_distances_beside_far_keys(check, monkeypatch):
    """Gathered tiles put keys that are 4,000 tokens apart into one step."""
    monkeypatch.setattr(gathered_builder, "GATHERED_STEP", 0.0)
    call = zoo.Call(head_dim=64, causal=True, has_slopes=True, are_slopes_fixed=True, dtype=torch.float16)
    layout = cases.Case("first-and-nearest-keys", first_and_nearest_keys)
    check(Simulation(seed=0), layout, call, backward=False, tile=GATHERED_TILE)


@pytest.mark.parametrize(
    ("layout", "tile"),
    [
        ((259, 390), TILE_SIDE),
        (cases.Case("window-of-200", lambda: masks.local(320, window=200, block_size=64)), FINE_TILE),
        (cases.Case("window-of-300", lambda: masks.local(520, window=300, block_size=128)), TILE_SIDE),
    ],
    ids=["causal", "tiles of 64", "layout"],
)
def test_steep_slopes_keep_small_distances(check, monkeypatch, layout, tile):
    """Regression: the two terms of a distance were larger than it, and lse lost digits from a slope of 0.5 on."""

    def score_mods(layout, call, dtype, device):
        slopes = 4.0 ** (1 - torch.arange(zoo.sizes_of(layout, call)[1]))
        return {"alibi_slopes": slopes.to(device, torch.promote_types(dtype, torch.float32))}

    monkeypatch.setattr(zoo, "score_mods", score_mods)
    call = zoo.Call(head_dim=64, causal=True, has_slopes=True, are_slopes_fixed=True, dtype=torch.float16)
    for seed in range(2):
        check(Simulation(seed=seed), layout, call, tile=tile)


@pytest.mark.sweep(by=lambda index: with_splits_in_tiles_of_64(index).values)
@pytest.mark.parametrize("index", range(0, len(cases.LAYOUTS), 2), ids=[str(each) for each in cases.LAYOUTS[::2]])
def test_split_layouts_are_accurate_in_tiles_of_64(check, index):
    """One, two or all tile rows and columns of each head are split."""
    each = with_splits_in_tiles_of_64(index)
    simulation = split(Simulation(seed=index), each.num_splits, each.n_lines)
    check(simulation, each.layout, in_float16(each.call), tile=FINE_TILE)


@pytest.mark.sweep(by=lambda index: options_of(CALLS[index]))
@pytest.mark.parametrize("index", range(len(CALLS)), ids=[str(call) for call in CALLS])
def test_every_call_is_accurate_in_tiles_of_64(check, index):
    check(Simulation(seed=index), MIXED_FINE, CALLS[index], tile=FINE_TILE)


@pytest.mark.parametrize("layout", [zoo.PER_HEAD, (40, 50)], ids=zoo.name_of)
def test_several_kv_heads_each_serve_a_group(check, layout):
    check(Simulation(seed=4), layout, zoo.Call(head_dim=64, kv_heads=2, dtype=torch.float16))


@pytest.mark.sweep
@pytest.mark.parametrize("call", WIDE_HEAD_CALLS, ids=str)
@pytest.mark.parametrize("layout", [WINDOW, (113, 203)], ids=zoo.name_of)
def test_wide_heads_are_accurate(check, layout, call):
    check(Simulation(seed=1), layout, call)


# a program per work tile; without a layout for two, in causal calls of one group of heads
@pytest.mark.parametrize(
    ("layout", "n_sms", "expected"),
    [(WINDOW, 99, False), (WINDOW, 7, True), ((113, 203), 99, False), ((300, 203), 13, False), ((300, 203), 6, True)],
    ids=str,
)
def test_programs_take_work_tiles_from_a_counter_if_there_are_many(check, layout, n_sms, expected):
    simulation = Simulation(seed=8, n_sms=n_sms)
    launches = []
    forward_launches = simulation.hopper_forward.forward_launches
    simulation.hopper_forward.forward_launches = lambda *key, is_uneven: (
        launches.append(forward_launches(*key, is_uneven=is_uneven)) or launches[-1]
    )
    check(simulation, layout, CALLS[0], backward=False)
    assert launches and all(launch.has_tile_counter == expected for launch in launches)


# of which deterministic calls at head_dim 64 take steps of 64 queries
SLOPES = zoo.Call(head_dim=64, has_slopes=True, are_slopes_fixed=True, causal=True, dtype=torch.float16, kv_heads=2)


@pytest.mark.sweep
@pytest.mark.parametrize("call", [CALLS[0], CALLS[-1], SLOPES], ids=str)
@pytest.mark.parametrize("layout", [WINDOW, (113, 203)], ids=zoo.name_of)
def test_the_deterministic_backward_is_accurate(check, layout, call):
    check(Simulation(seed=2), layout, call, deterministic=True)


# head_dim and v_head_dim with 96 columns of either in the backward, and in the forward if neither is above 96
TAILS_OF_32 = [(96, 96), (80, 128), (128, 72), (64, 96), (72, 40)]
# with 192 columns of q and k, and of v
TAILS_OF_64 = [(192, 192), (192, 128), (160, 136), (72, 192), (136, 40)]


def with_tails(index: int, dims: list[tuple[int, int]]) -> Each:
    each = Each(LAYOUTS[index], CALLS[(11 * index + 5) % len(CALLS)])
    head_dim, v_dim = dims[index % len(dims)]
    return each._replace(call=dataclasses.replace(each.call, head_dim=head_dim, v_dim=v_dim))


@pytest.mark.sweep(by=lambda index: {index % 8})
@pytest.mark.parametrize("index", range(len(LAYOUTS)), ids=[zoo.name_of(layout) for layout in LAYOUTS])
def test_every_layout_is_accurate_with_96_columns(check, index):
    check(Simulation(seed=index), *with_tails(index, TAILS_OF_32)[:2], deterministic=index % 8 == 5)


@pytest.mark.sweep(by=lambda index: {index % 4})
@pytest.mark.parametrize("index", range(len(LAYOUTS)), ids=[zoo.name_of(layout) for layout in LAYOUTS])
def test_every_layout_is_accurate_with_192_columns(check, index):
    check(Simulation(seed=index), *with_tails(index, TAILS_OF_64)[:2])


def split(simulation: Simulation, num_splits: int, n_lines: int) -> Simulation:
    """The simulation, with n_lines tile rows and columns of each head split, and all of them without a layout."""
    for module in (
        simulation.hopper_forward, simulation.hopper_backward, simulation.fine_forward, simulation.fine_backward,
        simulation.imports["wide_backward"],
    ):  # fmt: skip
        module.split_of = test_combine_splits.forced(num_splits, n_lines)
    return simulation


def in_float16(call: zoo.Call) -> zoo.Call:
    """The call in float16: the kernels that combine splits run in Triton's interpreter, which truncates bfloat16."""
    return dataclasses.replace(call, dtype=torch.float16)


# every other layout; on a GPU, tests/kernels/triton/test_combine_splits.py runs all of them
@pytest.mark.sweep(by=lambda index: with_splits(index).values)
@pytest.mark.parametrize("index", range(0, len(LAYOUTS), 2), ids=[zoo.name_of(layout) for layout in LAYOUTS[::2]])
def test_split_layouts_are_accurate(check, index):
    """One, two or all tile rows and columns of each head are split."""
    each = with_splits(index)
    check(split(Simulation(seed=index), each.num_splits, each.n_lines), each.layout, in_float16(each.call))


@pytest.mark.sweep(by=lambda layout, n_lines: {"one"})
@pytest.mark.parametrize("n_lines", [1, 99])
@pytest.mark.parametrize("layout", [(113, 203), WINDOW], ids=zoo.name_of)
def test_more_splits_than_tiles_are_accurate(check, layout, n_lines):
    """Some splits are empty; with kv_lengths and grouped heads."""
    check(split(Simulation(seed=5), 7, n_lines), layout, in_float16(CAUSAL_LENGTHS_GQA))


@pytest.mark.sweep(by=lambda layout: {"one"})
@pytest.mark.parametrize("layout", [(203, 113), WINDOW], ids=zoo.name_of)
def test_the_deterministic_backward_with_splits_is_accurate(check, layout):
    check(split(Simulation(seed=6), 2, 2), layout, in_float16(CALLS[0]), deterministic=True)


@pytest.mark.sweep(by=lambda layout: {"one"})
@pytest.mark.parametrize("layout", [(113, 203), WINDOW], ids=zoo.name_of)
def test_wide_heads_with_splits_are_accurate(check, layout):
    check(split(Simulation(seed=7), 2, 2), layout, in_float16(WIDE_HEAD_CALLS[0]))


@pytest.mark.thorough
def test_splits_give_the_same_bits_under_every_order_of_events(monkeypatch):
    """All results but dq, whose additions have no fixed order."""
    results = []
    for seed in range(3):
        simulation = split(Simulation(seed=seed, n_sms=1 + seed), 3, 2)
        monkeypatch.setattr(ops, "_kernels", lambda *_, s=simulation: (s.forward, s.backward))
        force_tile(monkeypatch, TILE_SIDE)
        monkeypatch.setattr(dispatch, "choose", lambda *arguments: "hopper")
        call = zoo.Call(head_dim=64, kv_heads=1, dtype=BFLOAT16)
        out, lse, _, *rest = zoo.run("hopper", WINDOW, call, zoo.inputs(WINDOW, call), CPU)
        results.append([out, lse, *rest])
    assert all(torch.equal(*pair) for other in results[1:] for pair in zip(results[0], other, strict=True))


CAUSAL = zoo.Call(head_dim=64, causal=True, dtype=BFLOAT16)
CAUSAL_LENGTHS_GQA = zoo.Call(head_dim=64, causal=True, has_kv_lengths=True, dtype=BFLOAT16, kv_heads=1)


@pytest.mark.parametrize(
    "n_interleaved", [pytest.param(1, marks=pytest.mark.thorough), 3, pytest.param(9, marks=pytest.mark.thorough)]
)
def test_causal_heads_in_turn_are_accurate(check, n_interleaved):
    """The last heads are fewer than those before; each KV head has a group of query heads or one query head."""
    for kv_heads in (2, 4):
        simulation = Simulation(seed=n_interleaved)
        for module in (simulation.hopper_forward, simulation.hopper_backward):
            module.interleaved_heads = lambda *_, is_uneven: n_interleaved
        check(simulation, (300, 270), dataclasses.replace(CAUSAL_LENGTHS_GQA, kv_heads=kv_heads))


@pytest.mark.parametrize("layout", [zoo.PER_HEAD, LONG_LINES], ids=zoo.name_of)
@pytest.mark.parametrize("n_interleaved", [2, pytest.param(3, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("has_separate_dq", [False, True])
def test_heads_in_turn_with_a_layout_are_accurate(check, layout, n_interleaved, has_separate_dq):
    """Each head has a launch order of its own, and long tile rows and columns before the others, or none."""
    simulation = Simulation(seed=n_interleaved)
    simulation.hopper_backward.is_dq_separate = lambda *_, **_options: has_separate_dq
    for module in (simulation.hopper_forward, simulation.hopper_backward, simulation.hopper_dq):
        module.interleaved_heads = lambda *_, is_uneven: n_interleaved
    check(simulation, layout, CAUSAL)


@pytest.mark.sweep(by=lambda layout, has_separate_dq, head_dim, **_: {(layout, has_separate_dq), head_dim})
@pytest.mark.parametrize(("head_dim", "has_kv_lengths", "n_interleaved"), [(64, False, 3), (80, True, 1)])
@pytest.mark.parametrize("layout", [WINDOW, zoo.PER_HEAD], ids=zoo.name_of)
@pytest.mark.parametrize("has_separate_dq", [False, True])
def test_sums_over_heads_with_a_layout_are_accurate(
    check, layout, head_dim, has_kv_lengths, n_interleaved, has_separate_dq
):
    """Each query head has tile columns of its own, in the launch order of its layout."""
    simulation = Simulation(seed=head_dim)
    simulation.hopper_backward.sums_over_heads = lambda *_, deterministic: True
    simulation.hopper_backward.is_dq_separate = lambda *_, **_options: has_separate_dq
    simulation.hopper_backward.interleaved_heads = lambda *_, is_uneven: n_interleaved
    call = zoo.Call(head_dim=head_dim, kv_heads=2, has_kv_lengths=has_kv_lengths, dtype=BFLOAT16)
    check(simulation, layout, call)


BIASED = [(layout, call) for layout in zoo.BIAS_LAYOUTS for call in zoo.BIAS_CALLS]


@pytest.mark.sweep(by=lambda index: options_of(BIASED[index][1]) | {BIASED[index][0].name})
@pytest.mark.parametrize("index", range(len(BIASED)), ids=[f"{layout}-{call}" for layout, call in BIASED])
def test_block_bias_is_accurate(check, index):
    check(Simulation(seed=index), *BIASED[index], deterministic=index % 5 == 4)


@pytest.mark.sweep(by=lambda index: options_of(BIASED[index][1]) | {index % 2, index % 3})
@pytest.mark.parametrize("index", range(0, len(BIASED), 5), ids=[f"{layout}-{call}" for layout, call in BIASED[::5]])
def test_block_bias_with_splits_is_accurate(check, index):
    """One, two or all tile rows and columns of each head are split."""
    layout, call = BIASED[index]
    simulation = split(Simulation(seed=index), (3, 2)[index // 2 % 2], (1, 99, 2)[index % 3])
    check(simulation, layout, in_float16(call), deterministic=index % 2 == 0)


@pytest.mark.sweep
@pytest.mark.parametrize("layout", zoo.BIAS_LAYOUTS[-4:], ids=str)
@pytest.mark.parametrize("is_trained", [True, False])
def test_block_bias_with_sums_over_heads_is_accurate(check, monkeypatch, layout, is_trained):
    """Each query head has tile columns of its own; a bias without a gradient leaves dq to them."""
    simulation = Simulation(seed=3)
    simulation.hopper_backward.sums_over_heads = lambda *_, deterministic: True
    if not is_trained:
        monkeypatch.setattr(zoo, "trained_mods", lambda mods, call: [])
    check(simulation, layout, zoo.Call(head_dim=64, kv_heads=2, bias="batch", dtype=torch.float16))


@pytest.mark.sweep
@pytest.mark.parametrize("lowest", [-torch.inf, -1e4])
@pytest.mark.parametrize("head_dim", [64, 192])
def test_a_block_bias_may_remove_blocks(check, monkeypatch, lowest, head_dim):
    """Also the first or all blocks of a row, and where the others have a large bias."""
    original = zoo.score_mods

    def score_mods(layout, call, dtype, device):
        found = original(layout, call, dtype, device)
        bias = found["block_bias"]
        bias[..., ::3] = lowest
        bias[..., :3] = lowest
        bias[..., 1::3] += 40.0
        return found

    monkeypatch.setattr(zoo, "score_mods", score_mods)
    layout = cases.Case(f"large-blocks-and-{lowest}", zoo.BIAS_LAYOUTS[-4].build)
    check(Simulation(seed=head_dim), layout, zoo.Call(head_dim=head_dim, bias="heads", dtype=torch.float16))


@pytest.mark.sweep(by=lambda layout, call: options_of(call) | {layout.name, call.bias, max(call.head_dim, 64)})
@pytest.mark.parametrize("call", zoo.BIAS_CALLS, ids=str)
@pytest.mark.parametrize("layout", zoo.BIAS_LAYOUTS[-4:], ids=str)
def test_block_bias_without_a_gradient_is_accurate(check, monkeypatch, layout, call):
    """Then one kernel computes dq, dk and dv."""
    monkeypatch.setattr(zoo, "trained_mods", lambda mods, call: [])
    check(Simulation(seed=len(str(call))), layout, call)


FORWARD_CONFIGS = [
    ForwardConfig(stages=3),
    ForwardConfig(stages=2, pin=True),
    ForwardConfig(stages=2, block_kv=64),
    ForwardConfig(stages=3, block_kv=64, out_in_q=True),
    ForwardConfig(stages=2, early_bitmask=False),
    ForwardConfig(stages=2),
    ForwardConfig(stages=1),
    ForwardConfig(stages=2, q_stages=2, rescale_threshold=8.0),
    ForwardConfig(stages=1, block_kv=64, out_in_q=True, q_stages=2, rescale_threshold=8.0),
]
THREE_WARPGROUP_CONFIGS = [
    ForwardConfig(stages=2, warpgroups=3),
    ForwardConfig(stages=2, block_kv=64, warpgroups=3, q_stages=2),
    ForwardConfig(stages=1, out_in_q=True, warpgroups=3, rescale_threshold=8.0),
]
# (q_len, kv_len), with tile rows of 192 queries: one query in the second warpgroup, one full tile row, one query more,
# three tile rows. Whole and ragged steps of keys, more and fewer than queries
THREE_WARPGROUP_LENGTHS = [(65, 65), (192, 256), (193, 130), (400, 203)]


@pytest.mark.sweep
@pytest.mark.parametrize("call", [CAUSAL, CAUSAL_LENGTHS_GQA], ids=str)
@pytest.mark.parametrize("layout", [WINDOW, (203, 400)], ids=zoo.name_of)
@pytest.mark.parametrize("config", FORWARD_CONFIGS, ids=str)
def test_every_forward_configuration_is_accurate(check, monkeypatch, config, layout, call):
    simulation = Simulation(seed=3, n_sms=1)
    monkeypatch.setattr(simulation.hopper_forward, "config", lambda *_, **__: config)
    check(simulation, layout, call, backward=False)


@pytest.mark.sweep
@pytest.mark.parametrize("call", [zoo.Call(head_dim=40, kv_heads=1), CAUSAL], ids=str)
@pytest.mark.parametrize("lengths", THREE_WARPGROUP_LENGTHS, ids=str)
@pytest.mark.parametrize("config", THREE_WARPGROUP_CONFIGS, ids=str)
def test_every_configuration_with_three_warpgroups_is_accurate(check, monkeypatch, config, lengths, call):
    simulation = Simulation(seed=5)
    monkeypatch.setattr(simulation.hopper_forward, "config", lambda *_, **__: config)
    monkeypatch.setattr(simulation.hopper_forward, "three_warpgroups_pay", lambda *_, causal: True)
    check(simulation, lengths, call, backward=False)


@pytest.mark.parametrize(("layout", "call"), [(WINDOW, CAUSAL), ((203, 400), CAUSAL_LENGTHS_GQA)], ids=str)
def test_three_warpgroups_are_rejected_with_a_layout_or_kv_lengths(check, monkeypatch, layout, call):
    simulation = Simulation()
    monkeypatch.setattr(simulation.hopper_forward, "config", lambda *_, **__: THREE_WARPGROUP_CONFIGS[0])
    with pytest.raises(AssertionError, match="two warpgroups"):
        check(simulation, layout, call, backward=False)


@pytest.mark.parametrize(
    ("q_len", "n_batch_heads", "expected"),
    [
        # tile rows of 192 and of 128 queries both take one wave of 132 programs, or both two
        (66 * 128, 1, False),
        (66 * 128, 4, False),
        # 132 tile rows of 192 queries take one wave, 198 of 128 take two
        (66 * 192, 2, True),
        (16384, 32, True),
        # per head one tile row of either size, two of either size, and two of 192 queries or three of 128
        (128, 1000, False),
        (256, 1000, False),
        (384, 1000, True),
    ],
)
def test_wide_tile_rows_are_chosen_if_they_finish_first(q_len, n_batch_heads, expected):
    assert three_warpgroups_pay(q_len, q_len, n_batch_heads, 132, causal=False) == expected


def test_wide_tile_rows_are_chosen_for_long_or_nearly_dense_causal_calls():
    assert not three_warpgroups_pay(8191, 8191, 132, 132, causal=True)
    assert three_warpgroups_pay(8192, 8192, 132, 132, causal=True)
    assert not three_warpgroups_pay(4096, 8192, 132, 132, causal=True)
    assert three_warpgroups_pay(4096, 8193, 132, 132, causal=True)


# scales at which the running maximum grows by more than the rescale threshold
LARGE_SCORES = [
    zoo.Call(head_dim=64, scale=1.0, dtype=BFLOAT16),
    zoo.Call(head_dim=64, scale=-1.0, dtype=torch.float16),
]


@pytest.mark.sweep
@pytest.mark.parametrize("call", LARGE_SCORES, ids=str)
@pytest.mark.parametrize("layout", [CAUSAL_LAYOUT, (113, 600)], ids=zoo.name_of)
def test_growth_below_and_above_the_rescale_threshold_is_accurate(check, monkeypatch, layout, call):
    simulation = Simulation(seed=6)
    growths = []

    def online_softmax(b_scores, b_max, b_sum, scale_log2, b_shift, rescale_threshold):
        growth = b_scores.amax(1) * scale_log2 - b_max
        growths.extend(growth[(b_max > -1.0e38) & (growth > 0)].tolist())
        return original(b_scores, b_max, b_sum, scale_log2, b_shift, rescale_threshold)

    original = simulation.forward_consumer.online_softmax
    monkeypatch.setattr(simulation.forward_consumer, "online_softmax", online_softmax)
    config = ForwardConfig(stages=2, q_stages=2, rescale_threshold=8.0)
    monkeypatch.setattr(simulation.hopper_forward, "config", lambda *_, **__: config)
    check(simulation, layout, call, backward=False)
    assert any(growth < 8.0 for growth in growths)
    assert any(growth > 8.0 for growth in growths)


@pytest.mark.sweep
@pytest.mark.parametrize("call", [CAUSAL, CAUSAL_LENGTHS_GQA], ids=str)
@pytest.mark.parametrize(
    "config",
    [
        BackwardConfig(block_q=block_q, kv_stages=kv_stages, dq_from_registers=dq_from_registers)
        for (block_q, dq_from_registers), kv_stages in itertools.product(((64, False), (64, True), (128, True)), (1, 2))
    ],
    ids=str,
)
def test_every_backward_configuration_is_accurate(check, monkeypatch, config, call):
    simulation = Simulation(seed=4, n_sms=1)
    monkeypatch.setattr(simulation.hopper_backward, "config", lambda *_, **__: config)
    check(simulation, WINDOW, call)
