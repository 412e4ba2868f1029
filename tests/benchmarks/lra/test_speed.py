"""benchmarks.lra speed: correct models of the published sizes; failures are reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

pytest.importorskip("numba", reason="needs the extra [lra]")
pytest.importorskip("lightning", reason="needs the extra [lra]")
pytest.importorskip("jsonargparse", reason="needs the extra [lra]")

from benchmarks.lra import __main__ as command
from benchmarks.lra import peers, published, speed
from benchmarks.run import measure
from blocksparse_flash import BlockLayout
from tests.support.closeness import assert_as_accurate

CPU = torch.device("cpu")
ON_CPU = [peers.OURS, peers.MATERIALIZED, peers.SDPA]
MASK = "butterfly(n_factors=1)"


def tiny(task: str, mask: str | None) -> speed.Case:
    return speed.case_of(task, mask=mask, block_size=16, length=64, batch=3)


def once(case: speed.Case, **changes: Any) -> list[dict[str, Any]]:
    return list(speed.run(case, CPU, warmup=1, n_steps=2, **changes))


# ---- training steps ----


@pytest.mark.sweep
@pytest.mark.parametrize("mask", [None, MASK])
@pytest.mark.parametrize("task", ["retrieval", "image"])
def test_lines_are_written_for_all_that_run_here(
    task: str, mask: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for line in once(tiny(task, mask)):
        measure.append(tmp_path / "lines.jsonl", line, speed.KEYS)
    found = measure.read(tmp_path / "lines.jsonl")
    assert [(line["provider"], line["status"]) for line in found] == [(provider, "ok") for provider in ON_CPU]
    assert all(line["ms_p20"] <= line["ms"] <= line["ms_p80"] for line in found)
    assert {(line["density"], line["direction"]) for line in found} == {(0.5 if mask else 1.0, "step")}
    assert "flex: FlexAttention has a backward pass on CUDA devices only" in capsys.readouterr().out


@pytest.mark.parametrize("provider", ON_CPU)
def test_what_attends_otherwise_is_not_timed(provider: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pair instead of those of the layout."""
    case = tiny("listops", MASK)
    expected = speed.given(
        speed.model_of(case, peers.MATERIALIZED, CPU),
        *(each[:2] for each in speed.samples(case, CPU)[:2]),
        is_mixed=False,
    )
    wrong = speed.model_of(tiny("listops", None), provider, CPU)
    monkeypatch.setattr(speed, "model_of", lambda *arguments: wrong)
    step, found = speed.prepared(case, provider, expected, CPU, warmup=1)
    assert step is None and found["status"].startswith("wrong, relative error") and found["ms"] is None


def test_what_does_not_fit_is_a_line_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any, **options: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(speed, "prepared", full)
    found = once(tiny("image", None), providers=[peers.SDPA])
    assert [(line["status"], line["ms"]) for line in found] == [("out of memory", None)]


def test_sizes_are_the_published_ones() -> None:
    """Nystromformer: 2 layers, 64 features, 2 heads; documents padded to 2048, 1024 and 4096 tokens; Retrieval: two."""
    cases = [speed.case_of(task, mask=None) for task in published.STEPS]
    sizes = [(case.batch, case.task.n_documents, case.task.length) for case in cases]
    assert sizes == [*published.STEPS.values()]
    assert {(c.architecture.n_layers, c.architecture.embed_dim, c.architecture.num_heads) for c in cases} == {
        (2, 64, 2)
    }
    with pytest.raises(ValueError, match="length must be a square for 'image'"):
        speed.case_of("image", mask=None, length=128)


# ---- attention alone ----


