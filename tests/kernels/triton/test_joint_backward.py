"""The joint launch of dk, dv and dq, and forward blocks of 64 queries, are as accurate as the other configurations.

Both are chosen on Hopper for some sizes. Here each is forced on or off for any size, with TMA and with pointers.
Without a GPU the interpreter runs the configurations of Hopper.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from blocksparse_flash.kernels import arguments
from blocksparse_flash.kernels.triton import backward, forward
from blocksparse_flash.runtime import launch
from tests import test_zoo as zoo
from tests.support import cases

# 16-bit types, no dropout and nothing that changes scores, which sinks do not, and not wider than the tables
# (float16, as Triton's interpreter cuts bfloat16 off: the sum over all queries adds that up)
SINKS = [
    zoo.Call(head_dim=64, has_sinks=True, dtype=torch.float16),
    zoo.Call(head_dim=128, has_sinks=True, causal=True, dtype=torch.float16),
]
CALLS = [*SINKS, *(call for call in zoo.HOPPER_CALLS if max(call.head_dim, call.v_dim or 0) <= 128)]
# half as many as CALLS at least, so that every call comes; "global" has a long row and a long column
FEW = (
    "full-ragged", "one-block", "causal", "global", "window-wide", "random-fine-blocks", "bitmask-heavy", "empty-cols",
    "tall", "per-batch-and-head", "dense-113x203",
)  # fmt: skip
# few queries have kernels of their own
DENSE = [lengths for lengths in zoo.DENSE if lengths[0] > 16]
LAYOUTS = [layout for layout in (*cases.LAYOUTS, *DENSE) if torch.cuda.is_available() or zoo.name_of(layout) in FEW]
HOPPER = (9, 232448)


@pytest.fixture
def launched(monkeypatch):
    """The launches since, as (kernel, block of queries); and a function that forces the tested choices on or off."""
    names: list[tuple[str, int | None]] = []
    made = launch.Launch.__call__

    def noted(self, *tensors):
        constants = self._rest.get("C")
        names.append((self._kernel.fn.__name__, None if constants is None else constants.BLOCK_Q))
        made(self, *tensors)

    def ask(*, small: bool, described: bool) -> list[tuple[str, int | None]]:
        monkeypatch.setattr(arguments, "device_limits", lambda _: HOPPER)
        monkeypatch.setattr(arguments, "MIN_TMA_ELEMENTS", 0 if described else 1 << 60)
        monkeypatch.setattr(forward, "narrow_pays", lambda *_, **__: small)
        monkeypatch.setattr(backward, "joint_pays", lambda *_, **__: small)
        for module, name in ((forward, "forward_launch"), (backward, "backward_launches")):
            # nothing that was cached before, nor for tests to come
            monkeypatch.setattr(module, name, getattr(module, name).__wrapped__)
        monkeypatch.setattr(launch.Launch, "__call__", noted)
        return names

    return ask


@pytest.mark.parametrize("described", [False, True], ids=["pointers", "descriptors"])
@pytest.mark.parametrize("small", [False, True], ids=["large", "small"])
@pytest.mark.parametrize("index", range(len(LAYOUTS)), ids=lambda index: zoo.name_of(LAYOUTS[index]))
def test_is_as_accurate_as_the_reference(index, small, described, device, launched):
    call = CALLS[(2 * index + described) % len(CALLS)]
    found = launched(small=small, described=described)
    zoo.assert_backend_is_accurate("triton", LAYOUTS[index], call, device)
    assert found[0] == ("forward_kernel", 64 if small else 128)
    walking = [name for name, _ in found if name in ("joint_kernel", "keys_kernel", "queries_kernel")]
    # grouped heads and lengths were not run so
    is_joint = small and call.kv_heads > 1 and not call.has_kv_lengths
    assert walking == (["joint_kernel"] if is_joint else ["keys_kernel", "queries_kernel"])


@pytest.mark.parametrize("layout", ["causal", "dense-113x203"])
def test_sinks_have_their_gradient(layout, device, launched):
    (chosen,) = [each for each in [*cases.LAYOUTS, *zoo.DENSE] if zoo.name_of(each) == layout]
    found = launched(small=True, described=False)
    zoo.assert_backend_is_accurate("triton", chosen, SINKS[0], device)
    assert "joint_kernel" in [name for name, _ in found]


def test_blocks_of_queries_are_halved():
    limits = {"major": 9, "tma": True, "dropout": False, "shared_memory": HOPPER[1]}
    for dim in (64, 128):
        assert forward.config(dim, 2, **limits).block_q == 128
        assert forward.config(dim, 2, **limits, narrow=True).block_q == 64
        # where it was not run
        for other in ({"major": 8}, {"major": 10}, {"dropout": True}, {"changed": True}):
            asked = {**limits, **other}
            assert forward.config(dim, 2, **asked, narrow=True) == forward.config(dim, 2, **asked)
    assert forward.config(128, 4, **limits, narrow=True) == forward.config(128, 4, **limits)


@pytest.mark.parametrize(
    ("element_size", "dim", "other"),
    [
        (4, 64, {}),
        (2, 256, {}),
        (2, 64, {"major": 8}),
        (2, 64, {"major": 10}),
        (2, 64, {"dropout": True}),
        (2, 64, {"changed": True}),
        (2, 64, {"group": 2}),
    ],
    ids=str,
)
def test_one_launch_is_for_what_was_run(element_size, dim, other):
    limits = {"major": 9, "tma": True, "dropout": False}
    assert backward.config_joint(64, 2, **limits) is not None
    assert backward.config_joint(dim, element_size, **{**limits, **other}) is None


def test_programs_that_share_a_launch_share_its_options():
    for dim, tma in itertools.product((16, 64, 128), (False, True)):
        of_keys, of_queries = backward.config_joint(dim, 2, major=9, tma=tma, dropout=False)
        assert (of_keys.num_warps, of_keys.num_stages) == (of_queries.num_warps, of_queries.num_stages)
        # and their descriptors
        assert not tma or of_keys == of_queries


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
def test_blocks_are_halved_where_it_pays(q_len, causal, has_layout, expected, monkeypatch):
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
def test_a_launch_is_shared_where_it_pays(n_programs, dim, tma, causal, has_layout, expected, monkeypatch):
    monkeypatch.setattr(backward, "num_sms", lambda _: 132)
    options = SimpleNamespace(causal=causal, device=0)
    assert backward.joint_pays(n_programs, dim, tma, options, has_layout=has_layout) == expected
