"""The joint launch of dk, dv and dq, and forward blocks of 64 queries, are as accurate as the other configurations.

Both are chosen on Hopper for some sizes. Here each is forced on or off for all sizes, with TMA and with pointers.
Without a GPU, the interpreter runs the configurations for Hopper.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from blocksparse_flash.kernels import arguments
from blocksparse_flash.kernels.arguments import Tuning
from blocksparse_flash.kernels.triton import backward, forward
from blocksparse_flash.plan_format import TILE
from blocksparse_flash.runtime import launch
from tests import test_zoo as zoo
from tests.support import cases
from tests.support.forced_tiles import force_tile

# The joint launch runs 16-bit types up to head_dim 128, without dropout and without score mods other than sinks.
# Float16: Triton's interpreter truncates bfloat16, which adds up in the gradient of sinks, a sum over all queries
SINKS = [
    zoo.Call(head_dim=64, has_sinks=True, dtype=torch.float16),
    zoo.Call(head_dim=128, has_sinks=True, causal=True, dtype=torch.float16),
]
CALLS = [
    *SINKS,
    *(call for call in zoo.HOPPER_CALLS if max(call.head_dim, call.v_dim or 0) <= 128 and not call.has_scores),
]
# at least half as many as CALLS, so that every call runs; "global" has a long row and a long column
INTERPRETED = (
    "full-ragged", "one-block", "causal", "global", "window-wide", "random-fine-blocks", "bitmask-heavy", "empty-cols",
    "tall", "per-head", "per-batch-and-head", "dense-113x203",
)  # fmt: skip
# few queries use split-KV
DENSE = [lengths for lengths in zoo.DENSE if lengths[0] > 16]
LAYOUTS = [
    layout for layout in (*cases.LAYOUTS, *DENSE) if torch.cuda.is_available() or zoo.name_of(layout) in INTERPRETED
]
assert 2 * len(LAYOUTS) >= len(CALLS)
HOPPER = (9, 232448)


@pytest.fixture
def launched(monkeypatch):
    """A function that forces the tested choices on or off and returns a list of later launches (kernel, BLOCK_Q)."""
    names: list[tuple[str, int | None]] = []
    original = launch.Launch.__call__

    def record(self, *tensors):
        constants = self._rest.get("C")
        names.append((self._kernel.fn.__name__, None if constants is None else constants.BLOCK_Q))
        original(self, *tensors)

    def force(*, small: bool, has_tma: bool) -> list[tuple[str, int | None]]:
        monkeypatch.setattr(arguments, "device_limits", lambda _: HOPPER)
        monkeypatch.setattr(arguments, "MIN_TMA_ELEMENTS", 0 if has_tma else 1 << 60)
        monkeypatch.setattr(forward, "narrow_pays", lambda *_, **__: small)
        monkeypatch.setattr(backward, "joint_pays", lambda *_, **__: small)
        for module, name in ((forward, "forward_launch"), (backward, "backward_launches")):
            # bypasses the caches, also for later tests
            monkeypatch.setattr(module, name, getattr(module, name).__wrapped__)
        monkeypatch.setattr(launch.Launch, "__call__", record)
        # in tiles of 64 all blocks have 64 queries
        force_tile(monkeypatch, TILE)
        return names

    return force


@pytest.mark.sweep(by=lambda index, small, has_tma: {("layout", index % 4), (small, has_tma)})
@pytest.mark.parametrize("has_tma", [False, True], ids=["pointers", "descriptors"])
@pytest.mark.parametrize("small", [False, True], ids=["large", "small"])
@pytest.mark.parametrize("index", range(len(LAYOUTS)), ids=lambda index: zoo.name_of(LAYOUTS[index]))
def test_is_as_accurate_as_the_reference(index, small, has_tma, device, launched):
    call = CALLS[(2 * index + has_tma) % len(CALLS)]
    found = launched(small=small, has_tma=has_tma)
    zoo.assert_backend_is_accurate("triton", LAYOUTS[index], call, device)
    assert found[0] == ("forward_kernel", 64 if small else 128)
    backward_kernels = [name for name, _ in found if name in ("joint_kernel", "keys_kernel", "queries_kernel")]
    # the joint launch does not run grouped heads and kv_lengths
    is_joint = small and call.kv_heads == 4 and not call.has_kv_lengths
    assert backward_kernels == (["joint_kernel"] if is_joint else ["keys_kernel", "queries_kernel"])


@pytest.mark.parametrize("layout", ["causal", "dense-113x203"])
def test_the_joint_launch_gives_the_gradient_of_sinks(layout, device, launched):
    (chosen,) = [each for each in [*cases.LAYOUTS, *zoo.DENSE] if zoo.name_of(each) == layout]
    found = launched(small=True, has_tma=False)
    zoo.assert_backend_is_accurate("triton", chosen, SINKS[0], device)
    assert "joint_kernel" in [name for name, _ in found]


def test_narrow_forward_blocks_have_64_queries():
    limits = {"major": 9, "tma": True, "dropout": False, "shared_memory": HOPPER[1]}
    for dim in (64, 128):
        assert forward.config(Tuning(dim, 2, **limits)).block_q == 128
        assert forward.config(Tuning(dim, 2, **limits), narrow=True).block_q == 64
        # not measured
        for other in ({"major": 8}, {"dropout": True}, {"modifies_scores": True}):
            call = Tuning(dim, 2, **{**limits, **other})
            assert forward.config(call, narrow=True) == forward.config(call)
    # on sm100 four warps spill
    assert forward.config(Tuning(64, 2, **{**limits, "major": 10}), narrow=True).num_warps == 8
    assert forward.config(Tuning(128, 4, **limits), narrow=True) == forward.config(Tuning(128, 4, **limits))


@pytest.mark.parametrize(
    ("element_size", "dim", "other"),
    [
        (4, 64, {}),
        (2, 256, {}),
        (2, 64, {"major": 8}),
        (2, 64, {"major": 10}),
        (2, 64, {"dropout": True}),
        (2, 64, {"modifies_scores": True}),
        (2, 64, {"group": 2}),
    ],
    ids=str,
)
def test_the_joint_launch_runs_only_what_was_measured(element_size, dim, other):
    limits = {"major": 9, "tma": True, "dropout": False, "shared_memory": HOPPER[1]}
    assert backward.config_joint(Tuning(64, 2, **limits)) is not None
    assert backward.config_joint(Tuning(dim, element_size, **{**limits, **other})) is None


def test_both_kinds_of_programs_of_a_joint_launch_have_the_same_options():
    for dim, tma in itertools.product((16, 64, 128), (False, True)):
        keys, queries = backward.config_joint(Tuning(dim, 2, 9, tma, False, HOPPER[1]))
        assert (keys.num_warps, keys.num_stages) == (queries.num_warps, queries.num_stages)
        # and the same TMA descriptors
        assert not tma or keys == queries


@pytest.mark.parametrize(
    ("q_len", "causal", "has_layout", "expected"),
    [
        (1024, False, True, True),
        (1025, False, True, False),
        (1025, True, True, False),
        (1025, True, False, True),
        (8448, True, False, True),
        (8449, True, False, False),
    ],
)
def test_narrow_forward_blocks_are_used_where_they_pay(q_len, causal, has_layout, expected, monkeypatch):
    monkeypatch.setattr(forward, "num_sms", lambda _: 132)
    options = SimpleNamespace(causal=causal, device=0)
    assert forward.narrow_pays(q_len, 16, options, has_layout=has_layout) == expected


@pytest.mark.parametrize(
    ("n_programs", "dim", "tma", "causal", "has_layout", "expected"),
    [
        (1056, 64, True, False, True, True),
        (1057, 64, True, False, True, False),
        (1057, 64, True, True, True, False),
        (8448, 64, True, True, False, True),
        (8449, 64, True, True, False, False),
        (1057, 128, True, False, True, True),
        (1056, 128, False, True, False, True),
        (1057, 128, False, True, False, False),
    ],
)
def test_the_joint_launch_is_used_where_it_pays(n_programs, dim, tma, causal, has_layout, expected, monkeypatch):
    monkeypatch.setattr(backward, "num_sms", lambda _: 132)
    options = SimpleNamespace(causal=causal, device=0)
    assert backward.joint_pays(n_programs, dim, tma, options, has_layout=has_layout) == expected
