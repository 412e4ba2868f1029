"""The quickstart notebook: its code cells run in order, and it is stored without outputs."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

NOTEBOOK = Path(__file__).resolve().parents[1] / "docs" / "quickstart.ipynb"
CELLS: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]


def run_cell(text: str, name: str, scope: dict[str, Any]) -> Any:
    """Executes a cell and returns the value of its last expression, which a notebook would show."""
    tree = ast.parse(text, filename=name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), scope)
    if last is None:
        return None
    return eval(compile(ast.Expression(last.value), name, "eval"), scope)


def test_every_cell_runs(capsys: pytest.CaptureFixture[str]) -> None:
    scope: dict[str, Any] = {"__name__": "__main__"}
    shown = []
    with torch.random.fork_rng():
        for number, cell in enumerate(CELLS):
            if cell["cell_type"] == "code":
                shown.append(run_cell("".join(cell["source"]), f"quickstart.ipynb, cell {number}", scope))
    assert shown.count(True) == 1, "equal masks are equal layouts"
    assert sum("<svg" in each._repr_html_() for each in shown if hasattr(each, "_repr_html_")) == 2
    # the model has learned its sequence and decodes it
    assert scope["loss"] < 1.0
    decoded, expected = re.findall(r"\[([\d, ]+)\]", capsys.readouterr().out.splitlines()[-1])
    assert sum(a == b for a, b in zip(decoded.split(", "), expected.split(", "), strict=True)) >= 10


def test_run_cell_returns_the_last_expression_and_raises_errors() -> None:
    assert run_cell("x = 1\nx + 1", "here", {}) == 2 and run_cell("x = 1", "here", {}) is None
    with pytest.raises(ZeroDivisionError):
        run_cell("1 / 0", "here", {})


def test_the_notebook_has_the_standard_format_and_no_outputs() -> None:
    text = NOTEBOOK.read_text(encoding="utf-8")
    notebook = json.loads(text)
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert json.dumps(notebook, indent=1, ensure_ascii=False) + "\n" == text
    assert len({cell["id"] for cell in CELLS}) == len(CELLS) > 10
    for cell in CELLS:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None


def test_links_exist() -> None:
    text = "".join("".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "markdown")
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert links and all((NOTEBOOK.parent / link).exists() for link in links)
