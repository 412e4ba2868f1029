"""benchmarks.run.decode: bytes counted as stored, wrong results never timed, one line per figure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from benchmarks.run import decode as benchmark
from benchmarks.run import measure
from benchmarks.run.decode import HEAD_DIM, KV_HEADS, Case, Provider

pytest.importorskip("triton", reason="needs Triton")

TIMES = dict.fromkeys(("ms", "ms_p20", "ms_p80"), 2.0)
SMALL = Case(1, 3, 2048, "sparse")


@pytest.fixture
def untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are made, not timed: there is no GPU."""
    monkeypatch.setattr(benchmark, "graphed", lambda call: call)
    monkeypatch.setattr(measure, "milliseconds", lambda call: call() is None or TIMES)
    monkeypatch.setattr(measure, "wall_milliseconds", lambda call, **_: call() is None or TIMES)
    monkeypatch.setattr(measure, "first_call_milliseconds", lambda call: call() is None or 1.0)
    monkeypatch.setattr(measure, "peak_bytes", lambda call: call() is None or 7)
    monkeypatch.setattr(measure, "environment", lambda: dict.fromkeys(("device", "torch", "triton", "commit"), "here"))


def reference(case: Case, _device: str) -> benchmark.Call:
    layout = case.layout()
    assert layout is not None
    mask = layout.to_dense()

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    return call


def test_stored_bytes_are_those_of_the_blocks() -> None:
    layout = SMALL.layout()
    assert layout is not None
    mask = layout.to_dense()[0, 0]
    counted = 0
    for col in range(0, SMALL.kv_len, 128):
        # k and v, 128 keys, 2 bytes a number
        counted += 2 * 128 * HEAD_DIM * 2 * KV_HEADS if mask[:, col : col + 128].any() else 0
    assert SMALL.stored_bytes == counted
    assert Case(3, 1, 2048, "dense").stored_bytes == 3 * 2 * 2048 * HEAD_DIM * 2 * KV_HEADS


def test_no_query_attends_to_its_future() -> None:
    for case in (SMALL, Case(1, 64, 2048, "sparse")):
        layout = case.layout()
        assert layout is not None
        layout.assert_causal()


def test_a_line_for_each_figure(untimed: None, tmp_path: Path) -> None:
    out = tmp_path / "decode.jsonl"
    benchmark.run(SMALL, Provider("plain", "math", reference), "cpu", 1000.0, out)
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["direction"] for line in found] == ["call", "graph"]
    for line in found:
        assert list(line) == benchmark.KEYS
        assert line["gb_per_s"] == pytest.approx(SMALL.stored_bytes / 2e-3 / 1e9)
        assert line["copy_share"] == pytest.approx(line["gb_per_s"] / 1000)


@pytest.mark.parametrize("wrong", [0.9, float("nan")])
def test_a_wrong_result_is_not_timed(untimed: None, tmp_path: Path, wrong: float, capsys: Any) -> None:
    def prepare(case: Case, device: str) -> benchmark.Call:
        right = reference(case, device)
        return lambda q, k, v: wrong * right(q, k, v)

    benchmark.run(SMALL, Provider("wrong", "math", prepare), "cpu", 1.0, tmp_path / "decode.jsonl")
    assert "WRONG" in capsys.readouterr().out
    assert not (tmp_path / "decode.jsonl").exists()


def test_ours_and_flex_are_given_the_same_mask() -> None:
    layout = SMALL.layout()
    ours, flex = benchmark._ours(SMALL, "cpu"), benchmark._flex(SMALL, "cpu")
    assert layout is not None and flex is not None and ours.keywords["layout"] == layout and flex.keywords["enable_gqa"]
    mask = flex.keywords["block_mask"]
    assert mask.shape == (1, 1, 3, 2048)
    assert int(mask.kv_num_blocks) == layout.nnz


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("q_len", "options"), [(3, {}), (64, {"FORCE_USE_FLEX_ATTENTION": True})])
@pytest.mark.parametrize("pattern", ["dense", "sparse"])
def test_flex_computes_with_its_blocks_what_attention_does(pattern: str, q_len: int, options: dict[str, bool]) -> None:
    case = Case(1, q_len, 2048, pattern)
    flex, layout = benchmark._flex(case, "cpu"), case.layout()
    assert flex is not None
    mask = flex.keywords["block_mask"]
    assert mask.BLOCK_SIZE == (128, 128) and flex.keywords["kernel_options"] == options
    n_blocks = 16 if layout is None else layout.nnz
    if options:
        # on the diagonal, and at the end of the window unless a random block is there
        n_partial = 0 if layout is None else (layout.bitmask_ids >= 0).sum()
        assert (mask.kv_num_blocks, mask.full_kv_num_blocks) == (n_partial, n_blocks - n_partial)
    else:
        # by whose number the decoding kernel splits its work
        assert mask.kv_num_blocks == n_blocks and mask.full_kv_num_blocks is None
    q, k, v = benchmark.inputs(case, "cpu")
    found = flex_attention(q, k, v, **flex.keywords)
    pairs = None if layout is None else layout.to_dense()
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=pairs, enable_gqa=True)
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("pattern", ["paged 16", "selected 64"])
def test_pages_hold_the_keys_of_other_patterns(untimed: None, pattern: str, tmp_path: Path) -> None:
    """A line for each clock, after the output was compared; peers have no pages."""
    case, out = Case(2, 1, 1024, pattern), tmp_path / "decode.jsonl"
    ours, *peers = benchmark.PROVIDERS
    benchmark.run(case, ours, "cpu", 1000.0, out)
    for peer in peers:
        benchmark.run(case, peer, "cpu", 1000.0, out)
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["direction"] for line in found] == ["call", "graph"]
    assert {line["density"] for line in found} == {1.0 if pattern == "paged 16" else 2 / 16}


def test_what_refuses_says_why(untimed: None, tmp_path: Path, capsys: Any) -> None:
    def prepare(case: Case, device: str) -> benchmark.Call:
        raise NotImplementedError("no such kernel")

    benchmark.run(SMALL, Provider("peer", "math", prepare), "cpu", 1.0, tmp_path / "decode.jsonl")
    assert "no such kernel" in capsys.readouterr().out
    with pytest.raises(NotImplementedError):
        benchmark.run(SMALL, Provider("blocksparse_flash", "triton", prepare), "cpu", 1.0, tmp_path / "x")
