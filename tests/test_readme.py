"""Does the README tell the truth? Its Python blocks run, and what it names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import masks
from blocksparse_flash import interop

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
# each below as many empty lines as stand above it in the README, so that tracebacks name the right line
BLOCKS = [
    "\n" * README.count("\n", 0, found.start(1)) + found.group(1)
    for found in re.finditer(r"^```python\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
]


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_python_blocks_run(block: str) -> None:
    torch.manual_seed(0)
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})


def test_blocks_are_found() -> None:
    assert len(BLOCKS) == README.count("```python") >= 4


def test_every_mask_is_in_the_table() -> None:
    tables = [README[README.index(head) :].split("\n\n")[0] for head in ("| `masks.` |", "| `masks.` order |")]
    # build reads the others
    expected = [name for name in masks.__all__ if name != "build"]
    assert sorted(re.findall(r"^\| `(\w+)` \|", "\n".join(tables), flags=re.MULTILINE)) == expected


def test_every_format_is_in_the_table() -> None:
    table = README[README.index("| library | in | out |") :].split("\n\n")[0]
    assert sorted(re.findall(r"`(\w+)\(", table)) == [name for name in interop.__all__ if name.islower()]


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert links
    assert [link for link in links if not link.startswith("https://") and not (ROOT / link).exists()] == []


def test_targets_exist() -> None:
    targets = set(re.findall(r"(?:^|`)make ([a-z-]+)", README, flags=re.MULTILINE))
    made = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert {"demo", "test", "test-gpu"} <= targets <= made
