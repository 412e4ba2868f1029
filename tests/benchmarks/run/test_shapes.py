"""benchmarks.run.shapes: the cases, their operations, and that results are compared before they are timed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.run import measure, shapes
from benchmarks.run.peers import Call
from benchmarks.run.shapes import Case, Peer

SMALL = [
    Case("grouped", 96, 2, 4, 2, 16, 16),
    Case("dense", 96, 1, 4, 1, 16, 16, causal=False),
    Case("window", 96, 1, 2, 2, 16, 16, window=20),
    Case("documents", 96, 1, 2, 2, 16, 16, documents=3),
    Case("narrow values", 96, 1, 2, 2, 24, 16),
    Case("sinks", 96, 1, 4, 2, 16, 16, option="sinks"),
    Case("softcap", 96, 1, 2, 2, 16, 16, option="softcap"),
    Case("slopes", 96, 1, 4, 2, 16, 16, option="alibi_slopes"),
    Case("block bias", 320, 1, 4, 2, 16, 16, option="block_bias"),
    Case("trained block bias", 320, 1, 4, 2, 16, 16, option="trained block_bias"),
    Case("deterministic", 96, 1, 2, 2, 16, 16, option="deterministic"),
]


@pytest.fixture
def untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are made, not timed: there is no GPU."""

    def turns(calls: list[Any]) -> list[dict[str, float]]:
        return [{"ms": 2.0 + 0 * len(str(call())), "ms_p20": 1.0, "ms_p80": 3.0} for call in calls]

    monkeypatch.setattr(measure, "milliseconds_in_turns", turns)
    monkeypatch.setattr(measure, "peak_bytes", lambda call: 0)
    monkeypatch.setattr(measure, "joules", lambda call, ms: 5.0 * ms)
    monkeypatch.setattr(measure, "environment", lambda: dict.fromkeys(("device", "torch", "triton", "commit"), "here"))


def written(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []


def test_names_of_cases_are_distinct() -> None:
    assert len({case.name for case in shapes.CASES}) == len(shapes.CASES)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_pairs_are_those_that_attend(case: Case) -> None:
    assert case.pairs == int(case.attends(torch.arange(case.length)).sum())
    assert case.flops("fwd") == 2 * case.batch * case.heads * case.pairs * (case.head_dim + case.v_dim)


@pytest.mark.usefixtures("untimed")
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_our_call_is_right_and_has_a_line_for_each_direction(case: Case, tmp_path: Path) -> None:
    shapes.compare(case, list(shapes.PEERS[:1]), tmp_path / "shapes.jsonl", "cpu")
    lines = written(tmp_path / "shapes.jsonl")
    directions = ["fwd", "bwd"] if case.documents is None else ["fwd", "bwd", "plan"]
    assert [(line["direction"], line["backend"], line["pattern"]) for line in lines] == [
        (direction, "eager", case.name) for direction in directions
    ]
    assert all([*line] == shapes.KEYS for line in lines)
    assert lines[0]["tflops"] == case.flops("fwd") / 2.0 * 1e-9
    assert [line["joules"] for line in lines] == [10.0, 10.0, None][: len(lines)]


@pytest.mark.usefixtures("untimed")
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_what_ignores_the_mask_or_the_option_is_not_timed(
    case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = case._replace(option="", window=None, documents=None, causal=not case.causal if case == SMALL[1] else True)
    same = plain == case or case.option == "deterministic"

    def prepare(_case: Case, device: str, values: dict[str, Tensor]) -> Call | str:
        return shapes.PEERS[0].prepare(plain, device, {})

    shapes.compare(case, [Peer("other", "cpu", prepare)], tmp_path / "shapes.jsonl", "cpu")
    assert bool(written(tmp_path / "shapes.jsonl")) == same
    assert same or "WRONG" in capsys.readouterr().out


@pytest.mark.usefixtures("untimed")
def test_a_peer_says_what_it_cannot_compute(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cudnn = [peer for peer in shapes.PEERS if peer.provider == "cudnn"]
    for case in SMALL[2:4]:
        shapes.compare(case, cudnn, tmp_path / "shapes.jsonl", "cpu")
    assert written(tmp_path / "shapes.jsonl") == []
    assert capsys.readouterr().out.count("has neither windows nor documents; not timed") == 2


def test_unknown_providers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "require_gpu", lambda: None)
    with pytest.raises(SystemExit, match="--providers: nobody is not known or not installed"):
        shapes.main(["--providers", "nobody"])


@pytest.mark.usefixtures("untimed")
def test_an_interrupted_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cases of the same commit are skipped; an interrupted one has no lines, and is measured as a whole."""
    path, measured = tmp_path / "shapes.jsonl", []
    turns = measure.milliseconds_in_turns

    def interrupted(calls: list[Any]) -> Any:
        measured.append(len(calls))
        if len(measured) == 4:
            raise KeyboardInterrupt
        return turns(calls)

    monkeypatch.setattr(measure, "require_gpu", lambda: None)
    monkeypatch.setattr(shapes, "matmul", lambda run: None)
    monkeypatch.setattr(shapes, "CASES", SMALL[:3])
    compare = shapes.compare
    monkeypatch.setattr(shapes, "compare", lambda case, among, out: compare(case, among, out, "cpu"))
    monkeypatch.setattr(measure, "milliseconds_in_turns", interrupted)
    arguments = ["--out", str(path), "--providers", "blocksparse_flash", "--resume"]
    with pytest.raises(KeyboardInterrupt):
        shapes.main(arguments)
    assert [line["pattern"] for line in written(path)] == ["grouped"] * 2
    monkeypatch.setattr(measure, "milliseconds_in_turns", turns)
    shapes.main(arguments)
    assert [line["pattern"] for line in written(path)] == [
        name for name in ("grouped", "dense", "window") for _ in "fb"
    ]
    assert "pattern grouped: measured before; skipped" in capsys.readouterr().out
    shapes.main(arguments)
    assert len(written(path)) == 6
    # another commit
    monkeypatch.setattr(measure, "environment", lambda: dict.fromkeys(("device", "torch", "triton", "commit"), "there"))
    shapes.main(arguments)
    assert len(written(path)) == 12
