"""benchmarks.run.selection: the selections, their pairs, and that results are compared before they are timed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.run import measure
from benchmarks.run import selection as benchmark
from benchmarks.run.selection import Case
from blocksparse_flash import dispatch, functional, selected_attention
from blocksparse_flash.plan import selected_builder

SMALL = [Case(320, 16, choice, 4, 2, 16) for choice in ("random", "alike")]
SIZES = {"n": 320, "heads": 4, "kv_heads": 2, "head_dim": 16}


@pytest.fixture
def untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are made, not timed: there is no GPU."""

    def turns(calls: list[Any]) -> list[dict[str, float]]:
        return [{"ms": 2.0 + 0 * len(str(call())), "ms_p20": 1.0, "ms_p80": 3.0} for call in calls]

    def host(call: Any, runs: int) -> float:
        call()
        return float(runs)

    monkeypatch.setattr(benchmark, "timed", turns)
    monkeypatch.setattr(benchmark, "microseconds", host)
    monkeypatch.setattr(benchmark, "EMBED_DIM", 32)
    monkeypatch.setattr(measure, "peak_bytes", lambda call: 0)
    monkeypatch.setattr(measure, "environment", lambda: dict.fromkeys(("device", "torch", "triton", "commit"), "here"))


def written(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []


def attends(case: Case, indices: Tensor) -> Tensor:
    """bool (kv_heads, queries, keys)."""
    keys = torch.arange(case.length)
    blocks = (keys // case.block_size == indices[0, ..., None]).any(2)
    return blocks & (keys <= keys[:, None])


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.choice)
def test_tokens_select_their_own_block_and_earlier_ones(case: Case) -> None:
    indices = benchmark.selected(case, "cpu")
    assert indices.shape == (1, 2, 320, 16)
    own = torch.arange(320) // 16
    assert (indices == own[:, None]).sum(3).eq(1).all() and (indices <= own[:, None]).all()
    # all that there are, at most 16, none twice
    assert ((indices >= 0).sum(3) == (own + 1).clamp(max=16)).all()
    assert benchmark.n_pairs(case, indices) == 2 * int(attends(case, indices).sum())
    assert benchmark.n_pairs(case, None) == 4 * int(torch.ones(320, 320).tril().sum())


def test_neighbors_that_choose_alike_share_seven_of_ten_blocks() -> None:
    shared = {}
    for choice in ("random", "alike"):
        case = Case(64 * 64, 64, choice, 1, 1)
        last = benchmark.selected(case, "cpu")[0, 0, -64:]
        shared[choice] = int((torch.bincount(last.flatten(), minlength=64) == 64).sum())
    assert shared == {"random": 1, "alike": 11}


@pytest.mark.usefixtures("untimed")
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.choice)
def test_a_line_for_each_provider_and_direction(case: Case, tmp_path: Path) -> None:
    benchmark.compare(case, tmp_path / "selection.jsonl", "cpu")
    lines = written(tmp_path / "selection.jsonl")
    # on a CPU there are no plans by key block
    assert [(line["provider"], line["direction"], line["plan"]) for line in lines] == [
        ("blocksparse_flash", "fwd", "tiles"), ("dense", "fwd", None), ("blocksparse_flash", "bwd", "tiles"),
        ("dense", "bwd", None), ("blocksparse_flash", "plan", "tiles"),
    ]  # fmt: skip
    assert all([*line] == benchmark.KEYS and SIZES.items() <= line.items() for line in lines)
    pairs = benchmark.n_pairs(case, benchmark.selected(case, "cpu"))
    assert lines[0]["tflops"] == pytest.approx(4 * 16 * pairs / 2e-3 / 1e12)
    assert lines[-1]["host_us"] == 40


