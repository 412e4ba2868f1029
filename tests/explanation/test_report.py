"""What explain reports of a call: its backend, the reasons against others, and its tiles."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from blocksparse_flash import BlockLayout
from blocksparse_flash.functional import explain
from tests.support.small_call import good_call, window


@pytest.mark.parametrize("backend", ["auto", "eager", "triton", "reference"])
def test_explain_prints_a_report(backend, device):
    explanation = explain(**good_call(device=device), layout=window(), backend=backend, deterministic=True)
    report = str(explanation)
    assert report.splitlines()[0].startswith(f'backend      "{explanation.backend}": {explanation.reason}')
    for name in ("hopper", "triton", "eager", "reference"):
        assert (f'not       "{name}": ' in report) == (name != explanation.backend)
    assert all(why for _, why in explanation.others)
    assert "deterministic=True" in report
    side = 64 if backend == "triton" else 128
    assert (f"{side} queries x {side} keys" in report) == (backend != "reference")


def test_shares_in_the_report_are_percentages():
    """As a fraction, a density of 1 would read as one tile: "1 of them are computed"."""
    q = torch.empty(1, 1, 256, 16)
    layout = BlockLayout.from_blocks([0, 0, 1], [0, 1, 1], 256, 256, block_size=128)
    report = str(explain(q, q, q, layout, backend="eager"))
    assert "density      75% of the layout's blocks\n" in report
    assert "tiles        128 queries x 128 keys; 75% of them are computed\n   masked    0.0% of these" in report
    # the reference has no tiles: nothing is said of computed or masked ones
    report = str(explain(q, q, q, layout, backend="reference"))
    assert "tiles        none: every pair is computed; 75.0% of them attend\nforward " in report


def test_explain_gives_the_reason_against_triton(monkeypatch):
    triton = pytest.importorskip("triton", reason="needs Triton")
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    assert "needs a CUDA device" in dict(explain(**good_call()).others)["triton"]
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    assert "interpreter" in dict(explain(**good_call()).others)["triton"]
    assert "float64" in dict(explain(**good_call(torch.float64)).others)["triton"]


def test_an_explanation_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        explain(**good_call()).backend = "triton"


@pytest.mark.parametrize(("q_len", "kv_len"), [*itertools.product([1, 127, 128, 129, 300], [1, 128, 200, 513])])
def test_explain_counts_the_tiles_of_dense_causal(q_len, kv_len):
    """Compared with the tiles of the dense mask that have a pair."""
    mask = torch.ones(q_len, kv_len).tril(kv_len - q_len).bool()
    tiles = BlockLayout.from_dense(mask, block_size=128)
    q, k = torch.empty(1, 1, q_len, 16), torch.empty(1, 1, kv_len, 16)
    explanation = explain(q, k, k, causal=True)
    assert explanation.tile_density == pytest.approx(tiles.density)
    assert explanation.flops == 2 * tiles.nnz * 128 * 128 * 32
    assert explanation.density == 1.0 and explanation.metadata_bytes == 0


def test_explain_counts_the_tiles_of_a_layout():
    layout = BlockLayout.from_blocks([0, 1, 7], [0, 0, 3], 512, 256, block_size=64)
    q, k = torch.empty(2, 4, 512, 16), torch.empty(2, 4, 256, 16)
    explanation = explain(q, k, k, layout)
    # 3 of 32 blocks, in 2 of 8 tiles
    assert (explanation.density, explanation.tile_density) == (3 / 32, 2 / 8)
    assert explanation.flops == 2 * 2 * 4 * (2 * 128 * 128) * 32
    assert explanation.metadata_bytes == sum(tensor.nbytes for tensor in layout.plan("cpu"))
    # bottom-right causal: key <= query - 256 drops the first two blocks
    assert explain(q, k, k, layout, causal=True).tile_density == 1 / 8
    assert explain(q, k, k, layout, backend="reference").tile is None


@pytest.mark.parametrize("shape", [(0, 4, 32, 16), (2, 4, 0, 16)])
def test_explain_of_empty_tensors_counts_no_flops(shape):
    q = torch.empty(shape)
    assert explain(q, q, q).flops == 0
