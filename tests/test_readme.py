"""README and docs: Python blocks run, names and links exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import blocksparse_flash
import masks
from blocksparse_flash import interop

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", ROOT / "benchmarks" / "README.md", *sorted((ROOT / "docs").glob("*.md")))
}
README = PAGES["README.md"]
# each below as many empty lines as stand above it in its page, so that tracebacks name the right line
BLOCKS = [
    pytest.param(name, "\n" * page.count("\n", 0, found.start(1)) + found.group(1), id=f"{name}-{number}")
    for name, page in PAGES.items()
    for number, found in enumerate(re.finditer(r"^```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL))
]


@pytest.mark.parametrize(("name", "block"), BLOCKS)
def test_python_blocks_run(name: str, block: str) -> None:
    if "transformers" in block:
        pytest.importorskip("transformers", reason="needs transformers")
    torch.manual_seed(0)
    exec(compile(block, name, "exec"), {"__name__": "readme"})


def test_blocks_are_found() -> None:
    assert len(BLOCKS) == sum(page.count("```python") for page in PAGES.values())
    assert README.count("```python") >= 4 and {"docs/coming_from.md", "docs/recipes.md"} <= PAGES.keys()


def test_every_mask_is_in_the_table() -> None:
    tables = [README[README.index(head) :].split("\n\n")[0] for head in ("| `masks.` |", "| `masks.` order |")]
    # build reads the others
    expected = [name for name in masks.__all__ if name != "build"]
    assert sorted(re.findall(r"^\| `(\w+)` \|", "\n".join(tables), flags=re.MULTILINE)) == expected


def test_every_format_is_in_the_table() -> None:
    table = README[README.index("| library | in | out |") :].split("\n\n")[0]
    assert sorted(re.findall(r"`(\w+)\(", table)) == [name for name in interop.__all__ if name.islower()]


def prose(page: str) -> str:
    """A page without its code."""
    return re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)


def anchors(page: str) -> set[str]:
    """What the headings of a page are called in a link."""
    headings = re.findall(r"^#+ (.*)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str) -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", prose(PAGES[name])) if not link.startswith("https://")]
    assert links
    for link in links:
        path, _, anchor = link.partition("#")
        target = (ROOT / name).parent / path if path else ROOT / name
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target.read_text(encoding="utf-8")), link


def test_the_version_to_cite_is_that_of_the_library() -> None:
    assert re.findall(r"version = {(.*?)}", README) == [blocksparse_flash.__version__]
    assert f"## [{blocksparse_flash.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_targets_exist() -> None:
    targets = set(re.findall(r"(?:^|`)make ([a-z-]+)", "\n".join(PAGES.values()), flags=re.MULTILINE))
    made = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert {"demo", "docs", "test", "test-gpu"} <= targets <= made
