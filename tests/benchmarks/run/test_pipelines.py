"""Measurements of whole pipelines: small ones on a CPU, and what the check of their results notices."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import masks
from benchmarks.run import measure, pipelines
from blocksparse_flash.diffusers import use

pytest.importorskip("diffusers", reason="needs diffusers")
pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning", "ignore:CUDA is not available:UserWarning")

HEADS = {"num_attention_heads": 2, "attention_head_dim": 32, "num_layers": 2}
SIZES = {
    "wan": {**HEADS, "text_dim": 24, "ffn_dim": 64},
    "flux": {
        **HEADS, "num_single_layers": 1, "joint_attention_dim": 24, "pooled_projection_dim": 16,
        "axes_dims_rope": (4, 12, 16),
    },
}  # fmt: skip
CASES = [
    pipelines.WAN._replace(grid=(4, 16, 16), tile=(4, 8, 4), cube=(4, 4, 4), kernel=(4, 8, 4), heads=2),
    pipelines.FLUX._replace(grid=(32, 32), tile=(8, 16), cube=(8, 8), kernel=(8, 16), heads=2, n_text=7),
]


def made(case: pipelines.Case) -> Any:
    return pipelines.pipeline_of(case, "cpu", SIZES[case.name])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_provider_has_a_line(case: pipelines.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "peak_bytes", lambda call: call() is None)
    monkeypatch.setattr(measure, "environment", lambda: {"device": "cpu", "torch": "", "triton": None, "commit": ""})
    lines = list(pipelines.lines(made(case), case, 1, rounds=1))
    assert [(line["provider"], line["pattern"]) for line in lines] == [
        ("diffusers", "dense"), ("blocksparse_flash", "dense"), ("blocksparse_flash", "sliding_tile"),
        ("blocksparse_flash", "top_blocks"),
    ]  # fmt: skip
    assert all({*line} == {*pipelines.KEYS} and line["n"] == 1024 for line in lines)


def test_a_wrong_order_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[0]
    pipe, order = made(case), masks.tile_order(case.grid, tile=case.tile)
    layout = masks.sliding_tile(case.grid, kernel=case.kernel, tile=case.tile, order=order)
    with torch.no_grad():
        pipelines.check(pipe, case, layout, order)
        monkeypatch.setattr(pipelines, "use", lambda pipe, layout=None, **_: use(pipe, layout))
        with pytest.raises(AssertionError, match="sliding_tile"):
            pipelines.check(pipe, case, layout, order)