@pytest.mark.usefixtures("untimed")
def test_calls_by_key_block_are_timed_in_tiles_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With plans of a GPU; the calls are computed on the CPU, which has other kernels."""

    def call(*inputs: Tensor, **options: Any) -> Tensor:
        return benchmark.in_tiles(lambda *tensors: selected_attention(*tensors, **options))(*inputs)

    monkeypatch.setattr(dispatch, "takes_selected_plans", lambda *_, **__: True)
    monkeypatch.setattr(benchmark, "selected_attention", call)
    monkeypatch.setattr(selected_builder, "MIN_PARTIAL_ROWS", 0)
    monkeypatch.setattr(benchmark, "N_BLOCKS", 2)
    benchmark.compare(Case(512, 64, "random", 16, 2, 16), tmp_path / "selection.jsonl", "cpu")
    lines = written(tmp_path / "selection.jsonl")
    plans = [("blocksparse_flash", "key blocks"), ("blocksparse_flash tiles", "tiles"), ("dense", None)]
    assert [(line["provider"], line["plan"]) for line in lines] == [*plans, *plans, *plans[:2]]


@pytest.mark.usefixtures("untimed")
def test_fla_takes_turns_where_it_is_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With a stand-in for its kernels, given tokens before heads."""
    case = Case(320, 16, "random", 32, 2, 16)

    def parallel_nsa(
        q: Tensor, k: Tensor, v: Tensor, *, block_indices: Tensor, block_counts: int, block_size: int
    ) -> Tensor:
        assert q.is_contiguous() and q.shape == (1, 320, 32, 16) and block_indices.shape == (1, 320, 2, block_counts)
        of_heads = (each.transpose(1, 2) for each in (q, k, v, block_indices))
        return selected_attention(*of_heads, block_size=block_size).transpose(1, 2)

    modules = {"fla": ModuleType("fla"), "fla.ops": ModuleType("fla.ops"), "fla.ops.nsa": ModuleType("fla.ops.nsa")}
    monkeypatch.setattr(modules["fla.ops.nsa"], "parallel_nsa", parallel_nsa, raising=False)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(benchmark, "is_installed", lambda name: name == "fla")
    benchmark.compare(case, tmp_path / "selection.jsonl", "cpu")
    lines = [line for line in written(tmp_path / "selection.jsonl") if line["provider"] == "fla"]
    assert [(line["direction"], line["backend"]) for line in lines] == [("fwd", "triton"), ("bwd", "triton")]
    # fewer than 16 heads on one
    assert not benchmark.has_fla(SMALL[0])


def test_tiles_are_asked_for_during_the_call_alone() -> None:
    def call(*_: Tensor) -> Any:
        return dispatch.takes_selected_plans("hopper", 128, 128, has_options=False)

    x = torch.zeros(1)
    assert call() and not benchmark.in_tiles(call)(x, x, x) and call()


@pytest.mark.usefixtures("untimed")
@pytest.mark.parametrize("wrong", ["selection", "causal"])
def test_wrong_results_are_not_timed(wrong: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def other(*inputs: Tensor, indices: Tensor, block_size: int) -> Tensor:
        chosen = indices.roll(1, 2) if wrong == "selection" else indices
        return selected_attention(*inputs, chosen, block_size=block_size, causal=wrong != "causal")

    monkeypatch.setattr(benchmark, "selected_attention", other)
    with pytest.raises(AssertionError, match="blocksparse_flash: WRONG"):
        benchmark.compare(SMALL[0], tmp_path / "selection.jsonl", "cpu")
    assert written(tmp_path / "selection.jsonl") == []


@pytest.mark.usefixtures("untimed")
def test_the_plan_that_is_timed_is_that_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(512, 64, "random", 16, 2, 16)
    indices = benchmark.selected(case, "cpu")
    found = []
    call = functional.attention_with_lse

    def noted(rows: Tensor, k: Tensor, v: Tensor, layout: Any, **options: Any) -> Any:
        found.append(layout)
        return call(rows, k, v, layout, **options)

    monkeypatch.setattr("blocksparse_flash.selection.attention_with_lse", noted)
    inputs, _ = benchmark.inputs_of(case, "cpu")
    selected_attention(*inputs, indices, block_size=64)
    made = benchmark.layout_of(case, indices)
    for one, other in zip(found[0]._selected_plan(True), made._selected_plan(True), strict=True):
        assert torch.equal(one, other)
    assert made.shape == found[0].shape


@pytest.mark.usefixtures("untimed")
def test_a_line_for_each_layer(tmp_path: Path) -> None:
    benchmark.compare_layers(SMALL[0], tmp_path / "selection.jsonl", "cpu")
    lines = written(tmp_path / "selection.jsonl")
    assert [line["pattern"] for line in lines] == [
        "SelfAttention", "NativeSparseAttention", "MixtureOfBlockAttention", "SharedIndexAttention",
    ]  # fmt: skip
    assert all([*line] == benchmark.KEYS and line["direction"] == "layer" for line in lines)


def test_a_failed_case_is_reported_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    seen = []

    def compare(case: Case, _out: Path) -> None:
        seen.append(case)
        if case.kv_heads == 2:
            raise RuntimeError("no kernel")

    monkeypatch.setattr(measure, "require_gpu", lambda: None)
    monkeypatch.setattr(benchmark, "compare", compare)
    monkeypatch.setattr(benchmark, "compare_layers", compare)
    with pytest.raises(SystemExit, match="1 cases failed"):
        benchmark.main(["--out", str(tmp_path / "out.jsonl")])
    assert "no kernel" in capsys.readouterr().out and len(seen) == len(benchmark.CASES) + len(benchmark.LENGTHS)
    seen.clear()
    benchmark.main(["--seconds", "-1"])
    assert seen == [] and capsys.readouterr().out.count("no time left") == len(benchmark.CASES) + 3
    benchmark.main(["--only", "layers", "--lengths", "8192"])
    assert seen == [Case(8192)]
