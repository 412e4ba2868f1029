"""Scripts of four users run unchanged and have at most 15 lines of code each."""

from __future__ import annotations

import ast
import runpy
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import masks

FOLDER = Path(__file__).parent
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py") if not path.stem.startswith(("test_", "__")))
MAX_LINES = 15


def own_lines(text: str) -> int:
    """Lines of statements: without imports, docstrings, comments and empty lines."""
    body = [
        node
        for node in ast.parse(text).body
        if not isinstance(node, ast.Import | ast.ImportFrom)
        and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
    ]
    lines = {number for node in body for number in range(node.lineno, (node.end_lineno or 0) + 1)}
    shown = text.splitlines()
    return sum(bool(shown[number - 1].split("#")[0].strip()) for number in lines)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Runs a script in an empty folder and returns its variables. Lightning changes global state and handlers."""
    monkeypatch.chdir(tmp_path)
    before = signal.getsignal(signal.SIGINT)

    def run_script(name: str) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", [f"{name}.py"])
        torch.manual_seed(0)
        return runpy.run_path(str(FOLDER / f"{name}.py"))

    with torch.random.fork_rng():
        yield run_script
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_short(name: str) -> None:
    assert 0 < own_lines((FOLDER / f"{name}.py").read_text(encoding="utf-8")) <= MAX_LINES


def test_own_lines_are_counted() -> None:
    text = '"""About."""\nimport os\n\nx = [\n    1,  # one\n    # nothing\n]\n\n\ndef f():\n    return x\n'
    assert own_lines(text) == 5


def test_there_are_four_users() -> None:
    assert SCRIPTS == ["flex_attention_user", "lra_experiment", "researcher", "transformers_user"]


def test_a_researcher_trains(run: Any) -> None:
    found = run("researcher")
    assert found["losses"][-1] < 0.7 * found["losses"][0]
    mask = found["layout"].to_dense()[0, 0]
    assert mask[0].all() and mask[:, 0].all() and mask[300].sum() == 1 + 129


def test_an_experiment_on_long_range_arena_trains_and_tests(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("numba", reason="needs the extra [lra]")
    pytest.importorskip("lightning", reason="needs the extra [lra]")
    pytest.importorskip("jsonargparse", reason="needs the extra [lra]")
    run("lra_experiment")
    assert len(Path("out/mine/test.jsonl").read_text(encoding="utf-8").splitlines()) == 1
    assert "accuracy" in capsys.readouterr().out


def test_a_user_of_flex_attention_gets_the_same_mask(run: Any) -> None:
    found = run("flex_attention_user")
    n = found["n"]
    assert found["layout"] == masks.sink_window(n, sinks=4, window=200)
    torch.testing.assert_close(found["layout"].to_dense()[0, 0], found["mask"])


def test_a_user_of_transformers_generates(run: Any) -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    found = run("transformers_user")
    model, generated = found["model"], found["generated"]
    assert generated.shape == (1, 308) and all(weight.grad is not None for weight in model.parameters())
    assert torch.equal(generated[0, 300:], model(generated).logits[0, 299:-1].argmax(dim=-1))
    dense = model(generated).logits
    model.config.attention_layout = None
    assert not torch.allclose(model(generated).logits, dense)