@pytest.mark.parametrize("length", [128, 256, 512, 1024, 2048, 4096])
def test_every_query_has_as_many_keys_as_in_the_paper(length: int) -> None:
    attends = speed.sparse_layout(length).to_dense()[0, 0]
    assert (attends.sum(1) == min(length // 8, 256)).all()
    assert attends.diagonal().all()
    # each key as many queries: no key block is a bottleneck of the backward pass
    assert (attends.sum(0) == min(length // 8, 256)).all()


@pytest.mark.parametrize("length", [64, 192, 1000])
def test_other_lengths_are_refused(length: int) -> None:
    with pytest.raises(ValueError, match=f"lengths must be powers of two, at least 128, got {length}"):
        speed.sparse_layout(length)


def test_lengths_are_checked_before_steps_are_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "run", lambda *_, **__: pytest.fail("steps are timed first"))
    with pytest.raises(ValueError, match="lengths must be powers of two, at least 128, got 100"):
        command.speed(lengths=[128, 100], quick=True, out=tmp_path / "lines.jsonl")
    assert not (tmp_path / "lines.jsonl").exists()


@pytest.mark.thorough
def test_directions_of_dense_and_sparse_are_lines(tmp_path: Path) -> None:
    for line in speed.run_alone(speed.Shape(256, 1, 2, 16), CPU, n_calls=2):
        measure.append(tmp_path / "lines.jsonl", line, speed.KEYS)
    found = measure.read(tmp_path / "lines.jsonl")
    assert [line["status"] for line in found] == ["ok"] * (2 * 3 * 3)
    assert {(line["pattern"], line["density"]) for line in found} == {("dense", 1.0), ("butterfly", 1 / 8)}
    # 2 products of 256 x 256 x 16 multiply-adds a head forward, 5 backward
    dense = [line for line in found if line["pattern"] == "dense" and line["provider"] == peers.SDPA]
    factors = {"fwd": 2, "bwd": 5, "fwd+bwd": 7}
    for line in dense:
        flops = factors[line["direction"]] * 2 * 2 * 256 * 256 * 16
        assert line["tflops"] == pytest.approx(flops / (line["ms"] * 1e9))


def planted(fault: str) -> peers.Attend:
    """Materialized attention that is right but for one thing, at one place of many."""

    def attend(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0) -> Tensor:
        half = torch.arange(k.shape[2]) < 200
        held = [
            torch.where(half[:, None], each, each.detach()) if name in fault else each
            for name, each in zip("kv", (k, v), strict=True)
        ]
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
        mask[-1, 7] = fault != "mask"
        out = peers.materialized(q, *held, dropout_p, mask=mask)
        return out.detach() + 0 * out if fault == "q" else out

    return attend


def status_of(attend: peers.Attend, layout: BlockLayout | None, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(speed, "attend_with", lambda *_, **__: attend)
    ((_, line), *_) = speed.measured_alone(speed.Shape(256, 1, 2, 16), peers.SDPA, layout, "auto", CPU, 1)
    return line["status"]


@pytest.mark.parametrize(("fault", "is_seen"), [("none", False), ("mask", True), ("k", True), ("v", True), ("q", True)])
def test_a_wrong_output_or_gradient_is_seen(fault: str, is_seen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    status = status_of(planted("" if fault == "none" else fault), None, monkeypatch)
    assert status.startswith("wrong, relative error") if is_seen else status == "ok"


def test_a_layout_that_is_not_kept_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    dense = peers.attend_with(peers.SDPA, None, CPU)
    assert status_of(dense, speed.sparse_layout(256), monkeypatch).startswith("wrong")


def test_directions_that_fit_come_before_those_that_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(100))

    def timed(*arguments: Any) -> dict[str, Any]:
        if next(calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return {"status": "ok"}

    monkeypatch.setattr(speed, "_timed", timed)
    found = dict(speed.measured_alone(speed.Shape(128, 1, 1, 16), peers.SDPA, None, "auto", CPU, 1))
    assert {direction: line["status"] for direction, line in found.items()} == {
        "fwd+bwd": "ok",
        "fwd": "out of memory",
        "bwd": "out of memory",
    }


def test_published_rows_say_what_the_paper_says_of_them() -> None:
    """Block-sparse over dense forward: 8.8 times at 4K, 182 at 64K; forward and backward 9.4 and 149."""
    for direction, ratios in {"fwd": (8.8, 182), "fwd+bwd": (9.4, 149)}.items():
        rows = published.RUNTIME_MS[direction]
        dense, sparse = rows["FlashAttention"], rows["Block-sparse FlashAttention"]
        assert [dense[i] / sparse[i] for i in (5, 9)] == pytest.approx(ratios, rel=0.01)
    complete = [row for rows in (*published.RUNTIME_MS.values(), published.MEMORY_MB) for row in rows.values()]
    assert all(list(row)[2:] == sorted(row[2:]) for row in complete if row[2] < row[4])
    assert {len(row) for row in complete} <= {6, 7, len(published.LENGTHS)}


# ---- the command ----


@pytest.mark.thorough
def test_the_command_prints_tables_and_leaves_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "speed.jsonl"
    command.main(
        [
            "speed",
            "--quick",
            "true",
            "--lengths",
            "[128]",
            "--providers",
            '["blocksparse_flash", "materialized"]',
            "--out",
            str(out),
        ]
    )
    printed = capsys.readouterr().out
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert {line["status"] for line in found} == {"ok"}
    assert len(found) == 5 * 2 * 2 * 2 + 2 * 2 * 3
    steps = [(line["task"], line["provider"], line["pattern"]) for line in found if line["bench"] == "lra_speed"]
    assert all(steps.count(each) == 2 for each in steps)
    assert {line["dropout_p"] for line in found if line["bench"] == "lra_speed"} == {0.0, 0.1}
    # nothing of the paper beside tiny sizes
    assert "## Training steps on cpu, NOT the sizes of Long Range Arena" in printed and "2.4x" not in printed
    assert (
        "## Attention alone on cpu, batch 1, 2 heads, head_dim 64: forward\n" in printed and "paper) |" not in printed
    )


def test_steps_can_be_timed_in_parts(tmp_path: Path) -> None:
    options = ["--quick", "true", "--providers", '["sdpa"]', "--out", str(tmp_path / "speed.jsonl")]
    command.main(["speed", "--tasks", '["image"]', "--lengths", "[]", *options])
    found = measure.read(tmp_path / "speed.jsonl")
    assert [(line["task"], line["pattern"], line["dropout_p"]) for line in found] == [
        ("image", pattern, dropout_p) for pattern in ("dense", "butterfly") for dropout_p in (0.1, 0.0)
    ]
    with pytest.raises(ValueError, match=r"tasks must be among listops, .*, got 'pathx'"):
        command.speed(tasks=["pathx"])
    assert 16_384 in published.LENGTHS


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_flex_drops_scores_before_the_softmax() -> None:
    """A tenth, another one for each seed, head and query, and the outputs of attention to the remaining keys."""
    q, k, v = torch.randn(3, 2, 2, 64, 16, generator=torch.Generator().manual_seed(0)).unbind()
    index = torch.meshgrid(*(torch.arange(n, dtype=torch.int32) for n in (2, 2, 64, 64)), indexing="ij")
    kept = [
        peers.dropped_scores(torch.tensor(seed, dtype=torch.int32), 0.1)(torch.zeros(2, 2, 64, 64), *index) == 0
        for seed in (1, 2)
    ]
    for each in kept:
        assert each.float().mean().item() == pytest.approx(0.9, abs=0.01)
        assert each.float().mean(dim=-1).std() == pytest.approx((0.09 / 64) ** 0.5, rel=0.2)
    for one, other in ((kept[0], kept[1]), (kept[0][0], kept[0][1]), (kept[0][:, 0], kept[0][:, 1])):
        assert (one & other).float().mean().item() == pytest.approx(0.81, abs=0.02)
    score_mod = peers.dropped_scores(torch.tensor(1, dtype=torch.int32), 0.1)
    out = flex_attention(q, k, v, score_mod=score_mod)
    plain = peers.materialized(q, k, v, mask=kept[0])
    truth = peers.materialized(q.double(), k.double(), v.double(), mask=kept[0])
    assert_as_accurate(out, plain, truth, name="out")


def test_a_mask_is_checked_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="locall"):
        command.speed(mask="locall(window=3)", quick=True, lengths=[], tasks=["image"], out=tmp_path / "speed.jsonl")
    assert not (tmp_path / "speed.jsonl").exists()


def test_an_unknown_provider_is_refused() -> None:
    with pytest.raises(
        ValueError, match="providers must be of blocksparse_flash, materialized, sdpa, flex, got 'xformers'"
    ):
        peers.attend_with("xformers", None, CPU)


def test_results_are_lines_of_these_keys() -> None:
    path = Path(measure.__file__).parents[1] / "results" / speed.RESULTS.name
    assert all([*line] == speed.KEYS for line in (measure.read(path) if path.exists() else []))
