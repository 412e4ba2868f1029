"""The fixture that runs a call on the simulated Hopper kernels."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch

from blocksparse_flash import attention_with_lse, dispatch, ops
from blocksparse_flash.plan_format import TILE as TILE_SIDE
from tests import test_zoo as zoo
from tests.support import cases
from tests.support.closeness import assert_as_accurate, buried_inputs
from tests.support.forced_tiles import force_tile

if TYPE_CHECKING:
    # imports Triton
    from tests.support.gluon_simulator import Simulation

CPU = torch.device("cpu")


@pytest.fixture
def check(monkeypatch):
    """Raises if a call on the simulated kernels is not as accurate as the reference."""

    def check(
        simulation: Simulation,
        layout: Any,
        call: zoo.Call,
        *,
        backward: bool = True,
        deterministic: bool = False,
        tile: int = TILE_SIDE,
    ) -> None:
        kernels = simulation.forward, functools.partial(simulation.backward, deterministic=deterministic)
        if tile < TILE_SIDE:
            kernels = simulation.fine_forward.forward, simulation.fine_backward.backward
            # the gradient of slopes needs tiles of 128
            call = dataclasses.replace(call, are_slopes_fixed=call.has_slopes)
        monkeypatch.setattr(ops, "_kernels", lambda *_: kernels)
        force_tile(monkeypatch, tile)
        monkeypatch.setattr(dispatch, "choose", lambda *arguments: "hopper")
        tensors = zoo.inputs(layout, call)
        tensors = buried_inputs(tensors)
        if backward:
            zoo.assert_accurate(zoo.run("hopper", layout, call, tensors, CPU), layout, call, CPU)
        else:
            q, k, v = (tensors[name] for name in ("q", "k", "v"))
            actual = attention_with_lse(
                q,
                k,
                v,
                layout.build() if isinstance(layout, cases.Case) else None,
                causal=call.causal,
                scale=call.scale,
                kv_lengths=zoo.kv_lengths(layout, call, CPU) if call.has_kv_lengths else None,
                softcap=call.softcap,
                **zoo.score_mods(layout, call, call.dtype, CPU),
            )
            for name, result, references in zip(zoo.NAMES, actual, zoo.expected(layout, call, CPU), strict=False):
                assert_as_accurate(result, *references, name=name)

    return check
